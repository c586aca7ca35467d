"""Other libraries' kernels, each in a process and an environment of its own, spoken to in lines of JSON.

A runner reads one request a line from standard input and answers each with one line on standard output:

- ``{"do": "prepare", "problem": {..}}``: ``{"about": {"name", "numerics", "kind", "weight_bytes", "versions"}}``, or
  ``{"refused": "why"}``;
- ``{"do": "load", "inputs": "FILE.safetensors"}``: ``{"loaded": true}``, or ``{"refused": "why"}``;
- ``{"do": "run", "start": 0, "calls": 4}``: ``{"seconds": [..], "disturbed": [..]}``;
- ``{"do": "output", "index": 0, "to": "FILE.safetensors"}``: ``{"written": true}``.

Whatever else it does (crash, hang, garbage) makes it a line of the report.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from hal_core.bench.contestants import About, ContestantError
from hal_core.bench.problem import Distance, distance_of
from hal_core.bench.timer import Sample
from hal_core.errors import SettingError
from hal_core.settings import cache_folder
from hal_core.spec import MoESpec

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.bench.problem import Batch, Problem

__all__ = ["LIST_FILE", "PeerContestant", "PeerEntry", "find_peers", "peer_entries"]

LIST_FILE = "peers.json"
#: Seconds that a runner may take to answer: packing a large model's experts takes minutes, a call does not.
_PREPARE, _ANSWER = 900.0, 300.0


@dataclass(frozen=True)
class PeerEntry:
    """One line of ``peers.json``: a runner's script, the variant it is started as, the environment it needs (None: this one's)."""

    name: str
    script: Path
    variant: str
    environment: str | None
    what: str

    @property
    def python(self) -> Path:
        """The interpreter that runs it; need not exist."""
        return Path(sys.executable) if self.environment is None else cache_folder() / "peers" / self.environment / "bin" / "python"

    @property
    def remedy(self) -> str:
        return f"python {self.script.parent / 'setup.py'} {self.environment} makes its environment"


def find_peers(given: Path | None) -> Path | None:
    """The folder of the runners: as given, else ``benchmarks/peers`` of the working folder or of the checkout; None if there is none.

    Raises:
        SettingError: the given folder has no list of peers.
    """
    if given is not None:
        if not (given / LIST_FILE).is_file():
            raise SettingError(f"--peers {given}", f"has no {LIST_FILE}", "give the folder benchmarks/peers of a checkout")
        return given.resolve()
    places = (Path.cwd(), Path(__file__).resolve().parents[2])
    return next((place / "benchmarks" / "peers" for place in places if (place / "benchmarks" / "peers" / LIST_FILE).is_file()), None)


def peer_entries(folder: Path) -> dict[str, PeerEntry]:
    """The runners of a folder by name.

    Raises:
        SettingError: its list cannot be read.
    """
    try:
        data = json.loads((folder / LIST_FILE).read_text(encoding="utf-8"))
        return {
            name: PeerEntry(name, folder / row["script"], row["variant"], row["environment"], row["what"]) for name, row in data.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(str(folder / LIST_FILE), f"cannot be read: {error!r}", "restore it") from error


class PeerContestant:
    """A runner's process. ``folder`` holds the files that pass between."""

    def __init__(self, entry: PeerEntry, threads: int, folder: Path) -> None:
        self.entry, self.threads, self.folder = entry, threads, folder
        self.name, self.alive = entry.name, True
        self.versions: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def prepare(self, problem: Problem, copies: int) -> About:
        if not self.entry.python.exists():
            raise ContestantError(self.name, "not installed", self.entry.remedy)
        self._start()
        answer = self._ask({"do": "prepare", "problem": self._described(problem, copies)}, _PREPARE)
        about = self._part(answer, "about", dict)
        words = [about.get(name) for name in ("name", "numerics", "kind")]
        size = about.get("weight_bytes")
        if not all(isinstance(word, str) for word in words) or not _positive(size):
            raise self._fault(f"sent {json.dumps(about)[:200]} about itself")
        self.versions = {str(k): str(v) for k, v in dict(about.get("versions") or {}).items()}
        return About(f"{self.name}: {words[0]}", "peer", str(words[1]), str(words[2]), float(size))

    def load(self, batch: Batch) -> None:
        target = self.folder / f"rows{batch.rows}.safetensors"
        if not target.exists():
            parts = {"x": batch.x, "ids": batch.ids, "scores": batch.scores}
            save_file({name: t for name, t in parts.items() if t is not None}, target)
        self._part(self._ask({"do": "load", "inputs": str(target)}, _ANSWER), "loaded", bool)

    def run(self, start: int, calls: int) -> list[Sample]:
        answer = self._ask({"do": "run", "start": start, "calls": calls}, _ANSWER)
        seconds = self._part(answer, "seconds", list)
        disturbed = answer.get("disturbed")
        if len(seconds) != calls or not all(map(_positive, seconds)):
            raise self._fault(f"sent {json.dumps(seconds)[:200]} as the times of {calls} calls")
        if not isinstance(disturbed, list) or len(disturbed) != calls:
            disturbed = [None] * calls
        return [Sample(float(s), d if isinstance(d, bool) else None) for s, d in zip(seconds, disturbed, strict=True)]

    def distance(self, index: int, truth: Tensor, rows: Tensor) -> Distance | None:
        target = self.folder / f"{self.name}.out.safetensors"
        self._part(self._ask({"do": "output", "index": index, "to": str(target)}, _ANSWER), "written", bool)
        try:
            y = load_file(target)["y"]
            return distance_of(y[rows], truth)
        except Exception as error:  # the file is the runner's word, and may hold anything
            raise self._fault(f"wrote an output that cannot be read: {type(error).__name__}: {error}") from error
        finally:
            target.unlink(missing_ok=True)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._errors.close()

    def _start(self) -> None:
        setting = {**os.environ, "OMP_NUM_THREADS": str(self.threads), "HAL_BENCH_THREADS": str(self.threads)}
        setting = {name: value for name, value in setting.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed in close()
        command = [str(self.entry.python), str(self.entry.script), self.entry.variant]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=setting, cwd=self.folder,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise ContestantError(self.name, f"does not start: {error}", self.entry.remedy) from error
        threading.Thread(target=_pump, args=(self._process, self._lines), daemon=True).start()

    def _described(self, problem: Problem, copies: int) -> dict[str, Any]:
        """The problem as a runner gets it; its weights are written once for all of them."""
        weights = self.folder / "weights.safetensors"
        if not weights.exists():
            tensors = {f"{role}.{name}": t for role, part in problem.parts.items() for name, t in part.tensors().items()}
            save_file({name: t.contiguous() for name, t in tensors.items()}, weights)
        s, first = problem.spec, next(iter(problem.parts.values()))
        scheme = first.scheme
        sizes = (
            {"experts": s.num_experts, "hidden": s.hidden, "intermediate": s.intermediate, "top_k": s.top_k}
            if isinstance(s, MoESpec) else {"n": s.n, "k": s.k}
        )  # fmt: skip
        return {
            "op": s.op, **sizes, "dtype": s.dtype, "element": scheme.dtype, "bits": scheme.bits, "zero": scheme.zero.value,
            "granularity": scheme.granularity.kind.value, "group": scheme.granularity.group, "act_order": scheme.act_order,
            "exact": s.numerics.exact, "threads": self.threads, "copies": copies, "weights": str(weights),
        }  # fmt: skip

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise ContestantError(self.name, "is no longer running")
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except (OSError, ValueError):
            pass  # it is gone: the end of its output says how
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise self._fault(f"did not answer '{request['do']}' within {seconds:.0f} s and was stopped") from None
        if line is None:
            raise self._fault(_ending(process.wait()))
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._fault(f"answered '{request['do']}' with {line.strip()[:120]!r}, which is no JSON object")
        if "refused" in answer:
            raise ContestantError(self.name, str(answer["refused"])[:400])
        return answer

    def _part(self, answer: dict[str, Any], name: str, kind: type) -> Any:
        value = answer.get(name)
        if not isinstance(value, kind):
            raise self._fault(f"answered {json.dumps(answer)[:120]}, without '{name}'")
        return value

    def _fault(self, what: str) -> ContestantError:
        self.alive = False
        if self._process is not None:
            self._process.kill()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return ContestantError(self.name, what + (f"; it last said: {said[-1][:200]}" if said else ""))


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Moves the runner's lines into a queue, whose end is None."""
    assert process.stdout is not None  # a pipe
    with contextlib.suppress(ValueError, OSError):  # closed from our side
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
