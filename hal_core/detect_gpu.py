"""GPUs of this machine, each usable or with the reason why not: NVML for NVIDIA, /sys of the kernel's drivers for AMD and Intel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hal_core.machine import Denied, Device, Version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hal_core.nvml import NvidiaFacts

__all__ = ["SeenGpu", "amd", "intel", "nvidia", "read_text", "visible"]

_CONTAINER_NVIDIA = "give the container the GPU with its driver's libraries (docker run --gpus all)"
_ACCESS = "give the container {path} (docker run --device), or add the user to the groups render and video"


@dataclass(frozen=True)
class SeenGpu:
    """device: as it counts when usable. problem, fix: why it is not. table: facts that are from a table of ours, not the device."""

    device: Device
    problem: str = ""
    fix: str = ""
    table: tuple[str, ...] = ()

    def denied(self, label: str) -> Denied:
        """The row for a device that may not be used."""
        return Denied(f"{label} {self.device.name}", self.problem, self.fix)


def read_text(path: Path) -> str:
    """Text of a file of /proc or /sys; empty when it is absent or not readable, which is how these trees say no."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def visible(mask: str | None, names: Sequence[str]) -> set[int]:
    """Indices that a mask such as ``0,2`` or ``GPU-ab12`` leaves; as in the vendors' runtimes, the first bad entry ends the list."""
    if mask is None or "MIG-" in mask:  # a slice's own name, which leads to no index
        return set(range(len(names)))
    found: set[int] = set()
    for part in (part.strip() for part in mask.split(",")):
        if part.isdecimal() and len(part) < 6:
            index = int(part)
        else:
            index = next((i for i, name in enumerate(names) if name and part and name.startswith(part)), -1)
        if not 0 <= index < len(names):
            break
        found.add(index)
    return found


def nvidia(root: Path, facts: NvidiaFacts, mask: str | None = None) -> tuple[list[SeenGpu], list[Version]]:
    """By NVML; where it is silent, by the kernel driver's files, which know the name alone."""
    versions = [Version("nvidia_driver", facts.driver)] if facts.driver else []
    versions += [Version("cuda_driver", facts.cuda)] if facts.cuda else []
    shown = visible(mask, [gpu.uuid for gpu in facts.gpus])
    found = []
    for index, gpu in enumerate(facts.gpus):
        device = Device("cuda", "nvidia", gpu.architecture or "unknown", gpu.name, gpu.units, gpu.memory_bytes)
        problem, fix = gpu.problem, "ask the administrator, or nvidia-smi -c DEFAULT"
        if not problem and index not in shown:
            problem, fix = f"hidden by CUDA_VISIBLE_DEVICES={mask}", "unset CUDA_VISIBLE_DEVICES, or name it there"
        found.append(SeenGpu(device, problem, fix if problem else ""))
    listed = {gpu.pci[-12:] for gpu in facts.gpus}
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        if path.parent.name.lower()[-12:] in listed:
            continue
        fields = dict(line.partition(":")[::2] for line in read_text(path).splitlines())
        name = fields.get("Model", "").strip() or "NVIDIA GPU"
        found.append(_without_nvml(name, facts))
    return found, versions


def _without_nvml(name: str, facts: NvidiaFacts) -> SeenGpu:
    device = Device("cuda", "nvidia", "unknown", name)
    if facts.computes:
        return SeenGpu(device)  # kernels for particular architectures will refuse it, others may run
    reason = facts.problem or "NVML does not list it: this process may not open it"
    return SeenGpu(device, f"seen by the kernel's driver, but {reason}", _CONTAINER_NVIDIA)


def amd(root: Path, masks: Mapping[str, str | None] | None = None) -> list[SeenGpu]:
    """By the compute driver's topology (KFD); processors appear there as nodes without SIMDs. A GPU that only DRM knows cannot compute."""
    found, minors = [], set()
    for path in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"), key=_node_number):
        fields = _numbers(path)
        target, simds = fields.get("gfx_target_version", 0), fields.get("simd_count", 0)
        if not target or not simds:
            continue
        minor = fields.get("drm_render_minor", 0)
        minors.add(minor)
        # 90402 is gfx942, 90010 is gfx90a: decimal pairs, written in hexadecimal digits.
        architecture = f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        units = simds // max(fields.get("simd_per_cu", 0), 1)
        banks = (_numbers(bank) for bank in (path.parent / "mem_banks").glob("*/properties"))
        memory = sum(bank.get("size_in_bytes", 0) for bank in banks)
        product = read_text(root / f"sys/class/drm/renderD{minor}/device/product_name").strip() if minor else ""
        name = product or read_text(path.parent / "name").strip() or architecture
        device = Device("rocm", "amd", architecture, name, units, memory or None)
        found.append(SeenGpu(device, *_closed(root, "dev/kfd", *([f"dev/dri/renderD{minor}"] if minor else []))))
    for name, mask in (masks or {}).items():
        shown = visible(mask, [""] * len(found))
        found = [gpu if gpu.problem or i in shown else _hidden(gpu, f"{name}={mask}") for i, gpu in enumerate(found)]
    return [*found, *_amd_without_kfd(root, minors)]


def _hidden(gpu: SeenGpu, setting: str) -> SeenGpu:
    return SeenGpu(gpu.device, f"hidden by {setting}", f"unset {setting.partition('=')[0]}, or name it there", gpu.table)


def _amd_without_kfd(root: Path, minors: set[int]) -> list[SeenGpu]:
    found = []
    for card in _cards(root, "0x1002"):
        minor = _render_minor(card)
        if minor in minors:
            continue
        name = read_text(card / "product_name").strip() or f"AMD GPU {read_text(card / 'device').strip()}".strip()
        problem = "its kernel driver offers no compute: it is not among the nodes of /sys/class/kfd"
        fix = "load amdgpu with KFD on a GPU that ROCm supports, and give the container /dev/kfd"
        found.append(SeenGpu(Device("rocm", "amd", "unknown", name), problem, fix))
    return found


#: PCI device ids of Intel GPUs with matrix engines: architecture, name, Xe cores and memory by the vendor's datasheets (None: not sure).
#: Others (older integrated graphics) are not listed as devices.
_INTEL: dict[str, tuple[str, str, int | None, int | None]] = {
    "0x0bd5": ("pvc", "Intel Data Center GPU Max 1550", 128, 128 << 30),
    **dict.fromkeys(("0x0bd6", "0x0bd9", "0x0bdb"), ("pvc", "Intel Data Center GPU Max", None, None)),
    "0x0bda": ("pvc", "Intel Data Center GPU Max 1100", 56, 48 << 30),
    "0x56a0": ("dg2", "Intel Arc A770", 32, None),
    "0x56a1": ("dg2", "Intel Arc A750", 28, 8 << 30),
    "0x56a2": ("dg2", "Intel Arc A580", 24, 8 << 30),
    "0x56a5": ("dg2", "Intel Arc A380", 8, 6 << 30),
    "0x56a6": ("dg2", "Intel Arc A310", 6, 4 << 30),
    **dict.fromkeys(("0x56c0", "0x56c1"), ("dg2", "Intel Data Center GPU Flex", None, None)),
    "0xe20b": ("bmg", "Intel Arc B580", 20, 12 << 30),
    "0xe20c": ("bmg", "Intel Arc B570", 18, 10 << 30),
    **dict.fromkeys(("0xe211", "0xe212"), ("bmg", "Intel Arc Pro B-series", None, None)),
}


def intel(root: Path, mask: str | None = None) -> list[SeenGpu]:
    """By DRM. The kernel publishes neither units nor memory in one place, so a table of device ids gives them."""
    found = []
    for card in _cards(root, "0x8086"):
        known = _INTEL.get(read_text(card / "device").strip().lower())
        if known is None:
            continue
        table = tuple(name for name, value in (("units", known[2]), ("memory_bytes", known[3])) if value is not None)
        device, minor = Device("xpu", "intel", *known), _render_minor(card)
        if minor is None:
            problem, fix = "no kernel driver serves it (no render node)", "load the driver xe or i915, of a kernel that knows this GPU"
        else:
            problem, fix = _closed(root, f"dev/dri/renderD{minor}")
        found.append(SeenGpu(device, problem, fix, table))
    # A mask may name tiles, as 0.1: the device counts then.
    shown = visible(None if mask is None else ",".join(part.partition(".")[0] for part in mask.split(",")), [""] * len(found))
    return [gpu if gpu.problem or i in shown else _hidden(gpu, f"ZE_AFFINITY_MASK={mask}") for i, gpu in enumerate(found)]


def _cards(root: Path, vendor: str) -> list[Path]:
    """The device folders of a vendor's cards; connectors (``card0-DP-1``) are passed over."""
    paths = sorted((root / "sys/class/drm").glob("card[0-9]*/device/vendor"))
    return [path.parent for path in paths if "-" not in path.parent.parent.name and read_text(path).strip() == vendor]


def _render_minor(card: Path) -> int | None:
    names = sorted(path.name for path in (card / "drm").glob("renderD*"))
    return int(names[0][7:]) if names and names[0][7:].isdecimal() else None


def _closed(root: Path, *paths: str) -> tuple[str, str]:
    """Why device files cannot be opened, and the remedy; two empty texts when they can."""
    for path in paths:
        if not (root / path).exists():
            return f"/{path} is not there, as in a container that was not given it", _ACCESS.format(path=f"/{path}")
        if not os.access(root / path, os.R_OK | os.W_OK):
            return f"/{path} may not be opened by this user", _ACCESS.format(path=f"/{path}")
    return "", ""


def _node_number(path: Path) -> tuple[int, str]:
    name = path.parent.name
    return (int(name) if name.isdecimal() else 1 << 30), name


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as the compute driver writes them."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal() and len(pair[1]) < 20}
