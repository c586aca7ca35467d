"""Those that take part in a benchmark: kernels of backends, and the machine's own limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hal_core.bench.problem import Distance, distance_of
from hal_core.bench.timer import Sample
from hal_core.dtypes import torch_dtype
from hal_core.errors import HalError
from hal_core.ops import Routed
from hal_core.spec import MoESpec
from hal_core.testing.data import to_device

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.bench.problem import Batch, Problem
    from hal_core.bench.timer import Timer
    from hal_core.registry import RegisteredKernel

__all__ = ["About", "Contestant", "ContestantError", "KernelContestant", "moved", "numerics_kind"]


class ContestantError(HalError):
    """A contestant cannot take part, or not any longer; it becomes a line of the report."""


@dataclass(frozen=True)
class About:
    """What a contestant says of itself.

    role: ``kernel``, ``peer`` or ``ceiling``. numerics: in words. kind: what it multiplies with: ``float``, ``int8``, ``fp8`` or ``read``.
    weight_bytes: packed bytes of one expert, or of the matrix; for a ceiling, the bytes or operations of one call.
    """

    name: str
    role: str
    numerics: str
    kind: str
    weight_bytes: float


class Contestant(Protocol):
    """Prepared once, then for each batch loaded and run in turns. ``alive``: whether it still answers after an error."""

    alive: bool

    def prepare(self, problem: Problem, copies: int) -> About:
        """Pack the problem's weights so many times, in memory of their own.

        Raises:
            ContestantError: it cannot; the message is for the report.
        """

    def load(self, batch: Batch) -> None:
        """Take the batch of the calls to come."""

    def run(self, start: int, calls: int) -> list[Sample]:
        """Call it ``calls`` times, each with another copy of the weights and another routing, from number ``start`` on."""

    def distance(self, index: int, truth: Tensor, rows: Tensor) -> Distance | None:
        """One more call with routing ``index`` into a poisoned output: how far its rows are from the truth."""

    def close(self) -> None:
        """Give back memory and processes."""


def numerics_kind(activations: tuple[Any, ...]) -> str:
    """What a kernel multiplies with, by how it quantizes activations."""
    if not activations:
        return "float"
    return "int8" if all(quant.dtype == "int8" for quant in activations) else activations[0].dtype.partition("_")[0]


def moved(weights: Any, device: torch.device) -> Any:
    """LinearWeights or MoEWeights with tensors of their own on the device, for an op that may keep them."""
    parts = {name: value for name in weights.__dataclass_fields__ if (value := getattr(weights, name)) is not None}
    return type(weights)(**{name: to_device(part, device) for name, part in parts.items()})


class KernelContestant:
    """A registered kernel, called as an engine calls it: prepared ops, fixed inputs and outputs. role: ``peer`` for one compared with."""

    def __init__(self, registered: RegisteredKernel, device: torch.device, timer: Timer, role: str = "kernel") -> None:
        self.registered, self.device, self.timer, self.role = registered, device, timer, role
        self.name, self.alive = registered.name, True
        self._ops: list[Any] = []
        self._timed: list[Callable[[], Sample]] = []

    def prepare(self, problem: Problem, copies: int) -> About:
        kernel, spec = self.registered.kernel, problem.spec
        self._spec = spec
        self._ops = [kernel.prepare(spec, moved(problem.weights, self.device)) for _ in range(copies)]
        held = sum(t.numel() * t.element_size() for t in self._ops[0].buffers())
        does = kernel.computes(spec)
        return About(self.name, self.role, str(does), numerics_kind(does.activations), held / problem.experts)

    def serves(self, rows: int) -> str | None:
        """Why it does not serve batches of so many rows; None where it does."""
        least, most = self.registered.kernel.m_range
        good = least <= rows and (most is None or rows <= most)
        return None if good else f"serves M = {least} to {'any' if most is None else most}"

    def load(self, batch: Batch) -> None:
        reason = self.serves(batch.rows)
        if reason is not None:
            raise ContestantError(f"M = {batch.rows}", reason)
        spec = self._spec
        self._batch, self._x = batch, batch.x.to(self.device, copy=True)
        self._routed = None if batch.ids is None else _on(batch.routing(0), self.device)
        width = spec.hidden if isinstance(spec, MoESpec) else spec.n
        self._out = torch.empty(batch.rows, width, dtype=torch_dtype(spec.output), device=self.device)
        with torch.inference_mode():
            self._timed = [self.timer.bind(self._call(op)) for op in self._ops]

    def _call(self, op: Any) -> Callable[[], object]:
        x, out, routed = self._x, self._out, self._routed
        if routed is None:
            return lambda: op.apply(x, out=out)
        return lambda: op.apply(x, routed, out=out)

    def run(self, start: int, calls: int) -> list[Sample]:
        with torch.inference_mode():
            samples = [self._once(index) for index in range(start, start + calls)]
        if not bool(torch.isfinite(self._out).all()):
            raise ContestantError(f"M = {self._batch.rows}", "left a poisoned output unwritten, or wrote what is not finite")
        return samples

    def _once(self, index: int) -> Sample:
        if self._routed is not None:
            routed = self._batch.routing(index)
            self._routed.topk_ids.copy_(routed.topk_ids)
            self._routed.topk_weights.copy_(routed.topk_weights)
        self._out.fill_(float("nan"))
        return self._timed[index % len(self._timed)]()

    def distance(self, index: int, truth: Tensor, rows: Tensor) -> Distance | None:
        with torch.inference_mode():
            self._once(index)
        return distance_of(self._out.to("cpu")[rows], truth)

    def close(self) -> None:
        self._ops, self._timed = [], []


def _on(routed: Routed, device: torch.device) -> Routed:
    return Routed(routed.topk_ids.to(device, copy=True), routed.topk_weights.to(device, copy=True))
