"""How well a model predicts a text, with standard errors, and how two models differ on the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import SettingError, ShapeError
from hal_core.jsonable import JsonValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    Progress = Callable[[int, int], None]

__all__ = ["Comparison", "TextLoss", "cached_logits", "compare", "measure"]

#: Logits held at once, in elements: 1 GiB in float32.
_LOGITS = 1 << 28


@dataclass(frozen=True, eq=False)
class TextLoss:
    """Negative log likelihoods, in nats, of every predicted token: one float64 tensor for each window.

    The first token of a window is context only, so a window of ``n`` tokens has ``n - 1`` losses.
    """

    windows: tuple[Tensor, ...]

    @property
    def predicted(self) -> int:
        """Number of predicted tokens."""
        return sum(window.numel() for window in self.windows)

    @property
    def nll(self) -> float:
        """Mean negative log likelihood of a token."""
        return _mean(self.windows)

    @property
    def nll_standard_error(self) -> float | None:
        """Standard error of the mean; None with fewer than two windows."""
        return _standard_error(self.windows)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf

    def to_json(self) -> dict[str, JsonValue]:
        """The figures, without the single losses."""
        error = self.nll_standard_error
        return {
            "windows": len(self.windows),
            "predicted_tokens": self.predicted,
            "nll": _finite(self.nll),
            "nll_standard_error": _finite(error),
            "perplexity": _finite(self.perplexity),
            "perplexity_standard_error": _finite(None if error is None else self.perplexity * error),
        }


@dataclass(frozen=True)
class Comparison:
    """A second model against a first on the same tokens; positive means that the second predicts worse.

    The errors are those of the paired differences: what makes a text hard is common to both models and cancels.
    """

    predicted: int
    nll: float
    nll_standard_error: float | None
    largest: float

    @property
    def relative_perplexity(self) -> float:
        """Perplexity of the second over that of the first, minus one."""
        return math.expm1(self.nll) if self.nll < 700 else math.inf

    def to_json(self) -> dict[str, JsonValue]:
        """The figures."""
        relative, error = self.relative_perplexity, self.nll_standard_error
        return {
            "predicted_tokens": self.predicted,
            "nll": _finite(self.nll),
            "nll_standard_error": _finite(error),
            "largest_token_nll": _finite(self.largest),
            "relative_perplexity": _finite(relative),
            "relative_perplexity_standard_error": _finite(None if error is None else (1 + relative) * error),
        }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _mean(windows: Sequence[Tensor]) -> float:
    return float(torch.cat(list(windows)).mean())


def _standard_error(windows: Sequence[Tensor]) -> float | None:
    """Of the mean over tokens, with windows as clusters: losses inside one window depend on each other, windows hardly do."""
    count, total = len(windows), sum(window.numel() for window in windows)
    if count < 2:
        return None
    mean = _mean(windows)
    residuals = torch.stack([(window - mean).sum() for window in windows])
    return math.sqrt(count / (count - 1) * float(residuals.square().sum())) / total


def measure(
    model: Any,
    ids: Tensor,
    window: int = 512,
    batch: int | None = None,
    progress: Progress | None = None,
    cache: Callable[[], Any] | None = None,
    step: int | None = None,
) -> TextLoss:
    """Losses of a text under a ``transformers`` causal model, in windows that do not overlap.

    Args:
        model: called as ``model(input_ids=..)``; its ``logits`` are used, in float32.
        ids: token ids ``[T]`` of the whole text.
        window: tokens of one window; a last shorter one is kept when it has two tokens or more.
        batch: windows of one call; default: as many as keep the logits below 1 GiB.
        progress: called with (predicted tokens so far, in all).
        cache: gives the empty ``KVCache`` of each call, through which keys and values are then read; None for none.
        step: tokens of one forward through the cache; None for a whole window. One token a step is what a decode computes.

    Raises:
        SettingError: a window below two tokens or beyond the model's positions, a text too short, or a step without a cache.
        ShapeError: an id outside the model's vocabulary.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    _check(ids, window, vocab, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    if step is not None and (cache is None or step < 1):
        raise SettingError(f"step {step}", "it counts tokens of a forward through a cache", "use 1 or more, with a cache")
    batch = batch or max(1, _LOGITS // (window * vocab))
    parts = [part for part in torch.split(ids, window) if part.numel() > 1]
    total = sum(part.numel() - 1 for part in parts)
    found: list[Tensor] = []
    with torch.inference_mode():
        for group in _batches(parts, batch):
            logits = cached_logits(model, torch.stack(group), None if cache is None else cache(), step)
            found += [_losses(rows[:-1], part[1:]) for rows, part in zip(logits, group, strict=True)]
            del logits
            if progress is not None:
                progress(sum(loss.numel() for loss in found), total)
    return TextLoss(tuple(found))


def cached_logits(model: Any, ids: Tensor, cache: Any = None, step: int | None = None) -> Tensor:
    """Logits ``[B, T, vocab]`` of ids ``[B, T]``, ``step`` tokens at a time through a :class:`KVCache` where one is given; on the CPU."""
    ids = ids.to(getattr(model, "device", "cpu"))
    if cache is None:
        return model(input_ids=ids, use_cache=False).logits.cpu()  # type: ignore[no-any-return]
    given = {cache.argument(model): cache}
    parts = [model(input_ids=part, use_cache=True, **given).logits for part in torch.split(ids, step or ids.shape[1], dim=1)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).cpu()


def _check(ids: Tensor, window: int, vocab: int, positions: int | None) -> None:
    if window < 2:
        raise SettingError(f"window {window}", "a window needs a token to predict and one before it", "use 2 or more")
    if ids.dim() != 1 or ids.numel() < 2:
        raise SettingError("text", f"token ids of shape {list(ids.shape)}", "give a text of two tokens or more")
    if positions is not None and min(window, ids.numel()) > positions:
        raise SettingError(f"window {window}", f"the model has {positions} positions", "use a smaller window")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        found = f"token ids from {int(ids.min())} to {int(ids.max())}, the model's vocabulary has {vocab}"
        raise ShapeError("text", found, "use the tokenizer of this model")


def _batches(parts: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Windows of one length together, so that nothing is padded."""
    full = [part for part in parts if part.numel() == parts[0].numel()]
    for start in range(0, len(full), size):
        yield full[start : start + size]
    if len(full) < len(parts):
        yield [parts[-1]]


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 ``[n]``; the softmax is taken in float32, as models are trained and judged."""
    logits = logits.float()
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.logsumexp(logits, dim=-1) - chosen).double()


def compare(first: TextLoss, second: TextLoss) -> Comparison:
    """How ``second`` differs from ``first``.

    Raises:
        ShapeError: they were measured on different windows.
    """
    shapes = [[window.numel() for window in loss.windows] for loss in (first, second)]
    if shapes[0] != shapes[1]:
        found = f"{first.predicted} and {second.predicted} predicted tokens, or other windows"
        raise ShapeError("comparison of two runs", found, "use one text and one window")
    paired = [b - a for a, b in zip(first.windows, second.windows, strict=True)]
    return Comparison(first.predicted, _mean(paired), _standard_error(paired), float(torch.cat(paired).abs().max()))
