"""Float matrices quantized while they are read: the numbers, what is reported, what is refused, and that nothing given is changed."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

import hal_core as hal
from hal_core.errors import FormatError, SettingError, ShapeError
from hal_core.explain_checkpoint import explain_checkpoint
from hal_core.formats.recasting import recast_checkpoint
from hal_core.machine import Machine
from hal_core.policy import Policy
from hal_core.registry import default_registry
from hal_core.schemes import WeightScheme

E, H, INNER = 4, 64, 48
CONFIG = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "hidden_size": H, "moe_intermediate_size": INNER, "num_experts": E,
    "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 96, "intermediate_size": 64,
    "torch_dtype": "bfloat16", "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"model.layers.1.mlp.experts": "fp8:channel"}
IDS = torch.tensor([[5, 90, 3, 44, 17, 0, 8]])


def tensors():
    made = {"model.embed_tokens.weight": (96, H), "lm_head.weight": (96, H), "model.norm.weight": (H,)}
    for layer in ("model.layers.0", "model.layers.1"):
        made |= {f"{layer}.{name}.weight": (H,) for name in ("input_layernorm", "post_attention_layernorm")}
        made |= {f"{layer}.self_attn.{name}_norm.weight": (32,) for name in "qk"}
        made |= {f"{layer}.self_attn.{name}_proj.weight": (32 if name in "kv" else 64, H) for name in "qkv"}
        made |= {f"{layer}.self_attn.o_proj.weight": (H, 64), f"{layer}.mlp.gate.weight": (E, H)}
        for expert in range(E):
            made |= {f"{layer}.mlp.experts.{expert}.{role}_proj.weight": (INNER, H) for role in ("gate", "up")}
            made[f"{layer}.mlp.experts.{expert}.down_proj.weight"] = (H, INNER)
    draw = lambda shape: torch.randn(shape) * 0.1 if len(shape) == 2 else torch.rand(shape) + 0.5  # noqa: E731
    return {name: draw(shape).to(torch.bfloat16) for name, shape in made.items()}


def written(folder, weights):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return tensors(), tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def folder(stored):
    weights, place = stored
    return written(place / "m", weights)


def rounded(weight):
    """Through e4m3 with a scale a row, by torch's own conversion."""
    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def logits(path, **options):
    model = hal.load(path, policy="require:reference", dtype="fp32", **options)
    with torch.inference_mode():
        return model(IDS).logits, model.hal


def test_the_model_computes_with_rounded_experts(stored, folder, tmp_path):
    weights, _ = stored
    by_hand = {name: rounded(w) if "layers.1.mlp.experts" in name else w for name, w in weights.items()}
    wanted, _ = logits(written(tmp_path / "rounded", {name: w.float() for name, w in by_hand.items()}))
    before, _ = logits(folder)
    found, report = logits(folder, recast=EXPERTS)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    assert float((found - before).norm() / before.norm()) > 1e-4
    (op,) = report.ops
    assert (op.module, op.kernel, str(op.selection.spec.up)) == ("model.layers.1.mlp.experts", "reference.moe", "fp8_e4m3:channel")
    assert [str(change) for change in op.selection.transforms] == ["recast:fp8_e4m3:channel (adds at most 0.0625 relative L2)"]


def test_what_was_given_is_left_as_it_was(folder):
    checkpoint, patterns = hal.open_checkpoint(folder), dict(EXPERTS)
    entries, config = dict(checkpoint.entries), copy.deepcopy(dict(checkpoint.config))
    logits(checkpoint, recast=patterns)
    changed = recast_checkpoint(checkpoint, patterns)
    changed.config["hidden_size"] = 7
    assert (dict(checkpoint.entries), dict(checkpoint.config), patterns) == (entries, config, EXPERTS)
    assert not any(entry.quantized for entry in checkpoint.entries.values())
    assert recast_checkpoint(checkpoint, None) is recast_checkpoint(checkpoint, {}) is checkpoint


def test_linears_too_in_blocks_and_the_first_pattern_holds(folder):
    changed = recast_checkpoint(hal.open_checkpoint(folder), {"*.q_proj": "fp8:channel", "*.self_attn": "fp8:b128x128"})
    schemes = {name: str(e.scheme) for name, e in changed.entries.items() if e.quantized}
    assert {name.rpartition("self_attn.")[2]: scheme for name, scheme in schemes.items() if "layers.0" in name} == {
        "q_proj.weight": "fp8_e4m3:channel",
        **{f"{each}_proj.weight": "fp8_e4m3:b128x128" for each in "kvo"},
    }
    found, report = logits(folder, recast={"*.self_attn": "fp8:b128x128"})
    assert {op.kernel for op in report.ops} == {"reference.linear"}
    assert bool(found.isfinite().all())


def test_it_is_explained_before_it_is_done(folder):
    registry = default_registry()
    found = explain_checkpoint(
        hal.open_checkpoint(folder), Machine.detect(), Policy(), registry.kernels(), registry.rows(), recast={"*.experts": "fp8:channel"}
    )
    (group,) = found.groups
    assert (group.layers, group.count) == (("model.layers.*.mlp.experts",), 2)
    assert [change.name for change in group.selection.transforms] == ["recast:fp8_e4m3:channel"]


@pytest.mark.parametrize(
    ("recast", "error", "told"),
    [
        ({"*.mlp.expert": "fp8:channel"}, FormatError, "matches no module"),
        ({"model.embed_tokens": "fp8:channel"}, FormatError, r"matches no float matrix, only such as model\.embed_tokens\.weight"),
        ({"model.norm": "fp8:channel"}, FormatError, "matches no float matrix"),
        ({"*.self_attn": "fp8:channel", "*.q_proj": "fp8:b128x128"}, FormatError, "an earlier pattern may hold"),
        ({"*.experts": "fp8"}, SettingError, r"\*\.experts=fp8"),
        ({"*.experts": "int4:g128"}, SettingError, "use fp8:channel"),
        ({"*.experts": "fp8:tensor"}, SettingError, "use fp8:channel"),
        ({"*.experts": 8}, SettingError, "give patterns with schemes"),
        ("*.experts=fp8:channel", SettingError, "give patterns with schemes"),
    ],
)
def test_what_cannot_be_meant_is_refused(folder, recast, error, told):
    with pytest.raises(error, match=told):
        recast_checkpoint(hal.open_checkpoint(folder), recast)


def test_a_part_of_a_block_is_refused(folder):
    with pytest.raises(FormatError, match="quantize a block of experts as a whole"):
        logits(folder, recast={"*.experts.*.up_proj": "fp8:channel"})


def test_weights_that_are_not_finite_are_named(stored, tmp_path):
    weights = {name: w.clone() for name, w in stored[0].items()}
    weights["model.layers.1.mlp.experts.2.up_proj.weight"][3, 4] = float("nan")
    with pytest.raises(FormatError, match=r"recast of model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight: values that are not finite"):
        logits(written(tmp_path / "m", weights), recast=EXPERTS)


def test_only_recast_tensors_are_read_as_such(folder):
    checkpoint = hal.open_checkpoint(folder)
    changed = recast_checkpoint(checkpoint, EXPERTS)
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert changed.read(name).scheme == WeightScheme.parse("fp8_e4m3:channel")
    with pytest.raises(FormatError, match=r"use read\(\)"):
        changed.load(name)
    other = name.replace("layers.1", "layers.0")
    assert torch.equal(changed.load(other), checkpoint.load(other))
    with pytest.raises(FormatError, match=r"use load\(\)"):
        changed.read(other)


def test_the_transform_refuses_what_it_does_not_make():
    from hal_core.transforms import ToFP8

    with pytest.raises(ShapeError, match="known: fp8_e4m3:channel"):
        ToFP8(WeightScheme.parse("int8:channel"))
