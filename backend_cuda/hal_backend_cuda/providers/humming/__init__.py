"""Humming's quantized matrix products (``humming-kernels``), dense and of experts, as kernels of this backend."""
