"""Every golden checkpoint inside vLLM: float32 logits are transformers' on the dequantized weights, however the model is cut."""

import tempfile
from pathlib import Path

import pytest
import torch
from golden import goldens
from safetensors.torch import load_file
from vllm_ranks import Job, on_ranks, prompt_logits

#: Those that are not carried in the repository take minutes together.
NAMES = [
    pytest.param(name, marks=() if (goldens.HERE / f"{name}.tar.xz").is_file() else pytest.mark.slow) for name in goldens.names()
]  # fmt: skip
MOE = [param for param in NAMES if goldens.config(param.values[0])["model_type"] != "qwen3"]
DENSE = [param for param in NAMES if param not in MOE]
FIRST_DENSE, FIRST_MOE = (next(param for param in params if not param.marks) for params in (DENSE, MOE))
#: Head sizes of vLLM's own attention on a CPU; others are served by our pages alone.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def job(name: str, **options) -> Job:
    """The golden prompt, served exactly by whatever attention has the model's head size."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=goldens.unpack_root()))
    for path in goldens.folder(name).iterdir():
        if path.name != "golden.safetensors":  # vLLM would load it as one of the model's own files
            (folder / path.name).symlink_to(path)
    config = goldens.config(name)
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    hal = {"numerics": "exact"} | ({} if size in HEAD_SIZES else {"kv_cache": "fp32"})
    return Job(str(folder), stored(name)["input_ids"].flatten().tolist(), {"hal": hal} | options)


def stored(name: str) -> dict[str, torch.Tensor]:
    return load_file(goldens.folder(name) / "golden.safetensors")


def check(name: str, found: torch.Tensor, bound: float = 1e-5) -> None:
    wanted = stored(name)["logits"].flatten(0, -2).float()
    error = float((found - wanted).norm() / wanted.norm())
    print(f"{name}: relative error {error:.1e}")
    assert error < bound
    assert bound > 1e-5 or torch.equal(found.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_one_process(name):
    check(name, prompt_logits(job(name)))


@pytest.mark.parametrize("name", [FIRST_DENSE, FIRST_MOE])
def test_logits_in_bf16(name):
    check(name, prompt_logits(job(name), dtype="bfloat16"), 2e-2)


@pytest.mark.slow
def test_logits_in_bf16_beside_those_of_vllms_own_path():
    name = "gptq_v1_sym_int4_g32"
    if name not in goldens.names():
        pytest.skip(f"HAL_GOLDEN_DIR is not set, and vLLM serves no carried golden by itself: {name} is needed")
    ours, own = (prompt_logits(job(name), dtype="bfloat16", quantization=method) for method in ("hal", None))
    wanted = stored(name)["logits"].flatten(0, -2).float()
    errors = [float((found - wanted).norm() / wanted.norm()) for found in (ours, own)]
    print(f"{name} in bf16: relative error {errors[0]:.1e}, of vLLM's own path {errors[1]:.1e}")
    assert errors[0] < 2e-2
    assert errors[0] < 1.1 * errors[1]  # far below it on processors where that path rounds inputs to int8


@pytest.fixture(scope="module")
def on_two_ranks(request, tmp_path_factory):
    """Logits by test: of all goldens that were chosen, from one start of two processes."""
    chosen = [item for item in request.session.items if item.module is request.module and "on_two_ranks" in item.fixturenames]
    options = [{"enable_expert_parallel": True} if "share_out" in item.name else {} for item in chosen]
    jobs = [job(item.callspec.params["name"], **own) for item, own in zip(chosen, options, strict=True)]
    answers = on_ranks(tmp_path_factory.mktemp("ranks"), jobs)
    return {item.name: found for item, found in zip(chosen, answers, strict=True)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_two_ranks(request, on_two_ranks, name):
    check(name, on_two_ranks[request.node.name])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MOE)
def test_logits_of_two_ranks_that_share_out_the_experts(request, on_two_ranks, name):
    check(name, on_two_ranks[request.node.name])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [FIRST_MOE, pytest.param(*FIRST_DENSE.values, marks=pytest.mark.slow)])
def test_logits_of_a_compiled_model(name):
    check(name, prompt_logits(job(name), enforce_eager=False))
