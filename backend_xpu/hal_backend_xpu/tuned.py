"""Values that were found by measurement, by unit of multiplication; what was not measured says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal_backend_xpu.engine import Engine

__all__ = ["Tuning", "tuning"]


@dataclass(frozen=True)
class Tuning:
    """Where rows are multiplied one by one with the weights as they are stored, and where by tiles.

    decode_rows: most rows of a linear that go one by one; decode_slots: most slots of experts; int8_slots: of experts that may be
    rescaled, where tiles multiply int8. per_unit: work-groups for each unit of a device. origin: where the numbers are from.
    """

    decode_rows: int
    decode_slots: int
    int8_slots: int
    per_unit: int
    origin: str


#: Tiles of 16 rows are AMX's: two cores, experts of 2048 by 768, 4 of 16 a token. One by one takes 28 ms for 32 slots and 101 ms for 128;
#: tiles with weights widened on the way 64 and 80 ms, int8 tiles 6 and 7 ms, and 1.7 ms for one token.
_AMX = Tuning(4, 64, 0, 8, "measured on two cores of a Xeon with AMX")
#: Memory decides there, and four-bit words are half of int8's.
_XMX = Tuning(4, 32, 32, 8, "not measured on a GPU")
#: Emulated tiles never win: what is tried is what runs elsewhere.
_EMULATION = Tuning(4, 32, 32, 8, "the numbers of a GPU")


def tuning(engine: Engine) -> Tuning:
    """For a way of multiplying."""
    if engine.name == "emulation":
        return _EMULATION
    return _AMX if engine.rows == 16 else _XMX
