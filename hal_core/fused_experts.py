"""Experts that a checkpoint publishes as two parameters, gate and up in one: their shapes, and their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError
from hal_core.kernel import MoEWeights
from hal_core.spec import Activation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.formats.base import Entry

__all__ = ["alternate_rows", "fused_activation", "fused_members", "fused_roles", "fused_weights"]


def fused_roles(block: str, entries: Mapping[str, Entry]) -> tuple[int, dict[str, Entry]]:
    """Number of experts, and an entry of one expert's matrix ``[N, K]`` for each role, of the fused parameters by last name.

    Raises:
        FormatError: one of the two is missing, or they do not fit each other.
    """
    for last in ("gate_up_proj", "down_proj"):
        if last not in entries:
            raise FormatError(f"{block}.{last}", "missing, or unquantized unlike its sibling", "quantize a block of experts as a whole")
    both, down = entries["gate_up_proj"], entries["down_proj"]
    (count, hidden, rows), (other, inner, out) = both.shape, down.shape
    if (count, rows, hidden) != (other, 2 * inner, out):
        raise FormatError(f"experts {block}", f"gate_up {list(both.shape)}, down {list(down.shape)}", "shapes must fit each other")
    half = replace(both, shape=(inner, hidden), fused=False)
    return count, {"gate_proj": half, "up_proj": half, "down_proj": replace(down, shape=(out, inner), fused=False)}


def fused_members(block: str, entries: Mapping[str, Entry]) -> tuple[tuple[tuple[str, str], ...], bool]:
    """Parameter names by role, and whether there are biases.

    Raises:
        FormatError: only one of the two biases is there, or one has another shape than its matrix.
    """
    members, biases = [], 0
    for role, last in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        name, weight = f"{block}.{last}_bias", entries[f"{block}.{last}"]
        members.append((role, weight.name))
        if name in entries:
            wanted = (weight.shape[0], weight.shape[2])
            if entries[name].shape != wanted:
                raise FormatError(f"parameter {name}", f"shape {list(entries[name].shape)}, expected {list(wanted)}", "check the file")
            members.append((f"{role}_bias", name))
            biases += 1
    if biases == 1:
        raise FormatError(f"biases of {block}", "only one of two is stored", "complete the checkpoint")
    return tuple(members), biases == 2


def fused_activation(config: Mapping[str, Any]) -> Activation:
    """gpt-oss's clamped swiglu, with the numbers of its config."""
    numbers = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    for field, usual in numbers.items():
        value = config.get(field, usual)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise FormatError(f"config.{field}", repr(value)[:80], "it is a positive number")
        numbers[field] = float(value)
    return Activation("swiglu_oai", alpha=numbers["swiglu_alpha"], limit=numbers["swiglu_limit"])


def alternate_rows(weight: QuantizedTensor, first: int) -> QuantizedTensor:
    """Every second row of N of a weight with scales by group, copied."""
    parts = {name: tensor[..., first::2, :].contiguous() for name, tensor in weight.tensors().items() if name in ("values", "scales")}
    shape = (*weight.shape[:-2], weight.shape[-2] // 2, weight.shape[-1])
    return replace(weight, shape=shape, values=parts["values"], scales=parts["scales"])


def fused_weights(
    names: Callable[[str], Sequence[str]], read: Callable[[str], QuantizedTensor], load: Callable[[str], Tensor]
) -> MoEWeights:
    """Gate, up and down with their biases: even rows are gate, odd rows are up.

    ``names`` gives the parameters of a role; ``read`` and ``load`` a quantized and a plain one by name.
    """
    both = read(names("gate_up")[0])
    gate, up = alternate_rows(both, 0), alternate_rows(both, 1)
    del both  # the largest tensor of the model is not held twice while the next is read
    bias = load(names("gate_up_bias")[0]) if names("gate_up_bias") else None
    return MoEWeights(
        up=up, down=read(names("down")[0]), gate=gate, gate_bias=None if bias is None else bias[:, 0::2].contiguous(),
        up_bias=None if bias is None else bias[:, 1::2].contiguous(), down_bias=None if bias is None else load(names("down_bias")[0]),
    )  # fmt: skip
