"""GGUF: codes stay packed, names and row order are the published ones, and damage is refused."""

from __future__ import annotations

import builtins
import struct

import numpy as np
import pytest
import torch

from hal_core.canonical import stack
from hal_core.errors import FormatError, MissingDependencyError
from hal_core.formats import open_checkpoint
from hal_core.formats.gguf_header import read_gguf_header

gguf = pytest.importorskip("gguf")
import gguf_files  # noqa: E402  needs the gguf package

SCHEMES = {
    "Q4_1": "int4:g32:min", "Q4_0": "int4:g32", "Q8_0": "int8:g32", "F16": "fp16", "F32": "fp32", "BF16": "bf16",
    "Q5_0": "int5:g32", "Q5_1": "int5:g32:min", "IQ4_NL": "iq4_nl:g32", "MXFP4": "mxfp4:g32",
    "Q2_K": "int2:g16/256:min", "Q3_K": "int3:g16/256", "Q4_K": "int4:g32/256:min", "Q5_K": "int5:g32/256:min",
    "Q6_K": "int6:g16/256", "IQ4_XS": "iq4_nl:g32/256",
}  # fmt: skip
PER_HEAD = {"q_proj": gguf_files.HEADS, "k_proj": gguf_files.KV_HEADS}


def own_dequantization(path):
    """What the gguf package says every tensor holds, by GGUF name."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        data = np.array(tensor.data)
        if tensor.tensor_type.name not in ("F32", "F16"):
            data = gguf.quants.dequantize(data, tensor.tensor_type)
        found[tensor.name] = torch.from_numpy(data.astype(np.float32))
    return found


def published_rows(weight, heads):
    """The inverse of the row order that llama files use, in one reshape."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("kind", list(SCHEMES))
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3moe", "mixtral", "mixtral-old"])
def test_every_parameter_equals_the_packages_dequantization(tmp_path, architecture, kind):
    path = gguf_files.write(tmp_path / "model.gguf", architecture, kind)
    checkpoint, expected = open_checkpoint(path), own_dequantization(path)
    seen = 0
    for name, entry in checkpoint.entries.items():
        got = checkpoint.read(name).dequantize() if entry.quantized else checkpoint.load(name).float()
        source, index = gguf_name(name, old=architecture == "mixtral-old")
        wanted = expected[source] if index is None else expected[source][index]
        if architecture in ("llama", *gguf_files.MIXTRAL) and name.split(".")[-2] in PER_HEAD:
            wanted = published_rows(wanted, PER_HEAD[name.split(".")[-2]])
        assert torch.equal(got, wanted), name
        assert tuple(got.shape) == entry.shape
        seen += wanted.numel()
        if len(entry.shape) == 2:
            assert str(entry.scheme) == SCHEMES[kind]
    assert seen == sum(tensor.numel() for tensor in expected.values())


def gguf_name(name, old=False):
    """Published name to GGUF name and expert, written out by hand."""
    table = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    }  # fmt: skip
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name], None
    _, _, layer, rest = name.split(".", 3)
    inner, _, suffix = rest.rpartition(".")
    if ".experts." in name:
        _, _, expert, projection = inner.split(".")
        projection = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(projection, projection)
        if old:
            return f"blk.{layer}.ffn_{projection[:-5]}.{expert}.{suffix}", None
        return f"blk.{layer}.ffn_{projection[:-5]}_exps.{suffix}", int(expert)
    return f"blk.{layer}.{table[inner]}.{suffix}", None


def test_biases_of_rotary_projections_are_put_in_order_too(tmp_path):
    tensors = gguf_files.values(gguf_files.tensor_shapes("llama", bias=True))
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", "llama", "Q8_0", tensors))
    assert checkpoint.config["attention_bias"] is True
    stored = torch.from_numpy(tensors["blk.1.attn_k.bias"])
    assert torch.equal(checkpoint.load("model.layers.1.self_attn.k_proj.bias"), published_rows(stored, gguf_files.KV_HEADS))
    assert torch.equal(checkpoint.load("model.layers.1.self_attn.v_proj.bias"), torch.from_numpy(tensors["blk.1.attn_v.bias"]))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3moe"])
def test_config_is_what_transformers_needs(tmp_path, architecture):
    config = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", architecture)).config
    assert config["hidden_size"] == gguf_files.HIDDEN
    assert config["num_hidden_layers"] == gguf_files.LAYERS
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 32)
    assert (config["rms_norm_eps"], config["rope_theta"], config["rope_scaling"]) == (1e-5, 50000.0, None)
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (gguf_files.VOCAB, True)
    assert (config["bos_token_id"], config["eos_token_id"], config["max_position_embeddings"]) == (1, 2, 128)
    assert ("num_experts" in config) == (architecture == "qwen3moe")


def test_a_separate_head_is_an_entry_and_unties_it(tmp_path):
    tensors = gguf_files.values(gguf_files.tensor_shapes("qwen3") | {"output.weight": (gguf_files.VOCAB, gguf_files.HIDDEN)})
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", "qwen3", tensors=tensors))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.entries["lm_head.weight"].quantized


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path):
    gguf_files.write(tmp_path / "model.gguf")
    assert open_checkpoint(tmp_path).format == "gguf"
    gguf_files.write(tmp_path / "other.gguf")
    with pytest.raises(FormatError, match=r"2 \.gguf files"):
        open_checkpoint(tmp_path)


def test_header_agrees_with_the_packages_reader(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", extra=lambda w: w.add_token_list([f"t{i}" for i in range(5000)]))
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    assert {t.name: (t.data_offset, t.n_bytes, t.tensor_type.name) for t in reader.tensors} == {
        t.name: (t.offset, t.nbytes, t.kind) for t in header.tensors.values()
    }
    assert header.metadata["tokenizer.ggml.tokens"].count == 5000
    assert header.metadata["qwen3moe.expert_count"] == reader.fields["qwen3moe.expert_count"].contents()


def test_llama3_rotary_factors_give_back_the_published_parameters(tmp_path):
    transformers = pytest.importorskip("transformers")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(rope_theta=50000.0, rope_scaling=dict(scaling), head_dim=32, hidden_size=64, num_attention_heads=4)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = 1.0 / 50000.0 ** (torch.arange(0, 32, 2) / 32)
    factors = (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy().astype(np.float32)
    tensors = gguf_files.values(gguf_files.tensor_shapes("llama")) | {"rope_freqs.weight": factors}
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", tensors=tensors))
    assert checkpoint.config["rope_scaling"] == scaling
    assert not any("rope" in name for name in checkpoint.entries)
    tensors["rope_freqs.weight"] = factors * 1.1
    with pytest.raises(FormatError, match="rope_freqs"):
        open_checkpoint(gguf_files.write(tmp_path / "odd.gguf", tensors=tensors))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (lambda w: w.add_float32("llama.logit_scale", 0.5), "logit_scale"),
        (lambda w: w.add_uint32("llama.expert_count", 8), "expert_used_count"),
        (lambda w: w.add_uint16("split.count", 3), "merge"),
        (lambda w: w.add_rope_dimension_count(16), "rotary"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
    ],
)
def test_what_would_change_numbers_and_is_not_served_is_refused(tmp_path, extra, said):
    with pytest.raises(FormatError, match=said):
        open_checkpoint(gguf_files.write(tmp_path / "model.gguf", extra=extra))


@pytest.mark.parametrize("kind", ["IQ2_XS", "IQ1_S", "IQ3_S", "TQ1_0", "Q8_K"])
def test_unserved_types_are_named_with_their_tensor(tmp_path, kind):
    path = gguf_files.write(tmp_path / "model.gguf", kinds={"blk.1.ffn_up.weight": "Q8_0"})
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.1.ffn_up.weight") + len("blk.1.ffn_up.weight") + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", gguf.GGMLQuantizationType[kind])
    path.write_bytes(data)
    with pytest.raises(FormatError, match=rf"blk\.1\.ffn_up\.weight.*{kind} is not served"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "MXFP4", "Q3_K", "Q4_K", "Q6_K"])
def test_rows_and_experts_of_every_kind_of_scale_can_be_taken_alone(tmp_path, kind):
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", "qwen3moe", kind))
    weight = checkpoint.read("model.embed_tokens.weight")
    whole, ids = weight.dequantize(), torch.tensor([5, 0, 63, 5])
    assert torch.equal(weight.rows(3, 9).dequantize(), whole[3:9])
    assert torch.equal(weight.gather_rows(ids).dequantize(), whole[ids])
    experts = [checkpoint.read(f"model.layers.0.mlp.experts.{index}.up_proj.weight") for index in range(gguf_files.EXPERTS)]
    block = stack(experts, gguf_files.EXPERTS)
    assert torch.equal(block.expert(2).dequantize(), experts[2].dequantize())
    assert torch.equal(block.dequantize()[3], experts[3].dequantize())


def test_k_quants_stay_near_the_size_of_the_file(tmp_path):
    checkpoint = open_checkpoint(gguf_files.write(tmp_path / "model.gguf", "qwen3", "Q4_K"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.read(name).nbytes < 1.03 * checkpoint.entries[name].nbytes


def test_unserved_architectures_are_named(tmp_path):
    with pytest.raises(FormatError, match="'gemma3'"):
        open_checkpoint(gguf_files.write(tmp_path / "model.gguf", "gemma3"))


def test_without_the_package_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    path = gguf_files.write(tmp_path / "model.gguf")
    real = builtins.__import__

    def without_gguf(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_gguf)
    with pytest.raises(MissingDependencyError, match="pip install gguf"):
        open_checkpoint(path)


def test_a_missing_layer_or_embedding_is_named(tmp_path):
    tensors = gguf_files.values(gguf_files.tensor_shapes("llama"))
    short = {name: value for name, value in tensors.items() if not name.startswith("blk.1.")}
    with pytest.raises(FormatError, match=r"model\.layers\.1"):
        open_checkpoint(gguf_files.write(tmp_path / "a.gguf", tensors=short))
    del tensors["token_embd.weight"]
    with pytest.raises(FormatError, match=r"token_embd\.weight"):
        open_checkpoint(gguf_files.write(tmp_path / "b.gguf", tensors=tensors))


def test_unknown_tensors_are_refused(tmp_path):
    tensors = gguf_files.values(gguf_files.tensor_shapes("llama") | {"blk.0.attn_sinks.weight": (32, 32)})
    with pytest.raises(FormatError, match=r"blk\.0\.attn_sinks\.weight"):
        open_checkpoint(gguf_files.write(tmp_path / "a.gguf", tensors=tensors))


def test_infinite_scales_are_refused_when_read(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", kind="Q4_0")
    tensor = read_gguf_header(path).tensors["blk.0.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset + 18 : tensor.offset + 20] = struct.pack("<e", float("inf"))
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_up\.weight"):
        open_checkpoint(path).read("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("keep", [0, 3, 23, 60, 500, -1, -40])
def test_truncated_files_are_refused(tmp_path, keep):
    path = gguf_files.write(tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep >= 0 else read_gguf_header(path).tensors["output_norm.weight"].offset + 100])
    with pytest.raises(FormatError):
        open_checkpoint(path)


@pytest.mark.parametrize("position", [8, 16])
def test_absurd_counts_are_refused_at_once(tmp_path, position):
    path = gguf_files.write(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    data[position : position + 8] = struct.pack("<Q", 2**60)
    path.write_bytes(data)
    with pytest.raises(FormatError, match="goes beyond"):
        open_checkpoint(path)


def test_another_file_with_the_name_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FormatError, match="does not begin with GGUF"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda shapes: shapes | {"blk.0.ffn_up.1.weight": (gguf_files.FFN, gguf_files.HIDDEN)}, "stored twice"),
        (lambda shapes: shapes | {"blk.0.ffn_up.weight": (gguf_files.FFN, gguf_files.HIDDEN)}, "no place in the architecture"),
        (lambda shapes: shapes | {"blk.0.attn_q.bias": (gguf_files.HEADS * gguf_files.HEAD,)}, "no bias"),
    ],
)
def test_a_mixtral_file_that_contradicts_itself_is_refused(tmp_path, change, said):
    tensors = gguf_files.values(change(gguf_files.tensor_shapes("mixtral")))
    path = gguf_files.write(tmp_path / "model.gguf", "mixtral", "Q8_0", tensors)
    with pytest.raises(FormatError, match=said):
        open_checkpoint(path)


def test_an_expert_that_is_missing_among_single_ones_is_named(tmp_path):
    shapes = gguf_files.tensor_shapes("mixtral-old")
    del shapes["blk.1.ffn_down.2.weight"]
    path = gguf_files.write(tmp_path / "model.gguf", "mixtral-old", "Q8_0", gguf_files.values(shapes))
    with pytest.raises(FormatError, match=r"layers\.1\.block_sparse_moe\.experts\.2\.w2\.weight: missing"):
        open_checkpoint(path)
