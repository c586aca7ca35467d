"""Checkpoints with float elements and quantized inputs, written tensor by tensor: values, schemes, layouts, refusals."""

from __future__ import annotations

import json

import checkpoints
import float_checkpoints as floats
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_core.canonical import stack
from hal_core.dequantize import dequantize_checkpoint
from hal_core.errors import FormatError
from hal_core.formats import open_checkpoint
from hal_core.layouts import LAYOUTS, ElementLayout, layout
from hal_core.schemes import Granularity, WeightScheme, ZeroKind

UP = "model.layers.0.mlp.up_proj"


def written(tmp_path, kind, change=lambda tensors, config: None):
    tensors, config, weights = floats.make(kind)
    change(tensors, config)
    return checkpoints.write(tmp_path / "model", tensors, config), tensors, weights


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)


@pytest.mark.parametrize("kind", list(floats.KINDS))
def test_values_scheme_and_inputs_are_the_definitions_own(kind, tmp_path):
    folder, tensors, weights = written(tmp_path, kind)
    checkpoint = open_checkpoint(folder)
    for module, weight in weights.items():
        parts = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] == module}
        got = checkpoint.read(f"{module}.weight")
        assert got.scheme == weight.scheme == checkpoint.entries[f"{module}.weight"].scheme
        assert got.tensors().keys() == weight.tensors().keys()
        for field, tensor in weight.tensors().items():
            assert same(got.tensors()[field], tensor), field
        assert torch.equal(got.dequantize(), floats.slow_weight(parts.get, weight.scheme))
        static = floats.slow_inputs(parts)
        assert (got.input_scale is None) == (static is None)
        assert static is None or float(got.input_scale) == pytest.approx(static, rel=1e-12)
        acts = checkpoint.entries[f"{module}.weight"].activations
        assert acts is None or acts.dynamic or static is not None


@pytest.mark.parametrize("kind", ["ct_fp8_block", "fp8_block_ue8m0"])
def test_blocks_are_dequantized_a_bounded_number_of_rows_at_a_time(kind, tmp_path, monkeypatch):
    import hal_core.dequantize as module

    monkeypatch.setattr(module, "_CHUNK", 64 * 60)
    folder, _, weights = written(tmp_path, kind)
    from safetensors.torch import load_file

    out = load_file(dequantize_checkpoint(folder, tmp_path / "out.safetensors"))
    for name, weight in weights.items():
        assert torch.equal(out[f"{name}.weight"], weight.dequantize())


def test_the_last_block_is_partial_and_blocks_begin_at_row_0(tmp_path):
    scheme = WeightScheme("fp8_e4m3", Granularity.blocks(128, 128))
    weight = floats.random_element_weight(scheme, 576, 192, 1, torch.float32)
    assert tuple(weight.scales.shape) == (5, 2)
    full = weight.values.float() * weight.scales.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :192]
    assert torch.equal(weight.dequantize(), full)
    assert torch.equal(weight.rows(512, 576).dequantize(), full[512:])
    tensors = {f"{UP}.{suffix}": tensor for suffix, tensor in layout("fp8").pack(weight).items()}
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert torch.equal(open_checkpoint(checkpoints.write(tmp_path / "m", tensors, config)).read(f"{UP}.weight").dequantize(), full)


EVERY = st.sampled_from(["int8", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4"])


@st.composite
def element_schemes(draw, dtypes=None):
    dtype = draw(EVERY if dtypes is None else dtypes)
    group = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(dtype)
    blocks = st.builds(Granularity.blocks, st.integers(2, 40), st.integers(1, 40))
    free = st.one_of(
        st.just(Granularity.tensor()), st.just(Granularity.channel()), st.builds(Granularity.groups, st.integers(1, 64)), blocks
    )
    g = Granularity.groups(group) if group else draw(free)
    zero = ZeroKind.INTEGER if dtype == "int8" and g.block is None and draw(st.booleans()) else ZeroKind.NONE
    return WeightScheme(dtype, g, zero)


ELEMENT_LAYOUTS = sorted(name for name, each in LAYOUTS.items() if isinstance(each, ElementLayout))


@pytest.mark.parametrize("name", ELEMENT_LAYOUTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_unpack_of_pack_is_the_weight_itself(name, data):
    chosen = layout(name)
    scheme = data.draw(element_schemes(st.sampled_from(chosen.dtypes) if data.draw(st.integers(0, 3)) else None))
    n, k = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 100))
    scales = {"mxfp8": torch.uint8, "mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(scheme.dtype)
    scales = scales or data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8 if name == "fp8" else torch.float16]))
    inputs = ("input_scale",) if name == "modelopt:nvfp4" else ("input_global",) if scheme.dtype == "nvfp4" else ()
    if scheme.dtype == "int8" and scales == torch.uint8:
        scales = torch.float32
    weight = floats.random_element_weight(scheme, n, k, data.draw(st.integers(0, 2**32)), scales, inputs)
    if chosen.obstacle(scheme, (n, k)):
        with pytest.raises(FormatError, match=f"layout {name}"):
            chosen.pack(weight)
        return
    again = chosen.unpack(chosen.pack(weight), scheme, (n, k))
    assert again.tensors().keys() == weight.tensors().keys()
    for field, tensor in weight.tensors().items():
        assert same(again.tensors()[field], tensor), field


def test_every_tool_has_its_layouts():
    packings = {each.packing.name for each in LAYOUTS.values() if isinstance(each, ElementLayout)}
    assert {"fp8", "modelopt", "quark", "auto-round:fp8", "auto-round:fp8_static", "auto-round:llm_compressor"} <= packings
    assert {layout_name for layout_name, *_ in floats.KINDS.values()} <= set(LAYOUTS)


@settings(max_examples=60, deadline=None)
@given(
    experts=st.integers(1, 4),
    n=st.integers(1, 9),
    groups=st.integers(1, 4),
    extra=st.sampled_from([0, 0, 1, 31]),
    seed=st.integers(0, 2**32),
)
def test_a_stack_of_fused_experts_is_a_layout_too(experts, n, groups, extra, seed):
    chosen, scheme = layout("gpt-oss:mxfp4"), WeightScheme("mxfp4", Granularity.groups(32))
    k = 32 * groups + extra
    weight = stack([floats.random_element_weight(scheme, n, k, seed + i, torch.uint8) for i in range(experts)], experts)
    if extra:
        with pytest.raises(FormatError, match="multiple of 32"):
            chosen.pack(weight)
        return
    packed = chosen.pack(weight)
    assert tuple(packed["_blocks"].shape) == (experts, n, groups, 16)
    again = chosen.unpack(packed, scheme, (experts, n, k))
    assert all(same(again.tensors()[field], tensor) for field, tensor in weight.tensors().items())
    with pytest.raises(FormatError, match=r"is not \[E, N, K\]"):
        chosen.pack(weight.expert(0))


def poisoned(suffix, value):
    def change(tensors, _):
        tensor = tensors[f"{UP}.{suffix}"]
        (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).flatten()[3 % tensor.numel()] = value

    return change


@pytest.mark.parametrize(
    ("kind", "suffix", "value"),
    [
        ("ct_fp8_channel", "weight", 0x7F),
        ("ct_fp8_channel", "weight", 0xFF),
        ("fp8_e5m2", "weight", 0x7C),
        ("ct_mxfp8", "weight", 0xFF),
        ("ct_mxfp8", "weight_scale", 255),
        ("ct_mxfp4", "weight_scale", 255),
        ("fp8_block_ue8m0", "weight_scale_inv", 255),
        ("fp8_block", "weight_scale_inv", float("nan")),
        ("ct_nvfp4", "weight_scale", 0x7F),
        ("ct_nvfp4", "weight_global_scale", 0.0),
        ("ct_nvfp4", "input_global_scale", float("inf")),
        ("modelopt_nvfp4", "weight_scale_2", -1.0),
        ("ct_fp8_tensor", "input_scale", float("nan")),
        ("ct_int8", "weight_scale", float("inf")),
    ],
)
def test_numbers_that_are_none_are_refused_with_the_tensors_name(kind, suffix, value, tmp_path):
    folder, _, _ = written(tmp_path, kind, poisoned(suffix, value))
    checkpoint = open_checkpoint(folder)
    with pytest.raises(FormatError, match=rf"{UP}\.{suffix}: .*(NaN|not a positive number)"):
        checkpoint.read(f"{UP}.weight")


def change_quant(**fields):
    return lambda _, config: config["quantization_config"].update(fields)


def group(part, **fields):
    return lambda _, config: config["quantization_config"]["config_groups"]["group_0"][part].update(fields)


REFUSED = [
    ("ct_fp8_tensor", lambda t, _: t.pop(f"{UP}.input_scale"), r"up_proj\.input_scale: missing"),
    ("ct_int8_static_asym", lambda t, _: t.pop(f"{UP}.input_zero_point"), r"input_zero_point: missing"),
    (
        "ct_int8",
        lambda t, _: t.update({f"{UP}.input_scale": torch.ones(1)}),
        r"input_scale: stored although the config says activations are",
    ),
    ("ct_int8", lambda t, _: t.update({f"{UP}.weight_zero_point": torch.zeros(96, 1, dtype=torch.int8)}), "weight_zero_point: stored"),
    ("ct_int8_zero", lambda t, _: t.pop(f"{UP}.weight_zero_point"), "weight_zero_point: missing"),
    ("ct_fp8_block", lambda t, _: t.pop(f"{UP}.weight_scale"), r"up_proj\.weight_scale: missing"),
    ("ct_fp8_block", group("weights", block_structure=[128, 128]), r"weight_scale: shape"),
    ("ct_fp8_block", group("weights", block_structure=[0, 128]), "block_structure"),
    ("ct_fp8_block", group("weights", block_structure=None), "block_structure"),
    ("ct_mxfp4", group("weights", group_size=64), "group_size|format"),
    ("ct_mxfp4", lambda t, _: t.update({f"{UP}.weight": torch.zeros(96, 64)}), "one or the other"),
    ("ct_nvfp4", lambda t, _: t.pop(f"{UP}.weight_global_scale"), "weight_global_scale: missing"),
    ("ct_fp8_channel", group("weights", type="int"), "type"),
    ("ct_fp8_channel", group("weights", symmetric=False), "symmetric"),
    ("ct_fp8_channel", change_quant(format="mxfp6-pack-quantized"), "mxfp6-pack-quantized"),
    ("ct_fp8_channel", change_quant(ignore=["re:.*up_proj"]), "not quantized"),
    ("ct_fp8_channel", change_quant(ignore=["model.layers.0.mlp.gate_up_proj"]), "not quantized"),
    ("ct_fp8_tensor", group("input_activations", strategy="channel"), "strategy|type"),
    ("ct_fp8_tensor", group("input_activations", num_bits=6), "type"),
    ("ct_int8", group("input_activations", dynamic="often"), "dynamic"),
    ("fp8_block", change_quant(weight_block_size=[128]), "weight_block_size"),
    ("fp8_block", change_quant(weight_block_size=None), "weight_scale_inv: shape"),
    ("fp8_block", change_quant(expert_dtype="fp4"), "expert_dtype"),
    ("fp8_block", change_quant(fmt="e3m4"), "fmt"),
    ("fp8_block", change_quant(activation_scheme="static"), r"(input|activation)_scale: missing"),
    ("fp8_block", change_quant(modules_to_not_convert=["mlp"]), "not quantized"),
    ("fp8_block", lambda t, _: t.update({f"{UP}.weight_scale": t[f"{UP}.weight_scale_inv"].clone()}), "holds both"),
    ("fp8_e5m2", change_quant(fmt="e4m3"), "dtype F8_E5M2"),
    ("ar_fp8", change_quant(rotation_config={"hadamard_type": "random"}), "rotation_config"),
    ("ar_fp8", change_quant(group_size=[32]), "group_size"),
    ("ar_mxfp8", change_quant(data_type="mx_int"), "data_type"),
    ("ar_mxfp4", change_quant(bits=6), "data_type"),
    ("ar_nvfp4", change_quant(act_bits=4, act_data_type="nv_fp4_e5m3"), "act_data_type"),
    ("modelopt_nvfp4", change_quant(quant_algo="NVFP4_AWQ"), "NVFP4_AWQ"),
    ("modelopt_nvfp4", change_quant(quant_algo="W4A16_AWQ"), "W4A16_AWQ"),
    ("modelopt_nvfp4", change_quant(group_size=32), "group_size"),
    ("modelopt_nvfp4", change_quant(ignore=["model.layers.0.mlp.*"]), "not quantized"),
    ("quark_int8", lambda _, c: c["quantization_config"]["global_quant_config"]["weight"].update(dtype="int4"), "int4"),
    ("quark_int8", lambda _, c: c["quantization_config"]["global_quant_config"].update(output_tensors={"dtype": "int8"}), "output_tensors"),
    ("quark_int8", change_quant(layer_type_quant_config={"Linear": {}}), "layer_type_quant_config"),
    ("quark_fp8", change_quant(export={"weight_format": "fake_quantized"}), "weight_format"),
]


@pytest.mark.parametrize(("kind", "change", "words"), REFUSED)
def test_what_contradicts_itself_or_is_not_served_is_refused(kind, change, words, tmp_path):
    folder, _, _ = written(tmp_path, kind, change)
    with pytest.raises(FormatError, match=words):
        open_checkpoint(folder)


def test_two_schemes_side_by_side(tmp_path):
    def change(tensors, config):
        weight = floats.random_element_weight(WeightScheme.parse("nvfp4:g16"), 96, 64, 9, torch.float8_e4m3fn)
        for name in [name for name in tensors if name.startswith(UP)]:
            del tensors[name]
        packed = layout("compressed-tensors:nvfp4-pack-quantized").pack(weight)
        tensors.update({f"{UP}.{suffix}": tensor for suffix, tensor in packed.items()})
        quant = config["quantization_config"]
        quant["format"] = "mixed-precision"
        quant["config_groups"]["group_0"]["format"] = "float-quantized"
        quant["config_groups"]["group_1"] = {
            "targets": ["re:.*gate_up_proj"], "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        }  # fmt: skip

    folder, _, _ = written(tmp_path, "ct_fp8_channel", change)
    entries = open_checkpoint(folder).entries
    assert str(entries[f"{UP}.weight"].scheme) == "nvfp4:g16"
    assert str(entries["model.layers.0.mlp.down_proj.weight"].scheme) == "fp8_e4m3:channel"


def test_modelopt_by_its_side_file_and_by_layer(tmp_path):
    def change(_, config):
        del config["quantization_config"]

    folder, _, _ = written(tmp_path, "modelopt_nvfp4", change)
    layers = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in checkpoints.LINEAR}
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": inner}))
    assert open_checkpoint(folder).format == "modelopt"
    del layers[UP]
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": inner}))
    with pytest.raises(FormatError, match="not quantized"):
        open_checkpoint(folder)


def test_a_plain_weight_that_the_fp8_writer_could_not_cut_into_blocks(tmp_path):
    def change(tensors, _):
        del tensors[f"{UP}.weight_scale_inv"]
        tensors[f"{UP}.weight"] = torch.ones(96, 64, dtype=torch.bfloat16)

    folder, _, _ = written(tmp_path, "fp8_block", change)
    assert not open_checkpoint(folder).entries[f"{UP}.weight"].quantized


@pytest.mark.parametrize("named", ["e8m0 dtype", "byte"])
def test_e8m0_scales_of_either_container_dtype(named, tmp_path):
    def change(tensors, _):
        if named == "e8m0 dtype":
            for name in [name for name in tensors if name.endswith("weight_scale_inv")]:
                tensors[name] = tensors[name].view(torch.float8_e8m0fnu)

    folder, _, weights = written(tmp_path, "fp8_block_ue8m0", change)
    got = open_checkpoint(folder).read(f"{UP}.weight")
    assert got.scales.dtype == torch.uint8
    assert torch.equal(got.dequantize(), weights[UP].dequantize())
