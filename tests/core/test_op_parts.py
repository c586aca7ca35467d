"""What ops share: checks of arguments, which torch.compile follows without a break."""

from __future__ import annotations

import pytest
import torch

from hal_core.errors import ShapeError
from hal_core.op_parts import check_grouped, check_out, check_routing, check_rows
from hal_core.ops import Grouped, Routed
from hal_core.schemes import WeightScheme
from hal_core.spec import MoESpec

SCHEME = WeightScheme.parse("int4:g32")
SPEC = MoESpec(4, 2, 64, 64, SCHEME, SCHEME, SCHEME)


def routed(x, ids, weights):
    way = check_routing("experts", SPEC, x, Routed(ids, weights), None)
    rows = check_rows("experts", x, 64, torch.float32, x.device)
    return check_out("experts", None, (len(rows), 64), torch.float32, x.device).copy_(rows * way.topk_weights.sum())


def grouped(x, counts):
    return x * check_grouped("experts", SPEC, x, Grouped(counts), None).sum()


def test_checks_are_traced_whole():
    x, ids, counts = torch.randn(5, 64), torch.zeros(5, 2, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    for function, arguments in ((routed, (x, ids, torch.ones(5, 2))), (grouped, (x, counts))):
        found = torch.compile(function, fullgraph=True, backend="eager")(*arguments)
        assert torch.equal(found, function(*arguments))


@pytest.mark.parametrize(("ids", "weights"), [([[0, 1]] * 5, torch.ones(5, 2)), (torch.zeros(5, 2, dtype=torch.int32), None)])
def test_routing_of_other_things_than_tensors_is_refused(ids, weights):
    with pytest.raises(ShapeError, match="give tensors"):
        routed(torch.randn(5, 64), ids, weights)
