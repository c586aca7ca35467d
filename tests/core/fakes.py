"""Kernels, machines and installed wheels made up for the tests."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hal_core.kernel import CONTRACT, EmbeddingKernel, LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet
from hal_core.machine import Device, Machine, Version
from hal_core.numerics import Numerics
from hal_core.registry import BackendRow, RegisteredKernel
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind
from hal_core.spec import LinearSpec, MoESpec

if TYPE_CHECKING:
    from pathlib import Path

    from hal_core.kernel import Kernel

MACHINE = Machine(
    platform="linux_x86_64",
    devices=(Device("cpu", "intel", "x86_64", "Test CPU", 8, 1 << 34),),
    isa=("avx2", "fma", "f16c"),
    versions=(Version("python", "3.11.7"), Version("torch", "2.13.0+cpu")),
)
INT4 = WeightScheme.parse("int4:g128")
LINEAR = LinearSpec(256, 512, INT4)
MOE = MoESpec(8, 2, 128, 256, up=INT4, down=INT4, gate=INT4)

_COMMON: dict[str, Any] = {
    "devices": ("cpu",),
    "isa": ("avx2",),
    "architectures": (),
    "schemes": SchemeSet(("int4", "int8"), (GranularityKind.GROUP, GranularityKind.CHANNEL), (ZeroKind.NONE, ZeroKind.INTEGER), False, 32),
    "numerics": Numerics(deterministic=True, batch_invariant=True),
    "dtypes": ("bf16", "fp32"),
    "out_dtypes": ("bf16", "fp32"),
    "limits": (),
    "m_range": (1, None),
    "layout": "fake.rows",
    "error_bound": 1e-3,
    "priority": 10,
}
_EPILOGUE = MoEEpilogue(
    activations=("silu",), alpha=False, limit=False, gated=True, ungated=False, bias=False, mixed_schemes=False, expert_map=False,
    expert_parallel=False, router_weight_on_input=False, routed_scaling=True, shared_experts=False, lora=False,
)  # fmt: skip
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "linear": (LinearKernel, {"epilogue": LinearEpilogue(bias=True, lora=False)}),
    "moe": (MoEKernel, {"epilogue": _EPILOGUE, "routing": ("routed",)}),
    "embedding": (EmbeddingKernel, {"tied_head": True}),
}


def _prepare(self: object, spec: object, weights: object) -> object:
    raise NotImplementedError


def kernel(name: str = "fast", op: str = "linear", *, without: tuple[str, ...] = (), **changes: Any) -> Kernel[Any]:
    """A kernel that answers everything, except ``without``, with ``changes`` of its answers."""
    base, own = _KINDS[op]
    answers = {"name": name, **_COMMON, **own, **changes}
    body = {key: value for key, value in answers.items() if key not in without}
    return type(f"Fake{op.title()}", (base,), {"prepare": _prepare, **body})()


def registered(full_name: str, op: str = "linear", **changes: Any) -> RegisteredKernel:
    """A kernel under ``backend.kernel``."""
    backend, _, name = full_name.partition(".")
    return RegisteredKernel(full_name, backend, kernel(name, op, **changes))


def reference(op: str = "linear") -> RegisteredKernel:
    """Something that serves everything these tests ask, as the reference does; its priority must not matter."""
    every = SchemeSet(("int2", "int4", "int8", "mxfp4"), tuple(GranularityKind), tuple(ZeroKind), True)
    changes: dict[str, Any] = {"priority": 10_000, "schemes": every, "isa": (), "layout": "canonical", "devices": ("any",)}
    if op == "linear":
        changes["epilogue"] = LinearEpilogue(bias=True, lora=True)
    return registered(f"reference.{op}", op, **changes)


def row(name: str, *kernels: str, status: str = "ready", refusals: tuple[Any, ...] = ()) -> BackendRow:
    """A row of the registry's table."""
    return BackendRow(name, f"hal-backend-{name}", "1.0", status, refusals, None, kernels)


def manifest(name: str, /, **changes: Any) -> dict[str, Any]:
    """The data of a hal_backend.json."""
    data = {
        "name": name, "distribution": f"hal-backend-{name}", "contract": CONTRACT, "torch": ">=2.11", "platforms": ["any"], "isa": [],
        "architectures": [], "ops": ["linear", "moe"], "install": f"pip install hal-backend-{name}",
    }  # fmt: skip
    return {**data, **changes}


#: A plugin's module that registers kernels built by this file; MARK is set when it is imported.
PLUGIN = """
import sys
from core.fakes import kernel
from hal_core.manifest import BackendManifest
sys.fake_imported = getattr(sys, "fake_imported", []) + [__name__]
class Backend:
    manifest = BackendManifest.parse({manifest!r})
    def devices(self, machine):
        return tuple(d for d in machine.devices if d.kind in {devices!r})
    def kernels(self):
        return {kernels}
backend = Backend()
"""


def install(
    folder: Path,
    name: str,
    *,
    code: str | None = None,
    kernels: str = "[kernel('fast')]",
    devices: tuple[str, ...] = ("cpu",),
    data: dict[str, Any] | str | None = None,
    distribution: str | None = None,
) -> None:
    """Put a wheel's files into ``folder``: a module and a real .dist-info. ``data`` is its manifest ("" for none)."""
    distribution = distribution or f"hal-backend-{name}"
    module = distribution.replace("-", "_")
    text = json.dumps(manifest(name)) if data is None else data if isinstance(data, str) else json.dumps(data)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hal_core.backends]\n{name} = {module}:backend\n")
    if text:
        (info / "hal_backend.json").write_text(text)
    (folder / f"{module}.py").write_text(code if code is not None else PLUGIN.format(manifest=text, devices=devices, kernels=kernels))
    sys.modules.pop(module, None)


def entry_points(folder: Path) -> tuple[metadata.EntryPoint, ...]:
    """The backends installed in ``folder``, which must be on ``sys.path``."""
    return tuple(ep for dist in metadata.distributions(path=[str(folder)]) for ep in dist.entry_points)
