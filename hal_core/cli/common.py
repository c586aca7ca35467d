"""What the commands share: consoles, options, JSON output, progress bars, memory readings."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hal_core.errors import SettingError
from hal_core.explain_checkpoint import layer_pattern as module_pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "CHECKPOINT",
    "JSON",
    "KV_CACHE",
    "NUMERICS",
    "OUT",
    "POLICY",
    "RECAST",
    "SEED",
    "THREADS",
    "console",
    "examples",
    "human_bytes",
    "kv_cache_line",
    "module_pattern",
    "peak_memory_bytes",
    "print_json",
    "progress_bar",
    "recast_of",
]

CHECKPOINT = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A checkpoint folder, a .gguf file, or a hub id: org/name, org/name@revision, org/name:file.gguf.",
        show_default=False,
    ),
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
POLICY = Annotated[
    str | None,
    typer.Option(
        help="auto, prefer:NAME or require:NAME; NAME is a backend, backend.kernel or glob, with an optional op= scope.",
        show_default="auto",
    ),
]
NUMERICS = Annotated[
    str,
    typer.Option(help="Activation numerics to tolerate: exact, bf16, checkpoint, int8, int8:token, int8:group, int8:rescaled or fp8."),
]


def _bearable(threads: int | None) -> int | None:
    """Far more threads than processors end the process inside the runtime that starts them, with no message."""
    most = 4 * (os.cpu_count() or 4)
    if threads is not None and threads > most:
        raise typer.BadParameter(f"{threads} threads; this machine has {os.cpu_count()} processors: give at most {most}")
    return threads


THREADS = Annotated[
    int | None, typer.Option(min=1, callback=_bearable, help="Threads of torch and the kernels.", show_default="all cores")
]
#: What torch's generator takes.
SEED = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")]
KV_CACHE = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        help="Store keys and values as int8, int4, fp8, turboquant:4, k4v3, k=int8,v=turboquant:4 ...; kv= is its scope in the policy.",
        show_default="transformers' own cache",
    ),
]
RECAST = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULES=SCHEME",
        help="Quantize float weights while they are read: a glob of modules and fp8:channel or fp8:b128x128. May be given again.",
        show_default="as they are stored",
    ),
]
OUT = Annotated[Path, typer.Option("--out", help="The safetensors file to write.", show_default=False)]


def recast_of(options: list[str] | None) -> dict[str, str]:
    """``--recast`` as ``hal_core.load`` takes it."""
    found = {}
    for text in options or ():
        pattern, equals, scheme = text.rpartition("=")
        if not equals or not pattern or pattern in found:
            wrong = "given twice" if pattern in found else "no scheme"
            raise SettingError(f"--recast {text!r}", wrong, "write '*.mlp.experts=fp8:channel'")
        found[pattern] = scheme
    return found


def console(stderr: bool = False) -> Console:
    """A console of the current stream, so that redirection and tests see what is printed. Pipes get plain wide text."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 160, soft_wrap=not stream.isatty())


def examples(*lines: str) -> str:
    """The epilogue of a command's help."""
    return "[bold]Examples[/bold]\n\n" + "\n\n".join(f"  $ {line}" for line in lines)


def print_json(data: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(data, indent=2, allow_nan=False))


def human_bytes(count: float) -> str:
    """Bytes in decimal units, as memory and file sizes are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def kv_cache_line(report: dict[str, Any]) -> str:
    """One line on a quantized cache: ``KVCache.report()``."""
    kernels = ", ".join(f"{name} x{count}" for name, count in report["kernels"].items())
    scales = f"; scales {', '.join(f'{word} x{count}' for word, count in report['scales'].items())}" if report["scales"] else ""
    return f"KV cache {report['scheme']}: {kernels}; {report['bytes_per_token']:.0f} bytes a token{scales}"


@contextmanager
def progress_bar(title: str, quiet: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A byte progress bar on standard error; yields the callback ``(done, total, name)``."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):  # a bar in a log is an empty line
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total, _name: bar.update(task, completed=done, total=total)


def peak_memory_bytes() -> int | None:
    """Largest resident set of this process so far; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
