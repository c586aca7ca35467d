"""The prepared ops of four-bit weights: packed buffers, checks that need no device, one call.

On an XPU everything goes into torch's current stream and nothing waits; CPU tensors are read where they lie, and an op has run when it
returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_backend_xpu.declared import device_of
from hal_backend_xpu.layout import WordMatrix
from hal_backend_xpu.prepack import PHASES
from hal_backend_xpu.products import CACHE, experts, int8_weights, linear
from hal_backend_xpu.registered import call_experts, call_linear
from hal_backend_xpu.views import ACTIVATION_NUMBERS, Block, Int4View
from hal_core.check import device_flag
from hal_core.errors import ShapeError
from hal_core.prepared import PreparedExperts, PreparedLinear
from hal_core.reference.activations import SWIGLU_OAI_ALPHA

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["Int4Experts", "Int4Linear"]


class Int4Linear(PreparedLinear):
    """``y = x @ w.T + bias``. Few rows exactly; many with weights rounded to the type of ``x``. engine: a name of ENGINES, for tests."""

    asked = "xpu linear"
    packed = staticmethod(WordMatrix)

    def __init__(self, spec: LinearSpec, weights: LinearWeights, engine: str | None = None) -> None:
        super().__init__(spec, weights)
        self.engine = engine

    def refresh(self) -> None:
        self.view = Int4View.of(self.weight, self.held_bias("bias"))
        self.device = device_of(self.view.codes)

    def traced(self, rows: Tensor) -> Tensor:
        return call_linear(rows, self.view, self.output)

    def launch(self, rows: Tensor, out: Tensor) -> None:
        linear(rows, self.view, out, self.engine)


class Int4Experts(PreparedExperts):
    """Routing, gate and up with the activation, down, and the weighted sum, one after another in one queue.

    rescaled: many rows are quantized to int8, a scale for each, and multiplied with int8 weights, a scale for each output, which are made
    from the four-bit ones when the op is prepared and kept beside them. Few rows are multiplied exactly, as without.
    """

    asked = "xpu experts"
    packed = staticmethod(WordMatrix)

    def __init__(self, spec: MoESpec, weights: MoEWeights, *, rescaled: bool = False, engine: str | None = None) -> None:
        self.rescaled = rescaled
        super().__init__(spec, weights)
        self.engine = engine
        if rescaled and self.device.type != "meta":
            self.prepack()

    def refresh(self) -> None:
        if hasattr(self, "block"):
            CACHE.forget(self.block.sources)
        s, act = self.spec, self.spec.activation
        gate = None if self.gate is None else Int4View.of(self.gate, self.held_bias("gate_bias"))
        self.block = Block(
            Int4View.of(self.up, self.held_bias("up_bias")), Int4View.of(self.down, self.held_bias("down_bias")), gate,
            ACTIVATION_NUMBERS[act.kind], SWIGLU_OAI_ALPHA if act.alpha is None else act.alpha,
            float("inf") if act.limit is None else act.limit, s.num_experts, s.local, s.routed_scaling, s.router_weight_on_input,
            self.rescaled,
        )  # fmt: skip
        self.device = device_of(self.block.up.codes)
        if self.device.type != "meta":
            device_flag(self.device)  # now, so that no captured graph makes it

    def prepack(self, phase: str = "both") -> None:
        """What the op holds beside its four-bit weights.

        Args:
            phase: ``both``: int8 weights too, twice the size of the four-bit ones; otherwise made at the first long input.
                ``decode``: none; long inputs are then multiplied with the four-bit weights and exact activations.

        Raises:
            ShapeError: another word. UnfitWeightsError: folding the groups would change weights by more than its bound.
        """
        if phase not in PHASES or (phase == "both" and not self.spec_rescales):
            raise ShapeError("prepack", f"phase {phase!r}", f"use one of {', '.join(PHASES)}; both is for kernels that rescale")
        self.rescaled = phase == "both"
        self.refresh()
        if self.rescaled:
            CACHE.get(self.block.sources, lambda: int8_weights(self.block))

    @property
    def spec_rescales(self) -> bool:
        """Whether the spec that the op was prepared for tolerates rescaled weights."""
        return self.spec.numerics.weights == "rescaled"

    def traced(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, reduce: bool) -> Tensor:
        return call_experts(rows, ids, weights, expert_map, self.block, reduce, self.output)

    def launch(self, rows: Tensor, ids: Tensor, weights: Tensor, expert_map: Tensor | None, out: Tensor) -> Tensor:
        return experts(rows, ids, weights, expert_map, self.block, out, self.engine)

    def __del__(self) -> None:
        if "block" in self.__dict__:
            CACHE.forget(self.block.sources)
