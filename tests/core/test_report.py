"""What a loaded model says of itself: what was asked, what is computed, and what of the checkpoint is not used."""

from __future__ import annotations

import shutil

import pytest
import torch
from golden import goldens
from safetensors.torch import load_file, save_file

import hal_core


@pytest.fixture
def folder(tmp_path):
    """A model whose checkpoint also holds scales for the KV cache."""
    place = tmp_path / "model"
    shutil.copytree(goldens.folder("ct_w4a16_channel"), place)
    (place / "golden.safetensors").unlink(missing_ok=True)
    tensors = load_file(place / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def test_the_report_says_what_is_asked_what_is_computed_and_what_is_not_used(folder):
    pytest.importorskip("transformers")
    report = hal_core.load(folder, policy="require:reference").hal
    assert report.numerics == "checkpoint"
    assert report.computed == ("exact,deterministic",)
    assert report.notes == ("KV-cache scales are present, which an fp8 cache uses: 2 tensors",)
    assert "numerics checkpoint (computed: exact,deterministic)" in str(report)
    assert str(report).endswith(report.notes[0])
