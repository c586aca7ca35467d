"""Damaged checkpoints with float elements load correctly or raise one clear HalError, as in `test_format_fuzz.py`."""

from __future__ import annotations

import functools
import random
import resource
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import checkpoints
import float_checkpoints as floats
import pytest
import torch
from core import test_format_fuzz as fuzz
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_core.canonical import stack
from hal_core.errors import HalError
from hal_core.formats import open_checkpoint
from hal_core.formats.gpt_oss import FusedBlocks
from hal_core.formats.packing import Rule
from hal_core.plan import plan_checkpoint
from hal_core.schemes import WeightScheme

if TYPE_CHECKING:
    from hal_core.canonical import QuantizedTensor

GROUPS = {name: [kind for kind in floats.KINDS if kind.startswith(name)] for name in ("ct_", "fp8", "ar_", "modelopt", "quark")}
GROUPS["gpt_oss"] = ["gpt_oss"]


def attempt(folder: Path, tensors: dict, config: dict | None) -> str:
    """Open, plan and read everything; '' or the error's text. What loads must be what its tensors hold by definition."""
    try:
        checkpoint = open_checkpoint(folder)
        got = {name: checkpoint.read(name) for name, entry in checkpoint.entries.items() if entry.quantized}
        for name, entry in checkpoint.entries.items():
            shape = tuple((got[name] if name in got else checkpoint.load(name)).shape)
            assert shape == ((shape[0], *entry.shape[:0:-1]) if entry.fused else entry.shape)
        plan_checkpoint(checkpoint, "bf16")
    except HalError as error:
        return fuzz.check_sentence(error)
    for name, weight in got.items() if config is not None else ():
        if weight.values.dim() == 3:
            check_experts(name, weight, tensors)
            continue
        module = name.removesuffix(".weight")
        expected = floats.slow_weight(lambda suffix, module=module: tensors.get(f"{module}.{suffix}"), weight.scheme)
        assert torch.equal(weight.dequantize(), expected), name
        if weight.input_scale is not None:
            parts = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == module}
            assert float(weight.input_scale) == pytest.approx(floats.slow_inputs(parts), rel=1e-12)
    return ""


def check_experts(name: str, weight: QuantizedTensor, tensors: dict) -> None:
    """gpt-oss: each expert is a module of its own to the slow reader."""
    for index, dense in enumerate(weight.dequantize()):
        parts = {"weight_packed": tensors[f"{name}_blocks"][index].flatten(-2), "weight_scale": tensors[f"{name}_scales"][index]}
        assert torch.equal(dense, floats.slow_weight(parts.get, weight.scheme)), name


@functools.cache
def made(kind: str) -> tuple[dict, dict]:
    return made_gpt_oss(2, 32) if kind == "gpt_oss" else floats.make(kind)[:2]


def made_gpt_oss(experts: int, size: int) -> tuple[dict, dict]:
    scheme, block = WeightScheme.parse("mxfp4:g32"), "model.layers.0.mlp.experts"
    tensors = {
        f"{block}.gate_up_proj_bias": torch.ones(experts, 2 * size, dtype=torch.bfloat16),
        f"{block}.down_proj_bias": torch.ones(experts, size, dtype=torch.bfloat16),
        "model.layers.0.mlp.router.weight": torch.ones(experts, size, dtype=torch.bfloat16),
    }
    for role, n, k in (("gate_up_proj", 2 * size, size), ("down_proj", size, size)):
        each = [floats.random_element_weight(scheme, n, k, seed, torch.uint8) for seed in range(experts)]
        packed = FusedBlocks().pack(stack(each, experts), Rule(FusedBlocks(), 4, 32, True, element="mxfp4"))
        tensors |= {f"{block}.{role}{tail}": tensor for tail, tensor in packed.items()}
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 1, "num_local_experts": experts, "num_experts_per_tok": 2, "swiglu_limit": 5.0,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "*.router", "lm_head"]},
    }  # fmt: skip
    return tensors, config


def one_example(name: str, seed: int) -> str:
    rng = random.Random(seed)
    tensors, config = made(rng.choice(GROUPS[name]))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        what = rng.choice(["file", "header", "config", "config", "tensors", "tensors"])
        config = fuzz.damage_config(config, rng) if what == "config" else config
        tensors = damage_tensors(tensors, rng) if what == "tensors" else tensors
        checkpoints.write(folder, tensors, config)
        file = folder / "model.safetensors"
        if what in ("file", "header"):
            file.write_bytes((fuzz.damage_file if what == "file" else fuzz.damage_header)(file.read_bytes(), rng))
            return attempt(folder, tensors, None)
        return attempt(folder, tensors, config)


def damage_tensors(tensors: dict, rng: random.Random) -> dict:
    """As for integers; of one-byte elements any byte, NaN codes among them, or the shape, or another type of one byte."""
    small = {name: tensor for name, tensor in tensors.items() if tensor.element_size() == 1}
    if rng.random() < 0.5:
        return {**small, **fuzz.damage_tensors({name: tensor for name, tensor in tensors.items() if name not in small}, rng)}
    name = rng.choice(list(small))
    raw, kind = small[name].view(torch.uint8).clone(), small[name].dtype
    action = rng.choice(["drop", "shape", "cast", "content", "content"])
    if action == "drop":
        return {key: tensor for key, tensor in tensors.items() if key != name}
    if action == "shape":
        raw = rng.choice([raw.flatten(), raw.unsqueeze(0), raw[:-1], raw[:0], torch.cat([raw, raw])])
    elif action == "cast":
        kind = rng.choice([torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
    else:
        raw.flatten()[rng.randrange(raw.numel())] = rng.choice([0x7F, 0xFF, 0x80, 0x7C, 0, rng.randrange(256)])
    return {**tensors, name: raw.view(kind)}


def run_example(name: str, seed: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one_example(name, seed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < fuzz.GROWTH_KB


@pytest.mark.parametrize("kind", sorted({kind for kinds in GROUPS.values() for kind in kinds}))
def test_undamaged_checkpoints_equal_the_slow_reader(kind, tmp_path):
    tensors, config = made(kind)
    assert not attempt(checkpoints.write(tmp_path, tensors, config), tensors, config)


@pytest.mark.parametrize("name", list(GROUPS))
@settings(max_examples=100, **fuzz.SETTINGS)
@given(seed=st.integers(0, 2**48))
def test_damage_is_read_right_or_refused(name, seed):
    run_example(name, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(GROUPS))
@settings(max_examples=3000, **fuzz.SETTINGS)
@given(seed=st.integers(0, 2**48))
def test_much_damage_is_read_right_or_refused(name, seed):
    run_example(name, seed)
