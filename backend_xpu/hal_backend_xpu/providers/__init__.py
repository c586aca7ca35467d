"""Other libraries' kernels for Intel GPUs. Importing this package imports none of them."""
