"""Facts of devices and processors by their drivers, each unusable one with its reason; and the facts that ship with the package."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from hal_core import cpuid, settings
from hal_core.cpuid import LeafBits
from hal_core.detect import Answers, detect_from
from hal_core.detect_gpu import visible
from hal_core.errors import SettingError, ValueDecodeError
from hal_core.machine import Denied, Machine, Mark
from hal_core.nvml import NvidiaFacts, NvidiaGpu, read_nvidia
from hal_core.stored import load_facts, stored_names, with_software

H200 = NvidiaGpu("NVIDIA H200", "GPU-81a8", "00000000:00:06.0", "sm_90", 132, 150754820096)
NVIDIA = NvidiaFacts((H200, replace(H200, uuid="GPU-92b9", pci="00000000:00:07.0")), "580.159.04", "13.0")


def put(root, path, text=""):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path):
    put(tmp_path, "proc/cpuinfo", "vendor_id : AuthenticAMD\nmodel name : EPYC\nflags : avx2 fma f16c avx512f avx512bw\n")
    return tmp_path


def gpus(machine):
    return machine.devices[1:]


# NVIDIA


def test_nvidia_gpus_by_nvml(root):
    machine = detect_from(root, answers=Answers(nvidia=NVIDIA))
    assert [(d.kind, d.architecture, d.units, d.memory_bytes) for d in gpus(machine)] == [("cuda", "sm_90", 132, 150754820096)] * 2
    assert (machine.version("nvidia_driver"), machine.version("cuda_driver")) == ("580.159.04", "13.0")
    assert machine.denied == ()
    assert machine.mark("devices.2.units") is Mark.REPORTED


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (NvidiaFacts(problem="libnvidia-ml.so.1 cannot be loaded (no such file)"), "libnvidia-ml.so.1 cannot be loaded"),
        (NvidiaFacts((replace(H200, pci="00000000:0a:00.0"),)), "NVML does not list it"),
    ],
)
def test_a_gpu_that_only_the_kernels_driver_sees_is_denied(root, facts, reason):
    put(root, "proc/driver/nvidia/gpus/0000:00:06.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n")
    machine = detect_from(root, answers=Answers(nvidia=facts))
    (denied,) = machine.denied
    assert denied.name == "cuda device NVIDIA H200"
    assert reason in denied.reason
    assert "--gpus all" in denied.fix
    assert len(gpus(machine)) == len(facts.gpus)


def test_a_container_with_computing_and_without_nvml_keeps_its_gpu(root):
    put(root, "proc/driver/nvidia/gpus/0000:00:06.0/information", "Model: NVIDIA H200\n")
    (device,) = gpus(detect_from(root, answers=Answers(nvidia=NvidiaFacts(problem="absent", computes=True))))
    assert (device.name, device.architecture) == ("NVIDIA H200", "unknown")


def test_a_gpu_that_nvml_lists_is_not_listed_twice(root):
    put(root, "proc/driver/nvidia/gpus/0000:00:06.0/information", "Model: NVIDIA H200\n")
    assert len(gpus(detect_from(root, answers=Answers(nvidia=replace(NVIDIA, gpus=(H200,)))))) == 1


def test_a_gpu_with_a_problem_is_denied_with_it(root):
    broken = replace(H200, problem="its compute mode is prohibited")
    machine = detect_from(root, answers=Answers(nvidia=NvidiaFacts((broken, H200))))
    assert len(gpus(machine)) == 1
    assert machine.denied == (Denied("cuda device NVIDIA H200", "its compute mode is prohibited", machine.denied[0].fix),)


class FakeNvml:
    """Calls of nvml.h with one GPU; ``failing`` maps a name to an error code, ``absent`` names what an old driver lacks."""

    def __init__(self, failing=(), absent=()):
        self.failing, self.absent, self.shut = dict(failing), absent, 0

    def __getattr__(self, name):
        if name in self.absent or not name.startswith("nvml"):
            raise AttributeError(name)

        def function(*arguments):
            return self.failing.get(name) or getattr(self, f"_{name}", lambda *_: 0)(*arguments) or 0

        if name == "nvmlErrorString":
            return type("Describe", (), {"restype": None, "__call__": lambda self, code: b"Unknown Error"})()
        return function

    def _nvmlShutdown(self):
        self.shut += 1

    def _nvmlDeviceGetCount_v2(self, pointer):
        pointer._obj.value = 1

    def _nvmlSystemGetCudaDriverVersion_v2(self, pointer):
        pointer._obj.value = 13010

    def _nvmlSystemGetDriverVersion(self, buffer, size):
        buffer.value = b"580.1"

    def _nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = b"NVIDIA H200"

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = 9, 0

    def _nvmlDeviceGetNumGpuCores(self, handle, pointer):
        pointer._obj.value = 16896

    def _nvmlDeviceGetMemoryInfo(self, handle, pointer):
        pointer._obj.total = 141 << 30

    def _nvmlDeviceGetPciInfo_v3(self, handle, pointer):
        pointer._obj.bus_id = b"00000000:00:06.0"


def test_nvml_is_read_call_by_call():
    library = FakeNvml()
    facts = read_nvidia(lambda name: library)
    assert facts == NvidiaFacts((NvidiaGpu("NVIDIA H200", "", "00000000:00:06.0", "sm_90", 132, 141 << 30),), "580.1", "13.1")
    assert library.shut == 1


@pytest.mark.parametrize(
    ("name", "field"), [("NumGpuCores", "units"), ("CudaComputeCapability", "architecture"), ("MemoryInfo", "memory_bytes")]
)
def test_what_a_driver_does_not_answer_is_unknown(name, field):
    for library in (FakeNvml({f"nvmlDeviceGet{name}": 3}), FakeNvml(absent=(f"nvmlDeviceGet{name}",))):
        (gpu,) = read_nvidia(lambda _, library=library: library).gpus
        assert getattr(gpu, field) is None
        assert gpu.name == "NVIDIA H200"


def test_nvml_that_does_not_start_is_a_reason():
    facts = read_nvidia(lambda name: FakeNvml({"nvmlInit_v2": 9}))
    assert (facts.gpus, facts.problem) == ((), "nvmlInit_v2: Unknown Error (9)")
    assert "is not in this driver's" in read_nvidia(lambda name: FakeNvml(absent=("nvmlDeviceGetCount_v2",))).problem

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    assert "cannot be loaded" in read_nvidia(missing).problem


def test_a_gpu_that_does_not_open_is_a_row():
    (gpu,) = read_nvidia(lambda name: FakeNvml({"nvmlDeviceGetHandleByIndex_v2": 4})).gpus
    assert gpu.problem == "nvmlDeviceGetHandleByIndex_v2: Unknown Error (4)"


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        (None, {0, 1, 2}), ("", set()), ("0", {0}), ("2,0", {0, 2}), ("-1", set()), ("1,9,0", {1}), ("GPU-b", {1}), (" 0 , 1 ", {0, 1}),
        ("NoDevFiles", set()), ("9" * 5000, set()), ("MIG-1234", {0, 1, 2}), (",", set()),
    ],
)  # fmt: skip
def test_masks_of_devices(mask, left):
    assert visible(mask, ["GPU-a", "GPU-b", "GPU-c"]) == left


def test_hidden_devices_are_denied_and_say_by_what(root, monkeypatch):
    machine = detect_from(root, answers=Answers(nvidia=NVIDIA), masks=("1", None, None, None))
    assert len(gpus(machine)) == 1
    assert machine.denied[0].reason == "hidden by CUDA_VISIBLE_DEVICES=1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("ZE_AFFINITY_MASK", raising=False)
    assert settings.device_masks()[0] == ""
    assert settings.device_masks()[3] is None


# AMD and Intel

NODES = "sys/class/kfd/kfd/topology/nodes"


def mi300x(root, minor=128):
    put(root, f"{NODES}/0/properties", "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n")
    put(root, f"{NODES}/1/properties", f"simd_count 1216\nsimd_per_cu 4\ngfx_target_version 90402\ndrm_render_minor {minor}\n")
    put(root, f"{NODES}/1/name", "aqua_vanjaram\n")
    put(root, f"{NODES}/1/mem_banks/0/properties", "heap_type 1\nsize_in_bytes 206141652992\n")


def test_amd_gpus_by_the_compute_drivers_topology(root):
    mi300x(root)
    put(root, f"{NODES}/2/properties", "simd_count 440\nsimd_per_cu 4\ngfx_target_version 90010\n")
    put(root, f"sys/class/drm/renderD{128}/device/product_name", "AMD Instinct MI300X\n")
    for path in ("dev/kfd", "dev/dri/renderD128"):
        put(root, path)
    mi300, mi200 = gpus(detect_from(root))
    assert (mi300.kind, mi300.architecture, mi300.units, mi300.memory_bytes) == ("rocm", "gfx942", 304, 206141652992)
    assert mi300.name == "AMD Instinct MI300X"
    assert mi200.architecture == "gfx90a"


@pytest.mark.parametrize(("given", "shown"), [((), "/dev/kfd is not there"), (("dev/kfd",), "/dev/dri/renderD128 is not there")])
def test_an_amd_gpu_that_a_container_was_not_given(root, given, shown):
    mi300x(root)
    for path in given:
        put(root, path)
    machine = detect_from(root)
    assert gpus(machine) == ()
    assert machine.denied[0].name == "rocm device aqua_vanjaram"
    assert shown in machine.denied[0].reason
    assert "docker run --device" in machine.denied[0].fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open everything")
def test_an_amd_gpu_that_the_user_may_not_open(root):
    mi300x(root)
    put(root, "dev/kfd")
    (root / "dev/kfd").chmod(0)
    assert "may not be opened by this user" in detect_from(root).denied[0].reason


def test_an_amd_gpu_without_compute_and_one_that_is_hidden(root):
    put(root, "sys/class/drm/card0/device/vendor", "0x1002\n")
    put(root, "sys/class/drm/card0/device/device", "0x744c\n")
    assert "offers no compute" in detect_from(root).denied[0].reason
    mi300x(root, minor=0)
    put(root, "dev/kfd")
    hidden = detect_from(root, masks=(None, "", None, None)).denied
    assert hidden[0].reason == "hidden by ROCR_VISIBLE_DEVICES="


def arc(root, device="0xe20b", node=True):
    put(root, "sys/class/drm/card1/device/vendor", "0x8086\n")
    put(root, "sys/class/drm/card1/device/device", f"{device}\n")
    put(root, "sys/class/drm/card1-DP-1/device/vendor", "0x8086\n")
    if node:
        put(root, "sys/class/drm/card1/device/drm/renderD129/dev", "226:129\n")


def test_intel_gpus_by_drm(root):
    arc(root)
    put(root, "dev/dri/renderD129")
    machine = detect_from(root)
    (device,) = gpus(machine)
    assert (device.kind, device.architecture, device.units, device.memory_bytes) == ("xpu", "bmg", 20, 12 << 30)
    assert machine.mark("devices.1.units") is Mark.DATASHEET
    assert machine.mark("devices.1.name") is Mark.REPORTED
    assert "hidden by ZE_AFFINITY_MASK=1.0" in str(detect_from(root, masks=(None, None, None, "1.0")).denied)
    assert len(gpus(detect_from(root, masks=(None, None, None, "0.1")))) == 1


def test_intel_gpus_that_do_not_serve(root):
    arc(root, node=False)
    assert "no kernel driver serves it" in detect_from(root).denied[0].reason
    arc(root)
    assert "/dev/dri/renderD129 is not there" in detect_from(root).denied[0].reason
    arc(root, device="0x9a49")  # integrated graphics without matrix engines
    assert detect_from(root).denied == ()


@pytest.mark.parametrize("text", ["", "x", "simd_count 99999999999999999999999999\ngfx_target_version 90402\n", "gfx_target_version -1\n"])
def test_driver_files_that_say_nothing(root, text):
    put(root, f"{NODES}/1/properties", text)
    put(root, "sys/class/drm/card0/device/vendor", text)
    put(root, "sys/devices/system/cpu/cpu0/cache/index0/level", text)
    put(root, "sys/devices/system/node/node0/cpulist", text)
    assert gpus(detect_from(root)) == ()


# The processor


def test_cores_nodes_and_caches(root):
    base = "sys/devices/system"
    for cpu in range(4):
        put(root, f"{base}/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 2},{cpu % 2 + 2}\n")
    for index, (level, kind, size) in enumerate(((1, "Data", "32K"), (1, "Instruction", "32K"), (3, "Unified", "32768K"))):
        for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", "0,2" if level == 1 else "0-3")):
            put(root, f"{base}/cpu/cpu0/cache/index{index}/{name}", f"{value}\n")
    put(root, f"{base}/node/node0/cpulist", "0-3\n")
    put(root, f"{base}/node/node0/meminfo", "Node 0 MemTotal:  1024 kB\nNode 0 MemFree: 1 kB\n")
    found = detect_from(root).processor
    assert (found.cores, found.threads) == (2, 4)
    assert [(node.node, node.cpus, node.memory_bytes) for node in found.numa] == [(0, 4, 1 << 20)]
    assert str(found) == "2 cores, 4 threads, 1 memory node, L1d 32 KiB for 2, L1i 32 KiB for 2, L3 32768 KiB for 4"


def test_a_feature_counts_only_where_cpuid_xcr0_and_kernel_agree(root):
    yes, no, off = LeafBits(True, True), LeafBits(False, False), LeafBits(True, False)
    leaves = {"avx2": yes, "fma": off, "f16c": no, "avx512f": yes, "avx512bw": yes, "avx512vl": yes}
    machine = detect_from(root, answers=Answers(leaves, ("avx",)))
    assert machine.isa == ("avx2",)
    assert "GLIBC_TUNABLES" in machine.why_not("fma")
    assert "CPUID does not have it" in machine.why_not("f16c")
    assert machine.why_not("avx512f") == "the operating system does not save its registers (avx512 is not in XCR0)"
    assert "does not list it in /proc/cpuinfo" in machine.why_not("avx512vl")
    assert machine.mark("isa") is Mark.MEASURED
    assert detect_from(root).mark("isa") is Mark.REPORTED


@pytest.mark.skipif(not cpuid.read_leaves(), reason="the C library does not publish CPUID here")
def test_the_leaves_of_this_processor_agree_with_the_kernel():
    flags = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split())
    leaves = cpuid.read_leaves()
    assert set(leaves) <= set(cpuid.BITS)
    assert {name for name, bits in leaves.items() if bits.active} == flags & set(leaves)
    assert "avx" in cpuid.read_states() or not cpuid.read_states()


def test_a_c_library_that_publishes_nothing(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: object())
    assert cpuid.read_leaves() == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpuid.read_states() == ()


# Stored facts

MEASURED = {"emerald-rapids", "epyc-zen4", "h200"}
STORED = {
    "arc-b580": ("bmg", 20, 12), "avx2-laptop": ("x86_64", 8, None), "b200": ("sm_100", 148, 180), "emerald-rapids": ("x86_64", 16, 125),
    "epyc-zen4": ("x86_64", 2, 23), "h20": ("sm_90", 78, 96), "h200": ("sm_90", 132, 140), "mi300x": ("gfx942", 304, 192),
    "mi355x": ("gfx950", 256, 288), "pvc": ("pvc", 128, 128),
}  # fmt: skip


def test_the_stored_machines():
    assert set(stored_names()) == {*STORED, "mixed"}
    for name, (architecture, units, gib) in STORED.items():
        device = load_facts(name).devices[-1]
        memory = None if device.memory_bytes is None else device.memory_bytes >> 30
        assert (device.architecture, device.units, memory) == (architecture, units, gib), name
    assert [device.kind for device in load_facts("mixed").devices] == ["cpu", "cuda", "rocm", "xpu"]
    assert "amx_int8" in load_facts("emerald-rapids").isa
    assert "avx512_bf16" in load_facts("epyc-zen4").isa
    assert load_facts("avx2-laptop").isa == ("avx2", "fma", "f16c")


def paths_of(value, path=""):
    if is_dataclass(value):
        for field in fields(value):
            if field.name not in ("marks", "facts_version"):
                yield from paths_of(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from paths_of(item, f"{path}.{index}")
    elif value is not None:
        yield path


@pytest.mark.parametrize("name", [*STORED, "mixed"])
def test_every_stored_fact_is_marked_measured_or_datasheet(name):
    machine = load_facts(name)
    found = {machine.mark(path) for path in paths_of(machine)}
    assert found == {Mark.MEASURED if name in MEASURED else Mark.DATASHEET}
    assert all(mark.source for mark in machine.marks)


def test_facts_from_a_file_and_from_a_name(tmp_path, monkeypatch):
    machine = load_facts("h200")
    (tmp_path / "box.json").write_text(machine.dumps())
    assert load_facts(str(tmp_path / "box.json")) == machine
    monkeypatch.chdir(tmp_path)
    assert load_facts("box.json") == machine
    with pytest.raises(ValueDecodeError, match=r"no such file, nor a stored name; give .* one of arc-b580, avx2-laptop"):
        load_facts("h2000")


def test_facts_of_hardware_alone_assume_this_software():
    local = Machine.detect()
    machine = with_software(load_facts("mi300x"), local)
    assert machine.version("torch") == local.version("torch")
    assert machine.mark("versions.0") is Mark.REPORTED
    assert with_software(machine, replace(local, versions=())) is machine


def test_detection_here_reports_no_contradiction(monkeypatch):
    monkeypatch.delenv("HAL_CPU_ISA", raising=False)
    machine = Machine.detect()
    assert json.loads(machine.dumps())["facts_version"] == 1
    assert machine.processor.threads is None or machine.processor.threads >= 1
    assert Machine.from_json(machine.dumps()) == machine


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    assert settings.cache_folder() == tmp_path
    monkeypatch.setenv("HAL_CACHE_DIR", "relative/place")
    with pytest.raises(SettingError, match="not an absolute path"):
        settings.cache_folder()
    monkeypatch.delenv("HAL_CACHE_DIR")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_folder() == tmp_path / "hal-core"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.cache_folder().name == "hal-core"
    assert settings.cache_folder().parent.name == ".cache"
