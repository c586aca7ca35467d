"""torch's queue crosses into this backend's library only where both use one SYCL runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hal_backend_xpu import native
from hal_backend_xpu.session import Session

from hal_core.errors import MissingDependencyError


def mapped(*paths):
    """Lines of ``/proc/self/maps``."""
    lines = (f"7f00{at:08x}-7f01{at:08x} r-xp 00000000 fe:00 {at}    {path}\n" for at, path in enumerate(("/usr/bin/python3", *paths)))
    return "".join((*lines, "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0    [stack]\n"))


OURS, OLDER = "/v/lib/libsycl.so.9.0.0", "/v/lib/torch/libsycl.so.8"


@pytest.mark.parametrize("paths", [(), (OURS,), (OURS, OURS), (OURS, "/v/lib/libsycl-jit.so.8", "/v/lib/libsycl_ur.so.8")], ids=str)
def test_one_runtime_is_taken(paths):
    native.one_runtime(mapped(*paths))


def test_two_are_an_error_that_names_both():
    with pytest.raises(MissingDependencyError, match=rf"{OURS} and {OLDER}"):
        native.one_runtime(mapped(OURS, OLDER))


@pytest.mark.usefixtures("sycl_device")
def test_the_library_of_the_wheel_is_found_among_what_is_loaded():
    native.library()
    text = Path("/proc/self/maps").read_text()
    native.one_runtime(text)
    with pytest.raises(MissingDependencyError, match=r"libsycl\.so\.9"):
        native.one_runtime(text + mapped(OLDER))


@pytest.mark.usefixtures("sycl_device")
def test_no_queue_of_torch_is_asked_for_before_the_check(monkeypatch):
    text = mapped(OURS, OLDER)
    monkeypatch.setattr(torch.xpu, "init", lambda: None)
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    with pytest.raises(MissingDependencyError, match="torch's queue"):
        Session(torch.device("xpu", 0))
