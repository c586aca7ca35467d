"""What is here, what is wrong with it, and what could be installed for what was seen."""

from __future__ import annotations

import json
from dataclasses import replace

from core.fakes import MACHINE, manifest, registered, row

import hal_core as hal
from hal_core.machine import Denied, Device, Version
from hal_core.manifest import BackendManifest
from hal_core.probe import Probe, probe_from, rows_elsewhere
from hal_core.refusal import Refusal

BROKEN = Refusal("backend.torch", "torch==2.8.*", "torch 2.13.0", 'pip install "torch==2.8.*"')


def test_text_shows_machine_backends_reasons_and_hints():
    machine = replace(
        MACHINE,
        devices=(*MACHINE.devices, Device("rocm", "amd", "gfx942", "MI300X", 304)),
        denied=(Denied("amx_tile", "not permitted", "ask the administrator"),),
    )
    rows = (row("cpu", "cpu.int4", "cpu.experts"), row("ipex", status="refused", refusals=(BROKEN,)), row("reference", "reference.linear"))
    probe = probe_from(machine, rows)
    text = str(probe)
    for shown in ("Test CPU", "isa: avx2 fma f16c", "torch 2.13.0+cpu", "amx_tile: not permitted; ask the administrator", "int4, experts",
                  "ipex", "refused", str(BROKEN),
                  "gfx942 seen (MI300X), and no rocm backend is installed: pip install hal-backend-rocm"):  # fmt: skip
        assert shown in text
    assert max(map(len, text.splitlines())) < 200
    assert Probe.from_json(probe.dumps()) == probe
    assert json.loads(probe.dumps())["backends"][1]["refusals"][0]["code"] == "backend.torch"


def test_a_backend_that_never_ran_says_so():
    told = replace(BackendManifest.parse(json.dumps(manifest("rocm"))), tested="compiled, never run")
    probe = probe_from(MACHINE, (replace(row("rocm", "rocm.linear"), manifest=told), row("cpu", "cpu.int4")))
    lines = [line.strip() for line in str(probe).splitlines()]
    assert lines[lines.index("compiled, never run") - 1].startswith("rocm ")
    assert Probe.from_json(probe.dumps()) == probe


def test_what_a_backend_says_of_this_machine_is_shown_and_of_another_is_not():
    here = replace(row("cpu", "cpu.int4"), remarks=("multiplies by tiles of 8x16",))
    assert "multiplies by tiles of 8x16" in str(probe_from(MACHINE, (here,)))
    assert rows_elsewhere(MACHINE, (here,), (registered("cpu.int4"),))[0].remarks == ()


def test_what_kernels_call_and_do_not_find_is_a_hint():
    def lacks(self, machine):
        return () if machine.version("libfast") else (Refusal("backend.package", "libfast", "not installed", "pip install libfast"),)

    def broken(self, machine):
        raise RuntimeError("oh")

    kernels = (*(registered(f"cpu.{name}", lacks=lacks) for name in "abcd"), registered("cpu.own"), registered("gone.a", lacks=lacks))
    rows = (row("cpu", "cpu.own"), row("gone", status="failed", refusals=(BROKEN,)))
    (hint,) = probe_from(MACHINE, rows, kernels).hints
    assert hint == f"cpu: a, b, c and 1 more: {lacks(None, MACHINE)[0]}"
    assert probe_from(replace(MACHINE, versions=(Version("libfast", "1"),)), rows, kernels).hints == ()
    (hint,) = probe_from(MACHINE, rows, (registered("cpu.own", lacks=broken),)).hints
    assert hint == "cpu: every kernel: lacks() raised RuntimeError: oh"


def test_a_cpu_without_its_backend_is_a_hint():
    assert probe_from(MACHINE, (row("reference"),)).hints == (
        "x86_64 seen (Test CPU), and no cpu backend is installed: pip install hal-backend-cpu",
    )
    assert probe_from(MACHINE, (row("cpu", status="failed", refusals=(BROKEN,)),)).hints == ()


def test_the_function_of_the_package():
    probe = hal.probe()
    assert probe.machine == hal.Machine.detect()
    assert probe.backends == hal.backends()
    assert Probe.from_json(probe.dumps()) == probe
    assert "reference" in str(probe)
