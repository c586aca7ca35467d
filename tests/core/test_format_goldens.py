"""Every golden checkpoint of a served format dequantizes bit for bit; every other is refused in one sentence."""

from __future__ import annotations

import json

import pytest
import torch
from golden import goldens
from safetensors import safe_open
from safetensors.torch import load_file

from hal_core.dequantize import dequantize_checkpoint
from hal_core.errors import FormatError
from hal_core.formats import open_checkpoint

NOT_WEIGHTS = ("logits", "input_ids")


def close_enough(name: str) -> float:
    """AutoRound multiplies NVFP4 values by the two scales in another order than compressed-tensors: two roundings apart."""
    quant = goldens.config(name)["quantization_config"]
    autoround = "auto-round" in (quant["quant_method"], quant.get("provider"))
    return 2e-7 if autoround and "nv" in json.dumps(quant) else 0.0


def must_be_served(quant: dict) -> bool:
    """By the configuration alone, so that a reader cannot excuse itself."""
    return quant["quant_method"] in ("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "mxfp4")


def equal(name: str, got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got, expected) or bool(((got - expected).abs() <= close_enough(name) * expected.abs()).all())


def opens(name: str) -> bool:
    try:
        open_checkpoint(goldens.folder(name))
    except FormatError:
        return False
    return True


def expected_weights(name: str) -> dict[str, torch.Tensor]:
    tensors = load_file(goldens.folder(name) / "golden.safetensors")
    return {key: value for key, value in tensors.items() if key not in NOT_WEIGHTS}


@pytest.mark.parametrize("name", goldens.names())
def test_weights_equal_the_tools_own_dequantization(name):
    if not must_be_served(goldens.config(name)["quantization_config"]) and not opens(name):
        with pytest.raises(FormatError, match=r".+: .+; .+"):
            open_checkpoint(goldens.folder(name))
        return
    checkpoint = open_checkpoint(goldens.folder(name))
    for key, expected in expected_weights(name).items():
        entry = checkpoint.entries[key]
        assert entry.quantized, f"{key} is stored quantized"
        weight = checkpoint.read(key)
        values = weight.dequantize().transpose(-1, -2) if entry.fused else weight.dequantize()
        assert (weight.scheme, values.shape) == (entry.scheme, entry.shape)
        assert equal(name, values, expected), key


@pytest.mark.parametrize("name", goldens.names())
def test_dequantized_file_has_the_published_names_and_shapes(name, tmp_path):
    if not opens(name):
        pytest.skip("not served")
    checkpoint = open_checkpoint(goldens.folder(name))
    steps = []
    out = dequantize_checkpoint(goldens.folder(name), tmp_path / "out.safetensors", progress=lambda *step: steps.append(step))
    expected = expected_weights(name)
    with safe_open(out, "pt") as file:
        assert set(file.keys()) == set(checkpoint.entries)
        for key in checkpoint.entries:
            tensor = file.get_tensor(key)
            assert tensor.dtype == torch.float32
            assert tuple(tensor.shape) == checkpoint.entries[key].shape
            assert equal(name, tensor, expected[key] if key in expected else checkpoint.load(key).float())
    assert [step[2] for step in steps] == list(checkpoint.entries)
    assert steps[-1][0] == steps[-1][1]
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_the_carried_set_covers_every_method():
    methods = {goldens.config(name)["quantization_config"]["quant_method"] for name in goldens.names()}
    assert {"gptq", "awq", "auto-round", "compressed-tensors"} <= methods
