"""What all methods do with a layer's weights: select and prepare on the engine's device, hold the ops, keep them with the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.platforms import current_platform

from hal_core.api import prepare
from hal_core.dtypes import torch_dtype
from hal_core.errors import HalError, ShapeError
from hal_core.integrations.placement import placed
from hal_core.integrations.vllm.held import HeldLayer, hold
from hal_core.ops import QuantLinear
from hal_core.spec import LinearSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hal_core.integrations.vllm.config import HalConfig
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.ops import Op
    from hal_core.spec import Spec

__all__ = ["Method", "serve"]


class Method(Protocol):
    """A layer's method. held: None until its weights are loaded. key: the layer's, for the registered ops."""

    config: HalConfig
    prefix: str
    held: HeldLayer | None
    key: str


def serve(
    method: Method, layer: Any, rank: tuple[int, int], asked: Sequence[tuple[Spec, LinearWeights | MoEWeights]], *,
    notes: tuple[str, ...] = (), pad: int = 0, expert_map: Tensor | None = None,
) -> None:  # fmt: skip
    """Make a layer's ops and hold them; ``notes``, ``pad`` and ``expert_map`` as of a :class:`HeldLayer`.

    Raises:
        HalError: nothing may serve it; the message names the layer. ShapeError: it is served already.
    """
    if method.held is not None:
        raise ShapeError(f"layer {method.prefix}", "its weights were loaded before", "start another engine: reloading is not served")
    device = torch.device(current_platform.device_type)
    try:
        made = tuple(_prepared(method, spec, placed(weights, device)) for spec, weights in asked)
    except HalError as error:
        error.args = (f"layer {method.prefix}: {error}",)
        raise
    method.held = HeldLayer(method.prefix, made, rank, notes, pad, expert_map)
    method.key = hold(method.config.key, method.held)
    layer.hal_ops = torch.nn.ModuleList(made)
    method.config.trimmer.passed(sum(buffer.nbytes for buffer in layer.hal_ops.buffers()))


def _prepared(method: Method, spec: Spec, weights: LinearWeights | MoEWeights) -> Op:
    if isinstance(spec, LinearSpec) and not spec.weights.quantized:
        return _PlainLinear(spec, weights)  # type: ignore[arg-type]
    return prepare(spec, weights, method.config.options.chosen_policy, layer=method.prefix)


class _PlainLinear(QuantLinear):
    """An unquantized part of a layer whose other parts are quantized, in the model's dtype, as vLLM computes it."""

    def __init__(self, spec: LinearSpec, weights: LinearWeights) -> None:
        super().__init__()
        self.register_buffer("weight", weights.weight.values.to(torch_dtype(spec.dtype)))
        self.register_buffer("bias", weights.bias)

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        y = torch.nn.functional.linear(x, self.get_buffer("weight"), self._buffers["bias"])
        return y if out is None else out.copy_(y)

    def update(self, weights: LinearWeights) -> None:
        self.get_buffer("weight").copy_(weights.weight.values)
        if self._buffers["bias"] is not None:
            self.get_buffer("bias").copy_(weights.bias)
