"""Every golden checkpoint inside vLLM: float32 logits are transformers' on the dequantized weights, however the model is cut."""

import pytest
import torch
from golden import goldens
from vllm_goldens import golden, serve, serve_on_ranks

NAMES = goldens.names()
MOE = [name for name in NAMES if goldens.config(name)["model_type"] == "qwen3_moe"]
#: One of each way of cutting a weight: reordered, asymmetric groups, channels, two-byte floats beside, blocks that end ragged.
CUT = [
    name
    for name in (
        "gptq_v1_descact_int4_g32", "gptq_v2_asym_int4_g32", "ct_w4a16_asym_g32", "ct_w4a16_channel", "ar_asym_int2_g32_native",
        "ar_sym_int3_g32", "fp8_block128_dense", "ct_fp8_block_ragged", "ct_fp8_static_tensor", "ct_nvfp4", "ct_mxfp4", "ct_mxfp8",
        "awq_gemm_int4_g32", "ct_w8a8_int8_dynamic",
    )
    if name in NAMES
]  # fmt: skip


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def check(name, found, bound=1e-5):
    wanted = golden(name)[1]
    error = relative(found, wanted)
    print(f"{name}: relative error {error:.1e}")
    assert error < bound
    assert torch.equal(found.argmax(-1), wanted.argmax(-1)) or bound > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_one_process(name):
    check(name, serve(name, {}))


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """Logits of two ranks by golden and by whether experts are spread."""
    jobs = [(name, {}) for name in (*CUT, *MOE)] + [(name, {"enable_expert_parallel": True}) for name in MOE]
    answers = serve_on_ranks(tmp_path_factory.mktemp("ranks"), jobs)
    return {(name, "enable_expert_parallel" in own): found for (name, own), found in zip(jobs, answers, strict=True)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*CUT, *MOE])
def test_logits_of_two_ranks(on_two_ranks, name):
    check(name, on_two_ranks[name, False])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MOE)
def test_logits_of_two_ranks_that_share_out_the_experts(on_two_ranks, name):
    check(name, on_two_ranks[name, True])
