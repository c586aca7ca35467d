"""Keys and queries in a form that vector quantizers lose less of, with the same attention in exact arithmetic.

A constant added to all keys changes all logits of a query alike, which a softmax does not see: the mean of the keys is taken away. A
channel's scale may move from the keys to the queries: it is chosen so that the error of a logit is least when the error of a key is spread
evenly over its channels, as a rotation spreads it. With ``q`` and ``k`` the channels' root mean squares, the sum of
``(s k)^2`` times that of ``(q / s)^2`` is least for ``s = sqrt(q / k)`` (Cauchy and Schwarz).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.kv.scheme import KVScheme

__all__ = ["LEAST_TOKENS", "Conditioning", "is_useful"]

#: Fewer tokens say too little of a channel: the first of a text are unlike the others.
LEAST_TOKENS = 32
#: Scales of one head differ at most by the square of this, so that no channel is lost in the queries' own rounding.
_MOST = 16.0


def is_useful(keys: KVScheme) -> bool:
    """Whether one scale holds for all channels of a key; per channel, offsets and sizes of channels cost nothing."""
    return keys.granularity in {"vector", "token"}


@dataclass(frozen=True, eq=False)
class Conditioning:
    """shift, scale: float32 ``[Hkv, D]``. Keys become ``(k - shift) * scale``, queries ``q / scale``."""

    shift: Tensor
    scale: Tensor

    @classmethod
    def measured(cls, k: Tensor, q: Tensor, shifted: bool) -> Conditioning | None:
        """From the first tokens' keys ``[n, Hkv, D]`` and queries ``[m, Hq, D]``; None where there are too few.

        Args:
            k: keys of the first tokens.
            q: their queries.
            shifted: whether the mean may be taken away: not with sinks or a soft cap, which see the logits themselves.
        """
        if len(k) < LEAST_TOKENS:
            return None
        k = k.float()
        shift = k.mean(0) if shifted else torch.zeros_like(k[0])
        grouped = q.float().reshape(len(q), k.shape[1], -1, k.shape[2])
        of_keys, of_queries = (k - shift).square().mean(0).sqrt(), grouped.square().mean((0, 2)).sqrt()
        scale = (of_queries / of_keys).sqrt()
        scale = torch.where(torch.isfinite(scale) & (scale > 0), scale, 1.0)
        middle = scale.log().mean(-1, keepdim=True).exp()
        return cls(shift, scale.clamp(middle / _MOST, middle * _MOST))

    def keys(self, k: Tensor) -> Tensor:
        """Keys ``[n, Hkv, D]``, to be stored."""
        return ((k.float() - self.shift) * self.scale).to(k.dtype)

    def queries(self, q: Tensor) -> Tensor:
        """Queries ``[n, Hq, D]``, to attend with."""
        group = q.shape[1] // len(self.scale)
        return (q.float() / self.scale.repeat_interleave(group, 0)).to(q.dtype)
