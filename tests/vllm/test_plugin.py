"""What the plugin changes in vLLM, and when: chosen by name or by setting only, its options, what every rank says, and its load format."""

import json
import logging

import gguf_files
import pytest
import torch
import vllm_models
from golden import goldens
from safetensors.torch import load_file, save_file
from vllm_engine import ask, elsewhere, engine
from vllm_ranks import Job, logits_of, prompt_logits

import hal_core as hal
from hal_core.errors import FormatError, SettingError, ShapeError

NAME = "gptq_v1_descact_int4_g32"
OPTIONS = {"quantization": "hal", "max_model_len": 128, "worker_extension_cls": "hal_core.integrations.vllm.worker.WorkerExtension"}


@pytest.fixture
def checkpoint(tmp_path):
    folder = goldens.copy(NAME, tmp_path / "model")
    (folder / "golden.safetensors").unlink()
    return folder


def chosen(folder, **options):
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **options).create_model_config().quantization


def test_a_checkpoint_is_taken_over_only_when_asked_for(checkpoint, monkeypatch):
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False  # else vLLM itself refuses it
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert chosen(checkpoint) != "hal"
    assert chosen(checkpoint, quantization="hal") == "hal"
    monkeypatch.setenv("HAL_VLLM_AUTO", "1")
    assert chosen(checkpoint) == "hal"
    monkeypatch.setenv("HAL_VLLM_AUTO", "perhaps")
    with pytest.raises(SettingError, match="HAL_VLLM_AUTO"):
        chosen(checkpoint)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def test_every_layer_says_what_serves_it_and_how_often_it_ran(checkpoint, monkeypatch):
    from hal_core.integrations.vllm import held

    monkeypatch.setattr(held, "_told", set())
    monkeypatch.setenv("HAL_POLICY", "require:reference")
    lines, logger = Lines(), logging.getLogger("of its own: vLLM sets up its loggers more than once")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    monkeypatch.setattr(held, "_log", logger)
    with engine(checkpoint, **OPTIONS) as llm:
        (layers,), before = llm.collective_rpc("hal_explain"), llm.collective_rpc("hal_counters")[0]
        logits_of(llm, [5, 6, 7])
        after = llm.collective_rpc("hal_counters")[0]
    assert {layer["layer"].rpartition(".")[2] for layer in layers} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert len(layers) == 4 * goldens.config(NAME)["num_hidden_layers"]
    assert {kernel for layer in layers for kernel in layer["kernels"]} == {"reference.linear"}
    assert layers[0]["specs"][0].startswith("linear ")
    assert layers[0]["rank"] == [0, 1]
    assert all(after[name] > count for name, count in before.items())
    assert len(lines.texts) == len(set(lines.texts)) == len({spec for layer in layers for spec in layer["specs"]})


@pytest.mark.timeout(600)
def test_workers_of_two_ranks_serve_alike_and_say_so(checkpoint, tmp_path):
    prompts = [[5, 6, 7, 8], [9, 10]]
    with engine(checkpoint, hal={"numerics": "exact"}, **OPTIONS) as llm:
        alone = ask(llm, prompts)
    options = {name: value for name, value in OPTIONS.items() if name != "worker_extension_cls"}
    together, ranks = elsewhere(tmp_path, checkpoint, prompts, hal={"numerics": "exact"}, tensor_parallel_size=2, **options)
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    assert all(float((a.logits - b.logits).norm() / b.logits.norm()) < 1e-5 for a, b in zip(together, alone, strict=True))
    first, second = [[layer for layer in rank if layer["layer"].endswith("_proj")] for rank in ranks]
    assert [layer["rank"] for layer in first] == [[0, 2]] * len(first)
    for name in ("layer", "specs", "kernels", "numerics", "calls"):
        assert [layer[name] for layer in first] == [layer[name] for layer in second]
    assert all(layer["calls"] for layer in first)


def test_the_options_policy_goes_before_that_of_the_environment(checkpoint, monkeypatch):
    monkeypatch.setenv("HAL_POLICY", "require:reference")
    with engine(checkpoint, hal={"policy": "auto", "numerics": "exact"}, **OPTIONS) as llm:
        kernels = {kernel for layer in llm.collective_rpc("hal_explain")[0] for kernel in layer["kernels"]}
    assert kernels
    assert all(kernel.startswith("cpu.") for kernel in kernels)


def test_quantized_parameters_without_a_place_are_an_error(checkpoint):
    module = "model.layers.0.mlp.extra_proj"
    tensors = load_file(checkpoint / "model.safetensors")
    parts = ("qweight", "qzeros", "scales", "g_idx")
    tensors |= {f"{module}.{part}": tensors[f"model.layers.0.mlp.down_proj.{part}"].clone() for part in parts}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"layers\.0\.mlp\.extra_proj.*no quantized layer of this name"), engine(checkpoint, **OPTIONS):
        pass


def test_a_checkpoint_with_nothing_quantized_is_an_error(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config(**vllm_models.SIZES, head_dim=32)).save_pretrained(tmp_path / "plain")
    with pytest.raises(FormatError, match="nothing in it is quantized"), engine(tmp_path / "plain", **OPTIONS):
        pass


@pytest.mark.parametrize("lost", ["norm.weight", "layernorm.weight"])
def test_plain_parameters_that_are_missing_in_every_layer_are_an_error(checkpoint, lost):
    tensors = {name: t for name, t in load_file(checkpoint / "model.safetensors").items() if not name.endswith(lost)}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"norm\.weight: missing from the files"), engine(checkpoint, **OPTIONS):
        pytest.fail("the engine was made")


def test_a_model_is_passed_over_where_the_file_has_other_names_only(checkpoint):
    from hal_core.integrations.vllm.complete import check_plain_parameters

    tensors = load_file(checkpoint / "model.safetensors")
    save_file({f"vllm.{name}": tensor for name, tensor in tensors.items()}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    check_plain_parameters(hal.open_checkpoint(checkpoint), ())


def test_an_engine_goes_on_when_a_later_one_like_it_is_gone():
    from hal_core.integrations.vllm import held

    first, second = (held.HeldLayer("layer", (), (0, 1)) for _ in range(2))
    key = held.hold("of this test", first)
    assert held.hold("of this test", second) == key
    assert held.get(key) is second
    del second
    assert held.get(key) is first
    del first
    with pytest.raises(ShapeError, match="not prepared"):
        held.get(key)


def test_the_revision_is_that_of_vllm(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from hal_core.integrations.vllm import config, kv_request

    opened = []

    def note(name):
        opened.append(name)
        raise FormatError("checkpoint", "noted", "nothing")

    for module in (config, kv_request):
        monkeypatch.setattr(module, "open_checkpoint", note)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    for model, revision in (("org/name", "v1"), ("org/name", None), ("org/local", "v1")):
        with pytest.raises(FormatError, match="noted"):
            config.HalConfig().maybe_update_config(model, revision=revision)
        with pytest.raises(FormatError, match="noted"):
            kv_request.cache_params(SimpleNamespace(model_config=SimpleNamespace(model=model, revision=revision)))
    assert opened == ["org/name@v1"] * 2 + ["org/name"] * 2 + ["org/local"] * 2


def test_our_load_format_names_a_plain_parameter_that_is_missing(checkpoint, monkeypatch):
    from hal_core.integrations.vllm import config

    monkeypatch.setattr(config, "check_plain_parameters", lambda *_: None)  # as for a model that transformers does not know
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.input_layernorm.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm"), engine(checkpoint, load_format="hal", **OPTIONS):
        pass


def test_a_gguf_file_is_served_through_our_load_format(tmp_path):
    routers = {f"blk.{layer}.ffn_gate_inp.weight": "F32" for layer in range(gguf_files.LAYERS)}
    path = gguf_files.write(tmp_path / "model.gguf", "qwen3moe", "Q4_0", kinds=routers)
    opened = hal.open_checkpoint(path)
    (tmp_path / "config.json").write_text(json.dumps({**opened.config, "architectures": ["Qwen3MoeForCausalLM"]}))
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    wanted = vllm_models.reference(path, ids)
    options = {"load_format": "hal", "hal": {"numerics": "exact"}}
    found = prompt_logits(Job(str(tmp_path), ids, options))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_another_release_of_vllm_disturbs_only_those_who_ask_for_us(monkeypatch):
    import vllm

    from hal_core.integrations import vllm as plugin

    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    try:
        plugin.register()
        from vllm.model_executor.layers.quantization import get_quantization_config

        method = get_quantization_config("hal")
        with pytest.raises(SettingError, match=r"in vLLM 0\.33\.1: tested with vLLM from 0\.32 up to, not including, 0\.33"):
            method.override_quantization_method({"quant_method": "gptq"}, "hal")
        assert method.override_quantization_method({"quant_method": "gptq"}, None) is None
    finally:
        monkeypatch.undo()
        register_again()


def register_again():
    from vllm.model_executor.layers.quantization import register_quantization_config

    from hal_core.integrations.vllm.attention import register_attention
    from hal_core.integrations.vllm.config import HalConfig

    register_quantization_config("hal")(HalConfig)
    register_attention()
