"""Tiny checkpoints of every folder format, and a reader of them written element by element, to compare with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.layouts import layout
from hal_core.schemes import Granularity, WeightScheme, ZeroKind

LINEAR = {
    "model.layers.0.self_attn.q_proj": (64, 32),
    "model.layers.0.mlp.up_proj": (96, 64),
    "model.layers.0.mlp.down_proj": (64, 96),
}
PLAIN = {"model.embed_tokens.weight": (16, 64), "model.layers.0.input_layernorm.weight": (64,), "lm_head.weight": (16, 64)}
CT_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False, "actorder": None}


def _gptq(**fields):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq", **fields}


def _awq(**fields):
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
        **fields,
    }


def _autoround(**fields):
    base = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
    }
    return {**base, "packing_format": "auto_round:auto_gptq", **fields}


def _ct(**weights):
    group = {
        "targets": ["Linear"],
        "weights": {**CT_WEIGHTS, **weights},
        "input_activations": None,
        "output_activations": None,
        "format": None,
    }
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


#: name: layout, weight scheme, quantization_config
KINDS: dict[str, tuple[str, str, dict]] = {
    "gptq": ("gptq", "int4:g32", _gptq()),
    "gptq_asym": ("gptq", "int4:g32:zero", _gptq(sym=False)),
    "gptq_act_order": ("gptq", "int4:g32:zero:act_order", _gptq(sym=False, desc_act=True)),
    "gptq_channel": ("gptq", "int4:channel", _gptq(group_size=-1)),
    "gptq_v2": ("gptq_v2", "int8:g32:zero", _gptq(sym=False, bits=8, checkpoint_format="gptq_v2")),
    "gptq_3bit": ("gptq", "int3:g32:zero", _gptq(sym=False, bits=3)),
    "gptq_8bit": ("gptq", "int8:g32:zero", _gptq(sym=False, bits=8)),
    "awq": ("awq:gemm", "int4:g32:zero", _awq()),
    "awq_sym": ("awq:gemm", "int4:g32", _awq(zero_point=False)),
    "awq_gemv": ("awq:gemv", "int4:g32:zero", _awq(version="gemv")),
    "autoround": ("gptq", "int4:g32", _autoround()),
    "autoround_native": ("gptq_v2", "int2:g32:zero", _autoround(bits=2, sym=False, packing_format="auto_round")),
    "autoround_g16": ("gptq", "int4:g16", _autoround(group_size=16)),
    "autoround_awq": ("awq:gemm", "int4:g32:zero", _autoround(sym=False, packing_format="auto_round:auto_awq")),
    "ct": ("compressed-tensors:pack-quantized", "int4:g32", _ct()),
    "ct_asym": ("compressed-tensors:pack-quantized", "int4:g32:zero", _ct(symmetric=False)),
    "ct_act_order": ("compressed-tensors:pack-quantized", "int4:g32:zero:act_order", _ct(symmetric=False, actorder="group")),
    "ct_2bit": ("compressed-tensors:pack-quantized", "int2:g32", _ct(num_bits=2)),
    "ct_3bit": ("compressed-tensors:pack-quantized", "int3:g32", _ct(num_bits=3)),
    "ct_3bit_asym": ("compressed-tensors:pack-quantized", "int3:g32:zero", _ct(num_bits=3, symmetric=False)),
    "ct_3bit_tens": ("compressed-tensors:pack-quantized:10", "int3:g32:zero", _ct(num_bits=3, symmetric=False)),
    "ct_8bit_channel": ("compressed-tensors:pack-quantized", "int8:channel", _ct(num_bits=8, strategy="channel", group_size=None)),
}


def random_weight(scheme: WeightScheme, n: int, k: int, seed: int, scale_dtype=torch.float16) -> QuantizedTensor:
    """Every field uniformly random, signs of scales included."""
    draw = torch.Generator().manual_seed(seed)
    bits, signed = scheme.bits, scheme.zero is ZeroKind.NONE and scheme.dtype.startswith("int")
    codes = torch.randint(0, 1 << bits, (n, k), generator=draw)
    bytewise = (codes - (1 << (bits - 1))).to(torch.int8) if signed else codes.to(torch.uint8)
    values = pack_nibbles(codes) if bits == 4 else bytewise
    size, block = scheme.granularity.group, scheme.granularity.superblock
    grid = {"tensor": (1, 1), "channel": (n, 1)}.get(scheme.granularity.kind.value) or (n, -(-k // (block or size)))
    scales = torch.randn(grid, generator=draw).to(scale_dtype)
    return QuantizedTensor(
        scheme, (n, k), values,
        torch.randint(0, 255, grid, generator=draw, dtype=torch.uint8) if scheme.dtype == "mxfp4" else scales,
        zeros=torch.randint(0, 1 << bits, grid, generator=draw, dtype=torch.uint8) if scheme.zero is ZeroKind.INTEGER else None,
        mins=torch.randn(grid, generator=draw).to(scale_dtype) if scheme.zero is ZeroKind.MINIMUM else None,
        g_idx=(torch.randperm(k, generator=draw) // size).to(torch.int32) if scheme.act_order else None,
        **(_factors(scheme, (n, -(-k // size)), draw) if block else {}),
    )  # fmt: skip


def _factors(scheme: WeightScheme, grid: tuple[int, int], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Factors of groups in superblocks, in the range of the type that has this scheme."""
    ranges = {"int2": (0, 16), "int4": (0, 64), "int5": (0, 64), "int6": (-128, 128)}
    low, high = ranges.get(scheme.dtype, (-32, 32))
    scales = torch.randint(low, high, grid, generator=draw, dtype=torch.int8)
    if scheme.zero is ZeroKind.NONE:
        return {"sub_scales": scales}
    return {"sub_scales": scales, "sub_mins": torch.randint(0, high, grid, generator=draw, dtype=torch.uint8)}


def make(kind: str, linear=None) -> tuple[dict[str, torch.Tensor], dict, dict[str, QuantizedTensor]]:
    """File tensors, config.json, and the canonical weights that they hold."""
    name, text, quant = KINDS[kind]
    tensors, weights = {}, {}
    for index, (module, shape) in enumerate((LINEAR if linear is None else linear).items()):
        scheme = WeightScheme.parse(text)
        if scheme.act_order and scheme.granularity.group >= shape[1]:
            scheme = WeightScheme(scheme.dtype, Granularity.groups(shape[1]), scheme.zero)
        weights[module] = random_weight(scheme, *shape, seed=index)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in layout(name).pack(weights[module]).items()}
        if "desc_act" in quant and quant["desc_act"] and f"{module}.g_idx" not in tensors:
            tensors[f"{module}.g_idx"] = torch.zeros(shape[1], dtype=torch.int32)
    for seed, (plain, shape) in enumerate(PLAIN.items()):
        tensors[plain] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 1,
        "quantization_config": json.loads(json.dumps(quant)),
    }
    return tensors, config, weights


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None) -> Path:
    """A checkpoint folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _bits(word: int, start: int, width: int) -> int:
    return (word & 0xFFFFFFFF) >> start & ((1 << width) - 1)


def _stream(words: list[int], index: int, bits: int) -> int:
    whole = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return whole >> (index * bits) & ((1 << bits) - 1)


def _tens(words: list[int], index: int, bits: int) -> int:
    return _bits(words[index // 10], index % 10 * bits, bits)


def _gptq_zeros(row: list[int], bits: int, minus_one: bool, count: int) -> list[int]:
    if not minus_one:
        return [_stream(row, i, bits) for i in range(count)]
    if 32 % bits:
        return [(_stream(row, i, bits) + 1) % (1 << bits) for i in range(count)]
    step = sum(1 << i for i in range(0, 32, bits))
    return [_stream([(word & 0xFFFFFFFF) + step & 0xFFFFFFFF for word in row], i, bits) for i in range(count)]


def slow_gptq(get, bits: int, group: int, minus_one: bool) -> torch.Tensor:
    """The layout's own definition, one element at a time."""
    columns, scales = get("qweight").t().tolist(), get("scales").float()
    n, k = len(columns), len(columns[0]) * 32 // bits
    zeros = [_gptq_zeros(row, bits, minus_one, n) for row in get("qzeros").tolist()]
    size = k if group == -1 else group
    order = get("g_idx").tolist() if get("g_idx") is not None else [index // size for index in range(k)]
    out = torch.empty(n, k)
    for row in range(n):
        whole = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(columns[row]))
        codes = [(whole >> (index * bits) & ((1 << bits) - 1)) - zeros[order[index]][row] for index in range(k)]
        out[row] = torch.tensor(codes, dtype=torch.float32) * scales[order, row]
    return out


def slow_awq(get, group: int) -> torch.Tensor:
    """GEMM, one element at a time."""
    qweight, qzeros, scales = get("qweight").tolist(), get("qzeros").tolist(), get("scales").float()
    n, k = scales.shape[1], len(qweight)
    size = k if group == -1 else group
    nibble = [0, 4, 1, 5, 2, 6, 3, 7]
    out = torch.empty(n, k)
    for col in range(n):
        shift = 4 * nibble[col % 8]
        for index in range(k):
            code = _bits(qweight[index][col // 8], shift, 4) - _bits(qzeros[index // size][col // 8], shift, 4)
            out[col, index] = torch.tensor(float(code)) * scales[index // size, col]
    return out


def slow_gemv(get, group: int) -> torch.Tensor:
    qweight, qzeros, scales = get("qweight").tolist(), get("qzeros").tolist(), get("scales").float()
    n, k = len(qweight), len(qweight[0]) * 8
    size = k if group == -1 else group
    out = torch.empty(n, k)
    for row in range(n):
        codes = [_stream(qweight[row], i, 4) - _stream(qzeros[row], i // size, 4) for i in range(k)]
        out[row] = torch.tensor(codes, dtype=torch.float32) * scales[row, [i // size for i in range(k)]]
    return out


def slow_ct(get, bits: int, group: int, symmetric: bool) -> torch.Tensor:
    n, k = get("weight_shape").tolist()
    packed, scales, half = get("weight_packed").tolist(), get("weight_scale").float(), 1 << (bits - 1)
    size = k if group == -1 else group
    order = get("weight_g_idx").tolist() if get("weight_g_idx") is not None else [index // size for index in range(k)]
    columns = None if symmetric else get("weight_zero_point").t().tolist()
    tens = bits == 3 and len(packed[0]) == -(-k // 10) != -(-k * 3 // 32)
    field = _tens if tens else _stream
    out = torch.empty(n, k)
    for row in range(n):
        zeros = [half] * scales.shape[1] if columns is None else [field(column, row, bits) for column in columns]
        codes = [field(packed[row], i, bits) - zeros[order[i]] for i in range(k)]
        out[row] = torch.tensor(codes, dtype=torch.float32) * scales[row, order]
    return out


def slow_read(tensors: dict[str, torch.Tensor], quant: dict, module: str) -> torch.Tensor:
    """A module's weight by the format's definition; ``quant`` must be a valid configuration."""

    def get(suffix):
        return tensors.get(f"{module}.{suffix}")

    method, group = quant["quant_method"], quant.get("group_size")
    if method == "gptq":
        for key, override in (quant.get("dynamic") or {}).items():
            if re.match(key.removeprefix("+:"), module):
                quant, group = {**quant, **override}, override.get("group_size", group)
                break
        version = quant.get("checkpoint_format") or quant.get("format") or "gptq"
        return slow_gptq(get, quant["bits"], group, version == "gptq")
    if method == "awq":
        return slow_gemv(get, group) if (quant.get("version") or "gemm").lower() == "gemv" else slow_awq(get, group)
    if method == "auto-round":
        packing = quant.get("packing_format") or quant.get("backend") or "auto_round"
        return slow_awq(get, group) if packing.endswith("auto_awq") else slow_gptq(get, quant["bits"], group, packing.endswith("auto_gptq"))
    weights = next(iter(quant["config_groups"].values()))["weights"]
    size = weights.get("group_size")
    channel = weights.get("strategy") == "channel" or size in (None, -1)
    return slow_ct(get, weights["num_bits"], -1 if channel else size, weights.get("symmetric", True) is not False)
