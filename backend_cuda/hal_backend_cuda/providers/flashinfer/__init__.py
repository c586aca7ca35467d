"""FlashInfer's attention over paged caches and its blocks of experts (``flashinfer-python``) as kernels of this backend."""

from __future__ import annotations

__all__ = ["DISTRIBUTION", "INSTALL", "VERSIONS"]

DISTRIBUTION = "flashinfer-python"
#: Versions whose signatures the calls are bound against in the tests, at both ends.
VERSIONS = ">=0.6.13,<0.8"
INSTALL = "pip install 'hal-backend-cuda[flashinfer]'"
