"""Calibrated scales of an fp8 cache: read from checkpoints that carry them, and refused when they cannot be right."""

from __future__ import annotations

import checkpoints
import pytest
import torch

from hal_core.errors import FormatError
from hal_core.formats import open_checkpoint
from hal_core.formats.cache_scales import cache_params

LAYER = "model.layers.0"


def opened(folder, scales, change=None):
    tensors, config, _ = checkpoints.make("ct")
    if change is not None:
        change(config)
    return open_checkpoint(checkpoints.write(folder, tensors | scales, config))


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_read_with_their_source(tmp_path, names, dtype):
    values = (torch.tensor([0.5]), torch.tensor(0.25))
    scales = {f"{LAYER}.self_attn.{name}": value.to(dtype) for name, value in zip(names, values, strict=True)}
    (params,) = opened(tmp_path, scales).kv_params().values()
    assert params.source == "calibrated"
    assert (params.key_scale.item(), params.value_scale.item()) == (0.5, 0.25)
    assert params.key_scale.dtype == params.value_scale.dtype == torch.float32


def test_scales_of_each_head_are_read(tmp_path):
    heads = torch.tensor([0.5, 2.0])
    scales = {f"{LAYER}.self_attn.{side}_scale": heads[:, None, None].clone() for side in "kv"}
    params = opened(tmp_path, scales, lambda config: config.update(num_key_value_heads=2)).kv_params()[0]
    assert torch.equal(params.key_scale, heads)


def test_a_checkpoint_without_scales_has_none(tmp_path):
    assert opened(tmp_path, {}).kv_params() == {}


def test_scales_of_an_integer_cache_are_not_taken_for_those_of_floats(tmp_path):
    scales = {f"{LAYER}.self_attn.{side}_scale": torch.ones(1) for side in "kv"}
    scheme = {"num_bits": 8, "type": "int"}
    checkpoint = opened(tmp_path, scales, lambda config: config["quantization_config"].update(kv_cache_scheme=scheme))
    assert checkpoint.kv_params() == {}
    assert "not used" in checkpoint.notes[0]


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ({"k_scale": torch.ones(1)}, "v_scale is missing"),
        ({"k_scale": torch.ones(1), "v_scale": torch.zeros(1)}, "positive"),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor([float("nan")])}, "positive"),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor([-1.0])}, "positive"),
        ({"k_scale": torch.ones(1), "v_scale": torch.tensor([1e-40])}, "positive"),
        ({"k_scale": torch.tensor([1e-40]).bfloat16(), "v_scale": torch.ones(1)}, "positive"),
        ({"k_scale": torch.ones(1), "v_scale": torch.ones(3)}, "one a kv head"),
        ({"k_scale": torch.ones(1), "v_scale": torch.ones(1, dtype=torch.int32)}, "one float"),
        ({"k_scale": torch.ones(1), "k_proj.k_scale": torch.ones(1), "v_scale": torch.ones(1)}, "stored beside"),
    ],
)
def test_scales_that_cannot_be_right_are_refused(tmp_path, scales, words):
    checkpoint = opened(tmp_path, {f"{LAYER}.self_attn.{name}": value for name, value in scales.items()})
    with pytest.raises(FormatError, match=words):
        checkpoint.kv_params()


def test_a_layer_that_the_model_has_not_is_refused(tmp_path):
    scales = {f"model.layers.7.self_attn.{side}_scale": torch.ones(1) for side in "kv"}
    checkpoint = opened(tmp_path, scales, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(FormatError, match="layer 7 of 1"):
        checkpoint.kv_params()


def test_names_that_are_no_layers_scales_are_passed_over():
    assert cache_params((), {}) == {}
