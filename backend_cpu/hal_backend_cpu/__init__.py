"""CPU backend of hal-core. Importing this package loads no native code; ``_native`` does."""

__version__ = "0.1.0"
