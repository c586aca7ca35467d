"""ROCm backend of hal-core. Importing this package imports neither Triton nor AITER."""

__version__ = "0.1.0"
