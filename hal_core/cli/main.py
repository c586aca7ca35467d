"""Entry point of the ``hal`` command: one line and exit code 2 for every user error, a traceback only with ``--debug``."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from hal_core.cli import dequantize, explain, facts, inspect, logits, perplexity, probe, run, verify
from hal_core.errors import HalError, NoKernelError

__all__ = ["app", "app_main"]

app = typer.Typer(
    name="hal",
    help="Which kernel runs a quantized model here, why others do not, and what to change.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)
# typer either depends on click or carries its own copy, by version; its own public error leads to the right base class.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]


def _version(wanted: bool) -> None:
    if wanted:
        from hal_core import __version__

        typer.echo(f"hal-core {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Every command takes --json for machine-readable output, and --debug for a traceback on errors."""


for _module in (probe, facts, inspect, explain, dequantize, logits, perplexity, run, verify):
    _module.register(app)


def one_line(error: HalError) -> str:
    """The error as one line; a missing kernel's reasons are joined, and counted when there are many."""
    if isinstance(error, NoKernelError):
        reasons = [f"{name}: {reason}" for name, refusals in error.refusals for reason in refusals]
        text = str(error).splitlines()[0]
        text = f"{text} ({' | '.join(reasons[:3])}{f' | and {len(reasons) - 3} more' if len(reasons) > 3 else ''})" if reasons else text
        return f"{text}; {error.fix}" if error.fix and error.fix not in text else text
    return " ".join(str(error).split())


def app_main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with 0, 1 (a fault of the program), 2 (of the input) or 130 (interrupted)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or os.environ.get("HAL_DEBUG", "") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    sys.exit(_guarded(arguments, debug))


def _guarded(arguments: list[str], debug: bool) -> int:
    try:
        return int(app(arguments, standalone_mode=False, prog_name="hal") or 0)
    except BrokenPipeError:
        # the reader of a pipe went away: nothing is left to say, and closing must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  the last resort of a program: every kind gets its line and its code
        if debug:
            traceback.print_exception(error)
        message, code = _verdict(error)
        typer.echo(f"error: {message}", err=True)
        return code


def _verdict(error: BaseException) -> tuple[str, int]:
    """The line to print and the exit code."""
    if isinstance(error, HalError):
        return one_line(error), 2
    if isinstance(error, _USAGE_ERROR):
        return _usage(error), 2
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", 130
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 2
    return f"internal error: {type(error).__name__}: {error} (run again with --debug and report it)", 1


def _usage(error: Exception) -> str:
    """A usage error with the command it belongs to."""
    context = getattr(error, "ctx", None)
    where = f"; see '{context.command_path} --help'" if context is not None else ""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(text.split()).removesuffix(".") + where
