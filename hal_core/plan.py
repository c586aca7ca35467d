"""What a checkpoint asks of kernels: its quantized parameters grouped into ops, each with its spec. Reads no weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from hal_core.dtypes import dtype_word, torch_dtype
from hal_core.errors import FormatError
from hal_core.fused_experts import fused_activation, fused_members, fused_roles
from hal_core.numerics import Numerics, numerics_from_word
from hal_core.spec import Activation, EmbeddingSpec, LinearSpec, MoESpec
from hal_core.widen import common_scheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from hal_core.formats.base import Checkpoint, Entry
    from hal_core.selection import Selection, Transform
    from hal_core.spec import Spec

__all__ = ["PlannedOp", "checkpoint_dtype", "plan_checkpoint"]

_EXPERT = re.compile(r"(?P<block>.+\.experts)\.(?P<index>\d+)\.(?P<role>gate_proj|up_proj|down_proj|w[123])\.weight")
#: Mixtral's names.
_ROLES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EMBEDDING = re.compile(r"(.+\.)?embed_tokens\.weight")
_HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class PlannedOp:
    """One op of the model. ``module`` is the module's dotted name; ``members`` are parameter names, by role.

    notes: what is done to the weights before a kernel sees them, all of it exact. transforms: what is not.
    """

    module: str
    spec: Spec
    members: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()
    transforms: tuple[Transform, ...] = ()

    def names(self, role: str) -> tuple[str, ...]:
        """Parameter names of a role (``weight``, ``bias``, ``gate``, ``up``, ``down``), experts in order."""
        return tuple(name for r, name in self.members if r == role)

    def served_by(self, selection: Selection) -> Selection:
        """The selection of its spec, with what is done to these weights before."""
        return replace(selection, transforms=(*self.transforms, *selection.transforms)) if self.transforms else selection


def plan_checkpoint(checkpoint: Checkpoint, dtype: str, numerics: str = "checkpoint") -> tuple[PlannedOp, ...]:
    """Every op with quantized weights, in checkpoint order.

    Args:
        checkpoint: an opened checkpoint.
        dtype: activation dtype word, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        numerics: a word of :func:`hal_core.numerics.numerics_from_word`.

    Raises:
        FormatError: experts that are incomplete or differ in shape or scheme; names them.
    """
    entries = checkpoint.entries
    experts: dict[str, dict[str, dict[int, Entry]]] = {}
    fused: dict[str, dict[str, Entry]] = {}
    planned: dict[str, PlannedOp | None] = {}
    for name, entry in entries.items():
        match = _EXPERT.fullmatch(name)
        if match and entry.quantized:
            planned.setdefault(match["block"], None)
            role = _ROLES.get(match["role"], match["role"])
            experts.setdefault(match["block"], {}).setdefault(role, {})[int(match["index"])] = entry
        elif entry.quantized and entry.fused:
            block, _, last = name.rpartition(".")
            planned.setdefault(block, None)
            fused.setdefault(block, {})[last] = entry
        elif entry.quantized and name.endswith(".weight") and len(entry.shape) == 2:
            module = name.removesuffix(".weight")
            planned[module] = _plan_matrix(checkpoint, module, entry, dtype, numerics)
        elif entry.quantized:
            raise FormatError(f"parameter {name}", f"quantized, with shape {list(entry.shape)}", "only matrices named *.weight are served")
    for block, roles in experts.items():
        planned[block] = _plan_experts(checkpoint, block, roles, dtype, numerics)
    for block, parts in fused.items():
        planned[block] = _plan_fused(checkpoint, block, parts, dtype, numerics)
    return tuple(op for op in planned.values() if op is not None)


def checkpoint_dtype(checkpoint: Checkpoint, dtype: torch.dtype | str | None = None) -> str:
    """The activation dtype word to run a checkpoint in: the one given, else the one its config names, else ``fp32``."""
    if isinstance(dtype, torch.dtype):
        return dtype_word(dtype)
    if dtype is not None and dtype != "auto":
        return dtype_word(torch_dtype(dtype))
    named = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "").removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(named, "fp32")


def _numerics(word: str, entry: Entry) -> Numerics:
    return numerics_from_word(word, entry.activations, entry.scheme.granularity.group)


def _plan_matrix(checkpoint: Checkpoint, module: str, entry: Entry, dtype: str, numerics: str) -> PlannedOp:
    n, k = entry.shape
    request = _numerics(numerics, entry)
    if _EMBEDDING.fullmatch(entry.name):
        tied = bool(checkpoint.config.get("tie_word_embeddings")) and "lm_head.weight" not in checkpoint.entries
        spec = EmbeddingSpec(n, k, entry.scheme, request, dtype, tied_head=tied)
        return PlannedOp(module, spec, (("weight", entry.name),), transforms=entry.transforms)
    bias = f"{module}.bias" in checkpoint.entries
    members = (("weight", entry.name), *((("bias", f"{module}.bias"),) if bias else ()))
    linear = LinearSpec(n, k, entry.scheme, entry.activations, request, dtype, bias=bias)
    return PlannedOp(module, linear, members, transforms=entry.transforms)


def _plan_fused(checkpoint: Checkpoint, block: str, parts: Mapping[str, Entry], dtype: str, numerics: str) -> PlannedOp:
    count, entries = fused_roles(block, parts)
    members, bias = fused_members(block, checkpoint.entries)
    spec = _experts_spec(checkpoint.config, block, count, entries, dtype, numerics)
    return PlannedOp(block, replace(spec, activation=fused_activation(checkpoint.config), bias=bias), members)


def _plan_experts(checkpoint: Checkpoint, block: str, roles: Mapping[str, Mapping[int, Entry]], dtype: str, numerics: str) -> PlannedOp:
    count = 1 + max(index for members in roles.values() for index in members)
    entries: dict[str, Entry] = {}
    for role, members in roles.items():
        if len(members) != count:
            missing = next(i for i in range(count) if i not in members)
            raise FormatError(f"{block}.{missing}.{role}.weight", f"missing, while {count} experts are named", "complete the checkpoint")
        for index, entry in members.items():
            if entry.shape != members[0].shape:
                found = f"shape {list(entry.shape)}, expert 0 has {list(members[0].shape)}"
                raise FormatError(f"{block}.{index}.{role}.weight", found, "experts of one block must share their shape")
        scheme = common_scheme((entry.scheme for entry in members.values()), members[0].shape[-1])
        if scheme is None:
            found = ", ".join(dict.fromkeys(str(entry.scheme) for entry in members.values()))
            raise FormatError(
                f"{block}.*.{role}.weight", f"no single scheme holds {found} exactly", "quantize the experts of a block alike"
            )
        entries[role] = replace(members[0], scheme=scheme)
        _check_inputs(members[0], members.values(), numerics)
    for role in ("up_proj", "down_proj", "gate_proj"):
        if role not in entries:
            raise FormatError(
                f"{block}.*.{role}.weight", "missing, or unquantized unlike its siblings", "quantize a block of experts as a whole"
            )
    _check_inputs(entries["up_proj"], entries.values(), numerics)
    spec = _experts_spec(checkpoint.config, block, count, entries, dtype, numerics)
    named = tuple((role.removesuffix("_proj"), roles[role][i].name) for role in ("gate_proj", "up_proj", "down_proj") for i in range(count))
    changes = dict.fromkeys(change for members in roles.values() for entry in members.values() for change in entry.transforms)
    return PlannedOp(block, spec, named, _widening_notes(roles, entries), tuple(changes))


def _check_inputs(first: Entry, others: Iterable[Entry], numerics: str) -> None:
    """Experts of one block compute with one kind of inputs."""
    odd = next((entry for entry in others if entry.activations != first.activations), None)
    if odd is not None and numerics == "checkpoint":
        found = f"inputs {odd.activations or 'not quantized'}, those of {first.name} {first.activations or 'not quantized'}"
        raise FormatError(odd.name, found, "give numerics exact, which quantizes no inputs")


def _widening_notes(roles: Mapping[str, Mapping[int, Entry]], entries: Mapping[str, Entry]) -> tuple[str, ...]:
    """Which experts are stored in a narrower scheme than their block is held in."""
    notes = []
    for role, members in roles.items():
        narrow: dict[str, list[int]] = {}
        for index, entry in sorted(members.items()):
            if entry.scheme != entries[role].scheme:
                narrow.setdefault(str(entry.scheme), []).append(index)
        notes += [
            f"{role} of experts {', '.join(map(str, which))} stored as {scheme}, held as {entries[role].scheme} (exact)"
            for scheme, which in narrow.items()
        ]
    return tuple(notes)


def _experts_spec(config: Mapping[str, Any], block: str, count: int, entries: Mapping[str, Entry], dtype: str, numerics: str) -> MoESpec:
    up, down, gate = entries["up_proj"], entries["down_proj"], entries["gate_proj"]
    (intermediate, hidden), top_k = up.shape, config.get("num_experts_per_tok")
    named = config.get("num_experts", config.get("num_local_experts"))
    if named is not None and named != count:
        raise FormatError(f"experts {block}", f"{count} in the files, {named} in config.json", "complete the checkpoint")
    if gate.shape != up.shape or down.shape != (hidden, intermediate):
        found = f"gate {list(gate.shape)}, up {list(up.shape)}, down {list(down.shape)}"
        raise FormatError(f"experts {block}", found, "shapes must fit each other")
    act = _HIDDEN_ACTS.get(str(config.get("hidden_act", "silu")))
    if act is None:
        raise FormatError("config.hidden_act", repr(config.get("hidden_act")), f"served: {', '.join(_HIDDEN_ACTS)}")
    if type(top_k) is not int or not 1 <= top_k <= count:
        raise FormatError("config.num_experts_per_tok", repr(top_k), f"must be from 1 to {count}")
    request = _numerics(numerics, up)
    return MoESpec(
        num_experts=count, top_k=top_k, hidden=hidden, intermediate=intermediate, up=up.scheme, down=down.scheme, gate=gate.scheme,
        activation=Activation(act), activations=up.activations, numerics=request, dtype=dtype,
    )  # fmt: skip
