"""Errors that a device found: kernels that must not wait for the host write a word, and ``check`` raises what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal_core.errors import ShapeError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["check", "device_flag"]

_flags: dict[torch.device, Tensor] = {}


def device_flag(device: torch.device) -> Tensor:
    """The error word of a device, int64 ``[2]``: (slot + 1) in the upper half of the first, the id below; then slots of a token.

    Or (expert + 1) above and a number of rows below; then -1.

    Made once for each device, so that captured graphs keep writing to it. Zero: nothing was found.
    """
    import torch

    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    flag = _flags.get(device)
    if flag is None:
        # two threads may come here at once, and kernels of both write to the one that is kept
        flag = _flags.setdefault(device, torch.zeros(2, dtype=torch.int64, device=device))
    return flag


def check(device: torch.device | str | None = None) -> None:
    """Wait for the devices and raise the first error that their kernels have found since the last call, then forget it.

    Args:
        device: one device; None for every one on which ops were prepared.

    Raises:
        ShapeError: an expert id was out of range; the message gives token, slot and id. Its slot was left out of the result. Or the
            rows of an expert were below zero or more than there are; the message gives the expert and their number.
    """
    import torch

    wanted = "" if device is None else str(torch.device(device))
    for own, flag in _flags.items():
        if own.type == "meta" or (wanted and wanted not in (str(own), own.type)):
            continue
        report, top_k = (int(value) for value in flag.tolist())
        if report:
            flag.zero_()
            found, at = ((report & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000, (report >> 32) - 1
            if top_k < 0:
                raise ShapeError(
                    "num_tokens_per_expert", f"{found} rows of expert {at} on {own}, below zero or with those before it more than x has",
                    "give the sizes of groups that lie in x one after another",
                )  # fmt: skip
            token, slot = divmod(at, max(top_k, 1))
            raise ShapeError(
                "topk id", f"{found} at token {token}, slot {slot} on {own}, or what the expert_map says of it",
                "ids run from 0 to num_experts - 1, and local ids to local_experts - 1; -1 skips",
            )  # fmt: skip
