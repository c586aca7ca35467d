"""AITER, AMD's library of kernels. Importing this package imports no AITER."""

DISTRIBUTION = "amd-aiter"
#: Signatures are known for the one published pre-release and for a source of August 2026.
VERSIONS = ">=0.1.7.dev0,<0.2"
INSTALL = "pip install --pre 'hal-backend-rocm[aiter]'"
