"""The result of a benchmark as a value: its JSON form is what ``hal bench --json`` prints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hal_core.jsonable import JsonValue, loads, to_json
from hal_core.machine import Machine, Version
from hal_core.spec import Spec

if TYPE_CHECKING:
    from hal_core.bench.timer import Sample

__all__ = ["SCHEMA", "Absence", "Ceiling", "Report", "Row", "Spread", "spread_of"]

#: Version of the JSON form. Fields are only added; a change of meaning raises it.
SCHEMA = 1


@dataclass(frozen=True)
class Spread:
    """Of all measured calls: least, quartiles, median, most. undisturbed: those without a preemption; None where that is not known."""

    samples: int
    median: float
    least: float
    lower: float
    upper: float
    most: float
    undisturbed: int | None = None


@dataclass(frozen=True)
class Ceiling:
    """A limit of the machine, measured in the turns of one batch size. kind: ``read`` (bytes/s), ``float`` or ``int8`` (operations/s)."""

    m: int
    name: str
    kind: str
    per_second: Spread


@dataclass(frozen=True)
class Row:
    """One contestant at one batch size.

    seconds: of one call. snr_db: against the fp32 reference; None where the result is not finite, or equal bit for bit. cosine of the
    two; largest_error: of an element, over the largest magnitude of the reference; both None where the result is not finite.
    experts_hit: distinct experts of a call, on average. bytes_read: packed bytes of their weights. of_read: bytes over time over the
    read ceiling. operations: of the products. of_peak: operations over time over the highest ceiling of the kind it multiplies with.
    times_first_peer, times_best_peer: the peer's median time over this one's, so more than 1 is faster than the peer.
    """

    m: int
    name: str
    role: str
    numerics: str
    kind: str
    seconds: Spread
    snr_db: float | None
    bits_per_weight: float
    experts_hit: float
    bytes_read: float
    gb_per_s: float
    of_read: float | None
    operations: float
    tera_per_s: float
    of_peak: float | None
    times_first_peer: float | None = None
    times_best_peer: float | None = None
    cosine: float | None = None
    largest_error: float | None = None


@dataclass(frozen=True)
class Absence:
    """A contestant that did not take part (``m`` None), or not at one batch size, and why. ``refused``: by a kernel's own answer."""

    name: str
    reason: str
    m: int | None = None
    refused: bool = False


@dataclass(frozen=True)
class Report:
    """Everything that was measured and with what."""

    schema: int
    command: str
    date: str
    machine: Machine
    versions: tuple[Version, ...]
    shape: str
    spec: Spec
    device: str
    timer: str
    threads: int
    rounds: int
    seed: int
    outliers: bool
    copies: int
    rows: tuple[Row, ...]
    ceilings: tuple[Ceiling, ...]
    absent: tuple[Absence, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Decode the JSON text of :meth:`to_json`."""
        return loads(cls, text)

    def to_json(self) -> JsonValue:
        """Plain JSON types."""
        return to_json(self)

    def best(self, m: int, kind: str) -> Ceiling | None:
        """The highest ceiling of a kind in the turns of one batch size."""
        return max((c for c in self.ceilings if (c.m, c.kind) == (m, kind)), key=lambda c: c.per_second.median, default=None)


def spread_of(samples: Sequence[Sample]) -> Spread:
    """Seconds of some calls."""
    seconds = sorted(sample.seconds for sample in samples)
    known = [sample.disturbed for sample in samples if sample.disturbed is not None]
    undisturbed = len([flag for flag in known if not flag]) if known else None
    quarters = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 3
    return Spread(len(seconds), quarters[1], seconds[0], quarters[0], quarters[2], seconds[-1], undisturbed)


def rate_of(seconds: Spread, amount: float) -> Spread:
    """Amounts per second: the least time is the highest rate."""
    s = seconds
    return Spread(s.samples, amount / s.median, amount / s.most, amount / s.upper, amount / s.lower, amount / s.least, s.undisturbed)
