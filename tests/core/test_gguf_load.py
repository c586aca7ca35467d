"""GGUF types without kernels in the backends load, are served by the reference, and give the dequantized model's logits."""

from __future__ import annotations

import warnings

import pytest
import torch

import hal_core
from hal_core.errors import FormatError, HalWarning

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
import gguf_files  # noqa: E402  needs the gguf package

IDS = torch.tensor([[3, 17, 40, 8, 63]])


def plain_model(checkpoint):
    """transformers' own model over the dequantized weights."""
    fields = {name: value for name, value in checkpoint.config.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(checkpoint.config["model_type"], **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {}
    for name, entry in checkpoint.entries.items():
        held = name.replace(".block_sparse_moe.", ".mlp.")
        for published, part in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            held = held.replace(f".{published}.", f".{part}.")
        state[held] = checkpoint.read(name).dequantize() if entry.quantized else checkpoint.load(name).float()
    for layer in range(gguf_files.LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        if f"{at}.0.up_proj.weight" not in state:
            continue
        each = [{p: state.pop(f"{at}.{e}.{p}_proj.weight") for p in ("gate", "up", "down")} for e in range(gguf_files.EXPERTS)]
        state[f"{at}.gate_up_proj"] = torch.stack([torch.cat([expert["gate"], expert["up"]]) for expert in each])
        state[f"{at}.down_proj"] = torch.stack([expert["down"] for expert in each])
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe", "mixtral", "mixtral-old"])
@torch.inference_mode()
def test_logits_are_those_of_the_dequantized_model(tmp_path, architecture, kind):
    routers = {f"blk.{layer}.ffn_gate_inp.weight": "F32" for layer in range(gguf_files.LAYERS)}  # as every converter does
    checkpoint = hal_core.open_checkpoint(gguf_files.write(tmp_path / "model.gguf", architecture, kind, kinds=routers))
    model = hal_core.load(checkpoint, policy="require:reference")
    got, wanted = model(IDS).logits.float(), plain_model(checkpoint)(IDS).logits
    assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    sizes = {op.module: op.nbytes for op in model.hal.ops}
    stored = sum(entry.nbytes for entry in checkpoint.entries.values() if entry.quantized)
    assert sum(sizes.values()) <= 1.2 * stored, "the reference must hold them packed"


def test_a_quantized_router_is_refused_by_name(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", "Q8_0")
    with pytest.raises(FormatError, match=r"model\.layers\.0\.mlp\.gate: quantized"):
        hal_core.load(path)


def test_auto_serves_them_by_the_reference_and_says_so_once(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3", "Q4_K")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = hal_core.load(path)
    said = [str(w.message) for w in caught if issubclass(w.category, HalWarning)]
    assert all(op.selection.backend == "reference" for op in model.hal.ops)
    assert len(said) == len(set(said))


def test_a_backend_without_superblocks_says_so():
    spec = hal_core.LinearSpec(64, 256, hal_core.WeightScheme.parse("int4:g32/256:min"))
    for candidate in hal_core.candidates(spec):
        codes = {refusal.code for refusal in candidate.refusals}
        assert candidate.accepted == candidate.kernel.startswith("reference.")
        assert candidate.accepted or codes & {"scheme.dtype", "scheme.granularity", "backend.ops"}, candidate
