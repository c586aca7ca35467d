"""``hal perplexity``: how well a quantized model predicts a text, alone or against another run of the same tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal_core.cli.common import (
    CHECKPOINT,
    JSON,
    KV_CACHE,
    NUMERICS,
    POLICY,
    THREADS,
    console,
    examples,
    kv_cache_line,
    print_json,
    progress_bar,
)
from hal_core.cli.run import load_tokenizer, packed_cache
from hal_core.errors import FormatError, SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.perplexity import Comparison, TextLoss

__all__ = ["register"]

#: What --against takes besides a checkpoint.
_BASELINES = ("dequantized", "transformers")
#: And this: the same model under the same settings, without the quantized key/value cache.
_PLAIN_CACHE = "unquantized-cache"
_WORDS = (*_BASELINES, _PLAIN_CACHE)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        "perplexity",
        epilog=examples(
            "hal perplexity CKPT --text book.txt", "hal perplexity CKPT --text book.txt --policy require:cpu --against dequantized",
            "hal perplexity model.gguf --text book.txt --against transformers --json",
            "hal perplexity CKPT --text book.txt --kv-cache turboquant:4 --against unquantized-cache",
        ),
    )  # fmt: skip
    def perplexity_command(
        checkpoint: CHECKPOINT,
        text: Annotated[Path, typer.Option("--text", help="A UTF-8 text file.", show_default=False)],
        window: Annotated[int, typer.Option(min=2, help="Tokens of one window; windows do not overlap.")] = 512,
        max_tokens: Annotated[int | None, typer.Option(min=2, help="Use only so many tokens of the text.", show_default="all")] = None,
        policy: POLICY = None,
        numerics: NUMERICS = "checkpoint",
        kv_cache: KV_CACHE = None,
        kv_step: Annotated[
            int | None, typer.Option(min=1, help="Tokens of one forward through that cache; 1 is as a decode.", show_default="a window")
        ] = None,
        dtype: Annotated[str, typer.Option(help="Activation dtype: auto, fp32, bf16 or fp16.")] = "fp32",
        against: Annotated[
            str | None,
            typer.Option(help="Another checkpoint under the same settings; 'dequantized': the same weights in float32 without our kernels; "
                              "'transformers': the same, and a GGUF file read by transformers itself; 'unquantized-cache': the same model "
                              "without --kv-cache.", show_default="nothing"),
        ] = None,
        batch: Annotated[int | None, typer.Option(min=1, help="Windows of one call.", show_default="1 GiB of logits")] = None,
        threads: THREADS = None,
        as_json: JSON = False,
    ) -> None:  # fmt: skip
        """Print mean negative log likelihood and perplexity with standard errors; with --against, the paired difference too."""
        import torch

        from hal_core.hub import resolve_checkpoint
        from hal_core.perplexity import compare

        if threads is not None:
            torch.set_num_threads(threads)
        check_cache_options(kv_cache, kv_step, against)
        written = read_text(text)
        path = resolve_checkpoint(checkpoint)
        other = None if against is None or against in _WORDS else resolve_checkpoint(against)
        ids = encode_text(path, other, written)[:max_tokens]
        options = {"policy": policy, "numerics": numerics, "dtype": dtype}
        cache = None if kv_cache is None else (kv_cache, kv_step)
        loss, shown = _run(path, ids, window, batch, as_json, options, cache)
        result: dict[str, Any] = {"checkpoint": checkpoint, "text": str(text), "tokens": ids.numel(), "window": window, **shown}
        if against is not None:
            same = other is not None or against == _PLAIN_CACHE
            second, shown = _run(other or path, ids, window, batch, as_json, options if same else against, cache if other else None)
            difference = compare(second, loss) if against in _WORDS else compare(loss, second)
            result |= {"against": {"checkpoint": against, **shown}, "difference": difference.to_json()}
            _print_both(result, as_json, loss, second, difference, against)
        elif as_json:
            print_json(result)
        else:
            console().print(_line(checkpoint, loss, shown), markup=False)


def check_cache_options(scheme: str | None, step: int | None, against: str | None) -> None:
    """Refuse what makes no sense without a quantized cache, and a scheme that does not parse, before anything is loaded."""
    from hal_core.kv.scheme import parse_pair

    if scheme is not None:
        parse_pair(scheme)
    elif step is not None or against == _PLAIN_CACHE:
        given = "--kv-step" if step is not None else f"--against {_PLAIN_CACHE}"
        raise SettingError(given, "there is no quantized cache", "give --kv-cache too")


def read_text(path: Path) -> str:
    """The whole file.

    Raises:
        SettingError: no such file, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(f"--text {path}", f"not UTF-8 at byte {error.start}", "give a plain text file") from error
    except OSError as error:
        raise SettingError(f"--text {path}", str(error.strerror or error), "give a plain text file") from error


def encode_text(path: Path, other: Path | None, text: str) -> Tensor:
    """Token ids ``[T]`` by the checkpoint's tokenizer, which a second checkpoint must share (or have none)."""
    import torch

    ids = load_tokenizer(path)(text, verbose=False)["input_ids"]
    if other is not None:
        try:
            same = load_tokenizer(other)(text, verbose=False)["input_ids"] == ids
        except FormatError:
            same = True  # weights alone: the first tokenizer is all there is
        if not same:
            raise FormatError(f"tokenizer of {other}", "gives other tokens for this text", "compare models that share a tokenizer")
    return torch.tensor(ids, dtype=torch.int64)


def _run(
    path: Path,
    ids: Tensor,
    window: int,
    batch: int | None,
    quiet: bool,
    options: dict[str, Any] | str,
    cache: tuple[str, int | None] | None = None,
) -> tuple[TextLoss, dict[str, Any]]:
    """Measure one model, which is freed again.

    Args:
        path: the checkpoint.
        ids: token ids of the text.
        window: tokens of one window.
        batch: windows of one call.
        quiet: no progress bars.
        options: those of ``hal.load``, or the word of a baseline.
        cache: scheme of a quantized cache and tokens of one forward through it.
    """
    from hal_core.perplexity import measure

    started = time.perf_counter()
    model, shown = _load(path, quiet, options)
    packed = None if cache is None or isinstance(options, str) else packed_cache(model, cache[0], options["policy"])
    with progress_bar("measuring", quiet) as bar:
        show = None if bar is None else lambda done, total: bar(done, total, "")
        loss = measure(model, ids, window, batch, show, None if packed is None else packed.emptied, cache[1] if cache else None)
    report = {} if packed is None else {"kv_cache": packed.report()}
    return loss, {**loss.to_json(), **shown, **report, "seconds": round(time.perf_counter() - started, 1)}


def _load(path: Path, quiet: bool, options: dict[str, Any] | str) -> tuple[Any, dict[str, Any]]:
    import hal_core
    from hal_core.baseline import dequantized_model, transformers_model

    if isinstance(options, str):
        build = dequantized_model if options == "dequantized" else transformers_model
        return build(hal_core.open_checkpoint(path)), {"kernels": {}, "dtype": "fp32"}
    with progress_bar("loading", quiet) as progress:
        model = hal_core.load(path, progress=progress, **options)
    report = model.hal
    return model, {"kernels": report.kernels(), "dtype": report.dtype, "numerics": report.numerics, "policy": report.policy}


def _line(name: str, loss: TextLoss, shown: dict[str, Any]) -> str:
    error = loss.nll_standard_error
    around = ("", "") if error is None else (f" ± {error:.4f}", f" ± {loss.perplexity * error:.3f}")
    kernels = ", ".join(f"{kernel} x{count}" for kernel, count in shown["kernels"].items()) or "transformers alone"
    cache = f"{kv_cache_line(shown['kv_cache'])}; " if "kv_cache" in shown else ""
    return (
        f"{name}: perplexity {loss.perplexity:.4f}{around[1]}, nll {loss.nll:.5f}{around[0]} over {loss.predicted} tokens "
        f"in {len(loss.windows)} windows; {kernels}; {cache}{shown['dtype']}; {shown['seconds']} s"
    )


def _print_both(result: dict[str, Any], as_json: bool, loss: TextLoss, second: TextLoss, difference: Comparison, against: str) -> None:
    if as_json:
        print_json(result)
        return
    out = console()
    out.print(_line(result["checkpoint"], loss, result), markup=False)
    out.print(_line(against, second, result["against"]), markup=False)
    names = (result["checkpoint"], against) if against in _WORDS else (against, result["checkpoint"])
    error = difference.nll_standard_error
    relative = f"{100 * difference.relative_perplexity:+.5f} %" + ("" if error is None else f" ± {100 * error:.5f} %")
    around = "" if error is None else f" ± {error:.2e}"
    out.print(f"difference {names[0]} - {names[1]}: perplexity {relative}, nll {difference.nll:+.2e}{around} (paired)", markup=False)
    out.print(f"largest difference of one token's nll: {difference.largest:.2e}")
