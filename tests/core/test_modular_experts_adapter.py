"""MoEExperts called with the argument list that vLLM's modular experts are called with: every argument has a place.

The adapter below is what an integration needs. It is written from the argument list alone; vllm is not imported.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, replace

import pytest
import torch

from hal_core.canonical import QuantizedTensor
from hal_core.errors import HalError, ShapeError
from hal_core.kernel import MoEWeights
from hal_core.ops import Batched, MoEExperts, QuantizedActivation, Routed
from hal_core.reference.moe import ReferenceMoE
from hal_core.registry import default_registry
from hal_core.schemes import WeightScheme
from hal_core.spec import Activation, MoESpec
from hal_core.testing import truth
from hal_core.testing.data import random_weight

SCHEME = WeightScheme.parse("int4:g32")
#: The engine's argument to where it goes: a field of the spec, of the weights or of the canonical tensor, or an argument of apply.
PLACES = {
    "output": ("apply", "out"),
    "hidden_states": ("apply", "x"),
    "w1": ("weights", "gate", "up"),
    "w2": ("weights", "down"),
    "topk_weights": ("routed", "topk_weights"),
    "topk_ids": ("routed", "topk_ids"),
    "activation": ("spec", "activation"),
    "global_num_experts": ("spec", "num_experts"),
    "expert_map": ("apply", "expert_map"),
    "a1q_scale": ("activation", "scales"),
    "a2_scale": ("tensor", "input_scale"),
    "workspace13": ("apply", "workspace"),
    "workspace2": ("apply", "workspace"),
    "expert_tokens_meta": ("batched", "counts"),
    "apply_router_weight_on_input": ("spec", "router_weight_on_input"),
}


@dataclass
class ExpertTokensMeta:
    """What the engine passes with padded rows: how many each expert has."""

    expert_num_tokens: torch.Tensor


class ModularExperts:
    """The engine's experts over an op of ours. What the spec fixed at load is compared at each call and never guessed."""

    def __init__(self, op: MoEExperts, spec: MoESpec, w1: torch.Tensor, w2: torch.Tensor) -> None:
        self.op, self.spec, self.w1, self.w2 = op, spec, w1, w2

    def workspace_shapes(self, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Of workspace13, workspace2 and the output; one workspace is enough for us."""
        return (self.op.workspace_size(tokens),), (0,), (tokens, self.spec.hidden)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale, a2_scale,
        workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ) -> None:  # fmt: skip
        self._agree("w1", w1.data_ptr(), self.w1.data_ptr())
        self._agree("w2", w2.data_ptr(), self.w2.data_ptr())
        self._agree("activation", activation, self.spec.activation.kind)
        self._agree("global_num_experts", global_num_experts, self.spec.num_experts)
        self._agree("apply_router_weight_on_input", apply_router_weight_on_input, self.spec.router_weight_on_input)
        static = self.spec.activations is not None and not self.spec.activations.dynamic
        self._agree("a2_scale", a2_scale is not None, static)  # a static scale travels with the weights
        x = hidden_states if a1q_scale is None else QuantizedActivation(hidden_states, a1q_scale, "token")
        routing = Routed(topk_ids.to(torch.int32), topk_weights.float())
        if expert_tokens_meta is not None:
            routing = Batched(expert_tokens_meta.expert_num_tokens)
        workspace = max(workspace13, workspace2, key=lambda w: w.numel() * w.element_size()).view(-1).view(torch.uint8)
        self.op.apply(x, routing, expert_map=expert_map, out=output, workspace=workspace)

    def _agree(self, name: str, given, prepared) -> None:
        if given != prepared:
            found = f"{given} at the call, {prepared} when prepared"
            raise ShapeError(f"experts {name}", found, "prepare the op for what it is called with")


def engine_weights(e: int, h: int, i: int, seed: int) -> tuple[dict[str, torch.Tensor], MoEWeights]:
    """Weights as the engine holds them, gate above up in one tensor, and the same as canonical tensors."""
    scheme, rng = SCHEME, torch.Generator().manual_seed(seed)
    fused, down = random_weight(scheme, (e, 2 * i, h), rng, "fp32"), random_weight(scheme, (e, h, i), rng, "fp32")
    gate, up = (QuantizedTensor(scheme, (e, i, h), fused.values[:, part], fused.scales[:, part]) for part in (slice(i), slice(i, None)))
    return {"w1": fused.values, "w2": down.values}, MoEWeights(up=up, down=down, gate=gate)


def kernels() -> list:
    found = [k for k in default_registry().kernels() if k.kernel.op == "moe"]
    return [pytest.param(k.kernel, id=k.name) for k in found]


CASES = {
    "plain": {},
    "experts on two ranks": {"local_experts": 4, "expert_map": True},
    "router weight on input": {"router_weight_on_input": True, "top_k": 1},
    "bf16": {"dtype": "bf16"},
    "swiglu of gpt-oss": {"activation": Activation("swiglu_oai", alpha=1.702, limit=7.0)},
}


def arguments(spec: MoESpec, tensors: dict[str, torch.Tensor], tokens: int) -> dict:
    rng = torch.Generator().manual_seed(tokens)
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float32
    mapping = None
    if spec.expert_map:
        mapping = torch.full((spec.num_experts,), -1, dtype=torch.int32)
        mapping[torch.randperm(spec.num_experts, generator=rng)[: spec.local]] = torch.arange(spec.local, dtype=torch.int32)
    return {
        "output": torch.full((tokens, spec.hidden), float("nan"), dtype=dtype),
        "hidden_states": torch.randn(tokens, spec.hidden, generator=rng).to(dtype),
        **tensors,
        "topk_weights": torch.rand(tokens, spec.top_k, generator=rng),
        "topk_ids": torch.randint(0, spec.num_experts, (tokens, spec.top_k), generator=rng),  # int64, as engines give them
        "activation": spec.activation.kind,
        "global_num_experts": spec.num_experts,
        "expert_map": mapping,
        "a1q_scale": None,
        "a2_scale": None,
        "workspace13": torch.empty(1 << 16, dtype=dtype),
        "workspace2": torch.empty(1 << 10, dtype=dtype),
        "expert_tokens_meta": None,
        "apply_router_weight_on_input": spec.router_weight_on_input,
    }


def spec_of(**changes) -> MoESpec:
    return replace(MoESpec(8, 2, 64, 48, SCHEME, SCHEME, SCHEME, dtype="fp32"), **changes)


def test_every_argument_of_the_engine_has_a_place() -> None:
    accepted = list(inspect.signature(ModularExperts.apply).parameters)[1:]
    assert accepted == list(PLACES)
    homes = {
        "apply": set(inspect.signature(MoEExperts.apply).parameters),
        "spec": {f.name for f in dataclasses.fields(MoESpec)},
        "weights": {f.name for f in dataclasses.fields(MoEWeights)},
        "tensor": {f.name for f in dataclasses.fields(QuantizedTensor)},
        "activation": {f.name for f in dataclasses.fields(QuantizedActivation)},
        "routed": {f.name for f in dataclasses.fields(Routed)},
        "batched": {f.name for f in dataclasses.fields(Batched)},
    }
    for argument, (home, *names) in PLACES.items():
        assert set(names) <= homes[home], argument


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("case", CASES)
def test_engine_call_gives_the_right_numbers(kernel, case: str) -> None:
    from hal_core.machine import Machine

    spec = spec_of(**CASES[case])
    refusals = kernel.refusals(spec, Machine.detect())
    if refusals:
        pytest.skip(str(refusals[0]))
    tensors, weights = engine_weights(spec.local, 64, 48, seed=1)
    experts = ModularExperts(kernel.prepare(spec, weights), spec, tensors["w1"], tensors["w2"])
    for tokens in (1, 33):
        given = arguments(spec, tensors, tokens)
        assert experts.apply(**given) is None  # the result is in output, as the engine wants it
        given_to_truth = (given[name] for name in ("hidden_states", "topk_ids", "topk_weights", "expert_map"))
        expected = truth.experts(spec, weights, *given_to_truth).sum(dim=1)
        error = (given["output"].double() - expected).norm() / expected.norm().clamp(min=1e-3)
        assert error < (4e-3 if spec.dtype == "bf16" else 3e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation", "gelu"), ("global_num_experts", 16), ("apply_router_weight_on_input", True), ("a2_scale", torch.ones(())),
        ("w1", torch.zeros(8, 96, 64, dtype=torch.int8)),
    ],
)  # fmt: skip
def test_a_call_that_contradicts_what_was_prepared_is_an_error(name: str, value) -> None:
    spec = spec_of()
    tensors, weights = engine_weights(8, 64, 48, seed=2)
    experts = ModularExperts(ReferenceMoE().prepare(spec, weights), spec, tensors["w1"], tensors["w2"])
    with pytest.raises(HalError, match=name):
        experts.apply(**{**arguments(spec, tensors, 3), name: value})


class Recorder(MoEExperts):
    """Keeps what it is called with."""

    def compute(self, x, routing, expert_map, out, workspace, reduce):
        self.x, self.routing, self.workspace = x, routing, workspace
        return out

    def workspace_size(self, max_tokens: int) -> int:
        return 1000 * max_tokens

    def update(self, weights) -> None:
        raise NotImplementedError


def test_quantized_inputs_counts_and_workspace_arrive() -> None:
    spec = spec_of()
    tensors, _ = engine_weights(8, 64, 48, seed=3)
    op = Recorder()
    experts = ModularExperts(op, spec, tensors["w1"], tensors["w2"])
    given = arguments(spec, tensors, 5)
    counts = torch.tensor([1, 0, 4, 0, 0, 0, 0, 0], dtype=torch.int32)
    given.update(a1q_scale=torch.ones(5, 1), expert_tokens_meta=ExpertTokensMeta(counts))
    experts.apply(**given)
    assert isinstance(op.x, QuantizedActivation)
    assert op.x.scales is given["a1q_scale"]
    assert isinstance(op.routing, Batched)
    assert op.routing.counts is counts
    assert op.workspace.dtype == torch.uint8
    assert op.workspace.data_ptr() == given["workspace13"].data_ptr()
    assert op.workspace.numel() >= experts.workspace_shapes(5)[0][0]


def test_a_kernel_without_quantized_inputs_says_so() -> None:
    spec = spec_of()
    tensors, weights = engine_weights(8, 64, 48, seed=4)
    experts = ModularExperts(ReferenceMoE().prepare(spec, weights), spec, tensors["w1"], tensors["w2"])
    with pytest.raises(HalError, match="unquantized"):
        experts.apply(**{**arguments(spec, tensors, 3), "a1q_scale": torch.ones(3, 1)})
