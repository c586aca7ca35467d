"""What the runners share: the conversation with `hal bench` over JSON lines, the weights in plain form, the clock.

A runner is a class with `prepare`, `load` and `bind`, handed to `serve`. It never imports hal_core: its environment may hold another torch.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

bf16 = torch.bfloat16


class Peer:
    """What `serve` asks of a runner. ``copies``: how many copies of the weights `bind` may be asked for, set by `prepare`."""

    copies = 1
    pool = 1

    def prepare(self, problem: Problem) -> dict[str, Any]:
        """Pack the weights; returns name, numerics, kind (``float`` or ``int8``), weight_bytes (of an expert, or the matrix), versions."""
        raise NotImplementedError

    def load(self, x: Tensor, ids: Tensor | None, scores: Tensor | None) -> None:
        """Take a batch ``x [M, K]`` and a pool of routings, ids and scores ``[C, M, k]``."""
        raise NotImplementedError

    def bind(self, copy: int, routing: int) -> Callable[[], Any]:
        """The call that is timed, with everything around it done."""
        raise NotImplementedError

    def result(self, returned: Any) -> Tensor:
        """The output ``[M, N]`` of a call that returned so."""
        return returned


class RefusedError(Exception):
    """The peer does not serve this problem; the message says why."""


@dataclass(frozen=True)
class Matrix:
    """One weight, or a stack of experts, as unsigned codes: ``w = (codes - zeros) * scales``, or ``codes * scales + mins``.

    codes: uint8 [.., N, K]. scales: fp32 [.., N, G], exact as bf16 and as fp16. zeros: fp32 [.., N, G]. mins: fp32 [.., N, G] or None.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    mins: Tensor | None
    group: int
    symmetric: bool

    def expert(self, index: int) -> Matrix:
        mins = None if self.mins is None else self.mins[index]
        return Matrix(self.codes[index], self.scales[index], self.zeros[index], mins, self.group, self.symmetric)

    def rows(self, start: int, stop: int) -> Matrix:
        cut = [t[..., start:stop, :] for t in (self.codes, self.scales, self.zeros)]
        return Matrix(*cut, None if self.mins is None else self.mins[..., start:stop, :], self.group, self.symmetric)

    def dequantized(self) -> Tensor:
        """fp32 [.., N, K]."""
        wide = self.codes.float().unflatten(-1, (-1, self.group))
        zeros = self.zeros[..., None] if self.mins is None else 0.0
        low = 0.0 if self.mins is None else self.mins[..., None]
        return ((wide - zeros) * self.scales[..., None] + low).flatten(-2)


@dataclass(frozen=True)
class Problem:
    """The request that `hal bench` makes, with the sizes that it has for its kind of op."""

    op: str
    dtype: str
    element: str
    bits: int
    zero: str
    granularity: str
    group: int | None
    act_order: bool
    exact: bool
    threads: int
    copies: int
    weights: str
    experts: int = 1
    hidden: int = 0
    intermediate: int = 0
    top_k: int = 0
    n: int = 0
    k: int = 0

    @property
    def parameters(self) -> int:
        return self.experts * self.hidden * self.intermediate * 3 if self.op == "moe" else self.n * self.k

    def copies_of(self, size: float) -> int:
        """How many copies of `size` bytes fill as much as the problem's copies do in its own element type."""
        return max(1, min(self.copies, math.ceil(self.copies * self.parameters * self.bits / 8 / size)))

    def need(self, good: bool, why: str) -> None:
        if not good:
            raise RefusedError(why)

    def need_int4(self) -> None:
        """What every int4 peer here needs."""
        self.need(self.element == "int4" and not self.act_order, f"serves int4 without act-order, not {self.element}")
        self.need(self.granularity in ("group", "channel"), f"serves scales per group, not per {self.granularity}")
        self.need(self.dtype == "bf16", f"is run with bf16 activations, not {self.dtype}")

    def matrices(self) -> dict[str, Matrix]:
        """The weights by role: `weight`, or `gate`, `up` and `down`."""
        stored = load_file(self.weights)
        roles = ("gate", "up", "down") if self.op == "moe" else ("weight",)
        return {role: self._matrix({n.partition(".")[2]: t for n, t in stored.items() if n.startswith(f"{role}.")}) for role in roles}

    def _matrix(self, parts: dict[str, Tensor]) -> Matrix:
        self.need("scales" in parts and self.element in ("int4", "int8"), f"takes integer weights, not {self.element}")
        values = parts["values"]
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        signed, middle = self.zero == "none", 1 << (self.bits - 1)
        codes = (values.view(torch.uint8) ^ middle) if signed else values  # two's complement, moved up by half its range
        scales = parts["scales"].float()
        zeros = parts["zeros"].float() if "zeros" in parts else torch.full_like(scales, float(middle))
        mins = parts["mins"].float() if "mins" in parts else None
        k = codes.shape[-1]
        if self.bits == 4 and signed:
            codes = codes & 15
        return Matrix(codes.contiguous(), scales, zeros, mins, self.group or k, signed)


def pack_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """uint8 codes [.., K] to int32 words [.., K/8]; nibble i of a word is code order[i]."""
    grouped = codes.unflatten(-1, (-1, 8))[..., list(order)].to(torch.int64)
    word = sum(grouped[..., i] << (4 * i) for i in range(8))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32).contiguous()


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def loop_over_experts(x: Tensor, ids: Tensor, scores: Tensor, products: Callable[[int, Tensor], Tensor], experts: int) -> Tensor:
    """A block of experts around one function of an expert and its rows, as engines without a fused op do it."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = ids.flatten().long()
    order = flat.argsort()
    token, weight = order // ids.shape[1], scores.flatten()[order]
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=experts).tolist()):
        if count:
            rows = token[start : start + count]
            y = products(expert, x[rows]).float()
            out.index_add_(0, rows, y * weight[start : start + count, None])
            start += count
    return out.to(x.dtype)


def gated(product: Callable[[Any, Tensor], Tensor], gate_up: Any, down: Any, rows: Tensor) -> Tensor:
    gate, up = product(gate_up, rows).chunk(2, -1)
    return product(down, torch.nn.functional.silu(gate) * up)


def serve(peer: Peer) -> None:
    """Answer requests until standard input ends.

    ``peer.prepare(problem) -> about``; ``peer.load(x, ids, scores)`` with one routing pool; ``peer.bind(copy, routing) -> call``, where
    ``call()`` is what is timed; ``peer.result`` makes a tensor of what it returns.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not stand between the answers
    torch.set_grad_enabled(False)
    torch.set_num_threads(int(os.environ.get("HAL_BENCH_THREADS", "1")))
    for line in sys.stdin:
        try:
            answer = _answer(peer, json.loads(line))
        except RefusedError as error:
            answer = {"refused": str(error)}
        except Exception as error:  # noqa: BLE001  a library may raise anything, the next batch size may do
            answer = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # pools of threads that some libraries keep do not end by themselves


def _answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "prepare":
        about = peer.prepare(Problem(**request["problem"]))
        return {"about": {**about, "versions": {"torch": torch.__version__, **about.get("versions", {})}}}
    if request["do"] == "load":
        parts = load_file(request["inputs"])
        peer.pool = len(parts["ids"]) if "ids" in parts else 1
        peer.load(parts["x"], parts.get("ids"), parts.get("scores"))
        return {"loaded": True}
    if request["do"] == "run":
        return _run(peer, request["start"], request["calls"])
    y = peer.result(peer.bind(0, request["index"] % peer.pool)())
    save_file({"y": y.contiguous()}, request["to"])
    return {"written": True}


def _run(peer: Peer, start: int, calls: int) -> dict[str, Any]:
    seconds, disturbed, y = [], [], None
    for index in range(start, start + calls):
        call = peer.bind(index % peer.copies, index % peer.pool)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        began = time.perf_counter()
        y = call()
        seconds.append(time.perf_counter() - began)
        disturbed.append(resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw != before)
    if not bool(torch.isfinite(peer.result(y)).all()):
        raise RefusedError("wrote results that are not finite")
    return {"seconds": seconds, "disturbed": disturbed}
