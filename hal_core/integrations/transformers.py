"""A quantized checkpoint as a ``transformers`` model whose quantized layers are HAL ops.

The model is built without storage, then filled one module at a time, so that memory never holds more than
the packed model and one module's canonical weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hal_core.api import prepare
from hal_core.canonical import stack
from hal_core.dtypes import dtype_word, torch_dtype
from hal_core.errors import FormatError, HalError
from hal_core.formats import open_checkpoint
from hal_core.formats.base import Checkpoint
from hal_core.formats.recasting import recast_checkpoint
from hal_core.fused_experts import fused_weights
from hal_core.integrations.placement import home_of, placed
from hal_core.integrations.skeleton import finish, model_skeleton
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.memory import Trimmer
from hal_core.ops import MoEExperts, Op, QuantEmbedding, Routed
from hal_core.plan import PlannedOp, checkpoint_dtype, plan_checkpoint
from hal_core.policy import current_policy
from hal_core.report import LoadReport, OpReport
from hal_core.widen import widen

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor

    from hal_core.integrations.transformers_kv import KVCache
    from hal_core.policy import Policy

    Progress = Callable[[int, int, str], None]

__all__ = ["KVCache", "load", "published_name"]

#: Parts of published names that transformers' own classes call otherwise, and names of experts' matrices.
_PUBLISHED, _HELD = ".block_sparse_moe.", ".mlp."
_EXPERT_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def __getattr__(name: str) -> Any:
    """``KVCache`` subclasses a class of transformers, which is imported only when it is asked for."""
    if name == "KVCache":
        from hal_core.integrations.transformers_kv import KVCache

        return KVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def published_name(name: str, entries: Collection[str]) -> str:
    """The published name of one of a transformers model's parameters."""
    other = name.replace(_HELD, _PUBLISHED)
    return other if name not in entries and other in entries else name


class ExpertsAdapter(nn.Module):
    """Takes the place of a transformers experts module: same call, HAL op inside."""

    def __init__(self, op: MoEExperts) -> None:
        super().__init__()
        self.op = op

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.op.apply(hidden_states, Routed(top_k_index.to(torch.int32), top_k_weights.float()))


class TiedHead(nn.Module):
    """An output head that computes with the embedding's packed weights."""

    def __init__(self, embedding: QuantEmbedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding.apply(x)


def load(
    path: str | Path | Checkpoint,
    *,
    policy: Policy | str | None = None,
    numerics: str = "checkpoint",
    dtype: torch.dtype | str | None = None,
    recast: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> Any:
    """A ``transformers`` model of the checkpoint, on the device of its kernels; ``model.hal`` is its :class:`LoadReport`.

    ``model.hal_kv_params`` holds the checkpoint's calibrated scales of an fp8 key/value cache by layer, which :class:`KVCache` takes.

    Args:
        path: folder, ``.gguf`` file, or an opened checkpoint.
        policy: a policy or its text; default: the surrounding ``hal.policy``, ``HAL_POLICY``, or ``auto``.
        numerics: ``checkpoint``, ``exact``, ``int8`` ...
        dtype: activation dtype; default: the checkpoint's.
        recast: modules whose float weights are quantized while they are read; see :func:`hal_core.formats.recasting.recast_checkpoint`.
        progress: called with (bytes read, bytes in all, parameter name).

    Raises:
        FormatError: the checkpoint does not hold what the model needs, or holds what the model does not use.
        NoKernelError: no kernel may serve a layer; names the layer and every candidate's reasons.
        PolicyError: the kernels of the model run on several devices.
    """
    checkpoint = recast_checkpoint(path if isinstance(path, Checkpoint) else open_checkpoint(path), recast)
    activation_dtype = torch_dtype(checkpoint_dtype(checkpoint, dtype))
    chosen = current_policy(policy)
    model = model_skeleton(checkpoint, activation_dtype)
    plan = tuple(plan_checkpoint(checkpoint, dtype_word(activation_dtype), numerics))
    filler = _Filler(checkpoint, model, activation_dtype, chosen, progress, home_of(plan, chosen))
    for planned in plan:
        filler.fill_op(planned)
    filler.fill_plain()
    finish(model, checkpoint)
    if filler.device.type != "cpu":
        model.to(filler.device)  # what no checkpoint stores; all else is there
    from hal_core.integrations.transformers_layers import fuse_layers  # needs transformers, which by now is there

    layers = fuse_layers(model, filler.trimmer)
    filler.trimmer.flush()
    model.save_pretrained = _refuse_saving
    model.hal_kv_params = checkpoint.kv_params()
    model.hal = LoadReport(
        path=str(checkpoint.path), format=checkpoint.format, dtype=dtype_word(activation_dtype), numerics=numerics, policy=str(chosen),
        ops=tuple(filler.reports), packed_bytes=sum(op.nbytes for op in filler.reports), unquantized_bytes=filler.plain_bytes,
        notes=checkpoint.notes, layers=layers,
    )  # fmt: skip
    return model


class _Filler:
    """Puts ops and plain parameters into the skeleton and keeps count."""

    def __init__(
        self, checkpoint: Checkpoint, model: Any, dtype: torch.dtype, policy: Policy, progress: Progress | None, device: torch.device
    ) -> None:
        self.checkpoint, self.model, self.dtype, self.policy, self.progress = checkpoint, model, dtype, policy, progress
        self.device = device
        self.reports: list[OpReport] = []
        self.trimmer = Trimmer()
        self.plain_bytes = 0
        self.used: set[str] = set()
        self.total = sum(entry.nbytes for entry in checkpoint.entries.values())
        self.done = 0

    def fill_op(self, planned: PlannedOp) -> None:
        """Read a planned op's weights, prepare it and put it in place of the module."""
        old = self._module(planned)
        try:
            op = prepare(planned.spec, placed(self._weights(planned), self.device), self.policy, layer=planned.module)
        except HalError as error:
            error.args = (f"layer {planned.module}: {error}",)
            raise
        new: nn.Module = ExpertsAdapter(op) if isinstance(op, MoEExperts) else op
        self._check_shape(planned, old)
        self.model.set_submodule(self._place(planned.module), new)
        if isinstance(op, QuantEmbedding) and planned.spec.op == "embedding" and getattr(planned.spec, "tied_head", False):
            self.model.set_output_embeddings(TiedHead(op))
        if op.selection is not None:  # prepare() always sets it
            op.selection = planned.served_by(op.selection)
            self.reports.append(OpReport(planned.module, op.selection, _nbytes(op), planned.notes))

    def _module(self, planned: PlannedOp) -> nn.Module:
        try:
            found: nn.Module = self.model.get_submodule(self._place(planned.module))
            return found
        except AttributeError as error:
            reason = f"the {type(self.model).__name__} of config.json has no such module"
            raise FormatError(f"weights of {planned.module}", reason, "check model_type and num_hidden_layers in config.json") from error

    def _place(self, module: str) -> str:
        """The model's name of a published module."""
        return module.replace(_PUBLISHED, _HELD)

    def _check_shape(self, planned: PlannedOp, old: nn.Module) -> None:
        spec: Any = planned.spec
        if spec.op == "linear" and not isinstance(old, nn.Linear):
            found = f"quantized, and the model's {type(old).__name__} computes more than a linear"
            raise FormatError(f"weights of {planned.module}", found, "store this module unquantized, as routers are")
        if spec.op == "moe":
            wanted = getattr(old, "down_proj", None)
            shape: tuple[int, ...] = (spec.num_experts, spec.hidden, spec.intermediate)
            if planned.names("gate_up"):  # gpt-oss holds its experts transposed, as it publishes them
                shape = (spec.num_experts, spec.intermediate, spec.hidden)
        else:
            wanted = getattr(old, "weight", None)
            shape = (spec.n, spec.k) if spec.op == "linear" else (spec.rows, spec.dim)
        if wanted is None or tuple(wanted.shape) != shape:
            expected = None if wanted is None else list(wanted.shape)
            found = f"shape {list(shape)}, the model expects {expected}"
            raise FormatError(f"weights of {planned.module}", found, "check the dimensions in config.json")

    def _weights(self, planned: PlannedOp) -> LinearWeights | MoEWeights:
        if planned.spec.op != "moe":
            (name,) = planned.names("weight")
            bias = [self._load(b, self.dtype) for b in planned.names("bias")]
            return LinearWeights(self._read(name), bias[0] if bias else None)
        if planned.names("gate_up"):
            return fused_weights(planned.names, self._read, lambda name: self._load(name, self.dtype))
        spec: Any = planned.spec
        matrices = {}
        for role in ("gate", "up", "down"):
            names = planned.names(role)
            matrices[role] = stack((widen(self._read(name), getattr(spec, role)) for name in names), len(names))
        return MoEWeights(**matrices)

    def _read(self, name: str) -> Any:
        self._count(name)
        return self.checkpoint.read(name)

    def _load(self, name: str, dtype: torch.dtype) -> Tensor:
        self._count(name)
        tensor = self.checkpoint.load(name)
        if not tensor.is_floating_point():
            raise FormatError(f"parameter {name}", f"dtype {tensor.dtype}", "a float tensor is expected")
        cast = tensor.to(dtype)
        if cast.numel() and not all(math.isfinite(float(end)) for end in cast.aminmax()):
            least, most = (float(end) for end in tensor.float().aminmax())
            found = f"values from {least:g} to {most:g}, which {dtype_word(dtype)} does not hold"
            raise FormatError(f"parameter {name}", found, "the file is damaged, or the model must run in another dtype")
        return cast

    def _count(self, name: str) -> None:
        self.used.add(name)
        self.trimmer.passed(self.checkpoint.entries[name].nbytes)
        self.done += self.checkpoint.entries[name].nbytes
        if self.progress:
            self.progress(self.done, self.total, name)

    def fill_plain(self) -> None:
        """Load every parameter that is still without storage; complain of what is missing or left over."""
        tied: dict[int, nn.Parameter] = {}
        for name, parameter in list(self.model.named_parameters(remove_duplicate=False)):
            # a tied parameter comes once for each name; a name that is stored for itself is what counts there
            loaded = tied.get(id(parameter))
            stored = published_name(name, self.checkpoint.entries)
            if loaded is None or stored in self.checkpoint.entries:
                loaded = self._shared(self._plain(stored, parameter), loaded)
                tied.setdefault(id(parameter), loaded)
            self.model.get_submodule(name.rpartition(".")[0]).register_parameter(name.rpartition(".")[2], loaded)
        left = [name for name in self.checkpoint.entries if name not in self.used]
        if left:
            shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            raise FormatError("checkpoint", f"the model does not use these of its parameters: {shown}", "check model_type and layer counts")

    def _shared(self, parameter: nn.Parameter, other: nn.Parameter | None) -> nn.Parameter:
        if other is None or not torch.equal(parameter, other):
            return parameter
        self.plain_bytes -= parameter.numel() * parameter.element_size()
        return other

    def _plain(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        source = self._experts_source(name, parameter)
        tensor = self._load_checked(name, tuple(parameter.shape)) if source is None else source
        self.plain_bytes += tensor.numel() * tensor.element_size()
        return nn.Parameter(tensor.to(self.device), requires_grad=False)

    def _load_checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.checkpoint.entries:
            raise FormatError(f"parameter {name}", "missing from the checkpoint", "complete the checkpoint, or check config.json")
        found = self.checkpoint.entries[name].shape
        if tuple(found) != shape:
            reason = f"shape {list(found)}, the model expects {list(shape)}"
            raise FormatError(f"parameter {name}", reason, "check the dimensions in config.json")
        return self._load(name, self.dtype)

    def _experts_source(self, name: str, parameter: nn.Parameter) -> Tensor | None:
        """Unquantized experts: published per expert, held by transformers as one tensor ``[E, 2I, H]`` or ``[E, H, I]``."""
        block, _, role = name.rpartition(".")
        block = next((b for b in (block, block.replace(_HELD, _PUBLISHED)) if self._has_experts(b)), "")
        if role not in ("gate_up_proj", "down_proj") or not block:
            return None
        parts = ("gate_proj", "up_proj") if role == "gate_up_proj" else ("down_proj",)
        fused = torch.empty(parameter.shape, dtype=self.dtype)
        rows = parameter.shape[1] // len(parts)
        for expert in range(parameter.shape[0]):
            for index, part in enumerate(parts):
                stored = next((f"{block}.{expert}.{p}.weight" for p in (part, _EXPERT_PARTS[part]) if self._has_experts(block, p)), "")
                fused[expert, index * rows : (index + 1) * rows] = self._load_checked(stored, (rows, parameter.shape[2]))
        return fused

    def _has_experts(self, block: str, part: str = "") -> bool:
        names = (part,) if part else ("down_proj", "w2")
        return any(f"{block}.0.{name}.weight" in self.checkpoint.entries for name in names)


def _nbytes(op: Op) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in op.buffers())


def _refuse_saving(*_: object, **__: object) -> None:
    raise HalError("save_pretrained of a loaded model", "its weights are packed for kernels", "keep the checkpoint it was loaded from")
