"""Kernels of other projects behind this backend's contract. Importing this package imports none of them."""
