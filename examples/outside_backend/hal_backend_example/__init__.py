"""An example backend of hal-core."""

__version__ = "0.1.0"
