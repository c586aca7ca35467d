"""Writes docs/refusals.md: a section for each refusal code, with an example that the code itself makes.

Run by hand after a change of codes: ``python scripts/refusal_docs.py``; ``tests/core/test_refusal_docs.py`` says when the page is old.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types
from dataclasses import fields, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from hal_core.explain import explain_from
from hal_core.isolated import crash_refusal, smoke_refusal
from hal_core.kernel import (
    EmbeddingKernel,
    KVEpilogue,
    KVKernel,
    KVSchemeSet,
    LinearEpilogue,
    LinearKernel,
    MoEEpilogue,
    MoEKernel,
    SchemeSet,
    ShapeLimit,
)
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Device, Version
from hal_core.manifest import BackendManifest, read_manifest
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.packages import package_refusals
from hal_core.policy import Policy
from hal_core.refusal import CODES, Refusal
from hal_core.registry import Judged, RegisteredKernel, loaded
from hal_core.schemes import GranularityKind, WeightScheme, ZeroKind
from hal_core.sharding import shard
from hal_core.spec import Activation, EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec
from hal_core.stored import load_facts
from hal_core.verdicts import Trial

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "refusals.md"
MACHINE = replace(load_facts("avx2-laptop"), versions=(Version("torch", "2.13.0"),))
INT4 = WeightScheme.parse("int4:g128")

#: What to do about a code, beyond the fix that each refusal carries.
REMEDIES = {
    "backend.import": (
        "Reinstall the wheel; `HAL_DEBUG=1 hal probe` shows the whole traceback. An undefined symbol means that it was built "
        "for another torch."
    ),
    "backend.manifest": (
        "Install a newer version of the wheel. Authors: put a valid `hal_backend.json` into the wheel's `.dist-info`; see "
        "[write a backend](write-a-backend.md)."
    ),
    "backend.contract": "Upgrade the older of the two sides, as the fix says.",
    "backend.torch": (
        "Install a torch inside the range, or a version of the wheel for the torch that is there. Nothing of the wheel was "
        "imported."
    ),
    "backend.platform": "Install the wheel's build for this operating system and processor, or remove it.",
    "backend.isa": (
        "If the feature is denied by the system or by a setting, the fix says what allows it; if the processor lacks it, remove "
        "the wheel. Nothing of it was imported."
    ),
    "backend.arch": (
        "Install a build of the wheel that names the architecture, or remove it. A wheel is judged so only where a device of "
        "its kind is there."
    ),
    "backend.crash": (
        "Reinstall or remove the wheel. A crash by a signal is remembered for the same wheel, drivers and torch, and the wheel "
        "is not imported into other processes until one of them changes or `hal probe --isolated --fresh` finds it well."
    ),
    "backend.smoke": (
        "Leave the kernel out by a [policy](how-selection-works.md#policies) and report it: its numbers are wrong on this "
        "machine."
    ),
    "backend.invalid": "Report it to the backend's authors: every attribute of the [contract](write-a-backend.md) must be answered.",
    "backend.device": "Nothing, if the machine has no such device; else see the rows *not usable* of `hal probe`.",
    "backend.package": "Install the library as the fix says; the backend's other kernels do not need it.",
    "device.missing": "Run on a machine with such a device. Where one is there, `hal probe` says why it is not usable.",
    "device.isa": (
        "A feature that is there and not permitted carries its remedy (a kernel option, a container's permission, "
        "`HAL_CPU_ISA`)."
    ),
    "device.arch": (
        "Use a kernel for this architecture, or install a wheel that was built for it. `unknown` means that the driver's "
        "management library is missing."
    ),
    "scheme.dtype": "Use a backend that serves the type, or quantize to a type that this one serves.",
    "scheme.granularity": "Use another backend, or quantize with scales of a granularity that is served.",
    "scheme.group": "Use another backend, or quantize with a group size that is a multiple of what the kernel needs.",
    "scheme.zero": "Use another backend, or quantize symmetrically where the kernel serves no zero points.",
    "scheme.act_order": "Quantize with `desc_act=False`, or use a kernel that follows `g_idx`.",
    "numerics.activations": "Tolerate it with `--numerics int8` (or `fp8`), knowingly; the default computes what the checkpoint says.",
    "numerics.weights": "Tolerate it with `--numerics int8:rescaled`; the transform and its error bound then stand in the selection.",
    "numerics.operand": "Give activations of that dtype, or tolerate the rounding in the spec's `Numerics`.",
    "numerics.accumulation": "Ask for the narrower sum in `Numerics`, or use another kernel.",
    "numerics.deterministic": "Drop `deterministic` from the request, or use a kernel that promises it.",
    "numerics.batch_invariant": "Drop `batch_invariant` from the request, or use a kernel that promises it.",
    "dtype.activation": "Run the model in a dtype that the kernel takes (`--dtype`).",
    "dtype.output": "Ask for an output dtype that the kernel writes.",
    "epilogue.bias": "Add the bias outside the op, or use another kernel.",
    "epilogue.lora": "Add the LoRA delta outside the op, or use another kernel.",
    "epilogue.activation": "Use a kernel with this activation function. It is never replaced by another.",
    "epilogue.alpha": "Use a kernel that takes an alpha. It is never dropped.",
    "epilogue.limit": "Use a kernel that clamps. The limit is never dropped.",
    "epilogue.gated": "Use a kernel for this form of experts.",
    "epilogue.expert_map": "Translate the ids before the call, or use another kernel.",
    "epilogue.expert_parallel": "Hold all experts on each rank, or use another kernel.",
    "epilogue.router_weight_on_input": "Multiply the input before the call, or use another kernel.",
    "epilogue.routed_scaling": "Scale the routing weights before the call, or use another kernel.",
    "epilogue.shared_experts": "Compute the shared experts beside the op, as the Transformers integration does.",
    "epilogue.tied_head": "Untie the head, or use another kernel.",
    "epilogue.mixed_schemes": "Quantize gate, up and down alike, or use another kernel.",
    "epilogue.gqa": "Repeat the key/value heads, or use another kernel.",
    "epilogue.value_dim": "Pad values to the size of keys, or use another kernel.",
    "epilogue.window": "Use another kernel. A window is never widened silently.",
    "epilogue.sink_tokens": "Use another kernel.",
    "epilogue.sinks": "Use another kernel. The logits are never dropped.",
    "epilogue.soft_cap": "Use another kernel. The cap is never dropped.",
    "kv.scheme": "Use a [scheme](kv-cache.md#schemes) that the kernel serves, or another backend.",
    "kv.mixed": "Store keys and values alike, or use another backend.",
    "kv.head_dim": "Use another backend; the reference serves every size.",
    "kv.scales": (
        "Load scales from a checkpoint that carries them, or let the cache compute them from its first tokens "
        '(`KVCacheSpec(.., scales="computed")`). Without `require`, default scales are served.'
    ),
    "routing.form": "Convert the routing before the call to a form that the kernel takes.",
    "shape.multiple": "Pad the dimension, shard by another degree, or use another kernel.",
    "shape.range": "Use another kernel for this size.",
    "shape.shard": "Use one of the degrees that the fix names. A cut through a scale group makes finer groups, of four elements at least.",
    "shape.rows": "Use a kernel that serves every batch size, or install one that shares the layout and serves the rest.",
    "op.unsupported": "Use another backend for this kind of op; a policy may name one for each.",
    "policy.excluded": "Name the kernel in the policy, or use `auto`.",
    "policy.unnamed": "Name it to try it, as `require:xpu`; other kernels serve what is to be fast.",
}  # fmt: skip

INTRODUCTION = (
    "A kernel or wheel that cannot serve gives every reason. Each has a stable code, what was asked, what was found and a fix;",
    "[how selection works](how-selection-works.md) tells when they are made. The examples are made by the code itself, with a kernel",
    "that serves little, on a laptop with AVX2.",
)

FAMILIES = {
    "backend": "A wheel as a whole. Such a backend stands among the candidates under its own name.",
    "device": "The machine.",
    "scheme": "How the weights are stored.",
    "numerics": "What the kernel computes, against what the request tolerates. These are never waived silently.",
    "dtype": "Types of activations and outputs.",
    "epilogue": "Optional parts of an op.",
    "kv": "Caches of keys and values.",
    "routing": "How tokens find their experts.",
    "shape": "Sizes, after sharding.",
    "op": "Kinds of op.",
    "policy": "What the user asked for.",
}


def _prepare(self: object, spec: object, weights: object) -> Any:
    raise NotImplementedError


_NARROW: dict[str, Any] = {
    "devices": ("cpu",), "isa": (), "architectures": (),
    "schemes": SchemeSet(("int4",), (GranularityKind.GROUP,), (ZeroKind.NONE,), False, 64),
    "numerics": Numerics(deterministic=True, batch_invariant=True), "dtypes": ("bf16",), "out_dtypes": ("bf16",), "m_range": (1, None),
    "limits": (), "layout": "example.rows", "error_bound": 1e-2, "priority": 1, "prepare": _prepare,
}  # fmt: skip
_NO = dict.fromkeys(
    ("alpha", "limit", "ungated", "bias", "mixed_schemes", "expert_map", "expert_parallel", "router_weight_on_input", "routed_scaling",
     "shared_experts", "lora"), False,
)  # fmt: skip
_OF = {
    "linear": (LinearKernel, {"epilogue": LinearEpilogue(bias=False, lora=False)}),
    "moe": (MoEKernel, {"epilogue": MoEEpilogue(activations=("silu",), gated=True, **_NO), "routing": ("routed",)}),
    "embedding": (EmbeddingKernel, {"tied_head": False}),
    "kv": (
        KVKernel,
        {
            "schemes": KVSchemeSet(("fp8",), ("fp8",), False),
            "head_dims": (128,),
            "epilogue": KVEpilogue(*(False,) * len(fields(KVEpilogue))),
        },
    ),
}


def kernel(op: str, **changes: Any) -> RegisteredKernel:
    """A kernel that serves little, so that much is refused."""
    base, own = _OF[op]
    made = type("Example", (base,), {**_NARROW, "name": f"example_{op}", "limits": (), **own, **changes})()
    return RegisteredKernel(f"toy.example_{op}", "toy", made)


def refusals(spec: Any, *kernels: RegisteredKernel, policy: str = "auto") -> Iterator[Refusal]:
    """What the candidates for a spec say."""
    found = explain_from(spec, MACHINE, Policy.parse(policy), kernels or (kernel(spec.op),))
    for candidate in found.candidates:
        yield from candidate.refusals


class Wheel(metadata.Distribution):
    """An installed wheel that has no files."""

    def read_text(self, filename: str) -> str | None:
        return "Metadata-Version: 2.1\nName: hal-backend-toy\nVersion: 1.0\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return pathlib.Path(path)


def entry_point(value: str) -> metadata.EntryPoint:
    """What the wheel registers."""
    return metadata.EntryPoint("toy", value, "hal_core.backends")._for(Wheel())  # type: ignore[attr-defined,no-any-return]


def manifest(**changes: Any) -> BackendManifest:
    """The manifest of a wheel that does not fit."""
    data = {"name": "toy", "distribution": "hal-backend-toy", "contract": 1, "torch": "", "ops": ["linear"]}
    data["install"] = "pip install hal-backend-toy"
    return BackendManifest.parse(json.dumps({**data, **changes}))


def backend_examples() -> Iterator[Refusal]:
    """Reasons of wheels."""
    gpu = replace(MACHINE, devices=(*MACHINE.devices, Device("rocm", "amd", "gfx1100", "Radeon RX 7900 XTX", 96)))
    wrong = {"contract": 2, "torch": "==2.8.*", "platforms": ["win32_amd64"], "isa": ["avx2", "avx512f"], "architectures": ["gfx942"]}
    yield from manifest(**wrong).refusals(gpu)
    module = types.ModuleType("hal_example_backend")
    module.no_device = types.SimpleNamespace(manifest=manifest(), devices=lambda machine: (), kernels=list)  # type: ignore[attr-defined]
    module.invalid = types.SimpleNamespace(manifest=manifest(), devices=lambda machine: (), kernels=lambda: [3])  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    for value in ("hal_backend_toy:backend", "hal_example_backend:invalid", "hal_example_backend:no_device"):
        yield from loaded(Judged(entry_point(value), manifest()), MACHINE)[0].refusals
    found = read_manifest(entry_point("hal_example_backend:backend"))
    assert isinstance(found, Refusal)
    yield found
    yield from package_refusals(MACHINE, "flashinfer-python", ">=0.6.13,<0.8", "pip install 'hal-backend-cuda[flashinfer]'")
    yield crash_refusal("toy", "hal-backend-toy", "was ended by SIGILL (an illegal instruction) while running toy.linear_amx")
    yield smoke_refusal(Trial("toy.linear_amx", "failed", "linear 128x256 int4:g64 bf16 [exact]: relative error 1.41, its bound is 0.01"))


def linear_examples() -> Iterator[Refusal]:
    """Reasons of linears and embeddings."""
    spec = LinearSpec(4096, 4096, INT4)
    yield from refusals(spec, kernel("linear", devices=("cuda",)))
    yield from refusals(spec, kernel("linear", isa=("avx512f",), architectures=("aarch64",)))
    for scheme in ("int3:g128", "int4:channel", "int4:g32", "int4:g128:zero", "int4:g128:act_order"):
        yield from refusals(replace(spec, weights=WeightScheme.parse(scheme)))
    does = Numerics((ActivationQuant("int8", "token"),), "rescaled", "bf16", "bf16")
    asked = Numerics(deterministic=True, batch_invariant=True)
    yield from refusals(replace(spec, dtype="fp32", numerics=asked), kernel("linear", numerics=does, dtypes=("fp32",)))
    yield from refusals(replace(spec, dtype="fp16", out_dtype="fp32", bias=True, lora=True))
    limits = (ShapeLimit("n", multiple=64), ShapeLimit("k", most=8192))
    yield from refusals(replace(spec, n=100, k=16384), kernel("linear", limits=limits))
    yield from refusals(spec, kernel("linear", m_range=(1, 32)))
    yield from refusals(spec, policy="require:cuda")
    yield from refusals(spec, kernel("linear"), kernel("linear", name="other"), policy="require:linear=toy.example_linear")
    yield from refusals(EmbeddingSpec(32000, 4096, INT4, tied_head=True))


def moe_examples() -> Iterator[Refusal]:
    """Reasons of blocks of experts, and of shards."""
    spec = MoESpec(128, 8, 2048, 768, up=INT4, down=WeightScheme.parse("int4:g64"), gate=INT4)
    loaded_up = replace(
        spec, activation=Activation("swiglu_oai", 1.702, 7.0), routing="grouped", local_experts=32, bias=True, expert_map=True, lora=True,
        router_weight_on_input=True, routed_scaling=2.5, shared_experts=1,
    )  # fmt: skip
    yield from refusals(loaded_up)
    yield from refusals(replace(spec, gate=None))
    yield from refusals(spec, kernel("moe"), kernel("moe", name="other"), policy="require:moe=toy.example_moe")
    found = shard("model.layers.0.mlp.down_proj", LinearSpec(4096, 650, INT4), 2)
    assert isinstance(found, Refusal)
    yield found


def kv_examples() -> Iterator[Refusal]:
    """Reasons of caches."""
    spec = KVCacheSpec(32, 8, 96, 32, KVScheme.parse("int8"), KVScheme.parse("turboquant:4"))
    yield from refusals(replace(spec, value_dim=64, window=4096, sink_tokens=4, sinks=True, soft_cap=50.0))
    fp8 = KVScheme.parse("fp8")
    yield from refusals(KVCacheSpec(32, 32, 128, 16, fp8, fp8), policy="require:toy")


def op_examples() -> Iterator[Refusal]:
    """Reasons of the choice itself."""
    from hal_core.registry import BackendRow

    row = BackendRow("toy", "hal-backend-toy", "1.0", "ready", kernels=("toy.example_linear",))
    found = explain_from(EmbeddingSpec(32000, 4096, INT4), MACHINE, Policy(), (kernel("linear"),), (row,))
    yield from (reason for candidate in found.candidates for reason in candidate.refusals)
    first, second = kernel("linear"), RegisteredKernel("other.example_linear", "other", kernel("linear").kernel)
    yield from refusals(LinearSpec(4096, 4096, INT4), first, second, policy="require:toy")
    trial = kernel("linear")
    trial.kernel.by_name_only = lambda spec, machine: True  # type: ignore[method-assign]
    yield from refusals(LinearSpec(4096, 4096, INT4), first, trial)


def examples() -> dict[str, Refusal]:
    """One refusal of each code."""
    found: dict[str, Refusal] = {}
    for source in (backend_examples, linear_examples, moe_examples, kv_examples, op_examples):
        for refusal in source():
            found.setdefault(refusal.code, refusal)
    return found


def page() -> str:
    """The text of docs/refusals.md."""
    made = examples()
    lines = [
        "# Refusal codes", "",
        "<!-- written by scripts/refusal_docs.py; tests/core/test_refusal_docs.py compares -->", "",
        *INTRODUCTION, "",
    ]  # fmt: skip
    for family, told in FAMILIES.items():
        lines += [f"## {family}", "", told, ""]
        for code in (code for code in CODES if code.partition(".")[0] == family):
            lines += [f"### `{code}`", "", CODES[code], "", "```text", str(made[code]), "```", "", f"**What to do.** {REMEDIES[code]}", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}: {len(CODES)} codes")
