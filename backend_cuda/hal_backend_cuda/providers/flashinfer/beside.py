"""What is launched beside FlashInfer: tokens into pages, natural logarithms, and slots of the same expert merged.

Pages are ``[num_pages, 2, page_size, kv heads, head_dim]`` here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from hal_core.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch import Tensor

    from hal_core.triton.repeat import Repeats

__all__ = ["LaterRepeats", "check_slots", "launch_merge", "launch_natural_logs", "launch_store", "merge_on_host", "store_on_host"]

_LARGEST = 448.0
#: The slots that were last found right, held weakly.
_SEEN: dict[str, tuple[int, int, int, int | None]] = {}
_SEEN_SLOTS: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()


class LaterRepeats:
    """Recorded calls, made at the first call on a GPU: listing and preparing these kernels must not need Triton."""

    def __init__(self) -> None:
        self.made: Repeats | None = None

    def __call__(self, key: Hashable, tensors: tuple[Tensor | None, ...], call: Callable[[], Any]) -> None:
        if self.made is None:
            from hal_core.triton.repeat import Repeats

            self.made = Repeats()
        self.made(key, tensors, call)


def check_slots(slots: Tensor, count: int) -> None:
    """Look at a step's slots once, though every layer appends by them; a graph under capture skips what is out of range instead.

    Raises:
        ShapeError: one is outside ``[-1, count)``, or given twice.
    """
    if slots.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    key = (slots.data_ptr(), len(slots), count, None if slots.is_inference() else slots._version)
    if _SEEN.get("slots") == key and _SEEN_SLOTS.get("slots") is slots:
        return
    ordered = slots.sort().values
    wrong = (slots < -1) | (slots >= count)
    twice = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    found = torch.stack([wrong.any(), twice.any()]).tolist()
    if found[0]:
        raise ShapeError("slots", f"{int(slots[wrong][0])}", f"these run from -1 to {count - 1}")
    if found[1]:
        raise ShapeError("slots", f"slot {int(ordered[1:][twice][0])} given twice", "each token has a place of its own")
    if not slots.is_inference():
        _SEEN["slots"], _SEEN_SLOTS["slots"] = key, slots


def launch_store(cache: Tensor, tokens: tuple[Tensor, Tensor], slots: Tensor, scales: tuple[float, float]) -> None:
    """Keys and values ``tokens`` of ``[T, kv heads, head_dim]`` to their slots, by one launch each; what is out of range is skipped."""
    from hal_backend_cuda.providers.flashinfer.beside_kernels import append_tokens
    from hal_core.triton import launch

    size, width = cache.shape[2], cache.shape[3] * cache.shape[4]
    block = min(1024, 1 << (width - 1).bit_length())
    for side, (x, scale) in enumerate(zip(tokens, scales, strict=True)):
        values = {
            "x_ptr": x, "pages_ptr": cache, "slots_ptr": slots, "width": width, "page_size": size, "page_stride": cache.stride(0),
            "side": side * size * width, "slot_count": cache.shape[0] * size, "scale": scale,
            "FP8": cache.dtype == torch.float8_e4m3fn, "BW": block,
        }  # fmt: skip
        launch.run(append_tokens, (len(slots), -(-width // block)), values, 4, 3)


def store_on_host(cache: Tensor, tokens: tuple[Tensor, Tensor], slots: Tensor, scales: tuple[float, float]) -> None:
    """The same without a GPU."""
    kept, size = slots >= 0, cache.shape[2]
    for side, (x, scale) in enumerate(zip(tokens, scales, strict=True)):
        rows = x[kept]
        if cache.dtype == torch.float8_e4m3fn:
            rows = (rows.float() / scale).clamp(-_LARGEST, _LARGEST)
        cache[slots[kept] // size, side, slots[kept] % size] = rows.to(cache.dtype)


def launch_natural_logs(lse: Tensor, out: Tensor) -> None:
    """From logarithms to base 2; of rows that saw no token, which FlashInfer gives as -50000, -infinity."""
    from hal_backend_cuda.providers.flashinfer.beside_kernels import natural_logs
    from hal_core.triton import launch

    count = lse.numel()
    launch.run(natural_logs, (-(-count // 1024),), {"lse_ptr": lse, "out_ptr": out, "count": count, "BW": 1024}, 4, 3)


def launch_merge(
    given: tuple[Tensor, Tensor], out: tuple[Tensor, Tensor], flag: Tensor, num_experts: int, top_k: int, scaling: float
) -> None:
    """Ids ``int32 [T, k]`` and weights ``float32 [T, k]`` of a routing to those of one in which no token has an expert twice.

    FlashInfer counts an expert once for a token where tokens or slots are many, and reads what was never written for the others.
    flag: of the device, which is told of ids out of range; top_k: slots of a token as the caller counts them.
    """
    from hal_backend_cuda.providers.flashinfer.beside_kernels import merge_slots
    from hal_core.triton import launch

    tokens, slots = given[0].shape
    values = {
        "ids_ptr": given[0], "weights_ptr": given[1], "ids_out_ptr": out[0], "weights_out_ptr": out[1], "flag_ptr": flag,
        "tokens": tokens, "num_experts": num_experts, "top_k": top_k, "scaling": scaling, "SLOTS": slots, "P": 32,
    }  # fmt: skip
    launch.run(merge_slots, (-(-tokens // 32),), values, 1, 1)


def merge_on_host(ids: Tensor, weights: Tensor, num_experts: int, scaling: float) -> tuple[Tensor, Tensor]:
    """The same without a GPU."""
    same = ids.unsqueeze(2) == ids.unsqueeze(1)
    kept = (ids >= 0) & (ids < num_experts) & ~same.tril(-1).any(2)
    total = torch.where(same, weights.unsqueeze(1), 0.0).sum(2) * scaling
    return torch.where(kept, ids, -1), torch.where(kept, total, 0.0)
