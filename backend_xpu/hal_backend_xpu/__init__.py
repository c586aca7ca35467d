"""XPU backend of hal-core: SYCL kernels for Intel GPUs. Importing this package loads no native code."""

__version__ = "0.1.0"
