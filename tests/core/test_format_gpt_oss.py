"""gpt-oss: fused experts in MXFP4 blocks, published transposed, rows of gate and up in turn."""

from __future__ import annotations

import checkpoints
import float_checkpoints as floats
import pytest
import torch
from golden import goldens
from safetensors.torch import load_file

from hal_core.baseline import dequantized_model
from hal_core.canonical import stack
from hal_core.dequantize import dequantize_checkpoint
from hal_core.errors import FormatError
from hal_core.formats import open_checkpoint
from hal_core.formats.gpt_oss import FusedBlocks
from hal_core.formats.packing import Rule
from hal_core.fused_experts import alternate_rows
from hal_core.plan import plan_checkpoint
from hal_core.schemes import WeightScheme

E, H, I = 3, 64, 32  # noqa: E741 - the field's own letters
BLOCK = "model.layers.0.mlp.experts"
RULE = Rule(FusedBlocks(), 4, 32, True, element="mxfp4")


def experts(n: int, k: int, seed: int):
    return stack((floats.random_element_weight(WeightScheme.parse("mxfp4:g32"), n, k, seed + e, torch.uint8) for e in range(E)), E)


def made():
    both, down = experts(2 * I, H, 1), experts(H, I, 50)
    tensors = {f"{BLOCK}.gate_up_proj{tail}": tensor for tail, tensor in FusedBlocks().pack(both, RULE).items()}
    tensors |= {f"{BLOCK}.down_proj{tail}": tensor for tail, tensor in FusedBlocks().pack(down, RULE).items()}
    tensors |= {
        f"{BLOCK}.gate_up_proj_bias": torch.randn(E, 2 * I).bfloat16(), f"{BLOCK}.down_proj_bias": torch.randn(E, H).bfloat16(),
        "model.layers.0.self_attn.sinks": torch.randn(4).bfloat16(), "model.layers.0.mlp.router.weight": torch.randn(E, H).bfloat16(),
    }  # fmt: skip
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": E, "num_experts_per_tok": 2, "swiglu_limit": 5.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "*.router", "lm_head"]},
    }  # fmt: skip
    return tensors, config, both, down


def test_published_names_shapes_and_values(tmp_path):
    tensors, config, both, down = made()
    folder = checkpoints.write(tmp_path / "m", tensors, config)
    assert tuple(tensors[f"{BLOCK}.gate_up_proj_blocks"].shape) == (E, 2 * I, H // 32, 16)
    out = load_file(dequantize_checkpoint(folder, tmp_path / "out.safetensors"))
    assert set(out) == {name for name in tensors if not name.endswith(("_blocks", "_scales"))} | {
        f"{BLOCK}.gate_up_proj", f"{BLOCK}.down_proj",
    }  # fmt: skip
    assert torch.equal(out[f"{BLOCK}.gate_up_proj"], both.dequantize().transpose(1, 2))
    assert torch.equal(out[f"{BLOCK}.down_proj"], down.dequantize().transpose(1, 2))
    for e in range(E):
        parts = {"weight": None, "weight_packed": both.values[e], "weight_scale": both.scales[e]}
        assert torch.equal(floats.slow_weight(parts.get, both.scheme), out[f"{BLOCK}.gate_up_proj"][e].T)


def test_gate_is_in_even_rows_and_the_plan_says_what_is_computed(tmp_path):
    tensors, config, both, _ = made()
    (planned,) = plan_checkpoint(open_checkpoint(checkpoints.write(tmp_path / "m", tensors, config)), "bf16")
    assert torch.equal(alternate_rows(both, 1).dequantize(), both.dequantize()[:, 1::2])
    spec = planned.spec
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate, spec.bias) == (E, 2, H, I, True)
    assert str(spec.activation) == "swiglu_oai(alpha=1.702, limit=5)"
    assert dict(planned.members)["gate_up_bias"] == f"{BLOCK}.gate_up_proj_bias"


def test_the_dequantized_model_is_transformers_own():
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = goldens.folder("gptoss_mxfp4")
    golden = load_file(folder / "golden.safetensors")
    with torch.inference_mode():
        logits = dequantized_model(open_checkpoint(folder))(input_ids=golden["input_ids"], use_cache=False).logits
    assert float((logits - golden["logits"]).norm() / golden["logits"].norm()) < 1e-5


def drop(name):
    return lambda tensors, config: tensors.pop(f"{BLOCK}.{name}")


def put(name, tensor):
    return lambda tensors, config: tensors.update({f"{BLOCK}.{name}": tensor})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop("gate_up_proj_scales"), "gate_up_proj_scales: missing"),
        (drop("down_proj_blocks"), "down_proj_blocks: missing"),
        (drop("down_proj_bias"), "only one of two"),
        (put("down_proj_bias", torch.zeros(E, H + 1)), "down_proj_bias: shape"),
        (put("gate_up_proj_blocks", torch.zeros(E, 2 * I, 2, 15, dtype=torch.uint8)), "gate_up_proj_blocks: shape"),
        (put("gate_up_proj_blocks", torch.zeros(E, 2 * I - 1, 2, 16, dtype=torch.uint8)), "gate_up_proj_blocks: shape"),
        (put("gate_up_proj_scales", torch.zeros(E, 2 * I, 1, dtype=torch.uint8)), "gate_up_proj_scales: shape"),
        (put("gate_up_proj_scales", torch.zeros(E, 2 * I, 2)), "gate_up_proj_scales: dtype F32"),
        (put("gate_up_proj", torch.zeros(E, H, 2 * I)), "stored twice"),
        (put("other_blocks", torch.zeros(E, 2 * I, 2, 16, dtype=torch.uint8)), "other_scales: missing"),
        (lambda t, _: [t.pop(f"{BLOCK}.down_proj{tail}") for tail in ("_blocks", "_scales")], "down_proj: missing"),
        (lambda _, c: c["quantization_config"].update(modules_to_not_convert=["model.layers.*.mlp"]), "not quantized"),
        (lambda _, c: c.update(swiglu_limit=-1), "swiglu_limit"),
        (lambda _, c: c.update(swiglu_alpha="x"), "swiglu_alpha"),
        (lambda _, c: c.update(num_local_experts=4), "experts"),
        (put("gate_up_proj_scales", torch.full((E, 2 * I, 2), 255, dtype=torch.uint8)), "gate_up_proj_scales: .*NaN"),
    ],
)  # fmt: skip
def test_damage_is_refused_by_name(change, words, tmp_path):
    tensors, config, _, _ = made()
    change(tensors, config)
    checkpoints.write(tmp_path / "m", tensors, config)
    with pytest.raises(FormatError, match=words):
        read_all(tmp_path / "m")


def read_all(folder):
    checkpoint = open_checkpoint(folder)
    plan_checkpoint(checkpoint, "bf16")
    return [checkpoint.read(name) for name, entry in checkpoint.entries.items() if entry.quantized]
