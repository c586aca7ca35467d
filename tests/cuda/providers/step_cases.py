"""Checks of one implementation of the steps; run as a program, those of Triton in the interpreter."""

from __future__ import annotations

import sys

import pytest
import torch
from hal_backend_cuda.providers.steps import Route, TorchSteps

from hal_core.check import check
from hal_core.errors import ShapeError
from hal_core.reference.activations import activate
from hal_core.spec import Activation


def random_route(seed, *, mapped, tokens=None, num_experts=12, top_k=3):
    rng = torch.Generator().manual_seed(seed)
    tokens = (1, 2, 5, 17, 40, 3)[seed % 6] if tokens is None else tokens
    ids = torch.randint(-1, num_experts, (tokens, top_k), generator=rng, dtype=torch.int32)
    ids[torch.rand(ids.shape, generator=rng) < 0.05] = num_experts + 3
    weights = torch.rand(tokens, top_k, generator=rng)
    if not mapped:
        return Route(ids, weights, num_experts, num_experts)
    places = torch.full((num_experts,), -1, dtype=torch.int32)
    places[torch.randperm(num_experts, generator=rng)[:5]] = torch.arange(5, dtype=torch.int32)
    return Route(ids, weights, num_experts, 5, places)


def check_sort(steps, route, block):
    rows = route.ids.numel()
    places = -(-(rows + min(route.experts, rows) * (block - 1)) // block) * block
    found = steps.sort(route, block, places)
    local = route.local().reshape(-1).tolist()
    used = int(found.padded)
    ids, experts = found.ids.tolist(), found.experts.tolist()
    assert used % block == 0
    assert used <= places
    seen = []
    for start in range(0, used, block):
        expert = experts[start // block]
        assert 0 <= expert < route.experts
        inside = [row for row in ids[start : start + block] if row != rows]
        assert all(local[row] == expert for row in inside), (start, expert, inside)
        seen += inside
    assert sorted(seen) == [row for row, expert in enumerate(local) if expert >= 0]


def check_bounds(steps):
    sound, wrong = ([3, 0, 5, 0], [0, 0, 0, 0]), {"-2 rows of expert 1": [3, -2, 1, 4], "2147483647 rows of expert 1": [8, 2**40, 0, 1]}
    none = ("1 rows of expert 2", [0, 0, 1, 0], 0)
    for told, counts, rows in [*(("", each, 21) for each in sound), *((*each, 21) for each in wrong.items()), none]:
        sizes = torch.tensor(counts)
        found, wanted = (torch.full((rows, 300), float("nan")) for _ in range(2))
        assert torch.equal(steps.bounds(sizes, found), TorchSteps().bounds(sizes, wanted))
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), torch.zeros_like(found))
        if told:
            with pytest.raises(ShapeError, match=told):
                check()
        check()


def check_activation(steps, kind, limit, gated):
    rng = torch.Generator().manual_seed(1)
    for rows, width in ((3, 300), (66, 40)):
        y = torch.randn(rows, width * (2 if gated else 1), generator=rng, dtype=torch.float32) * 3
        activation = Activation(kind, limit=limit)
        gate, up = y.chunk(2, dim=-1) if gated else (None, y)
        wanted = activate(activation, up, gate)
        torch.testing.assert_close(steps.activate(y, activation, gated), wanted, rtol=1e-5, atol=1e-5)


def check_reduce(steps, route, summed):
    tokens, k = route.ids.shape
    width = 70
    y = torch.randn(tokens * k, width, generator=torch.Generator().manual_seed(2))
    outside = route.local().reshape(-1) < 0
    y[outside] = float("nan")
    wanted = torch.where(outside[:, None], 0.0, y).view(tokens, k, width) * route.weights[..., None] * 2.5
    wanted = wanted.sum(1) if summed else wanted
    out = torch.full(wanted.shape, float("nan"))
    steps.reduce(y, route, 2.5, out)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def main(part):
    from hal_backend_cuda.providers import fused_steps

    from hal_core.triton import launch

    steps = fused_steps.TritonSteps(torch.device("cpu"))
    if part == "sort":
        for seed in range(6):
            check_sort(steps, random_route(seed, mapped=seed % 2 == 1), (8, 16, 24)[seed % 3])
        check_sort(steps, random_route(0, mapped=False, tokens=2, top_k=4), 8)
        with pytest.raises(ShapeError, match="topk id"):
            check()
        assert all(not bool(s.any()) for s in steps.scratch.values()), "counts are zero again"
    elif part == "bounds":
        check_bounds(steps)
    elif part == "many":
        launch._FEW, launch._CHUNK = 16, 64
        for seed in (3, 4):
            for mapped in (False, True):
                check_sort(steps, random_route(seed, mapped=mapped, tokens=50), 16)
    elif part == "activation":
        for kind in ("silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"):
            check_activation(steps, kind, 0.7 if kind == "silu" else None, gated=True)
            if kind != "swiglu_oai":
                check_activation(steps, kind, 0.7 if kind == "relu2" else None, gated=False)
    else:
        for seed, summed in ((1, False), (2, True), (5, True)):
            check_reduce(steps, random_route(seed, mapped=seed % 2 == 1), summed)


if __name__ == "__main__":
    main(sys.argv[1])
