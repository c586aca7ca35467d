"""Modules whose buffers stay what they are: ``model.to(dtype)`` casts floating buffers, and kernels read these by their own dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FixedBuffers"]


class FixedBuffers(nn.Module):
    """Base of modules with packed buffers, bound to the device that they were prepared on."""

    def _apply(self, fn: Any, recurse: bool = True) -> FixedBuffers:
        kept: dict[str, Tensor] = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is None or after.dtype == before.dtype:
                continue
            self._buffers[name] = before
            if after.device != before.device:
                raise ShapeError(f"{type(self).__name__} prepared on {before.device}", f"moved to {after.device}", "prepare it there")
        return self
