"""Portable Triton kernels that GPU backends share. Only backends import this package: ``import hal_core`` never does."""
