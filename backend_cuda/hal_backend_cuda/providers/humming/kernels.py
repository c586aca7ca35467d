"""Humming's products as this backend's kernels: one instance of each class for each recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hal_backend_cuda.providers.humming.recipes import DISTRIBUTION, INSTALL, RECIPES, VERSIONS, Recipe
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, ShapeLimit
from hal_core.packages import package_refusals
from hal_core.refusal import Refusal
from hal_core.selection import Transform
from hal_core.spec import ACTIVATIONS

if TYPE_CHECKING:
    from hal_backend_cuda.providers.humming.ops import HummingExperts, HummingGroups, HummingLinear
    from hal_core.kernel import LinearWeights, MoEWeights
    from hal_core.machine import Machine
    from hal_core.numerics import Numerics
    from hal_core.spec import LinearSpec, MoESpec

__all__ = ["KERNELS", "LinearHumming", "MoEHumming"]

#: Tiles span 128 rows of a weight at least, and 128 columns at most where few rows are multiplied.
_STEP = 128


class _Humming:
    """What both kinds share. Their answers are those of a recipe."""

    op: str
    _recipe: Recipe

    def _answer(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.name = f"{self.op}_humming_{recipe.name}"
        self.architectures, self.schemes, self.numerics = recipe.architectures, recipe.schemes, recipe.numerics
        self.dtypes = self.out_dtypes = recipe.dtypes
        self.layout = f"humming.{recipe.name}"
        self.error_bound, self.priority = recipe.error_bound(self.op), recipe.priority

    def _own_refusals(self, spec: LinearSpec | MoESpec, machine: Machine, columns: tuple[int, ...]) -> tuple[Refusal, ...]:
        out = list(package_refusals(machine, DISTRIBUTION, VERSIONS, INSTALL))
        if spec.output != spec.dtype:
            found = "writes the dtype of its input"
            out.append(Refusal("dtype.output", f"{spec.output} from {spec.dtype}", found, f"ask for {spec.dtype} output"))
        turing = {device.architecture for device in machine.devices if device.kind == "cuda"} == {"sm_75"}
        if turing and spec.dtype == "bf16":
            out.append(Refusal("dtype.activation", "bf16", "tensor cores of sm_75 take fp16", "run the model in fp16"))
        schemes = {spec.weights} if hasattr(spec, "weights") else set(spec.schemes)
        stacked = getattr(spec, "gate", None) is not None
        for scheme in sorted(schemes, key=str):
            if spec.dtype == "fp16" and self._recipe.narrow(scheme, stacked):
                found = "sums of codes become fp16 before they are multiplied by a row's scale, and pass its range"
                out.append(Refusal("dtype.activation", f"fp16 with {scheme}", found, "run the model in bf16, or use scales of groups"))
            out += self._group_refusals(str(scheme), scheme.granularity.group, scheme.granularity.block, columns)
        return tuple(out)

    def _group_refusals(self, scheme: str, group: int | None, block: tuple[int, int] | None, columns: tuple[int, ...]) -> list[Refusal]:
        least, out = self._recipe.least_group, []
        if group is not None and (group & (group - 1) or group < least or any(k % group for k in columns)):
            found = f"serves powers of two from {least} that divide {' and '.join(map(str, columns))}"
            out.append(Refusal("scheme.group", scheme, found, "requantize with such a group size"))
        if block is not None and block != (_STEP, _STEP):
            out.append(Refusal("scheme.granularity", scheme, f"serves blocks of {_STEP}x{_STEP}", "use another kernel"))
        return out


class LinearHumming(_Humming, LinearKernel):
    """A quantized linear by Humming's dense kernels."""

    devices = ("cuda",)
    isa = ()
    epilogue = LinearEpilogue(bias=True, lora=False)
    limits = (ShapeLimit("n", multiple=_STEP), ShapeLimit("k", multiple=_STEP))
    m_range = (1, None)

    def __init__(self, recipe: Recipe) -> None:
        self._answer(recipe)

    def refusals(self, spec: LinearSpec, machine: Machine) -> tuple[Refusal, ...]:
        return (*super().refusals(spec, machine), *self._own_refusals(spec, machine, (spec.k,)))

    def transforms(self, spec: LinearSpec) -> tuple[Transform, ...]:
        return self._recipe.changes(spec.weights, spec.dtype)

    def prepare(self, spec: LinearSpec, weights: LinearWeights) -> HummingLinear:
        from hal_backend_cuda.providers.humming.ops import HummingLinear

        return HummingLinear(spec, weights, self._recipe)


class MoEHumming(_Humming, MoEKernel):
    """A block of experts by Humming's kernels: indexed, with this backend's sort and sum; grouped, of rows that the caller sorted."""

    devices = ("cuda",)
    isa = ()
    routing = ("routed", "grouped")
    epilogue = MoEEpilogue(
        activations=ACTIVATIONS, alpha=True, limit=True, gated=True, ungated=True, bias=True, mixed_schemes=False, expert_map=True,
        expert_parallel=True, router_weight_on_input=False, routed_scaling=True, shared_experts=False, lora=False,
    )  # fmt: skip
    limits = (ShapeLimit("hidden", multiple=_STEP), ShapeLimit("intermediate", multiple=_STEP))
    rounds_products = True
    m_range = (1, None)

    def __init__(self, recipe: Recipe) -> None:
        self._answer(recipe)

    def refusals(self, spec: MoESpec, machine: Machine) -> tuple[Refusal, ...]:
        own = self._own_refusals(spec, machine, (spec.hidden, spec.intermediate))
        return (*super().refusals(spec, machine), *own, *self._form_refusals(spec))

    def _form_refusals(self, spec: MoESpec) -> tuple[Refusal, ...]:
        """What has no meaning for rows that the caller has sorted, and will sum."""
        asked = {"expert_map": spec.expert_map, "routed_scaling": spec.routed_scaling != 1.0}
        found, fix = "rows in groups have their local expert, and come back unweighted", "apply it where rows are sorted and summed"
        return tuple(
            Refusal(f"epilogue.{name}", f"{name} with grouped rows", found, fix)
            for name, on in asked.items()
            if on and spec.routing == "grouped"
        )

    def computes(self, spec: MoESpec) -> Numerics:
        return replace(self.numerics, operand=spec.dtype)  # what lies between the two products is rounded to it

    def transforms(self, spec: MoESpec) -> tuple[Transform, ...]:
        stacked = spec.gate is not None
        return tuple(dict.fromkeys(t for scheme in spec.schemes for t in self._recipe.changes(scheme, spec.dtype, stacked)))

    def prepare(self, spec: MoESpec, weights: MoEWeights) -> HummingExperts | HummingGroups:
        from hal_backend_cuda.providers.humming.ops import HummingExperts, HummingGroups

        return (HummingGroups if spec.routing == "grouped" else HummingExperts)(spec, weights, self._recipe)


KERNELS = tuple(kind(recipe) for kind in (LinearHumming, MoEHumming) for recipe in RECIPES)
