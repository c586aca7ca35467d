"""``hal logits``: the logits of a prompt given as token ids, for comparing kernels and checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hal_core.cli.common import (
    CHECKPOINT,
    JSON,
    KV_CACHE,
    NUMERICS,
    OUT,
    POLICY,
    console,
    examples,
    kv_cache_line,
    print_json,
    progress_bar,
)
from hal_core.errors import SettingError
from hal_core.outputs import check_output, whole_file

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["register"]


def parse_ids(text: str) -> list[int]:
    """``"1,2,3"`` to ``[1, 2, 3]``."""
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise SettingError(f"--ids {text!r}", "not a list of integers", "write them as 1,2,3") from error
    if not ids:
        raise SettingError("--ids", "is empty", "write them as 1,2,3")
    return ids


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("logits", epilog=examples("hal logits CKPT --ids 1,2,3 --out logits.safetensors --policy require:reference"))
    def logits_command(
        checkpoint: CHECKPOINT,
        ids: Annotated[str, typer.Option(help="Token ids, as 1,2,3.", show_default=False)],
        out: OUT,
        policy: POLICY = None,
        numerics: NUMERICS = "exact",
        kv_cache: KV_CACHE = None,
        as_json: JSON = False,
    ) -> None:
        """Run the model once in float32 and write its logits: key 'logits', float32 [1, T, vocab]."""
        import hal_core
        from hal_core.cli.run import packed_cache
        from hal_core.hub import resolve_checkpoint

        tokens = parse_ids(ids)
        path = resolve_checkpoint(checkpoint)
        target = check_output(out, path)
        with progress_bar("loading", as_json) as progress:
            model = hal_core.load(path, policy=policy, numerics=numerics, dtype="fp32", progress=progress)
        cache = None if kv_cache is None else packed_cache(model, kv_cache, policy)
        values = compute_logits(model, tokens, cache)
        write_logits(target, values, model.hal)
        summary = {
            "checkpoint": checkpoint, "out": str(out), "shape": list(values.shape), "kernels": model.hal.kernels(),
            "numerics": model.hal.numerics, "policy": model.hal.policy, "kv_cache": None if cache is None else cache.report(),
        }  # fmt: skip
        if as_json:
            print_json(summary)
        else:
            through = "" if cache is None else f"; {kv_cache_line(cache.report())}"
            console().print(f"wrote {out}: logits {list(values.shape)}; {model.hal}{through}")


def compute_logits(model: Any, tokens: list[int], cache: Any = None) -> Tensor:
    """Logits ``[1, T, vocab]`` float32 of one sequence, through a cache if given; an id outside the vocabulary is an error."""
    import torch

    from hal_core.perplexity import cached_logits

    vocab = model.config.vocab_size
    wrong = [(i, token) for i, token in enumerate(tokens) if not 0 <= token < vocab]
    if wrong:
        raise SettingError(
            f"token id {wrong[0][1]} at position {wrong[0][0]}", f"the vocabulary has {vocab}", f"ids run from 0 to {vocab - 1}"
        )
    with torch.inference_mode():
        return cached_logits(model, torch.tensor([tokens]), cache).float().clone()


def write_logits(target: Path, values: Tensor, report: Any) -> None:
    """One safetensors file, complete or not there at all."""
    from safetensors.torch import save

    data = save({"logits": values.contiguous()}, metadata={"producer": "hal-core", "kernels": str(report.kernels())})
    with whole_file(target) as partial:
        partial.write_bytes(data)
