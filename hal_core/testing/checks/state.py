"""What an op holds: a layout that reverses, weights that are replaced in place, buffers that survive what modules go through."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import HalError
from hal_core.testing.case import CheckFailedError, Status, Verdict
from hal_core.testing.measure import same_bits

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.testing.bench import Bench
    from hal_core.testing.subject import Subject

__all__ = ["layout", "module", "update"]

#: What a transform that a kernel declares may round.
_LOSSY = ("scales", "mins", "global_scale")


def layout(bench: Bench) -> Verdict:
    """``unpack()`` of the op, or of its parts named by role, gives back each canonical tensor; without one, see below."""
    subject = bench.subject()
    op, roles = subject.prepare(), subject.roles(subject.weights)
    found = _unpacked(subject, op, roles)
    if found is None:
        return _injective(subject, op, max((t.error_bound for t in bench.kernel.transforms(subject.spec)), default=0.0))
    for role, weight in roles.items():
        back = found.get(role)
        if back is None or back.scheme != weight.scheme or back.shape != weight.shape:
            told = "nothing" if back is None else f"{back.scheme} {list(back.shape)}"
            raise CheckFailedError(f"unpack() gives {told} for {role}, packed was {weight.scheme} {list(weight.shape)}")
        for name, tensor in weight.tensors().items():
            same_bits(back.tensors()[name], tensor, f"{role}.{name} after pack and unpack")
    return Verdict()


def _unpacked(subject: Subject, op: Any, roles: dict[str, QuantizedTensor]) -> dict[str, QuantizedTensor] | None:
    if callable(getattr(op, "unpack", None)):
        return subject.roles(op.unpack())
    parts: dict[str, Any] = {role: getattr(op, role, None) for role in roles}
    found = {role: part.unpack() for role, part in parts.items() if callable(getattr(part, "unpack", None))}
    return found or None


def _injective(subject: Subject, op: Any, loss: float) -> Verdict:
    """No ``unpack``: a changed code, scale, zero point or minimum must at least change what is held, but for a declared ``loss``."""
    held = _state(op)
    for role, weight in subject.roles(subject.weights).items():
        for name, tensor in weight.tensors().items():
            if name == "g_idx":
                continue  # its order may be folded away
            lossy = loss > 0 and name in _LOSSY and tensor.is_floating_point()
            changed: dict[str, Any] = {name: _moved(tensor, loss) if lossy else _flipped(tensor)}
            other = replace(subject.weights, **{role: replace(weight, **changed)})
            if _same_state(held, _state(subject.prepare(other))):
                raise CheckFailedError(f"another last element of {role}.{name} packs to the same: the layout cannot reverse")
    return Verdict(reason="no unpack(); packed forms of different weights differ")


def _moved(tensor: Tensor, loss: float) -> Tensor:
    """The last element changed by more than a declared transform may lose, and than its own type may."""
    changed = tensor.clone().contiguous()
    most = max(1.02 + 4 * loss, 1.1 + torch.finfo(tensor.dtype).eps if tensor.itemsize == 1 else 0.0)
    last = changed.reshape(-1)[-1:].float()
    # away from zero: the two parts must not cancel
    changed.reshape(-1)[-1:] = (last * most + torch.where(last < 0, -loss, loss)).to(tensor.dtype)
    return changed


def _flipped(tensor: Tensor) -> Tensor:
    """The last element with its lowest bit turned over."""
    changed = tensor.clone().contiguous()
    changed.reshape(-1)[-1:].view(torch.uint8)[0] ^= 1
    return changed


def _state(op: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in (*op.named_buffers(), *op.named_parameters()) if tensor is not None}


def _same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    try:
        for name, tensor in a.items():
            same_bits(tensor, b[name], name)
    except CheckFailedError:
        return False
    return a.keys() == b.keys()


def update(bench: Bench) -> Verdict:
    """Replaced weights are as if prepared so; the given weights and the addresses stay as they are."""
    subject = bench.subject()
    mine = subject.copied(subject.weights)
    op: Any = bench.kernel.prepare(subject.spec, mine)
    for role, weight in subject.roles(mine).items():
        for name, tensor in weight.tensors().items():
            same_bits(tensor, subject.roles(subject.weights)[role].tensors()[name], f"{role}.{name}, which prepare must not change")
    inputs, other = subject.inputs(subject.rows), subject.new_weights()
    before = {name: tensor.data_ptr() for name, tensor in _state(op).items()}
    op.update(subject.copied(other))
    moved = [name for name, tensor in _state(op).items() if before.get(name) != tensor.data_ptr()]
    if moved or before.keys() != _state(op).keys():
        raise CheckFailedError(f"update moved {', '.join(moved) or 'buffers'}: captured graphs would read freed memory")
    fresh = subject.prepare(other)
    for name, tensor in _state(fresh).items():
        same_bits(_state(op)[name], tensor, f"buffer {name} after update, against a fresh prepare")
    same_bits(subject.call(op, inputs), subject.call(fresh, inputs), "result after update, against a fresh prepare")
    ruler = subject.ruler(inputs, other)
    ruler.check(subject.call(op, inputs), what="result after update")
    _refuses_strangers(bench, subject, op)
    same_bits(subject.call(op, inputs), subject.call(fresh, inputs), "result after an update that was refused")
    return Verdict(ruler.largest, ruler.bound)


def _refuses_strangers(bench: Bench, subject: Subject, op: Any) -> None:
    """Weights of another shape are an error, in ``update`` as in ``prepare``."""
    role, weight = next(iter(subject.roles(subject.weights).items()))
    stranger = replace(subject.weights, **{role: _stranger(weight)})
    for what, attempt in (("update", lambda: op.update(stranger)), ("prepare", lambda: bench.kernel.prepare(subject.spec, stranger))):
        try:
            attempt()
        except HalError:
            continue
        except Exception as error:
            raise CheckFailedError(f"{what} with a {role} of another shape: {type(error).__name__}, not a HalError: {error}") from error
        raise CheckFailedError(f"{what} took a {role} of another shape")


def _stranger(weight: QuantizedTensor) -> QuantizedTensor:
    """A valid float weight with one more row: neither the spec's scheme nor its shape."""
    from hal_core.canonical import QuantizedTensor as Canonical
    from hal_core.schemes import WeightScheme

    shape = (*weight.shape[:-2], weight.shape[-2] + 1, weight.shape[-1])
    return Canonical(WeightScheme("fp32"), shape, torch.zeros(shape, device=weight.values.device))


def module(bench: Bench) -> Verdict:
    """Deep copy, state dict and ``.to(dtype)`` of the model around it leave the result as it is."""
    subject = bench.subject()
    op, inputs = subject.prepare(), subject.inputs(subject.rows)
    before = subject.call(op, inputs)
    same_bits(subject.call(copy.deepcopy(op), inputs), before, "result of a deep copy")
    other = subject.prepare(subject.new_weights())
    other.load_state_dict(copy.deepcopy(op.state_dict()))
    same_bits(subject.call(other, inputs), before, "result after load_state_dict")
    biased = bool(getattr(subject.spec, "bias", False))
    for dtype in (torch.bfloat16,) if biased else (torch.bfloat16, torch.float64):
        model: Any = copy.deepcopy(torch.nn.Sequential(op)).to(dtype)
        y = subject.call(model[0], inputs)
        if not biased:  # a bias may follow the dtype of the model
            same_bits(y, before, f"result after model.to({dtype}): packed tensors must keep their dtype")
    if any(parameter.requires_grad for parameter in op.parameters()):
        return Verdict(status=Status.FAILED, reason="packed tensors are parameters that ask for gradients; make them buffers")
    return Verdict()
