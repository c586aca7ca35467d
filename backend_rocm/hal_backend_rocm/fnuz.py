"""e4m3fn weights for gfx942, whose matrix units multiply e4m3fnuz.

The same eight bits stand for half the number in e4m3fnuz, so codes stay and scales double, exactly. Two codes differ: 0x80, -0 in
e4m3fn, is the only NaN of e4m3fnuz and becomes 0; 0x7f and 0xff, NaN in e4m3fn, would be 240 and -240 and become 0x80. Numbers come
back exactly, the sign of a zero does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.codes import to_fnuz
from hal_core.triton.modules import TritonExperts, TritonLinear
from hal_core.triton.rows import RowMatrix

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor

__all__ = ["FnuzExperts", "FnuzLinear", "FnuzRows"]


class FnuzRows(RowMatrix):
    """As :class:`RowMatrix`, with e4m3fnuz codes and doubled scales. No ``unpack``: signs of zeros do not come back."""

    unpack = None  # type: ignore[assignment]

    def _packed(self, weight: QuantizedTensor) -> dict[str, Tensor | None]:
        found = super()._packed(weight)
        values, scales = found["weight"], found["scales"]
        assert values is not None  # every scheme has values
        return {"weight": to_fnuz(values), "scales": None if scales is None else 2 * scales}


class FnuzLinear(TritonLinear):
    """A linear with e4m3 weights on gfx942."""

    packed = staticmethod(FnuzRows)


class FnuzExperts(TritonExperts):
    """Experts with e4m3 weights on gfx942."""

    packed = staticmethod(FnuzRows)
