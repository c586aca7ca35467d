"""Whole checkpoints as transformers models: logits of every golden, both backends; what does not fit is refused."""

from __future__ import annotations

import json

import pytest
import torch
from golden import goldens
from safetensors.torch import load_file, save_file

import hal_core as hal
from hal_core.errors import FormatError, HalError, HalWarning, NoKernelError, PolicyError
from hal_core.notes import forget_notes

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("hal_backend_cpu", reason="the hal-backend-cpu wheel is not installed")

BOUND = {"require:reference": 1e-4, "require:cpu": 1e-2}
MODELS = ("llama", "qwen3", "qwen3_moe", "gpt_oss")


def served() -> list[str]:
    """Goldens that open and that the model integration covers; tests of the formats hold which must open."""
    names = []
    for name in goldens.names():
        try:
            hal.open_checkpoint(goldens.folder(name))
        except FormatError:
            continue
        if goldens.config(name)["model_type"] in MODELS:
            names.append(name)
    return names


SERVED = served()


def unserved_by_cpu(name: str) -> bool:
    """Codes of 2 and 3 bits are the reference's until the CPU has kernels for them."""
    entries = hal.open_checkpoint(goldens.folder(name)).entries.values()
    return any(entry.quantized and entry.scheme.dtype not in ("int4", "int8") for entry in entries)


@pytest.mark.parametrize("policy", BOUND)
@pytest.mark.parametrize("name", SERVED)
def test_logits_of_goldens(name: str, policy: str) -> None:
    golden = load_file(goldens.folder(name) / "golden.safetensors")
    if policy == "require:cpu" and unserved_by_cpu(name):
        with pytest.raises(NoKernelError, match=r"scheme\.dtype"):
            hal.load(goldens.folder(name), policy=policy, numerics="exact", dtype="fp32")
        return
    model = hal.load(goldens.folder(name), policy=policy, numerics="exact", dtype="fp32")
    with torch.inference_mode():
        logits = model(input_ids=golden["input_ids"], use_cache=False).logits.float()
    assert torch.isfinite(logits).all()
    assert float((logits - golden["logits"]).norm() / golden["logits"].norm()) < BOUND[policy]
    assert all(kernel.startswith(policy.removeprefix("require:") + ".") for kernel in model.hal.kernels())


def test_some_golden_is_served() -> None:
    assert len(SERVED) >= 4


def test_default_dtype_is_the_checkpoints_and_generation_works() -> None:
    model = hal.load(goldens.folder("ar_sym_int4_g32_moe"))
    assert model.dtype == torch.bfloat16
    assert model.hal.dtype == "bf16"
    ids = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=5, do_sample=False)
    assert ids.shape == (1, 8)
    assert sum(model.hal.kernels().values()) == 10
    assert model.hal.packed_bytes > 0


def test_progress_counts_every_byte_once() -> None:
    seen: list[tuple[int, int]] = []
    hal.load(goldens.folder("ar_sym_int4_g32_moe"), progress=lambda done, total, _: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_policy_names_the_layer_that_cannot_be_served() -> None:
    with pytest.raises((NoKernelError, PolicyError), match=r"layer model\.layers\.0"):
        hal.load(goldens.folder("ar_sym_int4_g32_moe"), policy="require:cuda")


def edited(tmp_path, name: str, change):
    folder = goldens.copy(name, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c, _: c.update(num_hidden_layers=1), "does not use|no such module"),
        (lambda c, _: c.update(num_hidden_layers=3), "missing"),
        (lambda c, _: c.update(hidden_size=128), "expects|shape"),
        (lambda c, _: c.update(model_type="no-such-model"), "no-such-model"),
        (lambda c, _: c.pop("model_type"), "model_type"),
        (lambda c, _: c.update(num_attention_heads=0), "."),
        (lambda c, _: c.update(num_experts_per_tok=99), "num_experts_per_tok"),
        (lambda c, _: c.update(num_local_experts=9), "experts"),
        (lambda _, t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda _, t: t.update({"model.extra.weight": torch.zeros(3)}), "model.extra.weight"),
        (lambda _, t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}), "model.norm.weight"),
        (lambda _, t: [t.pop(k) for k in list(t) if ".experts.3.up_proj." in k and ".0.mlp" in k], r"experts\.3\.up_proj"),
        (lambda _, t: [t.pop(k) for k in list(t) if ".experts.7." in k], "experts"),
    ],
)  # fmt: skip
def test_checkpoints_that_contradict_their_config_are_refused_by_name(tmp_path, change, words: str) -> None:
    folder = edited(tmp_path, "ar_sym_int4_g32_moe", change)
    with pytest.raises(HalError, match=words):
        hal.load(folder)


def tied(config, tensors, same: bool) -> None:
    config["tie_word_embeddings"] = True
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() * (1 if same else 2)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_stored_beside_a_tied_embedding_is_what_is_used(tmp_path, same: bool) -> None:
    folder = edited(tmp_path, "ar_sym_int4_g32_moe", lambda c, t: tied(c, t, same))
    model = hal.load(folder, dtype="fp32")
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert torch.equal(head, embedding * (1 if same else 2))
    assert (head.data_ptr() == embedding.data_ptr()) is same


def test_a_tied_head_that_is_not_stored_shares_the_embedding(tmp_path) -> None:
    folder = edited(tmp_path, "ar_sym_int4_g32_moe", lambda c, t: (c.update(tie_word_embeddings=True), t.pop("lm_head.weight", None)))
    model = hal.load(folder, dtype="fp32")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


WITH_INPUTS = [name for name in SERVED if any(e.activations for e in hal.open_checkpoint(goldens.folder(name)).entries.values())]


@pytest.mark.parametrize(
    "name",
    WITH_INPUTS or [pytest.param("", marks=pytest.mark.skip(reason="HAL_GOLDEN_DIR is not set: no carried golden quantizes its inputs"))],
)
def test_checkpoint_numerics_quantize_inputs_as_the_checkpoint_says(name: str) -> None:
    golden = load_file(goldens.folder(name) / "golden.safetensors")
    model = hal.load(goldens.folder(name), policy="require:reference", numerics="checkpoint", dtype="fp32")
    for op in model.hal.ops:
        acts = op.selection.spec.activations
        assert [str(a) for a in op.selection.numerics.activations] == [str(acts)]
        assert f"numerics: {acts}" in str(op.selection)
    with torch.inference_mode():
        logits = model(input_ids=golden["input_ids"], use_cache=False).logits.float()
    away = float((logits - golden["logits"]).norm() / golden["logits"].norm())
    assert 1e-4 < away < (0.6 if "4" in str(acts) else 0.2), "computed with other inputs than the golden's, and not wildly others"


def test_auto_serves_by_the_reference_what_the_cpu_has_no_kernel_for_and_says_so() -> None:
    name = next(name for name in SERVED if unserved_by_cpu(name))
    forget_notes()
    with pytest.warns(HalWarning, match=r"runs on reference\.\w+, which"):
        model = hal.load(goldens.folder(name), numerics="exact", dtype="fp32")
    assert any(kernel.startswith("reference.") for kernel in model.hal.kernels())
