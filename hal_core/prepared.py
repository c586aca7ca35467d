"""What prepared ops of several backends share: packed matrices as buffers, and checks that need no device."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hal_core.dtypes import torch_dtype
from hal_core.op_parts import check_out, check_routing_form, check_rows
from hal_core.ops import MoEExperts, QuantLinear
from hal_core.weight_checks import check_linear_weights, check_moe_weights, check_same_kind, kinds_of

if TYPE_CHECKING:
    from hal_core.canonical import QuantizedTensor
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["PreparedExperts", "PreparedLinear"]


class _Prepared(nn.Module):
    """Views of packed buffers, made anew when these move. asked: the op in messages."""

    asked: ClassVar[str]
    device: torch.device
    output: torch.dtype

    @abstractmethod
    def packed(self, weight: QuantizedTensor) -> Any:
        """A weight as the op holds it: a module with ``update`` and ``unpack``."""

    @abstractmethod
    def refresh(self) -> None:
        """Take up the buffers as they are, and where they lie."""

    def room(self, out: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """``out``, or new memory; raises where it does not fit."""
        return check_out(self.asked, out, shape, self.output, self.device)

    def _apply(self, fn: object, recurse: bool = True) -> _Prepared:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh()
        return self

    def _hold_bias(self, name: str, bias: Tensor | None) -> None:
        # integers of the same bits: Module.to(dtype) would round a float buffer
        self.register_buffer(name, None if bias is None else bias.float().view(torch.int32))

    def held_bias(self, name: str) -> Tensor | None:
        """A bias as float32."""
        held = self._buffers[name]
        return None if held is None else held.view(torch.float32)

    def _update_bias(self, name: str, bias: Tensor | None) -> None:
        if bias is not None:
            self.get_buffer(name).copy_(bias.float().view(torch.int32))


class PreparedLinear(_Prepared, QuantLinear):
    """One packed matrix ``weight`` and its ``bias``."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights) -> None:
        super().__init__()
        check_linear_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.dtype, self.output = torch_dtype(spec.dtype), torch_dtype(spec.output)
        self.weight = self.packed(weights.weight)
        self._hold_bias("bias", weights.bias)
        self.refresh()

    def checked(self, x: Any) -> tuple[Tensor, tuple[int, ...]]:
        """``x`` as contiguous rows, and the shape of the result; raises where it is not of the spec's width and dtype, or elsewhere."""
        rows = check_rows(self.asked, x, self.spec.k, self.dtype, self.device)
        return rows, (*x.shape[:-1], self.spec.n)

    @abstractmethod
    def traced(self, rows: Tensor) -> Tensor:
        """The product by a registered op, as part of a graph: new memory ``[M, N]``."""

    @abstractmethod
    def launch(self, rows: Tensor, out: Tensor) -> None:
        """The product at once, into ``out [M, N]``."""

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        rows, shape = self.checked(x)
        if torch.compiler.is_compiling():
            y = self.traced(rows).view(shape)
            return y if out is None else self.room(out, shape).copy_(y)
        y = self.room(out, shape)
        self.launch(rows, y if y.dim() == 2 else y.view(-1, self.spec.n))
        return y

    def update(self, weights: LinearWeights) -> None:
        check_linear_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        self.weight.update(weights.weight)
        self._update_bias("bias", weights.bias)


class PreparedExperts(_Prepared, MoEExperts):
    """Packed matrices ``gate`` (or None), ``up`` and ``down`` of all experts, and their biases."""

    def __init__(self, spec: MoESpec, weights: MoEWeights) -> None:
        super().__init__()
        check_moe_weights(spec, weights)
        self.spec, self.kinds = spec, kinds_of(weights)
        self.dtype, self.output = torch_dtype(spec.dtype), torch_dtype(spec.output)
        self.gate = None if weights.gate is None else self.packed(weights.gate)
        self.up, self.down = self.packed(weights.up), self.packed(weights.down)
        for name in ("gate_bias", "up_bias", "down_bias"):
            self._hold_bias(name, getattr(weights, name))
        self.refresh()

    def checked(self, x: Any) -> Tensor:
        """``x`` as contiguous rows; raises where it is not of the spec's width and dtype, or elsewhere."""
        return check_rows(self.asked, x, self.spec.hidden, self.dtype, self.device)

    def routing(self, routing: Any, x: Any, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
        """Contiguous ids and weights; raises where shapes, dtypes or devices do not agree. What ids are is seen on the device."""
        routed = check_routing_form(self.asked, self.spec, x, routing, expert_map)
        return routed.topk_ids.contiguous(), routed.topk_weights.contiguous()

    @abstractmethod
    def traced(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, reduce: bool) -> Tensor:
        """All experts by a registered op, as part of a graph: new memory ``[T, H]``, or ``[T, k, H]`` unreduced."""

    @abstractmethod
    def launch(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, out: Tensor) -> Tensor:
        """All experts at once, into ``out [T, H]``, or ``[T, k, H]`` unreduced; returns it."""

    def compute(
        self, x: Any, routing: Any, expert_map: Tensor | None, out: Tensor | None, workspace: Tensor | None, reduce: bool
    ) -> Tensor:
        ids, weights = self.routing(routing, x, expert_map)
        rows = self.checked(x)
        mapping = None if expert_map is None else expert_map.contiguous()
        shape = (rows.shape[0], self.spec.hidden) if reduce else (*ids.shape, self.spec.hidden)
        if torch.compiler.is_compiling():
            y = self.traced(rows, ids, weights, mapping, reduce)
            return y if out is None else self.room(out, shape).copy_(y)
        return self.launch(rows, ids, weights, mapping, self.room(out, shape))

    def workspace_size(self, max_tokens: int) -> int:
        return 0  # scratch comes from torch's allocator, which captured graphs keep

    def update(self, weights: MoEWeights) -> None:
        check_moe_weights(self.spec, weights)
        check_same_kind(self.kinds, weights)
        for name in ("gate", "up", "down"):
            matrix: Any = getattr(self, name)
            if matrix is not None:
                matrix.update(getattr(weights, name))
        for name in ("gate_bias", "up_bias", "down_bias"):
            self._update_bias(name, getattr(weights, name))
