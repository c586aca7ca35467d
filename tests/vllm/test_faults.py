"""Damage and requests that cannot be met: an error that names them before anything is served, in every process, and an exit code."""

import pytest
from safetensors.torch import load_file, save_file
from vllm_engine import CARRIED, carried_model, engine, program, workers, write_model

from hal_core.errors import HalError


def without_scales(tensors):
    del tensors["model.layers.1.self_attn.o_proj.scales"]


def without_an_expert(tensors):
    for name in [name for name in tensors if ".layers.1.mlp.experts.5." in name]:
        del tensors[name]


def with_an_expert_too_many(tensors):
    for name in [name for name in tensors if ".layers.0.mlp.experts.7." in name]:
        tensors[name.replace("experts.7", "experts.8")] = tensors[name].clone()


def without_a_plain_weight(tensors):
    del tensors["model.layers.0.mlp.gate.weight"]


def keep(tensors):
    pass


DAMAGED = {
    "scales": (without_scales, {}, r"model\.layers\.1\.self_attn\.o_proj"),
    "expert": (without_an_expert, {}, r"model\.layers\.1\.mlp\.experts(\.5)?"),
    "surplus expert": (with_an_expert_too_many, {}, r"model\.layers\.0\.mlp\.experts(\.8)?"),
    "plain weight": (without_a_plain_weight, {}, r"model\.layers\.0\.mlp\.gate"),
    "policy": (keep, {"policy": "require:linear=cuda.*"}, r"require:linear=cuda"),
    "option": (keep, {"numeric": "exact"}, r"numeric.*use policy, numerics, kv_cache"),
}


def checkpoint(folder, change):
    target = carried_model(folder)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("fault", DAMAGED)
def test_the_fault_is_named_and_nothing_is_served(tmp_path, fault):
    change, hal, words = DAMAGED[fault]
    options = CARRIED | {"hal": CARRIED["hal"] | hal}
    with pytest.raises((HalError, ValueError), match=words), engine(checkpoint(tmp_path, change), **options):
        pytest.fail("the engine was made")


@pytest.mark.timeout(900)
def test_a_program_of_two_ranks_ends_with_the_error_of_each(tmp_path):
    options = CARRIED | {"hal": CARRIED["hal"] | {"policy": "require:moe=cuda.*"}, "tensor_parallel_size": 2}
    done = program(tmp_path, checkpoint(tmp_path, keep), options, workers(2))
    printed = done.stdout + done.stderr
    assert done.returncode != 0
    assert not (tmp_path / "answers.pt").exists()
    for rank in (0, 1):
        assert any("require:moe=cuda" in line and f"Worker_TP{rank}" in line for line in printed.splitlines()), printed[-3000:]


@pytest.mark.parametrize("asked", ["quantization hal", "kv_cache int8:token"])
def test_another_release_of_vllm_ends_the_program_with_its_number(tmp_path, asked):
    pretend = "import runpy, sys, vllm; vllm.__version__ = '0.33.1'; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    setting = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    pages = asked.startswith("kv_cache")
    model = write_model(tmp_path / "plain") if pages else checkpoint(tmp_path, keep)
    done = program(tmp_path, model, {"hal": {"kv_cache": "int8:token"}} if pages else CARRIED, setting, prefix=("-c", pretend))
    assert done.returncode != 0
    assert not (tmp_path / "answers.pt").exists()
    assert f"{asked} in vLLM 0.33.1: tested with vLLM from 0.32 up to, not including, 0.33" in done.stdout + done.stderr
