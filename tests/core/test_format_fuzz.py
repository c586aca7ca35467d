"""Damaged checkpoints load correctly or raise one clear HalError: never another exception, never silently other numbers.

"Correctly" is what the format's definition says of the damaged content, computed one element at a time in `checkpoints.py`.
"""

from __future__ import annotations

import functools
import json
import random
import resource
import tempfile
from pathlib import Path

import checkpoints
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal_core.errors import HalError
from hal_core.formats import open_checkpoint
from hal_core.formats.gguf_header import read_gguf_header

KINDS = list(checkpoints.KINDS)
FORMATS = {name: [kind for kind in KINDS if kind.startswith(name)] for name in ("gptq", "awq", "autoround", "ct")}
GGUF_KINDS = ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]
DTYPES = ["F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F64", "F4", "", None, 7]
ODD = [
    None, True, False, 0, 1, -1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 96, 128, 2**31, 2**63, 2**70, 1.5, float("nan"),
    "", "gptq", "gptq_v2", "gemv", "auto_round", "group", "channel", "tensor", "int", "float", "pack-quantized", "(", "re:(", "Linear",
    [], {}, ["Linear"], [1], {"a": 1},
]  # fmt: skip
SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
#: A damaged checkpoint of some 30 kB must not make the process grow by more than this.
GROWTH_KB = 400_000


def attempt(folder: Path, tensors: dict, config: dict | None) -> str:
    """Open and read everything; '' or the error's text. What loads must be right."""
    try:
        checkpoint = open_checkpoint(folder)
        got = {}
        for name, entry in checkpoint.entries.items():
            got[name] = checkpoint.read(name).dequantize() if entry.quantized else checkpoint.load(name).float()
            assert tuple(got[name].shape) == entry.shape
    except HalError as error:
        return check_sentence(error)
    if config is not None:
        for name, value in got.items():
            if checkpoint.entries[name].quantized:
                expected = checkpoints.slow_read(tensors, config["quantization_config"], name.removesuffix(".weight"))
                assert torch.equal(value, expected), name
            else:
                assert torch.equal(value.view(torch.int32), tensors[name].float().view(torch.int32)), name  # NaN too is kept
    return ""


def check_sentence(error: HalError) -> str:
    """It says what was asked and what was found."""
    assert error.asked
    assert error.found
    return str(error)


def damage_file(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut or added, mostly in the header."""
    out = bytearray(data)
    length = int.from_bytes(data[:8], "little")
    action = rng.choice(["flip", "flip", "cut", "grow", "length"])
    if action == "flip":
        for _ in range(rng.randint(1, 4)):
            out[rng.randrange(8 + length)] = rng.randrange(256)
    elif action == "cut":
        del out[rng.randrange(len(out)) :]
    elif action == "grow":
        out += bytes(rng.randint(1, 99))
    else:
        out[:8] = rng.choice([0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
    return bytes(out)


def damage_header(data: bytes, rng: random.Random) -> bytes:
    """One field of the header's JSON, with its length kept true."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = rng.choice(list(header))
    entry = header[name]
    if name == "__metadata__" or rng.random() < 0.2:
        header[rng.choice([name, name + "x", "model.layers.0.mlp.up_proj.weight"])] = rng.choice([None, [], {}, entry, 3])
    else:
        field = rng.choice(["shape", "dtype", "data_offsets"])
        if field == "dtype":
            entry[field] = rng.choice(DTYPES)
        elif entry[field] and rng.random() < 0.7:
            entry[field][rng.randrange(len(entry[field]))] = rng.choice([0, 1, 8, -1, 2**20, 2**40, 2**62, 2**64, 1e3, None, "8", True])
        else:
            entry[field] = rng.choice([[], None, [1], [2**50, 2**50], [0, 2**60], {}, "x", [[1]]])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def damage_config(config: dict, rng: random.Random) -> dict:
    """One field at any depth of the configuration changed, removed or added."""
    config = json.loads(json.dumps(config))
    spot = config["quantization_config"] if rng.random() < 0.9 else config
    while True:
        key = rng.choice(list(spot))
        inner = spot[key]
        if isinstance(inner, dict) and inner and rng.random() < 0.8:
            spot = inner
            continue
        break
    if rng.random() < 0.2:
        del spot[key]
    else:
        spot[key] = rng.choice(ODD)
    return config


def damage_tensors(tensors: dict, rng: random.Random) -> dict:
    """One tensor dropped, renamed, reshaped, recast, or with other content."""
    out = dict(tensors)
    name = rng.choice(list(out))
    tensor = out[name].clone()
    action = rng.choice(["drop", "rename", "shape", "cast", "content", "content", "content", "poison"])
    if action == "drop":
        del out[name]
    elif action == "rename":
        module, _, _ = name.rpartition(".")
        suffix = rng.choice(["weight", "qweight", "qzeros", "scales", "g_idx", "bias", "weight_packed", "weight_scale", "other"])
        out.pop(name)
        out[f"{module}.{suffix}"] = tensor
    elif action == "shape":
        out[name] = rng.choice([tensor.flatten(), tensor.unsqueeze(0), tensor[:-1], tensor[:0], torch.cat([tensor, tensor])])
    elif action == "cast":
        out[name] = tensor.to(rng.choice([torch.int32, torch.float32, torch.float16, torch.int8, torch.int64, torch.bool]))
    elif action == "poison" and tensor.is_floating_point():
        tensor.flatten()[rng.randrange(tensor.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])
        out[name] = tensor
    elif not tensor.is_floating_point():
        flat = tensor.flatten()
        for _ in range(rng.randint(1, 5)):
            flat[rng.randrange(flat.numel())] = rng.choice([0, 1, 2, 3, -1, rng.randint(-(2**31), 2**31 - 1)])
        out[name] = tensor
    return out


def one_example(name: str, seed: int) -> str:
    rng = random.Random(seed)
    tensors, config = made(rng.choice(FORMATS[name]))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        what = rng.choice(["file", "header", "config", "config", "tensors", "tensors"])
        if what == "config":
            config = damage_config(config, rng)
        if what == "tensors":
            tensors = damage_tensors(tensors, rng)
        checkpoints.write(folder, tensors, config)
        file = folder / "model.safetensors"
        if what in ("file", "header"):
            file.write_bytes((damage_file if what == "file" else damage_header)(file.read_bytes(), rng))
            return attempt(folder, tensors, None)  # a header may name the same bytes otherwise: there is no other truth to compare with
        return attempt(folder, tensors, config if "quantization_config" in config else None)


@functools.cache
def made(kind: str) -> tuple[dict, dict]:
    return checkpoints.make(kind)[:2]


def gguf_example(seed: int) -> str:
    """A GGUF file with damaged bytes. Whatever loads has its declared shapes, and is what the package says of the bytes that are there."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.gguf"
        architecture = rng.choice(["llama", "qwen3moe"])
        data, start = gguf_data(architecture, rng.choice(GGUF_KINDS))
        out = bytearray(data)
        action = rng.choice(["flip", "flip", "flip", "word", "cut", "data", "data"])
        if action == "cut":
            del out[rng.randrange(len(out)) :]
        for _ in range(rng.randint(1, 3)):
            if action == "flip":
                out[rng.randrange(start)] = rng.randrange(256)
            elif action == "word":
                spot = rng.randrange(start - 8)
                out[spot : spot + 8] = rng.choice([0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
            elif action == "data":
                spot = rng.randrange(start, len(out) - 64)
                out[spot : spot + 64] = rng.choice([rng.randbytes(64), b"\xff" * 64, bytes(64), b"\x00\x7c" * 32])
        path.write_bytes(out)
        return gguf_values(path, architecture) if action == "data" else attempt(path, {}, None)


def gguf_values(path: Path, architecture: str) -> str:
    """Every parameter is what the gguf package reads; what is refused is no finite number there either."""
    import numpy as np
    from core import test_format_gguf as package

    checkpoint = open_checkpoint(path)
    with np.errstate(all="ignore"):
        expected = package.own_dequantization(path)
    said = ""
    for name, entry in checkpoint.entries.items():
        source, index = package.gguf_name(name)
        wanted = expected[source] if index is None else expected[source][index]
        if architecture == "llama" and name.split(".")[-2] in package.PER_HEAD:
            wanted = package.published_rows(wanted, package.PER_HEAD[name.split(".")[-2]])
        try:
            got = checkpoint.read(name).dequantize() if entry.quantized else checkpoint.load(name).float()
        except HalError as error:
            said = check_sentence(error)
            assert source in said
            assert not bool(torch.isfinite(wanted).all())
            continue
        assert tuple(got.shape) == entry.shape
        assert torch.allclose(got, wanted, rtol=0, atol=0, equal_nan=True), name
    return said


@functools.cache
def gguf_data(architecture: str, kind: str) -> tuple[bytes, int]:
    """A small file and where its tensors begin."""
    import gguf_files

    with tempfile.TemporaryDirectory() as scratch:
        path = gguf_files.write(Path(scratch) / "model.gguf", architecture, kind)
        return path.read_bytes(), min(tensor.offset for tensor in read_gguf_header(path).tensors.values())


def run_example(name: str, seed: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gguf_example(seed) if name == "gguf" else one_example(name, seed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH_KB


@pytest.mark.parametrize("kind", KINDS)
def test_undamaged_checkpoints_equal_the_slow_reader(kind, tmp_path):
    tensors, config, weights = checkpoints.make(kind)
    assert not attempt(checkpoints.write(tmp_path, tensors, config), tensors, config)
    checkpoint = open_checkpoint(tmp_path)
    for module, weight in weights.items():
        got = checkpoint.read(f"{module}.weight")
        assert got.scheme == weight.scheme
        assert all(torch.equal(got.tensors()[field], tensor) for field, tensor in weight.tensors().items())


@pytest.mark.parametrize("name", [*FORMATS, "gguf"])
@settings(max_examples=100, **SETTINGS)
@given(seed=st.integers(0, 2**48))
def test_damage_is_read_right_or_refused(name, seed):
    run_example(name, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*FORMATS, "gguf"])
@settings(max_examples=3000, **SETTINGS)
@given(seed=st.integers(0, 2**48))
def test_much_damage_is_read_right_or_refused(name, seed):
    run_example(name, seed)
