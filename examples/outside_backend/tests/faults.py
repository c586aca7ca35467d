"""Kernels with one fault each, of kinds that were found in real projects. Not part of the wheel.

``FAULTS`` maps a name to the kernel and to the check of the conformance kit that must catch it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hal_backend_example.kernels import ExampleExperts, ExampleLinear
from hal_backend_example.layout import Columns
from hal_backend_example.ops import ExpertsOp, LinearOp

from hal_core.canonical import QuantizedTensor
from hal_core.numerics import Numerics
from hal_core.ops import Routed
from hal_core.refusal import Refusal

FAULTS: dict[str, tuple[Any, str]] = {}


def linear_fault(name: str, check: str, columns: type[Columns] = Columns, **answers: Any) -> Any:
    """Registers a linear whose op is the decorated class."""
    return _registered(name, check, ExampleLinear, columns, answers)


def experts_fault(name: str, check: str, columns: type[Columns] = Columns, **answers: Any) -> Any:
    """Registers experts whose op is the decorated class."""
    return _registered(name, check, ExampleExperts, columns, answers)


def _registered(name: str, check: str, base: type, columns: type[Columns], answers: dict[str, Any]) -> Any:
    def register(op: type) -> type:
        op.columns = columns
        body = {"prepare": lambda self, spec, weights: op(spec, weights), **answers}
        FAULTS[name] = (type(f"Faulty{base.__name__}", (base,), body)(), check)
        return op

    return register


class ZeroPlusOne(Columns):
    """GPTQ's stored zero point taken for the true one, or the reverse."""

    def pack(self, weight: QuantizedTensor) -> dict[str, torch.Tensor]:
        packed = super().pack(weight)
        return packed if weight.zeros is None else {**packed, "zeros": packed["zeros"] + 1}


class Rescaled(Columns):
    """One scale a row instead of one a group, and codes rounded to it."""

    def pack(self, weight: QuantizedTensor) -> dict[str, torch.Tensor]:
        packed, bits = super().pack(weight), weight.scheme.bits
        scales = packed["scales"].float()
        coarse = scales.abs().amax(dim=-2, keepdim=True).clamp(min=1e-6)
        codes = packed["codes"] if bits == 8 else torch.stack([packed["codes"] & 15, packed["codes"] >> 4], -2).flatten(-3, -2)
        columns = (torch.arange(codes.shape[-2]) // self.group).clamp(max=scales.shape[-2] - 1)
        value = (codes.float() - packed["zeros"].float()[..., columns, :]) * (scales / coarse)[..., columns, :]
        middle = 1 << (bits - 1)
        rounded = (value.round() + middle).clamp(0, (1 << bits) - 1).to(torch.uint8)
        if bits == 4:
            rounded = rounded[..., 0::2, :] | (rounded[..., 1::2, :] << 4)
        return {
            "codes": rounded, "scales": coarse.expand(scales.shape).to(packed["scales"].dtype).contiguous(),
            "zeros": torch.full_like(packed["zeros"], middle),
        }  # fmt: skip


class LastGroupShort(Columns):
    """A group cut short by the end of K uses its neighbour's scale."""

    def pack(self, weight: QuantizedTensor) -> dict[str, torch.Tensor]:
        packed = super().pack(weight)
        if self.shape[-1] % self.group and packed["scales"].shape[-2] > 1:
            packed["scales"][..., -1, :] = packed["scales"][..., -2, :]
        return packed


class NoWayBack(Columns):
    """Unpacks to what it would have been with the nibbles the other way round."""

    def unpack(self) -> QuantizedTensor:
        weight = super().unpack()
        return replace(weight, values=(weight.values >> 4) | (weight.values << 4)) if weight.scheme.bits == 4 else weight


class NegativeLost(Columns):
    """Scales are taken to be positive."""

    def pack(self, weight: QuantizedTensor) -> dict[str, torch.Tensor]:
        return {**super().pack(weight), "scales": super().pack(weight)["scales"].abs()}


class NewStorage(Columns):
    """Updates by assignment."""

    def update(self, weight: QuantizedTensor) -> None:
        for name, tensor in self.pack(weight).items():
            setattr(self, name, tensor)


class HalfUpdated(Columns):
    """Forgets the zero points of new weights."""

    def update(self, weight: QuantizedTensor) -> None:
        zeros = self.zeros.clone()
        super().update(weight)
        self.zeros.copy_(zeros)


class Recast(Columns):
    """Packed scales follow model.to(dtype)."""

    def _apply(self, fn: object, recurse: bool = True) -> Any:
        return torch.nn.Module._apply(self, fn, recurse)


for _name, _check, _columns in (
    ("zero point off by one", "accuracy", ZeroPlusOne), ("weights rescaled undeclared", "accuracy", Rescaled),
    ("wrong in the last partial group", "accuracy", LastGroupShort), ("negative scales lost", "accuracy", NegativeLost),
    ("layout does not reverse", "layout", NoWayBack), ("update moves buffers", "update", NewStorage),
    ("update forgets zero points", "update", HalfUpdated), ("scales recast with the model", "module", Recast),
):  # fmt: skip
    linear_fault(_name, _check, _columns)(type("FaultyLinearOp", (LinearOp,), {}))
    experts_fault(f"{_name}, experts", _check, _columns)(type("FaultyExpertsOp", (ExpertsOp,), {}))


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    """Activations as int8 would hold them, one scale a token."""
    scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-6) / 127
    return ((x.float() / scale).round() * scale).to(x.dtype)


@linear_fault("int8 activations undeclared", "accuracy")
class Int8Linear(LinearOp):
    """W4A16 that is W4A8."""

    def compute(self, x, out=None):
        return super().compute(int8_rows(x) if x.is_floating_point() else x, out)


@linear_fault("int8 activations undeclared, bf16 only", "accuracy", dtypes=("bf16",), out_dtypes=("bf16",))
class Int8LinearBF16(Int8Linear):
    """As above, in a kernel that takes no float32, whose bound is that of bfloat16."""


@experts_fault("int8 activations undeclared, experts", "accuracy")
class Int8Experts(ExpertsOp):
    def slots(self, x, *rest):
        return super().slots(int8_rows(x), *rest)


@linear_fault("bias dropped", "effects")
class NoBias(LinearOp):
    def compute(self, x, out=None):
        bias, self.bias = self.bias, None
        try:
            return super().compute(x, out)
        finally:
            self.bias = bias


@linear_fault("wrong only for M > 32", "accuracy")
class LargeBatch(LinearOp):
    """A second way through the kernel, with a fault of its own."""

    def compute(self, x, out=None):
        y = super().compute(x)
        if y.dim() == 2 and len(y) > 32:
            y[32:] *= 1.01
        return y if out is None else out.copy_(y)


@linear_fault("NaN swallowed", "rows")
class NanToZero(LinearOp):
    def compute(self, x, out=None):
        return super().compute(torch.nan_to_num(x, nan=0.0) if x.is_floating_point() else x, out)


@linear_fault("NaN spreads to other rows", "rows")
class NanSpreads(LinearOp):
    def compute(self, x, out=None):
        y = super().compute(x)
        y = y + 0 * y.sum()
        return y if out is None else out.copy_(y)


@linear_fault("output rows left unwritten", "accuracy")
class LastRowMissing(LinearOp):
    def compute(self, x, out=None):
        y = super().compute(x)
        if out is None:
            return y
        out[:-1] = y[:-1]
        return out


@linear_fault("writes past the output", "memory")
class WritesPastOut(LinearOp):
    def compute(self, x, out=None):
        y = super().compute(x, out)
        if out is not None and out.is_contiguous() and out.numel():
            end = out.storage_offset() + out.numel()
            if (end + 1) * out.element_size() <= out.untyped_storage().nbytes():
                out.as_strided((1,), (1,), end).fill_(0)
        return y


@linear_fault("changes its input", "memory")
class ChangesInput(LinearOp):
    def compute(self, x, out=None):
        y = super().compute(x, out)
        if x.is_floating_point() and x.numel():
            x.view(-1)[:1] += 1
        return y


@linear_fault("scratch shared by threads", "threads")
class SharedScratch(LinearOp):
    """The input is kept in the op between two steps."""

    def compute(self, x, out=None):
        import time

        self.kept = x
        time.sleep(1e-3)
        return super().compute(self.kept, out)


@linear_fault("batch invariance promised in vain", "batch_invariance", numerics=Numerics(batch_invariant=True))
class DependsOnBatch(LinearOp):
    def compute(self, x, out=None):
        y = super().compute(x)
        y = y * (1 + 1e-6 * (len(x) % 2)) if x.dim() == 2 else y
        return y if out is None else out.copy_(y)


@linear_fault("determinism promised in vain", "determinism")
class Drifts(LinearOp):
    calls = 0

    def compute(self, x, out=None):
        self.calls += 1
        y = super().compute(x) * (1 + 1e-6 * self.calls)
        return y if out is None else out.copy_(y)


@linear_fault("breaks the graph", "compile")
class BreaksGraph(LinearOp):
    def compute(self, x, out=None):
        if float(x.sum()) > 1e30:
            return super().compute(x * 1, out)
        return super().compute(x, out)


@torch.library.custom_op("hal_example_faulty::linear", mutates_args=())
def wrong_fake(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.clone()


@wrong_fake.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], y.shape[1] + 1))


@linear_fault("fake kernel of another shape", "opcheck")
class WrongFake(LinearOp):
    def compute(self, x, out=None):
        y = super().compute(x.reshape(-1, x.shape[-1]))
        y = wrong_fake(x, y).reshape(*x.shape[:-1], -1)
        return y if out is None else out.copy_(y)


@linear_fault("plain exceptions", "errors")
class PlainException(LinearOp):
    def compute(self, x, out=None):
        if x.shape[-1] != self.spec.k:
            raise ValueError("bad shape")
        return super().compute(x, out)


@experts_fault("limit dropped", "effects")
class NoLimit(ExpertsOp):
    """The clamp of gpt-oss, forgotten in seven projects."""

    def slots(self, *arguments):
        spec = self.spec
        self.spec = replace(spec, activation=replace(spec.activation, limit=None))
        try:
            return super().slots(*arguments)
        finally:
            self.spec = spec


@experts_fault("alpha fixed", "effects")
class FixedAlpha(ExpertsOp):
    def slots(self, *arguments):
        spec = self.spec
        self.spec = replace(spec, activation=replace(spec.activation, alpha=None))
        try:
            return super().slots(*arguments)
        finally:
            self.spec = spec


@experts_fault("biases of experts dropped", "effects")
class NoExpertBias(ExpertsOp):
    def slots(self, *arguments):
        spec, self.spec = self.spec, replace(self.spec, bias=False)
        try:
            return super().slots(*arguments)
        finally:
            self.spec = spec


@experts_fault("routed scaling dropped", "effects")
class NoScaling(ExpertsOp):
    def slots(self, *arguments):
        spec, self.spec = self.spec, replace(self.spec, routed_scaling=1.0)
        try:
            return super().slots(*arguments)
        finally:
            self.spec = spec


@experts_fault("wrong expert map", "accuracy")
class WrongMap(ExpertsOp):
    def compute(self, x, routing, expert_map, out, workspace, reduce):
        expert_map = None if expert_map is None else expert_map.roll(1)
        return super().compute(x, routing, expert_map, out, workspace, reduce)


@experts_fault("router weight applied twice", "accuracy")
class WeightTwice(ExpertsOp):
    def slots(self, x, ids, scores, *rest):
        return super().slots(x, ids, scores * scores, *rest)


@experts_fault("an id out of range computed", "routing")
class ClampedIds(ExpertsOp):
    def compute(self, x, routing, expert_map, out, workspace, reduce):
        ids = routing.topk_ids.clamp(-1, self.spec.num_experts - 1)
        return super().compute(x, Routed(ids, routing.topk_weights), expert_map, out, workspace, reduce)


@experts_fault("skipped slots computed", "routing")
class NoSkip(ExpertsOp):
    def compute(self, x, routing, expert_map, out, workspace, reduce):
        ids = torch.where(routing.topk_ids == -1, 0, routing.topk_ids)
        return super().compute(x, Routed(ids, routing.topk_weights), expert_map, out, workspace, reduce)


@experts_fault("an error after the output was written", "routing")
class WritesBeforeRaising(ExpertsOp):
    def compute(self, x, routing, expert_map, out, workspace, reduce):
        if out is not None:
            out.zero_()
        return super().compute(x, routing, expert_map, out, workspace, reduce)


@experts_fault("NaN swallowed, experts", "rows")
class NanToZeroExperts(ExpertsOp):
    def slots(self, x, *rest):
        return super().slots(torch.nan_to_num(x, nan=0.0), *rest)


def _verdict(name: str, check: str, refusals: Any, **answers: Any) -> None:
    linear_fault(name, check, refusals=refusals, **answers)(type("PlainLinearOp", (LinearOp,), {}))


_verdict("a verdict that is a bool", "declaration", lambda self, spec, machine: True)
_verdict("accepts what it does not declare", "refusals", lambda self, spec, machine: ())
_verdict(
    "a refusal without a fix", "accuracy",
    lambda self, spec, machine: (
        *ExampleLinear.refusals(self, spec, machine), *([Refusal("shape.range", "n=1", "small", "")] * (spec.n == 1)),
    ),
)  # fmt: skip
_verdict(
    "declares a bias and refuses it", "declaration",
    lambda self, spec, machine: (
        *ExampleLinear.refusals(self, spec, machine), *([Refusal("epilogue.bias", "bias", "none", "add it yourself")] * spec.bias),
    ),
)  # fmt: skip
