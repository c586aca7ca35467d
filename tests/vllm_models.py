"""Small random models of several families, quantized to nearest and written as checkpoints, with the logits that they should give."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.layouts import layout
from hal_core.schemes import WeightScheme

GROUP, BITS = 32, 4
GPTQ = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": True, "sym": False, "checkpoint_format": "gptq"}
SIZES = {
    "vocab_size": 264, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """A checkpoint, a prompt, and transformers' float32 logits on its dequantized weights."""

    folder: Path
    ids: list[int]
    logits: torch.Tensor


def nearest(weight: torch.Tensor, act_order: bool, seed: int) -> QuantizedTensor:
    """Asymmetric groups of a matrix; the order of columns is random, or trivial."""
    n, k = weight.shape
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(k, generator=draw) if act_order else torch.arange(k)
    groups = weight[:, order].reshape(n, -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15).to(torch.uint8)
    g_idx = torch.empty(k, dtype=torch.int32)
    g_idx[order] = (torch.arange(k) // GROUP).to(torch.int32)
    codes = (weight / scales.float()[:, g_idx.long()] + zeros[:, g_idx.long()]).round().clamp(0, 15).to(torch.uint8)
    scheme = WeightScheme.parse(f"int{BITS}:g{GROUP}:zero{':act_order' if act_order else ''}")
    return QuantizedTensor(scheme, (n, k), pack_nibbles(codes), scales, zeros=zeros, g_idx=g_idx if act_order else None)


def write(folder: Path, config, quantized: str, *, ordered: str = "$^") -> Served:
    """A GPTQ checkpoint of a random model; ``quantized`` and ``ordered`` match the modules that are, and that have act-order."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 1.0 if name.endswith("bias") else 0.3 if "lm_head" in name or "embed" in name else 0.06
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.normal_(0, spread)
    folder.mkdir()
    model.save_pretrained(folder, max_shard_size="1GB")  # under published names
    (plain,) = folder.glob("*.safetensors")
    tensors = requantized(plain, quantized, ordered)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": GPTQ | {"lm_head": "lm_head" in quantized}}))
    save_file(tensors, plain, metadata={"format": "pt"})
    ids = torch.randint(3, SIZES["vocab_size"], (19,), generator=torch.Generator().manual_seed(3)).tolist()
    return Served(folder, ids, reference(folder, ids))


def requantized(plain: Path, quantized: str, ordered: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with some of its matrices packed."""
    from safetensors.torch import load_file

    out = {}
    for index, (name, tensor) in enumerate(load_file(plain).items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and tensor.dim() == 2 and re.search(quantized, module):
            weight = nearest(tensor.float(), bool(re.search(ordered, module)), index)
            out[f"{module}.g_idx"] = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)  # in every file of this kind
            out |= {f"{module}.{suffix}": t for suffix, t in layout("gptq").pack(weight).items()}
        else:
            out[name] = tensor
    return out


def reference(folder: Path, ids: list[int]) -> torch.Tensor:
    """float32 logits of a checkpoint in transformers, from the reference kernels."""
    import hal_core as hal

    model = hal.load(folder, policy="require:reference", numerics="exact", dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]
