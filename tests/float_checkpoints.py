"""Tiny checkpoints of the formats with float elements or quantized inputs, and a reader of them that goes element by element."""

from __future__ import annotations

import json
import math

import torch
from checkpoints import LINEAR, PLAIN

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.layouts import layout
from hal_core.schemes import Granularity, WeightScheme, ZeroKind

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _ct(form, weights, inputs=None):
    base = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**base, **weights}, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def _autoround(**fields):
    base = {"quant_method": "auto-round", "sym": True, "data_type": "fp", "bits": 8, "block_name_to_quantize": "model.layers"}
    return {**base, **fields}


def _quark(weight, inputs=None):
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
        "layer_quant_config": {},
        "exclude": ["lm_head"],
        "export": {"weight_format": "real_quantized"},
    }


_STATIC = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
_INT = {"type": "int", "num_bits": 8, "strategy": "channel"}
_TOKEN = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_NV = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]}
_CT = "compressed-tensors:"

#: name: layout, weight scheme, dtype of the scales, static input numbers, quantization_config
KINDS: dict[str, tuple[str, str, torch.dtype, tuple[str, ...], dict]] = {
    "ct_int8": (f"{_CT}int-quantized", "int8:channel", torch.bfloat16, (), _ct("int-quantized", _INT, _TOKEN)),
    "ct_int8_static_asym": (
        f"{_CT}int-quantized", "int8:channel", torch.bfloat16, ("input_scale", "input_zero"),
        _ct("int-quantized", _INT, {**_STATIC, "type": "int", "symmetric": False}),
    ),
    "ct_int8_zero": (f"{_CT}int-quantized", "int8:channel:zero", torch.float32, (), _ct("naive-quantized", {**_INT, "symmetric": False})),
    "ct_fp8_tensor": (
        f"{_CT}float-quantized", "fp8_e4m3:tensor", torch.bfloat16, ("input_scale",),
        _ct("float-quantized", {"strategy": "tensor"}, _STATIC),
    ),
    "ct_fp8_channel": (f"{_CT}float-quantized", "fp8_e4m3:channel", torch.float32, (), _ct("float-quantized", {"strategy": "channel"})),
    "ct_fp8_block": (
        f"{_CT}float-quantized", "fp8_e4m3:b24x40", torch.bfloat16, (),
        _ct("float-quantized", {"strategy": "block", "block_structure": [24, 40]}),
    ),
    "ct_mxfp8": (f"{_CT}mxfp8-quantized", "mxfp8:g32", torch.uint8, (), _ct("mxfp8-quantized", _MX)),
    "ct_mxfp4": (f"{_CT}mxfp4-pack-quantized", "mxfp4:g32", torch.uint8, (), _ct("mixed-precision", {**_MX, "num_bits": 4})),
    "ct_nvfp4": (
        f"{_CT}nvfp4-pack-quantized", "nvfp4:g16", torch.float8_e4m3fn, ("input_global",),
        _ct("nvfp4-pack-quantized", _NV, {**_STATIC, **_NV, "dynamic": "local"}),
    ),
    "ct_nvfp4a16": (f"{_CT}nvfp4-pack-quantized", "nvfp4:g16", torch.float8_e4m3fn, (), _ct("nvfp4-pack-quantized", _NV)),
    "fp8_block": ("fp8", "fp8_e4m3:b32x48", torch.float32, (), {**_FP8, "weight_block_size": [32, 48]}),
    "fp8_block_ue8m0": ("fp8", "fp8_e4m3:b32x48", torch.uint8, (), {**_FP8, "weight_block_size": [32, 48], "scale_fmt": "ue8m0"}),
    "fp8_tensor_static": ("fp8", "fp8_e4m3:tensor", torch.float32, ("input_scale",), {**_FP8, "activation_scheme": "static"}),
    "fp8_e5m2": ("fp8", "fp8_e5m2:channel", torch.float16, (), {**_FP8, "fmt": "e5m2"}),
    "ar_fp8": ("fp8", "fp8_e4m3:b32x48", torch.bfloat16, (), _autoround(
        packing_format="auto_round:fp8", group_size=[32, 48], act_bits=8, act_data_type="fp", act_group_size=48, act_dynamic=True)),
    "ar_fp8_static": ("fp8", "fp8_e4m3:channel", torch.bfloat16, ("input_scale",), _autoround(
        packing_format="auto_round:fp8_static", group_size=-1, act_bits=8, act_data_type="fp", act_group_size=0, act_dynamic=False)),
    "ar_mxfp8": (f"{_CT}mxfp8-quantized", "mxfp8:g32", torch.uint8, (), _autoround(
        packing_format="auto_round:llm_compressor", data_type="mx_fp", group_size=32, act_bits=8, act_data_type="mx_fp",
        act_group_size=32)),
    "ar_mxfp4": (f"{_CT}mxfp4-pack-quantized", "mxfp4:g32", torch.uint8, (), _autoround(
        packing_format="auto_round:llm_compressor", data_type="mx_fp", bits=4, group_size=32, act_bits=16)),
    "ar_nvfp4": (f"{_CT}nvfp4-pack-quantized", "nvfp4:g16", torch.float8_e4m3fn, ("input_global",), _autoround(
        packing_format="auto_round:llm_compressor", data_type="nv_fp", bits=4, group_size=16, act_bits=4,
        act_data_type="nv_fp4_with_static_gs", act_group_size=16)),
    "modelopt_nvfp4": ("modelopt:nvfp4", "nvfp4:g16", torch.float8_e4m3fn, ("input_scale",), {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "quark_fp8": ("fp8", "fp8_e4m3:tensor", torch.float32, ("input_scale",), _quark(
        {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False})),
    "quark_int8": (f"{_CT}int-quantized", "int8:channel", torch.float32, (), _quark(
        {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True})),
}  # fmt: skip


def random_element_weight(scheme: WeightScheme, n: int, k: int, seed: int, scales: torch.dtype, inputs=()) -> QuantizedTensor:
    """Every field random over what its type can hold; float elements finite. ``inputs`` names static numbers of the inputs."""
    draw = torch.Generator().manual_seed(seed)
    g, integer = scheme.granularity, scheme.zero is ZeroKind.INTEGER
    grid = {"tensor": (1, 1), "channel": (n, 1)}.get(g.kind.value) or (n, -(-k // (g.group or 1)))
    grid = grid if g.block is None else (-(-n // g.block[0]), -(-k // g.block[1]))
    codes = torch.randint(0, 256, (n, k), generator=draw, dtype=torch.uint8)
    if scheme.bits == 4:
        values = pack_nibbles(codes)
    elif scheme.dtype == "int8":
        values = codes if integer else codes.view(torch.int8)
    else:
        wrong = 0x7C if scheme.dtype == "fp8_e5m2" else 0x7F
        values = torch.where((codes & 0x7F) >= wrong, codes & 0x80, codes)
        values = values.view(torch.float8_e5m2 if scheme.dtype == "fp8_e5m2" else torch.float8_e4m3fn)
    divides = scheme.dtype == "nvfp4" and "input_scale" not in inputs
    number = torch.rand((), generator=draw) * 3000 + 0.01
    static = torch.rand((), generator=draw) + 0.01
    return QuantizedTensor(
        scheme, (n, k), values, _random_scales(grid, scales, draw),
        zeros=torch.randint(0, 256, grid, generator=draw, dtype=torch.uint8) if integer else None,
        global_scale=None if scheme.dtype != "nvfp4" else number.double().reciprocal() if divides else number,
        input_scale=static.double().reciprocal() if "input_global" in inputs else static if "input_scale" in inputs else None,
        input_zero=torch.tensor(-7, dtype=torch.int8) if "input_zero" in inputs else None,
    )  # fmt: skip


def _random_scales(grid, dtype: torch.dtype, draw: torch.Generator) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(100, 150, grid, generator=draw, dtype=torch.uint8)
    if dtype == torch.float8_e4m3fn:
        return torch.randint(1, 0x7F, grid, generator=draw, dtype=torch.uint8).view(dtype)
    return torch.randn(grid, generator=draw).to(dtype)


def make(kind: str) -> tuple[dict[str, torch.Tensor], dict, dict[str, QuantizedTensor]]:
    """File tensors, config.json, and the canonical weights that they hold."""
    name, text, scales, inputs, quant = KINDS[kind]
    tensors, weights = {}, {}
    for index, (module, shape) in enumerate(LINEAR.items()):
        weights[module] = random_element_weight(WeightScheme.parse(text), *shape, index, scales, inputs)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in layout(name).pack(weights[module]).items()}
    for seed, (plain, shape) in enumerate(PLAIN.items()):
        tensors[plain] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    config = {"model_type": "qwen3", "num_hidden_layers": 1, "quantization_config": json.loads(json.dumps(quant))}
    return tensors, config, weights


def _byte_value(byte: int, dtype: torch.dtype) -> float:
    """A float8 byte by the definition of its fields."""
    sign, bits = (-1.0 if byte & 0x80 else 1.0), byte & 0x7F
    mantissa_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    exponent, mantissa = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias))


def _scale_value(scale: torch.Tensor) -> torch.Tensor:
    """float32 of one stored scale."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.tensor(math.ldexp(1.0, int(scale.view(torch.uint8)) - 127), dtype=torch.float32)
    if scale.dtype == torch.float8_e4m3fn:
        return torch.tensor(_byte_value(int(scale.view(torch.uint8)), scale.dtype), dtype=torch.float32)
    return scale.float()


def slow_weight(get, scheme: WeightScheme) -> torch.Tensor:
    """A module's weight by the names of its tensors. The scheme says which elements share a scale."""
    values = get("weight") if get("weight") is not None and get("weight").element_size() == 1 else get("weight_packed")
    scales = get("weight_scale_inv") if get("weight_scale_inv") is not None else get("weight_scale")
    n, k = values.shape[0], values.shape[1] * (2 if scheme.bits == 4 else 1)
    g = scheme.granularity
    rows, columns = g.block or ((1, g.group) if g.group else (1, k) if g.kind.value == "channel" else (n, k))
    scales = scales.reshape(-(-n // rows), -(-k // columns))
    zeros, out = get("weight_zero_point"), torch.empty(n, k)
    table = [_scale_value(scale) for scale in scales.flatten()]
    if get("weight_global_scale") is not None:
        table = [scale / get("weight_global_scale").float().reshape(()) for scale in table]
    if get("weight_scale_2") is not None:
        table = [scale * get("weight_scale_2").float().reshape(()) for scale in table]
    raw = values.view(torch.uint8).tolist() if values.dtype != torch.int8 else values.tolist()
    floats = {} if values.dtype in (torch.int8, torch.uint8) else {byte: _byte_value(byte, values.dtype) for byte in range(256)}
    for row in range(n):
        if scheme.bits == 4:
            codes = [(raw[row][i // 2] >> 4 * (i % 2)) & 15 for i in range(k)]
            codes = [E2M1[code & 7] * (-1 if code & 8 else 1) for code in codes]
        else:
            codes = [floats[byte] for byte in raw[row]] if floats else raw[row]
        spots = [(row // rows) * scales.shape[1] + i // columns for i in range(k)]
        if zeros is not None:
            codes = [code - int(zeros.flatten()[spot]) for code, spot in zip(codes, spots, strict=True)]
        out[row] = torch.tensor(codes, dtype=torch.float32) * torch.stack([table[spot] for spot in spots])
    return out


def slow_inputs(module_tensors) -> float | None:
    """The static scale of a module's inputs as a multiplier."""
    for name in ("input_scale", "activation_scale"):
        if name in module_tensors:
            return float(module_tensors[name].reshape(()))
    if "input_global_scale" in module_tensors:
        return 1 / float(module_tensors["input_global_scale"].reshape(()))
    return None


__all__ = ["KINDS", "Granularity", "make", "random_element_weight", "slow_inputs", "slow_weight"]
