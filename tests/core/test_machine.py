"""Facts of a machine: read from files of the operating system, lowered by a setting, each with its mark."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from hal_core import detect as detection
from hal_core.errors import SettingError, ValueDecodeError
from hal_core.machine import Denied, Device, FactMark, Machine, Mark

FLAGS = "fpu sse2 fma f16c avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16"
CPUINFO = f"""processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Test CPU @ 2.0GHz
flags\t\t: {FLAGS}

processor\t: 1
vendor_id\t: GenuineIntel
flags\t\t: fpu
"""


@pytest.fixture
def root(tmp_path):
    put(tmp_path, "proc/cpuinfo", CPUINFO)
    put(tmp_path, "proc/meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB\n")
    return tmp_path


def put(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def tiles(monkeypatch):
    """Answer for the operating system: granted, unless the test changes it."""
    monkeypatch.setattr(detection, "_request_tiles", lambda: "")
    return monkeypatch


def test_cpu_facts_come_from_the_kernels_files(root, tiles):
    machine = detection.detect_from(root)
    (cpu,) = machine.devices
    assert (cpu.kind, cpu.vendor, cpu.name, cpu.memory_bytes) == ("cpu", "intel", "Test CPU @ 2.0GHz", 1024 * 1024)
    assert {"avx2", "fma", "f16c", "avx_vnni", "avx512_vnni", "amx_int8"} <= set(machine.isa)
    assert machine.denied == ()
    assert machine.mark("devices.0.memory_bytes") is Mark.REPORTED
    assert machine.version("python") == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("level", "kept", "lost"),
    [
        ("avx2", {"avx2", "fma", "f16c"}, {"avx512f", "avx512_vnni", "avx_vnni", "amx_tile", "amx_int8"}),
        ("avx512", {"avx2", "avx512f", "avx512bw"}, {"avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}),
        ("avx512vnni", {"avx2", "avx512f", "avx512_vnni"}, {"avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}),
        ("avx512bf16", {"avx2", "avx512f", "avx512_vnni", "avx512_bf16"}, {"avx_vnni", "amx_tile", "amx_int8", "amx_bf16"}),
    ],
)
def test_a_level_lowers_and_says_so(root, tiles, level, kept, lost):
    machine = detection.detect_from(root, level)
    assert kept <= set(machine.isa)
    assert not lost & set(machine.isa)
    for feature in lost:
        assert machine.why_not(feature) == f"lowered by HAL_CPU_ISA={level}"
        assert machine.remedy(feature) == "unset HAL_CPU_ISA"


def test_amx_that_the_system_does_not_permit_is_denied_with_its_reason(root, monkeypatch):
    monkeypatch.setattr(detection, "_request_tiles", lambda: "not permitted: Operation not permitted")
    machine = detection.detect_from(root)
    assert not any(feature.startswith("amx") for feature in machine.isa)
    assert "avx512_vnni" in machine.isa
    assert machine.why_not("amx_int8") == "not permitted: Operation not permitted"
    assert "arch_prctl" in machine.remedy("amx_int8")
    # Both at once: one entry a feature, and the setting's reason does not hide that it was lowered.
    assert len({d.name for d in detection.detect_from(root, "avx2").denied}) == len(detection.detect_from(root, "avx2").denied)


def test_a_processor_without_amx_asks_for_no_permission(root, monkeypatch):
    put(root, "proc/cpuinfo", "vendor_id : AuthenticAMD\nmodel name : EPYC\nflags : avx2 fma f16c\n")
    monkeypatch.setattr(detection, "_request_tiles", lambda: pytest.fail("asked"))
    machine = detection.detect_from(root)
    assert machine.isa == ("avx2", "fma", "f16c")
    assert machine.why_not("amx_int8") == "not in this processor (EPYC)"
    assert machine.why_not("avx2") == ""


class FakeSyscall:
    """The three calls of arch_prctl for extended states."""

    restype = None

    def __init__(self, supported, permitted, granted):
        self.supported, self.permitted, self.granted, self.requests = supported, permitted, granted, 0

    def __call__(self, number, code, argument):
        assert number.value == 158
        if code.value == 0x1023:
            assert argument.value == 18
            self.requests += 1
            ctypes.set_errno(0 if self.granted else 1)
            return 0 if self.granted else -1
        mask = self.supported if code.value == 0x1021 else self.permitted
        if mask is None:
            ctypes.set_errno(22)
            return -1
        argument._obj.value = mask
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="arch_prctl is Linux's")
@pytest.mark.parametrize(
    ("supported", "permitted", "granted", "shown", "requests"),
    [
        (1 << 18, 1 << 18, False, "", 0),
        (1 << 18, 0, True, "", 1),
        (1 << 18, 0, False, "refused AMX tile state", 1),
        (0, 0, True, "does not save AMX tile state", 0),
        (None, 0, True, "Invalid argument", 0),  # Linux before 5.16 knows no such call
        (1 << 18, None, True, "Invalid argument", 0),
    ],
)
def test_tile_permission_is_asked_of_the_kernel(monkeypatch, supported, permitted, granted, shown, requests):
    call = FakeSyscall(supported, permitted, granted)
    monkeypatch.setattr(detection.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: type("Libc", (), {"syscall": call})())
    reason = detection._request_tiles()
    assert (shown in reason) if shown else (reason == "")
    assert call.requests == requests


@pytest.mark.parametrize("text", ["", "no colon here", ":::\n\n", "flags", "\x00\xff"])
def test_files_that_say_nothing_give_a_machine_without_features(tmp_path, text):
    put(tmp_path, "proc/cpuinfo", text)
    put(tmp_path, "sys/class/kfd/kfd/topology/nodes/0/properties", "gfx_target_version x\nsimd_count\n")
    machine = detection.detect_from(tmp_path)
    assert machine.isa == ()
    assert [device.kind for device in machine.devices] == ["cpu"]


def test_an_empty_root_is_survived(tmp_path):
    assert detection.detect_from(tmp_path).devices[0].memory_bytes is None


def test_detect_is_cached_per_level(monkeypatch):
    monkeypatch.delenv("HAL_CPU_ISA", raising=False)
    full = Machine.detect()
    assert Machine.detect() is full
    monkeypatch.setenv("HAL_CPU_ISA", "avx2")
    assert not [feature for feature in Machine.detect().isa if feature.startswith(("avx512", "amx"))]
    monkeypatch.setenv("HAL_CPU_ISA", "")
    assert Machine.detect() is full


def test_a_misspelt_level_is_an_error(monkeypatch):
    monkeypatch.setenv("HAL_CPU_ISA", "AVX-2")
    with pytest.raises(SettingError, match="HAL_CPU_ISA='AVX-2': unknown level; use one of avx2, avx512, avx512vnni, avx512bf16, amx"):
        Machine.detect()


def test_detection_touches_no_device_and_imports_no_torch():
    code = "import sys; from hal_core.machine import Machine; Machine.detect(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_facts_of_another_machine():
    h200 = Machine(
        "linux_x86_64",
        (Device("cpu", "intel", "x86_64", "Xeon", 32), Device("cuda", "nvidia", "sm_90", "H200", 132, 141 << 30)),
        ("avx2",),
        (Denied("amx_tile", "not permitted", "ask"),),
        marks=(FactMark("devices", Mark.DATASHEET), FactMark("devices.1", Mark.MEASURED)),
    )
    again = Machine.from_json(h200.dumps())
    assert again == h200
    assert again.mark("devices.0.units") is Mark.DATASHEET
    assert again.mark("devices.1.units") is Mark.MEASURED
    assert again.mark("devices.10") is Mark.DATASHEET
    assert again.mark("isa") is None
    for shown in ("H200", "sm_90", "132 units", "amx_tile: not permitted; ask"):
        assert shown in str(again)


@pytest.mark.parametrize(
    "text",
    [
        '{"platform": "p"}',
        '{"platform": "p", "devices": [{"kind": "gpu"}]}',
        '{"platform": 1, "devices": []}',
        '{"platform": "p", "devices": {}}',
        '{"platform": "p", "devices": [], "isa": "avx2"}',
        '{"platform": "p", "devices": [], "marks": [{"fact": "isa", "mark": "guessed"}]}',
        "[]",
    ],
)
def test_facts_that_are_none(text):
    with pytest.raises(ValueDecodeError):
        Machine.from_json(text)
