"""The conformance kit of the CUDA backend in several processes, for a machine that is lent by the minute.

    python tests/cuda/kit_on_gpu.py --out FILE.json [--seconds 240] [--full-of GLOB ..] [--each 6] [--not GLOB ..] [--done EARLIER.json ..]

Kernels that match ``--full-of`` have all cases of the kit's quick profile, those of ``--not`` none, the others ``--each`` cases of every
check. Cases that an earlier file holds are not run again. Humming's tables are cut to two tiles. ``hal verify cuda`` does the same in one
process, with whole tables; here a file is written even when time runs out. It is of the form of ``hal verify --json``, for ``hal matrix``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import triton
import two_tiles
from hal_backend_cuda.providers.humming import runtime
from kit_cases import some

from hal_core.jsonable import to_json
from hal_core.testing.case import Result, Status
from hal_core.testing.kit import Report, kit_of
from hal_core.testing.run import run_case
from hal_core.testing.writers import as_json, as_markdown

#: Cases of one unit of work, neighbours of one kernel: they share compiled kernels.
_UNIT = 8
#: Seconds for cases that began in time; what takes longer is given up, with its unit.
_GRACE = 15


def cases(whole: tuple[str, ...], each: int, without: tuple[str, ...]):
    """Units of ``(plan, case)`` in the order in which they are run: kernels in turn, so that time is spread; accuracy last."""
    by_kernel: dict[str, list] = {}
    for plan, case in kit_of(("cuda",)).cases():
        if any(fnmatchcase(case.kernel, f"cuda.{glob}") for glob in without):
            continue
        by_kernel.setdefault(case.kernel, []).append((plan, case))
    units = []
    for name, found in by_kernel.items():
        checks: dict[str, list] = {}
        for pair in found:
            checks.setdefault(pair[1].check, []).append(pair)
        kept = (
            found
            if any(fnmatchcase(name, f"cuda.{glob}") for glob in whole)
            else [pair for group in checks.values() for pair in some(group, each)]
        )
        for start in range(0, len(kept), _UNIT):
            unit = kept[start : start + _UNIT]
            units.append((unit[0][1].check == "accuracy", start / len(kept), unit))
    return [unit for *_, unit in sorted(units, key=lambda entry: entry[:2])]


def begin(*chosen) -> None:
    """What each process holds."""
    global HELD, EXPECTED
    kit = kit_of(("cuda",))
    HELD, EXPECTED = cases(*chosen), kit.expectations("cuda.any")
    runtime.Problem.table = two_tiles.table
    torch.set_num_threads(1)


def work(argument: tuple[int, frozenset[str], float]) -> list[dict]:
    index, done, until = argument
    found = []
    for plan, case in HELD[index]:
        if case.id not in done and time.time() < until:
            found.append(to_json(run_case(plan, case, 0, EXPECTED)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--full-of", nargs="*", default=["*"])
    parser.add_argument("--each", type=int, default=0)
    parser.add_argument("--not", dest="without", nargs="*", default=[])
    parser.add_argument("--done", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    until, earlier = time.time() + options.seconds, [row for path in options.done for row in json.loads(path.read_text())["results"]]
    chosen = (tuple(options.full_of), options.each, tuple(options.without))
    count, done, rows = len(cases(*chosen)), frozenset(row["case"] for row in earlier), list(earlier)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, begin, chosen) as pool:
        found = pool.imap_unordered(work, [(index, done, until) for index in range(count)])
        while True:
            try:
                rows += found.next(max(1.0, until + _GRACE - time.time()))
            except (StopIteration, multiprocessing.TimeoutError):
                break
    results = tuple(Result(**{**row, "status": Status(row["status"])}) for row in rows)
    kit = kit_of(("cuda",))
    wanted = {case.id for unit in cases(*chosen) for _, case in unit}
    missing = sorted(wanted - {result.case for result in results})
    report = Report(0, False, kit.plans, results)
    counts = {status.value: report.count(status) for status in Status}
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    whole = {"date": time.strftime("%Y-%m-%d"), **versions, "cases": len(wanted), "not_run": len(missing), "counts": counts}
    options.out.write_text(json.dumps({**whole, **as_json(report)}) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(as_markdown(report), encoding="utf-8")
    print(json.dumps(whole))
    for result in report.failures:
        print(f"{result.status.value}: {result.case}\n    {result.reason[:500]}")


if __name__ == "__main__":
    main()
