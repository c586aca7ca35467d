"""Values that were found by measurement, by engine; what was not measured says so."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tuning", "tuning"]


@dataclass(frozen=True)
class Tuning:
    """decode_rows: up to so many rows of a linear, and decode_slots of experts, are multiplied row by row, each with its own weights.

    per_unit: work-groups for each unit of a device. origin: where the numbers are from.
    """

    decode_rows: int
    decode_slots: int
    per_unit: int
    origin: str


_TUNED = {
    # of one row; more rows read the same weights again
    "joint_matrix": Tuning(4, 32, 8, "not measured on a GPU"),
    "dpas": Tuning(4, 32, 8, "not measured"),
    # emulated tiles never win: what is tried here is what runs elsewhere
    "emulation": Tuning(4, 32, 8, "the numbers of matrix units"),
}


def tuning(engine: str) -> Tuning:
    """For an engine's name."""
    return _TUNED[engine]
