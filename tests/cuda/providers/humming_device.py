"""Humming's Python on a machine without a GPU: what it asks of a device is answered here, nothing is launched."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

__all__ = ["pretend"]


def pretend(monkeypatch, sm: int = 90, name: str = "NVIDIA H200", units: int = 132) -> None:
    """Let Humming believe in one device of compute capability ``sm / 10``."""
    pytest.importorskip("humming", reason="needs humming-kernels, triton and cuda-bindings")
    import humming.device

    info = types.SimpleNamespace(
        index=0, name=name, is_ppu=False, sm_count=units, max_threads_per_block=1024, max_threads_per_sm=2048,
        max_registers_per_sm=65536, sm_major=sm // 10, sm_minor=sm % 10, sm_version=sm, l2_cache_size=60 << 20, l2_cache_size_mb=60.0,
        l1_cache_size=256 << 10, l1_cache_size_kb=256.0, default_smem_size=48 << 10, max_smem_size=227 << 10, max_smem_size_kb=227.0,
        memory_clock_khz=3201000, memory_bus_width=6144, sm_clock_khz=1980000, memory_bandwidth_gbps=4800.0, tensorcore_tops={},
    )  # fmt: skip
    monkeypatch.setattr(humming.device.current_device, "_value", info)
    instance = object.__new__(humming.device.DeviceInfo)
    instance._index, instance._value = 0, info
    monkeypatch.setitem(humming.device.DeviceInfo._instances, 0, instance)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
