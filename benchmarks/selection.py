"""The cost of asking: imports, probes, selections and the hot path, each beside its target.

    python benchmarks/selection.py [--json] [--rounds N] [--kernels N]

Every figure is the least of many rounds: other programs on the machine only ever add to a time, so the least is nearest to the cost
of the code itself. Interpreters are started fresh for the import; hot-path rounds of the op and of the bare native call alternate.
Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pathlib
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

import hal_core as hal
from hal_core.api import _memo
from hal_core.kernel import LinearEpilogue, LinearKernel, MoEEpilogue, MoEKernel, SchemeSet, ShapeLimit
from hal_core.policy import Policy
from hal_core.registry import BackendRow, RegisteredKernel, default_registry
from hal_core.schemes import GranularityKind, ZeroKind
from hal_core.select import candidates_from, select_from

if TYPE_CHECKING:
    from collections.abc import Callable

TARGETS = {"import": 150e-3, "probe": 50e-3, "select": 2e-3, "select cached": 5e-6, "hot path": 2e-6}
INT4 = hal.WeightScheme.parse("int4:g128")


@dataclass(frozen=True)
class Figure:
    """One measured cost in seconds, its target, and what was measured."""

    name: str
    seconds: float
    target: float
    what: str

    @property
    def met(self) -> bool:
        return self.seconds < self.target

    def __str__(self) -> str:
        unit, scale = ("us", 1e6) if self.target < 1e-4 else ("ms", 1e3)
        mark = "met " if self.met else "MISSED"
        return f"{self.name:14} {self.seconds * scale:8.3f} {unit}  target {self.target * scale:6.1f} {unit}  {mark}  {self.what}"


def least(run: Callable[[], Any], rounds: int, calls: int = 1) -> float:
    """Seconds of one call, in the quickest of ``rounds`` rounds of ``calls``."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        best = min(best, (time.perf_counter() - start) / calls)
    return best


def fresh_costs(rounds: int) -> tuple[float, float]:
    """``import hal_core`` in an interpreter that has imported torch, and the first ``hal.probe()`` after it; the least of each."""
    code = (
        "import torch, time; a = time.perf_counter(); import hal_core; b = time.perf_counter(); hal_core.probe(); "
        "print(b - a, time.perf_counter() - b)"
    )
    # The interpreter finds what this one finds, installed or not, and may keep bytecode, as an installed wheel does.
    setting = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    setting["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path[1:]))
    command = [sys.executable, "-c", code]
    printed = [subprocess.run(command, env=setting, capture_output=True, text=True, check=True).stdout.split() for _ in range(rounds)]
    return min(float(took[0]) for took in printed), min(float(took[1]) for took in printed)


def fresh_figures(rounds: int) -> list[Figure]:
    """The import, and a probe after the first."""
    processes = max(rounds // 20, 3)
    imported, first = fresh_costs(processes)
    hal.probe()
    warm = least(hal.probe, rounds)
    told = f"hal.probe() again in a process; the first takes {first * 1e3:.1f} ms, backends imported"
    return [
        Figure("import", imported, TARGETS["import"], f"import hal_core above import torch; {processes} fresh interpreters"),
        Figure("probe", warm, TARGETS["probe"], told),
    ]


def _prepare(self: object, spec: object, weights: object) -> Any:
    raise NotImplementedError


def made_up(index: int) -> RegisteredKernel:
    """A kernel that refuses the benchmark's spec for several reasons, as most of many backends do."""
    answers: dict[str, Any] = {
        "name": f"kernel{index}", "devices": ("cpu",), "isa": ("amx_tile", "amx_int8"), "architectures": (),
        "schemes": SchemeSet(("int8", "fp8_e4m3"), (GranularityKind.CHANNEL,), (ZeroKind.INTEGER,), False), "dtypes": ("fp16",),
        "numerics": hal.Numerics((hal.ActivationQuant("int8", "token"),)), "out_dtypes": ("fp16",), "m_range": (1, None),
        "limits": (ShapeLimit("n" if index % 3 else "hidden", multiple=3),), "layout": "made.up", "error_bound": 1e-2, "priority": index,
        "prepare": _prepare,
    }  # fmt: skip
    if index % 3:
        kind, own = LinearKernel, {"epilogue": LinearEpilogue(bias=False, lora=False)}
    else:
        no = dict.fromkeys(("alpha", "limit", "ungated", "bias", "mixed_schemes", "expert_map", "expert_parallel", "router_weight_on_input",
                            "routed_scaling", "shared_experts", "lora"), False)  # fmt: skip
        own = {"epilogue": MoEEpilogue(activations=("silu",), gated=True, **no), "routing": ("routed",)}
        kind = MoEKernel
    kernel = type(f"MadeUp{index}", (kind,), {**answers, **own})()
    return RegisteredKernel(f"backend{index % 8}.kernel{index}", f"backend{index % 8}", kernel)


def select_costs(rounds: int, count: int) -> list[Figure]:
    """A selection among at least ``count`` kernels for the spec's kind of op, with all refusals kept; and an equal question again."""
    machine, registry = hal.Machine.detect(), default_registry()
    new = tuple(k for k in map(made_up, range(count * 2)) if k.kernel.op == "linear")[:count]
    rows = (*registry.rows(), *(BackendRow(f"backend{i}", f"hal-backend-{i}", "1.0", "ready") for i in range(8)))
    kernels = (*registry.kernels(), *new)
    specs = iter(hal.LinearSpec(64 + i, 4096, INT4, bias=True) for i in range(1 << 20))
    kept = [c for c in candidates_from(next(specs), machine, Policy(), kernels, rows) if not c.accepted]
    reasons = sum(len(candidate.refusals) for candidate in kept)
    took = least(lambda: select_from(next(specs), machine, Policy(), kernels, rows), rounds)
    what = f"{len(kernels)} kernels registered, {len(kept)} candidates refused with {reasons} reasons kept"
    spec = hal.LinearSpec(4096, 4096, INT4)
    hal.select(spec)
    assert len(_memo)
    cached = least(lambda: hal.select(spec), rounds, 2000)
    equal = least(lambda: hal.select(hal.LinearSpec(4096, 4096, INT4)), rounds, 2000)
    told = f"hal.select(spec) of a known spec; {equal * 1e6:.2f} us with the making of an equal one"
    return [Figure("select", took, TARGETS["select"], what), Figure("select cached", cached, TARGETS["select cached"], told)]


def hot_path_cost(rounds: int) -> Figure:
    """What ``op.apply(x)`` adds to the native op with the same arguments, on the smallest layer that there is."""
    from hal_backend_cpu import _native
    from hal_core.smoke import random_weight

    spec = hal.LinearSpec(16, 128, INT4)
    op: Any = hal.prepare(spec, hal.LinearWeights(random_weight(INT4, 16, 128)), "require:cpu")
    x = torch.randn(1, 128, dtype=torch.bfloat16)
    w = op.weight
    arguments = (x, *w.arguments(), op.bias, w.n, w.k, w.group, w.scheme.bits, op.isa)
    native = _native.ops.linear
    assert torch.equal(op.apply(x), native(*arguments))
    through, bare = float("inf"), float("inf")
    for _ in range(rounds):
        through = min(through, least(lambda: op.apply(x), 1, 500))
        bare = min(bare, least(lambda: native(*arguments), 1, 500))
    what = f"op.apply {through * 1e6:.2f} us, {native} {bare * 1e6:.2f} us; {op.selection.kernel}, 16x128, M = 1"
    return Figure("hot path", through - bare, TARGETS["hot path"], what.replace("torch.ops.", ""))


def measure(rounds: int, kernels: int) -> list[Figure]:
    """All five; without the CPU backend, the last is left out."""
    torch.set_num_threads(1)
    figures = [*fresh_figures(rounds), *select_costs(rounds, kernels)]
    try:
        figures.append(hot_path_cost(rounds))
    except ImportError:
        print("hot path: hal-backend-cpu is not installed", file=sys.stderr)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kernels", type=int, default=60, help="kernels for the spec's kind of op beside those installed")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", hal.HalWarning)
    figures = measure(options.rounds, options.kernels)
    if options.json:
        print(json.dumps([{**asdict(figure), "met": figure.met} for figure in figures], indent=2))
    else:
        print(f"least of {options.rounds} rounds, {pathlib.Path(sys.executable).name} {sys.version.split()[0]}, torch {torch.__version__}")
        print("\n".join(map(str, figures)))
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
