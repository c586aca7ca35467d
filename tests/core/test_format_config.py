"""Which modules are quantized, and how: the configuration and the tensors together, with every tool's own matching rules."""

from __future__ import annotations

import checkpoints
import pytest
import torch

from hal_core.errors import FormatError
from hal_core.formats import open_checkpoint
from hal_core.formats.quant_config import compile_pattern

LAYER = "model.layers.0"
MODULES = {
    f"{LAYER}.self_attn.q_proj": (64, 32),
    f"{LAYER}.mlp.gate_proj": (96, 64),
    f"{LAYER}.mlp.up_proj": (96, 64),
    f"{LAYER}.mlp.down_proj": (64, 96),
}


def opened(tmp_path, kind, config_edit=None, plain=(), other=None):
    """A checkpoint with some modules stored plain, and others of another kind."""
    tensors, config, _ = checkpoints.make(kind, MODULES)
    for module in plain:
        for name in [name for name in tensors if name.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = torch.zeros(MODULES.get(module, (4, 64)), dtype=torch.bfloat16)
    for module, chosen in (other or {}).items():
        found = checkpoints.make(chosen, MODULES)[0]
        tensors |= {name: tensor for name, tensor in found.items() if name.startswith(f"{module}.")}
    if config_edit is not None:
        config_edit(config["quantization_config"])
    return open_checkpoint(checkpoints.write(tmp_path / "model", tensors, config))


def scheme(checkpoint, module: str) -> str:
    return str(checkpoint.entries[f"{LAYER}.{module}.weight"].scheme)


@pytest.mark.parametrize("kind", ["gptq", "awq", "autoround", "ct"])
def test_a_plain_weight_that_the_config_wants_quantized(tmp_path, kind):
    with pytest.raises(FormatError, match=r"up_proj\.weight: a plain BF16 weight, but the config says"):
        opened(tmp_path, kind, plain=[f"{LAYER}.mlp.up_proj"])


LEFT_OUT = {
    "gptq": {"dynamic": {r"-:.*\.up_proj": {}}},
    "awq": {"modules_to_not_convert": ["up_proj"]},
    "autoround": {"extra_config": {f"{LAYER}.mlp.up_proj": {"bits": 16}}},
    "ct": {"ignore": ["lm_head", "re:.*up_proj$"]},
}


@pytest.mark.parametrize("kind", list(LEFT_OUT))
def test_a_module_left_out_is_read_plain(tmp_path, kind):
    checkpoint = opened(tmp_path, kind, lambda quant: quant.update(LEFT_OUT[kind]), plain=[f"{LAYER}.mlp.up_proj"])
    assert scheme(checkpoint, "mlp.up_proj") == "bf16"
    assert checkpoint.entries[f"{LAYER}.mlp.down_proj.weight"].quantized


@pytest.mark.parametrize("kind", list(LEFT_OUT))
def test_a_quantized_module_that_the_config_leaves_out(tmp_path, kind):
    with pytest.raises(FormatError, match=r"up_proj\.\w+: the config says module .*up_proj is not quantized"):
        opened(tmp_path, kind, lambda quant: quant.update(LEFT_OUT[kind]))


ROUTER = {
    "gptq": {"dynamic": {r"-:.*\.mlp\.gate": {}}},
    "awq": {"modules_to_not_convert": ["gate"]},
    "autoround": {"extra_config": {r".*layers\.0\.mlp\.gate.*": {"bits": 16, "data_type": "float"}}},
    "ct": {"ignore": ["lm_head", "re:.*mlp.gate"]},
}


@pytest.mark.parametrize("kind", list(ROUTER))
def test_a_routers_pattern_does_not_take_gate_proj_with_it(tmp_path, kind):
    checkpoint = opened(tmp_path, kind, lambda quant: quant.update(ROUTER[kind]), plain=[f"{LAYER}.mlp.gate"])
    assert checkpoint.entries[f"{LAYER}.mlp.gate_proj.weight"].quantized
    assert scheme(checkpoint, "mlp.gate") == "bf16"


@pytest.mark.parametrize("kind", list(ROUTER))
def test_a_routers_pattern_over_a_plain_gate_proj_is_believed_too(tmp_path, kind):
    checkpoint = opened(tmp_path, kind, lambda quant: quant.update(ROUTER[kind]), plain=[f"{LAYER}.mlp.gate_proj"])
    assert scheme(checkpoint, "mlp.gate_proj") == "bf16"


def test_gptq_dynamic_overrides_the_first_pattern_wins(tmp_path):
    dynamic = {r"+:.*\.down_proj": {"bits": 8, "group_size": 32, "sym": False}, r".*proj": {}}
    checkpoint = opened(
        tmp_path,
        "gptq_asym",
        lambda quant: quant.update(dynamic=dynamic | {r"-:.*down_proj": {}}),
        other={f"{LAYER}.mlp.down_proj": "gptq_8bit"},
    )
    assert scheme(checkpoint, "mlp.down_proj") == "int8:g32:zero"
    assert scheme(checkpoint, "mlp.up_proj") == "int4:g32:zero"


def test_gptq_dynamic_patterns_match_from_the_start_of_the_name(tmp_path):
    checkpoint = opened(tmp_path, "gptq", lambda quant: quant.update(dynamic={"-:mlp": {}, "-:up_proj": {}}))
    assert all(checkpoint.entries[f"{module}.weight"].quantized for module in MODULES)


def test_gptq_lists_of_inner_modules(tmp_path):
    inner = [["self_attn.q_proj"], ["mlp.gate_proj", "mlp.down_proj"]]
    checkpoint = opened(tmp_path, "gptq", lambda quant: quant.update(modules_in_block_to_quantize=inner), plain=[f"{LAYER}.mlp.up_proj"])
    assert scheme(checkpoint, "mlp.up_proj") == "bf16"


def test_gptq_says_the_head_is_quantized_and_stores_it_plain(tmp_path):
    with pytest.raises(FormatError, match=r"lm_head\.weight: a plain"):
        opened(tmp_path, "gptq", lambda quant: quant.update(lm_head=True))


def test_autoround_lists_the_head_as_quantized_and_stores_it_plain(tmp_path):
    checkpoint = opened(tmp_path, "autoround", lambda quant: quant.update(extra_config={"lm_head": {"bits": 4}}))
    assert str(checkpoint.entries["lm_head.weight"].scheme) == "bf16"


def test_autoround_exact_names_win_over_patterns_and_earlier_patterns_over_later(tmp_path):
    extra = {
        r".*mlp.*": {"bits": 4},
        r".*proj.*": {"bits": 16},
        f"{LAYER}.self_attn.q_proj": {"group_size": 16},
    }
    checkpoint = opened(
        tmp_path, "autoround", lambda quant: quant.update(extra_config=extra), other={f"{LAYER}.self_attn.q_proj": "autoround_g16"}
    )
    assert scheme(checkpoint, "mlp.up_proj") == "int4:g32"
    assert scheme(checkpoint, "self_attn.q_proj") == "int4:g16"


def test_autoround_patterns_search_anywhere_in_the_name(tmp_path):
    checkpoint = opened(
        tmp_path, "autoround", lambda quant: quant.update(extra_config={r"\.up_": {"bits": 16}}), plain=[f"{LAYER}.mlp.up_proj"]
    )
    assert scheme(checkpoint, "mlp.up_proj") == "bf16"


def test_autoround_a_block_name_covers_what_is_below_it_and_not_its_neighbours(tmp_path):
    extra = {"layers.0.mlp.up": {"bits": 16}, "layers.0.self_attn": {"bits": 16}}
    plain = [f"{LAYER}.self_attn.q_proj"]
    checkpoint = opened(tmp_path, "autoround", lambda quant: quant.update(extra_config=extra), plain=plain)
    assert scheme(checkpoint, "self_attn.q_proj") == "bf16"
    assert scheme(checkpoint, "mlp.up_proj") == "int4:g32"


@pytest.mark.parametrize(
    "fields",
    [{"packing_format": "auto_round:mlx"}, {"packing_format": "auto_round:exllamav9"}, {"data_type": "mx_fp"}, {"act_bits": 8}],
)
def test_unserved_autoround_forms(tmp_path, fields):
    with pytest.raises(FormatError, match=next(iter(fields))):
        opened(tmp_path, "autoround", lambda quant: quant.update(fields))


def ct_groups(quant, **groups):
    base = quant["config_groups"]["group_0"]
    quant["config_groups"] = {
        name: {**base, "targets": targets, "weights": {**base["weights"], **weights}} for name, (targets, weights) in groups.items()
    }


def test_ct_exact_names_win_over_patterns_and_those_over_classes(tmp_path):
    def edit(quant):
        ct_groups(
            quant,
            a=(["Linear"], {}),
            b=(["re:.*mlp.*"], {"symmetric": False}),
            c=([f"{LAYER}.mlp.down_proj"], {"num_bits": 8, "strategy": "channel", "group_size": None}),
        )

    other = {f"{LAYER}.mlp.down_proj": "ct_8bit_channel", f"{LAYER}.mlp.up_proj": "ct_asym", f"{LAYER}.mlp.gate_proj": "ct_asym"}
    checkpoint = opened(tmp_path, "ct", edit, other=other)
    assert scheme(checkpoint, "mlp.down_proj") == "int8:channel"
    assert scheme(checkpoint, "mlp.up_proj") == "int4:g32:zero"
    assert scheme(checkpoint, "self_attn.q_proj") == "int4:g32"


def test_ct_modules_that_no_target_names(tmp_path):
    with pytest.raises(FormatError, match="no target matches"):
        opened(tmp_path, "ct", lambda quant: ct_groups(quant, a=(["re:.*mlp.*"], {})))


def test_ct_activation_scheme_is_reported_and_not_applied(tmp_path):
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    checkpoint = opened(tmp_path, "ct", lambda quant: quant["config_groups"]["group_0"].update(input_activations=inputs))
    assert str(checkpoint.entries[f"{LAYER}.mlp.up_proj.weight"].activations) == "int8:token"


def test_ct_one_scale_for_a_matrix(tmp_path):
    tensors, config, weights = checkpoints.make("ct_8bit_channel")
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"
    for module in weights:
        tensors[f"{module}.weight_scale"] = torch.tensor([0.5], dtype=torch.bfloat16)
    checkpoint = open_checkpoint(checkpoints.write(tmp_path, tensors, config))
    weight = checkpoint.read("model.layers.0.mlp.up_proj.weight")
    assert str(weight.scheme) == "int8:tensor"
    assert torch.equal(weight.dequantize(), weights["model.layers.0.mlp.up_proj"].values.float() * 0.5)


def test_a_group_larger_than_the_input_is_one_group(tmp_path):
    checkpoint = opened(tmp_path, "gptq_channel", lambda quant: quant.update(group_size=2**30))
    weight = checkpoint.read(f"{LAYER}.mlp.up_proj.weight")
    assert str(weight.scheme) == "int4:g64"
    assert weight.dequantize().shape == (96, 64)


def test_a_checkpoint_without_quantization_is_all_plain(tmp_path):
    tensors, config, _ = checkpoints.make("gptq", {})
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(8, 8)
    del config["quantization_config"]
    checkpoint = open_checkpoint(checkpoints.write(tmp_path, tensors, config))
    assert checkpoint.format == "safetensors"
    assert not any(entry.quantized for entry in checkpoint.entries.values())


def test_entries_count_every_byte_once(tmp_path):
    checkpoint = opened(tmp_path, "ct_asym")
    stored = sum(tensor.numel() * tensor.element_size() for tensor in checkpoints.make("ct_asym", MODULES)[0].values())
    assert sum(entry.nbytes for entry in checkpoint.entries.values()) == stored


def test_scales_of_a_quantized_cache_are_no_parameters(tmp_path):
    tensors, config, _ = checkpoints.make("ct")
    tensors |= {f"{LAYER}.self_attn.k_scale": torch.ones(1), f"{LAYER}.self_attn.v_scale": torch.ones(1)}
    checkpoint = open_checkpoint(checkpoints.write(tmp_path, tensors, config))
    assert not any(name.endswith("_scale") for name in checkpoint.entries)
    assert checkpoint.notes == ("KV-cache scales are present, which an fp8 cache uses: 2 tensors",)


def test_a_cache_scheme_without_scales_is_said_not_to_be_used(tmp_path):
    checkpoint = opened(tmp_path, "ct", lambda quant: quant.update(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    assert checkpoint.notes == ("the config's kv_cache_scheme is not followed by itself: ask for a quantized KV cache",)
    assert opened(tmp_path / "other", "ct", lambda quant: quant.update(kv_cache_scheme=None)).notes == ()


def test_autoround_blocks_are_compared_by_whole_names(tmp_path):
    modules = {f"model.layers.{layer}.mlp.up_proj": (96, 64) for layer in (1, 10)}
    for blocks in ("model.layers.1", "model.layers.1.,", [["model.layers.1"]]):
        tensors, config, _ = checkpoints.make("autoround", modules)
        for name in [name for name in tensors if ".10." in name]:
            del tensors[name]
        tensors["model.layers.10.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.bfloat16)
        config["quantization_config"]["block_name_to_quantize"] = blocks
        folder = checkpoints.write(tmp_path / str(len(str(blocks))), tensors, config)
        entries = open_checkpoint(folder).entries
        assert entries["model.layers.1.mlp.up_proj.weight"].quantized
        assert not entries["model.layers.10.mlp.up_proj.weight"].quantized


COSTLY = [
    r"((\w|\.)+)+X", r"(.*a){20}X", r"(?:a|aa)+X", r"(a?b?)*X", r"(?:(?:(){65535}){65535}){65535}", ".*.*.*.*.*.*X", "a?" * 30 + "a" * 30,
    r"(?=(\w+)+X)", "a{1,9}" * 6 + "X", "x" * 513,
]  # fmt: skip
ORDINARY = [
    r".*model\.layers\.1\.mlp\.experts.*\.down_proj.*", r".*\.(?:1[0-9]|2[0-9])\..*(?:gate|up)_proj.*", r"model\.layers\.(\d+)\.mlp",
    r".*self_attn\.(q|k|v|o)_proj$", r"(?:.*\.)?lm_head", r"[a-z_.]+\d{1,2}(\.\w+)?", r"^(?!.*gate).*$", r".*experts\.(\d|\d\d)\..*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", COSTLY)
@pytest.mark.parametrize("kind", ["gptq", "autoround", "ct"])
def test_patterns_that_could_take_forever_are_refused(pattern, kind, tmp_path):
    place = {"gptq": {"dynamic": {f"-:{pattern}": {}}}, "autoround": {"extra_config": {f"({pattern})": {"bits": 16}}}}
    with pytest.raises(FormatError, match=r"pattern .*(take forever|at most 512)"):
        opened(tmp_path, kind, lambda quant: quant.update(place.get(kind, {"ignore": [f"re:{pattern}"]})))


@pytest.mark.parametrize("pattern", ORDINARY)
def test_patterns_that_tools_write_are_taken(pattern):
    assert compile_pattern(pattern, "config").pattern == pattern


FUSED = {f"{LAYER}.self_attn.qkv_proj": (128, 64), f"{LAYER}.mlp.gate_up_proj": (192, 64), f"{LAYER}.mlp.down_proj": (64, 96)}
CT_OTHER = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
#: What gives one part of a fused module another scheme; the name that decides, and what both parts are.
PARTED = {
    "gptq": ({"dynamic": {r"+:.*\.v_proj": {"bits": 8}}}, "q_proj is int4:g32", "v_proj is int8:g32"),
    "gptq_left_out": ({"dynamic": {r"-:.*\.k_proj": {}}}, "q_proj is int4:g32", "k_proj is not quantized"),
    "awq": ({"modules_to_not_convert": ["up_proj"]}, "gate_proj is int4:g32:zero", "up_proj is not quantized"),
    "autoround": ({"extra_config": {r".*up_proj": {"bits": 8}}}, "gate_proj is int4:g32", "up_proj is int8:g32"),
    "ct": (
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": checkpoints.CT_WEIGHTS},
                           "group_1": {"targets": [r"re:.*\.k_proj$"], "weights": CT_OTHER}}},
        "q_proj is int4:g32", "k_proj is int8:g32",
    ),
}  # fmt: skip


def fused(tmp_path, kind, edit=None):
    tensors, config, _ = checkpoints.make(kind, FUSED)
    config["quantization_config"].update(edit or {})
    return open_checkpoint(checkpoints.write(tmp_path / "model", tensors, config))


@pytest.mark.parametrize("kind", list(PARTED))
def test_a_fused_tensor_whose_parts_have_two_schemes_is_refused_with_both_names(tmp_path, kind):
    edit, first, second = PARTED[kind]
    with pytest.raises(FormatError, match="one tensor, but by the config") as error:
        fused(tmp_path, kind.removesuffix("_left_out"), edit)
    assert all(f"{LAYER}.{part}" in str(error.value).replace("self_attn.", "").replace("mlp.", "") for part in (first, second))


@pytest.mark.parametrize("kind", ["gptq", "awq", "autoround", "ct"])
def test_a_fused_tensor_whose_parts_agree_is_read(tmp_path, kind):
    checkpoint = fused(tmp_path, kind)
    for module, shape in FUSED.items():
        assert tuple(checkpoint.read(f"{module}.weight").shape) == shape


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("gptq", {"dynamic": {r"+:.*\.qkv_proj": {"group_size": 32}, r"+:.*\.v_proj": {"bits": 8}}}),
        ("autoround", {"extra_config": {f"{LAYER}.self_attn.qkv_proj": {"bits": 4}, f"{LAYER}.self_attn.v_proj": {"bits": 8}}}),
    ],
)
def test_a_config_that_names_the_fused_module_has_decided(tmp_path, kind, edit):
    assert scheme(fused(tmp_path, kind, edit), "self_attn.qkv_proj") == "int4:g32"


def test_parts_that_are_stored_apart_may_differ(tmp_path):
    module = f"{LAYER}.mlp.up_proj"
    checkpoint = opened(tmp_path, "gptq", lambda quant: quant.update(dynamic={r"+:.*\.up_proj": {"bits": 8}}, sym=False),
                        other={name: "gptq_8bit" if name == module else "gptq_asym" for name in MODULES})  # fmt: skip
    assert scheme(checkpoint, "mlp.up_proj") == "int8:g32:zero"
    assert scheme(checkpoint, "mlp.gate_proj") == "int4:g32:zero"
    for name in MODULES:
        checkpoint.read(f"{name}.weight")
