"""All kernels of providers; listing them imports no provider."""

from __future__ import annotations

from hal_backend_cuda.providers.flashinfer.attention import KERNELS as ATTENTION
from hal_backend_cuda.providers.flashinfer.moe import KERNELS as EXPERTS
from hal_backend_cuda.providers.humming.kernels import KERNELS as HUMMING

__all__ = ["KERNELS"]

KERNELS = (*HUMMING, *ATTENTION, *EXPERTS)
