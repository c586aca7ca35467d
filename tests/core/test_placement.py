"""Where a model lives: on the one device that its kernels run on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hal_core.errors import PolicyError
from hal_core.integrations import placement
from hal_core.policy import Policy
from hal_core.schemes import WeightScheme
from hal_core.spec import LinearSpec

CHOICES = {64: "cpu.a", 128: "cuda.b", 192: "reference.c"}
DEVICES = {"cpu.a": ("cpu",), "cuda.b": ("cuda",), "reference.c": ("any",)}


@pytest.fixture
def home(monkeypatch):
    registry = SimpleNamespace(kernel=lambda name: SimpleNamespace(devices=DEVICES[name]), kernels=tuple, rows=tuple)
    monkeypatch.setattr(placement, "default_registry", lambda: registry)
    monkeypatch.setattr(placement, "select_from", lambda spec, *_: SimpleNamespace(kernel=CHOICES[spec.n]))
    ops = [SimpleNamespace(module=f"layers.{n}", spec=LinearSpec(n, 64, WeightScheme.parse("int4:g32"))) for n in CHOICES]
    return lambda *names: placement.home_of([op for op in ops if CHOICES[op.spec.n] in names], Policy.parse("auto"))


def test_the_only_device_is_the_home_and_the_cpu_where_any_will_do(home):
    assert home("reference.c") == torch.device("cpu")
    assert home("cuda.b", "reference.c") == torch.device("cuda")
    assert home("cpu.a", "reference.c") == torch.device("cpu")


def test_kernels_on_two_devices_are_an_error_that_names_both(home):
    with pytest.raises(PolicyError, match=r"cpu \(cpu.a of layers.64\), cuda \(cuda.b of layers.128\)"):
        home("cpu.a", "cuda.b")
