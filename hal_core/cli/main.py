"""Entry point of the ``hal`` command: one line and exit code 2 for every user error, a traceback only with ``--debug``."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from hal_core import settings
from hal_core.cli import bench, dequantize, explain, facts, inspect, logits, matrix, perplexity, probe, run, verify
from hal_core.errors import HalError, HalWarning, NoKernelError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


for _module in (probe, facts, inspect, explain, dequantize, logits, perplexity, run, verify, matrix, bench):
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
    """Run the command line and exit with 0, 1 (a fault of the program), 2 (of the input), 130 or 143 (interrupted)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed_streams()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported; its notes are not about the user's input
    try:
        debug = "--debug" in arguments or settings.debug()
    except HalError as error:
        typer.echo(f"error: {one_line(error)}", err=True)
        sys.exit(2)
    arguments = [argument for argument in arguments if argument != "--debug"]
    sys.exit(_guarded(arguments or ["--help"], debug))


def _open_closed_streams() -> None:
    """A stream that was closed before the start is None; what is printed there goes nowhere, as asked."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


def _terminated(_signal: int, _frame: object) -> None:
    raise _Terminated


class _Terminated(BaseException):
    """SIGTERM as an exception, so that half-written files are removed on the way out."""


@contextmanager
def _quietly() -> Iterator[None]:
    """One line for each warning of ours; other libraries' warnings are about their own use of each other."""

    def show(message: Warning | str, category: type[Warning], *_: object) -> None:
        if issubclass(category, HalWarning):
            typer.echo(f"warning: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", HalWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        # what the warnings say is also logged, for engines; a terminal needs it once
        logging.getLogger("hal_core").addHandler(logging.NullHandler())
        yield


def _guarded(arguments: list[str], debug: bool) -> int:
    previous = signal.getsignal(signal.SIGTERM)
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _terminated)
        with _quietly():
            code = int(app(arguments, standalone_mode=False, prog_name="hal") or 0)
        if code == 130:  # typer ends an interrupted command by itself, without a word
            typer.echo("error: interrupted", err=True)
        return code
    except BrokenPipeError:
        # the reader of a pipe went away: nothing is left to say, and closing must not raise again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Exception, KeyboardInterrupt, _Terminated) as error:  # noqa: BLE001  the last resort: every kind gets its line and its code
        if debug:
            traceback.print_exception(error)
        message, code = _verdict(error)
        typer.echo(f"error: {message}", err=True)
        return code
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)


def _verdict(error: BaseException) -> tuple[str, int]:
    """The line to print and the exit code."""
    if isinstance(error, HalError):
        return one_line(error), 2
    if isinstance(error, _USAGE_ERROR):
        return _usage(error), 2
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return "interrupted", 130
    if isinstance(error, _Terminated):
        return "terminated", 143
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 2
    return f"internal error: {type(error).__name__}: {error} (run again with --debug and report it)", 1


def _usage(error: Exception) -> str:
    """A usage error with the command it belongs to."""
    context = getattr(error, "ctx", None)
    where = f"; see '{context.command_path} --help'" if context is not None else ""
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    return " ".join(text.split()).removesuffix(".") + where
