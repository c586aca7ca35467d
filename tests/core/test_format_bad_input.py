"""What is wrong with a checkpoint is said in one sentence: the tensor or field, what was found, what to do."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc

import checkpoints
import pytest
import torch
from safetensors.torch import save_file

from hal_core.dequantize import dequantize_checkpoint
from hal_core.errors import FormatError, HalError, OutputError
from hal_core.formats import open_checkpoint

UP = "model.layers.0.mlp.up_proj"


def read_all(folder) -> None:
    checkpoint = open_checkpoint(folder)
    for name, entry in checkpoint.entries.items():
        (checkpoint.read if entry.quantized else checkpoint.load)(name)


def refused(folder, *said: str) -> str:
    """Opening, or reading everything, fails with all of these words and something to do or found."""
    with pytest.raises(FormatError) as caught:
        read_all(folder)
    for word in said:
        assert word in str(caught.value)
    assert caught.value.found
    return str(caught.value)


def make(tmp_path, kind="gptq", edit=None, config_edit=None):
    tensors, config, _ = checkpoints.make(kind)
    if edit is not None:
        edit(tensors)
    if config_edit is not None:
        config_edit(config["quantization_config"])
    return checkpoints.write(tmp_path / "model", tensors, config)


def with_header(folder, change) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -5000])
def test_truncated_files(tmp_path, keep):
    folder = make(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "fetch" in refused(folder, "model.safetensors")


def test_files_that_are_not_safetensors(tmp_path):
    folder = make(tmp_path)
    (folder / "model.safetensors").write_bytes(b"<html><body>404 not found</body></html>" * 10)
    refused(folder, "not a safetensors file")


@pytest.mark.parametrize("length", [2**31, 2**40, 2**63, 2**64 - 1])
def test_header_sizes_beyond_the_file_allocate_nothing(tmp_path, length):
    folder = make(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    tracemalloc.start()
    refused(folder, str(length))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**41], [2**40, 2**40], [2**20, 2**20]])
def test_absurd_dimensions(tmp_path, shape):
    folder = make(tmp_path)
    with_header(folder, lambda header: header[f"{UP}.scales"].update(shape=shape))
    refused(folder, f"{UP}.scales")


def test_overlapping_tensors(tmp_path):
    folder = make(tmp_path)

    def overlap(header):
        header[f"{UP}.scales"]["data_offsets"] = [0, header[f"{UP}.scales"]["data_offsets"][1] - header[f"{UP}.scales"]["data_offsets"][0]]

    with_header(folder, overlap)
    refused(folder, "model.safetensors", "byte")


def test_a_name_given_twice(tmp_path):
    folder = make(tmp_path)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip().replace(b'{"__metadata__"', b'{"lm_head.weight":{},"__metadata__"', 1)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    refused(folder, "appears twice")


def test_unknown_dtypes(tmp_path):
    folder = make(tmp_path)
    with_header(folder, lambda header: header[f"{UP}.scales"].update(dtype="F12"))
    refused(folder, f"{UP}.scales", "'F12'")


def test_pickle_files_are_refused_unread(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(folder, "pickle", "convert them to safetensors")
    refused(folder / "pytorch_model.bin", "pickle")


def test_missing_places(tmp_path):
    refused(tmp_path / "nowhere", "there is no such file or folder")
    refused(tmp_path, "no .safetensors and no .gguf file")
    refused(make(tmp_path) / "model.safetensors", "give its folder")


# --- shards ---------------------------------------------------------------------------------------------------------


def shards(tmp_path, index_edit=None):
    tensors, config, _ = checkpoints.make("gptq")
    folder = tmp_path / "sharded"
    folder.mkdir()
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    if index_edit is not None:
        index_edit(index)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_shards_read_like_one_file(tmp_path):
    one, many = open_checkpoint(make(tmp_path)), open_checkpoint(shards(tmp_path))
    assert set(one.entries) == set(many.entries)
    for name, entry in one.entries.items():
        if entry.quantized:
            assert torch.equal(one.read(name).values, many.read(name).values)
    assert len(many.files) == 2


def test_shards_without_an_index_need_all_their_numbers(tmp_path):
    folder = shards(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    assert open_checkpoint(folder).entries
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "missing")


def test_a_missing_shard_is_named(tmp_path):
    folder = shards(tmp_path)
    (folder / "model-00001-of-00002.safetensors").unlink()
    refused(folder, "model-00001-of-00002.safetensors", "missing", "fetch")


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a\\..\\model.safetensors", "sub/model.safetensors", "x.bin", 3]
)
def test_an_index_cannot_point_outside_its_folder(tmp_path, name):
    refused(shards(tmp_path, lambda index: index["weight_map"].update({f"{UP}.scales": name})), "model.safetensors.index.json")


def test_an_index_that_names_what_is_not_there(tmp_path):
    file = "model-00001-of-00002.safetensors"
    refused(shards(tmp_path, lambda index: index["weight_map"].update({"model.extra.weight": file})), "model.extra.weight", "not stored")


def test_an_index_that_forgets_a_tensor(tmp_path):
    refused(shards(tmp_path, lambda index: index["weight_map"].pop(f"{UP}.scales")), f"{UP}.scales", "not named by")


def test_an_index_that_puts_a_tensor_in_the_wrong_shard(tmp_path):
    def swap(index):
        names = index["weight_map"]
        names[f"{UP}.scales"] = next(file for file in names.values() if file != names[f"{UP}.scales"])

    refused(shards(tmp_path, swap), f"{UP}.scales")


# --- the configuration ----------------------------------------------------------------------------------------------


def test_missing_config(tmp_path):
    folder = make(tmp_path)
    (folder / "config.json").unlink()
    refused(folder, "has no config.json", "fetch")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":1,"a":2}', "[" * 5000, "\ud800".encode("utf-16", "surrogatepass")])
def test_a_config_that_is_no_json_object(tmp_path, text):
    folder = make(tmp_path)
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(folder, "config.json")


def test_quantized_tensors_without_a_quantization_config(tmp_path):
    folder = make(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "no quantization_config", "I32")


def test_unknown_methods_are_named_with_what_is_served(tmp_path):
    refused(make(tmp_path, config_edit=lambda quant: quant.update(quant_method="hqq")), "'hqq' is not served", "gptq")


@pytest.mark.parametrize("bits", [1, 5, 6, 7, 16, "4", None, 4.0])
def test_unknown_bits(tmp_path, bits):
    refused(make(tmp_path, config_edit=lambda quant: quant.update(bits=bits)), "field bits")


@pytest.mark.parametrize("kind", ["gptq", "awq", "autoround"])
def test_bits_that_contradict_the_shapes(tmp_path, kind):
    refused(make(tmp_path, kind, config_edit=lambda quant: quant.update(bits=8)), "bits" if kind == "awq" else "8 bits")


@pytest.mark.parametrize("kind", ["gptq", "awq", "awq_gemv", "autoround", "ct"])
def test_group_size_that_contradicts_the_shapes(tmp_path, kind):
    def edit(quant):
        spot = quant["config_groups"]["group_0"]["weights"] if kind == "ct" else quant
        spot["group_size"] = 16 if kind == "ct" else 128

    refused(make(tmp_path, kind, config_edit=edit), "expected")


@pytest.mark.parametrize("value", ["marlin", "gptq_p", "bitblas", 2])
def test_unserved_gptq_forms(tmp_path, value):
    refused(make(tmp_path, config_edit=lambda quant: quant.update(checkpoint_format=value)), "checkpoint_format")


def test_two_places_that_contradict_each_other(tmp_path):
    folder = make(tmp_path)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": False}))
    refused(folder, "group_size", "quantize_config.json", "128")


def test_a_side_file_alone_is_enough(tmp_path):
    folder = make(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    side = config.pop("quantization_config")
    del side["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps(side))
    assert open_checkpoint(folder).format == "gptq"


def test_the_two_names_of_the_zero_rule_must_agree(tmp_path):
    refused(make(tmp_path, config_edit=lambda quant: quant.update(format="gptq_v2")), "contradict")


def test_symmetric_config_over_other_zero_points(tmp_path):
    refused(make(tmp_path, "gptq_asym", config_edit=lambda quant: quant.update(sym=True)), ".qzeros", "symmetric", "set the config's")


def test_activation_order_that_the_config_denies(tmp_path):
    refused(make(tmp_path, "gptq_act_order", config_edit=lambda quant: quant.update(desc_act=False)), ".g_idx", "desc_act")


@pytest.mark.parametrize("field", ["transform_config", "sparsity_config"])
def test_compressed_tensors_extras_that_change_the_numbers(tmp_path, field):
    refused(make(tmp_path, "ct", config_edit=lambda quant: quant.update({field: {"format": "sparse-24-bitmask"}})), field)


# --- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gptq", "awq", "awq_gemv", "autoround", "ct_asym"])
def test_zero_points_of_a_wrong_shape(tmp_path, kind):
    name = f"{UP}.weight_zero_point" if kind == "ct_asym" else f"{UP}.qzeros"
    refused(make(tmp_path, kind, edit=lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()})), name, "shape")


@pytest.mark.parametrize("kind", list(checkpoints.KINDS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite(tmp_path, kind, value):
    name = f"{UP}.weight_scale" if kind.startswith("ct") else f"{UP}.scales"

    def poison(tensors):
        tensors[name][0, 0] = value

    refused(make(tmp_path, kind, edit=poison), name, "NaN or infinite")


@pytest.mark.parametrize(("suffix", "dtype"), [("qweight", torch.int64), ("qzeros", torch.float32), ("scales", torch.int32)])
def test_unexpected_dtypes(tmp_path, suffix, dtype):
    refused(
        make(tmp_path, edit=lambda tensors: tensors.update({f"{UP}.{suffix}": tensors[f"{UP}.{suffix}"].to(dtype)})),
        f"{UP}.{suffix}",
        "dtype",
    )


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_a_missing_part_of_a_module_is_named(tmp_path, suffix):
    refused(make(tmp_path, edit=lambda tensors: tensors.pop(f"{UP}.{suffix}")), f"{UP}.{suffix}", "missing")


def test_a_module_stored_both_ways(tmp_path):
    refused(make(tmp_path, edit=lambda tensors: tensors.update({f"{UP}.weight": torch.zeros(96, 64)})), f"{UP}.weight", "beside")


@pytest.mark.parametrize("g_idx", [-1, 2, 1000])
def test_group_numbers_out_of_range(tmp_path, g_idx):
    def edit(tensors):
        tensors[f"{UP}.g_idx"][3] = g_idx

    refused(make(tmp_path, "gptq_act_order", edit=edit), f"{UP}.g_idx", "there are 2 groups")


def test_stored_shape_that_contradicts_the_packed_width(tmp_path):
    name = f"{UP}.weight_shape"
    refused(make(tmp_path, "ct", edit=lambda tensors: tensors.update({name: torch.tensor([96, 63 * 8])})), name, "does not fit")
    refused(make(tmp_path / "b", "ct", edit=lambda tensors: tensors.update({name: torch.tensor([-96, 64])})), name)


@pytest.mark.parametrize(("kind", "width"), [("ct_3bit", 6), ("ct_3bit_tens", 7)])
def test_ten_codes_a_word_is_told_from_the_bit_stream_by_its_width(tmp_path, kind, width):
    tensors, config, weights = checkpoints.make(kind)
    assert tensors[f"{UP}.weight_packed"].shape == (96, width)
    got = open_checkpoint(checkpoints.write(tmp_path, tensors, config)).read(f"{UP}.weight")
    assert torch.equal(got.values, weights[UP].values)
    tensors[f"{UP}.weight_packed"] = torch.zeros(96, 8, dtype=torch.int32)
    refused(checkpoints.write(tmp_path / "neither", tensors, config), f"{UP}.weight_shape", "does not fit weight_packed")


def moe(tmp_path, edit):
    linear = {f"model.layers.0.mlp.experts.{e}.{p}_proj": (32, 32) for e in range(4) for p in ("gate", "up", "down")}
    tensors, config, _ = checkpoints.make("gptq", linear)
    config["num_experts"] = 4
    edit(tensors, config)
    return checkpoints.write(tmp_path / "moe", tensors, config)


def test_a_missing_expert_is_named(tmp_path):
    def drop(tensors, config):
        for name in [name for name in tensors if ".experts.2." in name]:
            del tensors[name]

    refused(moe(tmp_path, drop), "model.layers.0.mlp.experts.2.", "missing")


def test_a_missing_last_expert_is_named(tmp_path):
    def drop(tensors, config):
        for name in [name for name in tensors if ".experts.3." in name]:
            del tensors[name]

    refused(moe(tmp_path, drop), "model.layers.0.mlp.experts.3.", "missing")


def test_a_missing_projection_of_one_expert_is_named(tmp_path):
    def drop(tensors, config):
        for name in [name for name in tensors if ".experts.1.up_proj." in name]:
            del tensors[name]

    refused(moe(tmp_path, drop), "experts.1.up_proj.weight", "missing")


def test_more_experts_than_the_config_says(tmp_path):
    refused(moe(tmp_path, lambda tensors, config: config.update(num_experts=3)), "experts.3", "3 experts")


def test_a_missing_layer_is_named(tmp_path):
    tensors, config, _ = checkpoints.make("gptq")
    config["num_hidden_layers"] = 2
    refused(checkpoints.write(tmp_path, tensors, config), "model.layers.1")


# --- writing --------------------------------------------------------------------------------------------------------


def test_dequantize_never_writes_over_the_checkpoint(tmp_path):
    folder = make(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    (tmp_path / "link.safetensors").symlink_to(folder / "model.safetensors")
    for out in (folder / "model.safetensors", tmp_path / "link.safetensors", folder):
        with pytest.raises(OutputError, match="output"):
            dequantize_checkpoint(folder, out)
    assert (folder / "model.safetensors").read_bytes() == before


def test_dequantize_leaves_nothing_behind_when_it_fails(tmp_path):
    def poison(tensors):
        tensors["model.layers.0.mlp.down_proj.scales"][0, 0] = float("nan")

    folder = make(tmp_path, edit=poison)
    out = tmp_path / "out"
    out.mkdir()
    (out / "x.safetensors").write_text("an older file")
    with pytest.raises(FormatError, match="NaN"):
        dequantize_checkpoint(folder, out / "x.safetensors")
    assert [path.name for path in out.iterdir()] == ["x.safetensors"]
    assert (out / "x.safetensors").read_text() == "an older file"


def test_dequantize_to_a_place_that_does_not_exist(tmp_path):
    with pytest.raises(HalError, match="there is no folder"):
        dequantize_checkpoint(make(tmp_path), tmp_path / "no" / "x.safetensors")


def test_asking_for_what_is_not_there(tmp_path):
    checkpoint = open_checkpoint(make(tmp_path))
    with pytest.raises(FormatError, match="not in the checkpoint"):
        checkpoint.read("model.other.weight")
    with pytest.raises(FormatError, match=r"use load\(\)"):
        checkpoint.read("lm_head.weight")
    with pytest.raises(FormatError, match=r"use read\(\)"):
        checkpoint.load(f"{UP}.weight")


# --- what is no file ------------------------------------------------------------------------------------------------

PLACES = [
    "model.safetensors", "model.safetensors.index.json", "model-00001-of-00001.safetensors", "other.safetensors", "config.json",
    "quantize_config.json", "hf_quant_config.json", "only.gguf",
]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_refused_and_never_opened(place, kind, tmp_path):
    folder = make(tmp_path)
    if place.startswith(("model", "other", "only")):
        (folder / "model.safetensors").unlink()
    (folder / place).unlink(missing_ok=True)
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}[kind](folder / place)
    refused(folder, place, "not a regular file")
    if place.endswith((".gguf", ".safetensors")) and kind != "folder":
        refused(folder / place, "not a regular file")


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_shard_that_is_a_pipe_is_refused(tmp_path):
    folder = make(tmp_path)
    file = folder / "model.safetensors"
    names = list(open_checkpoint(folder).entries)
    file.unlink()
    os.mkfifo(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "part.safetensors", "not a regular file")


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_file_that_became_a_pipe_is_not_waited_for(tmp_path):
    folder = make(tmp_path)
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(FormatError, match="not a regular file"):
        checkpoint.read(f"{UP}.weight")
