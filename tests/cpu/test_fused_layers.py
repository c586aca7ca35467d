"""Decoder layers of loaded models in one call each: the same numbers, only where they are served, and said so."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")
import gguf_files
from golden import goldens
from transformers import DynamicCache

import hal_core as hal
from hal_backend_cpu.ops import CpuLinear
from hal_core.integrations.transformers_growing import cache_argument, growing_cache
from hal_core.integrations.transformers_layers import FusedForward, fuse_layers
from hal_core.memory import Trimmer

FUSED = ("2 of 2 decoder layers run in one call each",)
#: Architecture, its tensors' kind, those of another kind, and whether there are biases.
FILES: dict[str, tuple[str, str, dict[str, str], bool]] = {
    "llama": ("llama", "Q4_1", {}, False),
    "values of another kind": ("llama", "Q4_0", {"blk.0.attn_v.weight": "Q8_0", "blk.1.ffn_up.weight": "Q8_0"}, False),
    "biases": ("llama", "Q8_0", {}, True),
    "qwen3": ("qwen3", "Q4_0", {}, False),
}


def written(path: Any, name: str = "llama") -> Any:
    architecture, kind, kinds, bias = FILES[name]
    shapes = gguf_files.tensor_shapes(architecture, bias=bias)
    tensors = {key: value / max(value.shape[-1], 1) ** 0.5 for key, value in gguf_files.values(shapes).items()}
    return gguf_files.write(path / "model.gguf", architecture, kind, tensors=tensors, kinds=kinds)


@pytest.fixture
def model(tmp_path):
    return hal.load(written(tmp_path), numerics="exact", dtype="fp32")


def logits(model: Any, ids: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    named = {cache_argument(model): growing_cache(model)}
    with torch.inference_mode():
        return torch.cat([model(part, **named).logits for part in ids.split(parts, dim=1)], dim=1)


def own(model: Any) -> Any:
    """The same model with its layers' own forward."""
    twin = copy.deepcopy(model)
    for layer in twin.base_model.layers:
        del layer.forward
    return twin


def forwards(model: Any) -> list[FusedForward]:
    return [layer.forward for layer in model.base_model.layers]


@pytest.mark.parametrize(("dtype", "numerics", "bound"), [("fp32", "exact", 1e-5), ("bf16", "exact", 2e-2), ("fp32", "int8", 2e-2)])
@pytest.mark.parametrize("name", FILES)
def test_a_fused_model_gives_the_logits_of_its_own_layers(tmp_path, name: str, dtype: str, numerics: str, bound: float) -> None:
    model = hal.load(written(tmp_path, name), numerics=numerics, dtype=dtype, policy="require:cpu")
    assert model.hal.layers == FUSED
    ids = torch.randint(3, gguf_files.VOCAB, (2, 40))
    wanted, found = (logits(one, ids, (30, 1, 5, 1, 1, 1, 1)).float() for one in (own(model), model))
    assert torch.isfinite(found).all()
    assert float((found - wanted).norm() / wanted.norm()) < bound


def test_generation_is_that_of_the_layers_own_forward(model) -> None:
    ids = torch.randint(3, gguf_files.VOCAB, (1, 12))
    texts = [
        one.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None, **{cache_argument(one): growing_cache(one)})
        for one in (model, own(model))
    ]
    assert torch.equal(*texts)


def broken(*_: object) -> torch.Tensor:
    raise AssertionError("the fused layer was called")


def plain_cache(model: Any) -> dict[str, Any]:
    return {cache_argument(model): DynamicCache(config=model.config)}


def padded(model: Any) -> dict[str, Any]:
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, :3] = 0
    return {"attention_mask": mask}


def hooked(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *_: None)
    return {}


def replaced(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.self_attn.o_proj = copy.deepcopy(layer.self_attn.o_proj)
    return {}


def training(model: Any) -> dict[str, Any]:
    model.train()
    return {}


def patched(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.self_attn.q_proj.forward = layer.self_attn.q_proj.forward
    return {}


def rescaled(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.self_attn.scaling /= 2
    return {}


def seeing_all(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.self_attn.is_causal = False
    return {}


def finer(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.input_layernorm.variance_epsilon /= 2
    return {}


def coarser(model: Any) -> dict[str, Any]:
    for layer in model.base_model.layers:
        layer.post_attention_layernorm.bfloat16()
    return {}


UNSERVED = {
    "a replaced forward": patched, "another factor of logits": rescaled, "attention to what follows": seeing_all,
    "another epsilon": finer, "a norm of another dtype": coarser, "attention to what follows, by argument": lambda _: {"is_causal": False},
    "an argument of several values": lambda _: {"cu_seq_lens_q": torch.tensor([0, 9])},
    "a mask": padded, "transformers' cache": plain_cache, "hooks": hooked, "a replaced module": replaced, "training": training,
    "attentions": lambda model: {"output_attentions": True} if not model.set_attn_implementation("eager") else {},
}  # fmt: skip


@pytest.mark.parametrize("case", UNSERVED)
def test_what_a_fused_layer_does_not_serve_goes_to_its_own_forward(model, case: str) -> None:
    wanted_model = own(model)
    for forward in forwards(model):
        forward.fused = broken
    ids = torch.randint(3, gguf_files.VOCAB, (2, 9))
    found = []
    for one in (model, wanted_model):
        named = {cache_argument(one): growing_cache(one)} | UNSERVED[case](one)
        with torch.inference_mode():
            answer = one(ids, **named)
        found.append(answer.logits)
        assert case != "attentions" or len(answer.attentions) == 2
    assert torch.equal(*found)


def test_hooks_of_all_modules_hear_the_layers_own(model) -> None:
    heard: list[torch.nn.Module] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(module))
    try:
        logits(model, torch.randint(3, gguf_files.VOCAB, (1, 5)), (5,))
    finally:
        handle.remove()
    assert all(layer.mlp.act_fn in heard for layer in model.base_model.layers)


def test_gradients_go_through_the_layers_own_forward(model) -> None:
    for forward in forwards(model):
        forward.fused = broken
    x = torch.randn(1, 3, gguf_files.HIDDEN, requires_grad=True)
    with pytest.raises(hal.errors.HalError, match="gradient"):  # of the linears, which refuse them
        model(inputs_embeds=x, **{cache_argument(model): growing_cache(model)})


def test_a_fused_form_that_computes_something_else_is_left_alone(tmp_path, monkeypatch) -> None:
    right = CpuLinear.fuse

    class Wrong:
        def __init__(self, fused: Any) -> None:
            self.fused = fused

        def __call__(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            return x + 1.05 * (self.fused(x, *rest) - x)

    monkeypatch.setattr(CpuLinear, "fuse", classmethod(lambda cls, parts: Wrong(right(parts))))
    model = hal.load(written(tmp_path), numerics="exact", dtype="fp32")
    assert model.hal.layers == ("2 of 2 decoder layers keep their own forward: the fused form is off by 0.05 on random input",)
    assert not any("forward" in vars(layer) for layer in model.base_model.layers)


def test_other_layers_and_backends_keep_their_own_forward_and_say_so(tmp_path) -> None:
    (line,) = hal.load(goldens.folder("ar_sym_int4_g32_moe")).hal.layers
    assert line.endswith("decoder layers keep their own forward: Qwen3MoeDecoderLayer is not one whose steps are known")
    model = hal.load(written(tmp_path), policy="require:reference", dtype="fp32")
    assert model.hal.layers == ("2 of 2 decoder layers keep their own forward: ReferenceLinearOp has no call for layers of their form",)


def test_new_weights_reach_the_fused_layer_and_copies_are_apart(model) -> None:
    ids = torch.randint(3, gguf_files.VOCAB, (1, 5))
    before, twin = logits(model, ids, (4, 1)), copy.deepcopy(model)
    attention = model.base_model.layers[1].self_attn
    weights = hal.kernel.LinearWeights(attention.k_proj.weight.unpack(), None)
    attention.v_proj.update(weights)
    assert not torch.equal(logits(model, ids, (4, 1)), before)
    torch.testing.assert_close(logits(model, ids, (4, 1)), logits(own(model), ids, (4, 1)), rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(twin, ids, (4, 1)), before)


def test_new_biases_reach_the_fused_layer_after_a_change_of_dtype(tmp_path) -> None:
    model = hal.load(written(tmp_path, "biases"), numerics="exact", dtype="bf16").bfloat16()
    ids = torch.randint(3, gguf_files.VOCAB, (1, 5))
    before = logits(model, ids, (4, 1))
    for layer in model.base_model.layers:
        attention = layer.self_attn
        attention.v_proj.update(hal.kernel.LinearWeights(attention.v_proj.weight.unpack(), torch.full_like(attention.v_proj.bias, 3.0)))
    found, wanted = logits(model, ids, (4, 1)).float(), logits(own(model), ids, (4, 1)).float()
    assert not torch.equal(found, before.float())
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.parametrize("fused", [True, False])
def test_a_cache_begun_in_inference_mode_goes_on_outside_of_it(model, fused: bool) -> None:
    model = model if fused else own(model)
    ids, named = torch.randint(3, gguf_files.VOCAB, (1, 5)), {cache_argument(model): growing_cache(model)}
    with torch.inference_mode():
        model(ids[:, :4], **named)
    with torch.no_grad():
        found = model(ids[:, 4:], **named).logits
    torch.testing.assert_close(found, logits(model, ids, (4, 1))[:, 4:], rtol=1e-4, atol=1e-5)


def test_layers_with_a_window_keep_their_own_forward(model) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    other = MistralForCausalLM(MistralConfig(vocab_size=64, head_dim=32, sliding_window=8, **sizes))
    assert fuse_layers(other, Trimmer()) == ("2 of 2 decoder layers keep their own forward: generate gives them a cache of another kind",)
