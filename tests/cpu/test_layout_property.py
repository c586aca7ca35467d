"""The kernels' own layout reverses: a packed weight gives back the canonical tensor it was made of, bit for bit."""

from __future__ import annotations

import checkpoints
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hal_backend_cpu.constants import LAYOUT
from hal_backend_cpu.layout import PackedMatrix
from hal_core.canonical import stack
from hal_core.registry import default_registry
from hal_core.schemes import Granularity, WeightScheme, ZeroKind

GRANULARITIES = (Granularity.tensor(), Granularity.channel(), *map(Granularity.groups, (8, 16, 24, 32, 64, 128)))


@st.composite
def weights(draw):
    granularity, zero = draw(st.sampled_from(GRANULARITIES)), draw(st.sampled_from(list(ZeroKind)))
    act_order = granularity.group is not None and draw(st.booleans())
    scheme = WeightScheme(f"int{draw(st.sampled_from([4, 8]))}", granularity, zero, act_order)
    n, k = draw(st.integers(1, 70)), draw(st.integers(1, 300))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    seed, experts = draw(st.integers(0, 2**32)), draw(st.sampled_from([0, 0, 1, 3]))
    # groups that lie in memory order, of which only the last is short, are what this layout takes
    assume(not act_order or k > granularity.group)
    found = [checkpoints.random_weight(scheme, n, k, seed + index, dtype) for index in range(max(1, experts))]
    return stack(found, experts) if experts else found[0]


@settings(max_examples=250, deadline=None)
@given(weights())
def test_unpack_of_pack_is_the_weight_itself(weight):
    again = PackedMatrix(weight).unpack()
    assert (again.scheme, again.shape) == (weight.scheme, weight.shape)
    assert again.tensors().keys() == weight.tensors().keys()
    for name, tensor in weight.tensors().items():
        found = again.tensors()[name]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.contiguous().flatten().view(torch.uint8), tensor.contiguous().flatten().view(torch.uint8)), name


def test_integer_kernels_declare_that_layout():
    kernels = [each for each in default_registry().kernels() if each.name.startswith("cpu.linear_avx")]
    assert kernels
    assert LAYOUT in {each.kernel.layout for each in kernels}
