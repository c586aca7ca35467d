"""CUDA backend of hal-core. Importing this package imports neither Triton nor any provider."""

__version__ = "0.1.0"
