"""Recorded calls without a GPU: the processor is taken for the current one."""

from __future__ import annotations

import types

import torch

from hal_core.triton import repeat

__all__ = ["CPU", "pretend_gpu"]

CPU = torch.device("cpu")


def pretend_gpu(monkeypatch, stream) -> None:
    """As if tensors of the host were on the current GPU, whose streams ``stream`` numbers by device."""
    active = types.SimpleNamespace(get_current_device=lambda: 0, get_current_stream=stream)
    monkeypatch.setattr(repeat, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(repeat, "_recordable", lambda tensors: True)
    monkeypatch.setattr(repeat, "_device", lambda index: CPU)
    monkeypatch.setattr(repeat, "_shared", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
