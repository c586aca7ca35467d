"""The native experts op against a plain loop, on every instruction set this machine has."""

from __future__ import annotations

import pytest
import torch
from cpu.native_cases import USABLE, activations, error
from cpu.native_moe import experts, routing

from hal_backend_cpu import _native

ACTIVATIONS = [
    ("silu", None, None), ("silu", None, 0.5), ("silu", 1.3, None), ("gelu", None, None), ("gelu_tanh", None, None), ("relu2", None, None),
    ("swiglu_oai", 1.702, None), ("swiglu_oai", 1.5, 0.7), ("swiglu_oai", None, 7.0),
]  # fmt: skip


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize(("activation", "alpha", "limit"), ACTIVATIONS)
def test_activations(activation, alpha, limit, isa):
    x, (ids, weights) = activations(19, 96), routing(19, 6, 3)
    for gated in (True, False):
        if activation == "swiglu_oai" and not gated:
            continue
        block = experts(activation=activation, alpha=alpha, limit=limit, gated=gated)
        assert error(block.native(x, ids, weights, isa=isa), block.truth(x, ids, weights)) < 5e-6


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("zero", ["none", "zeros", "mins"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_schemes_and_dtypes(tokens, bits, zero, isa):
    # Scaled into the range of fp16.
    block = experts(bits=bits, zero=zero, scaling=1e-4)
    ids, weights = routing(tokens, 6, 4)
    for dtype, bound in ((torch.float32, 5e-6), (torch.bfloat16, 4e-3), (torch.float16, 6e-4)):
        x = activations(tokens, 96, dtype)
        y = block.native(x, ids, weights, isa=isa)
        assert y.dtype == dtype
        assert error(y, block.truth(x, ids, weights)) < bound


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("with_perm", [False, True])
def test_everything_at_once(with_perm, reduce, on_input, isa):
    sizes = (96, 96, 72)
    perms = tuple(torch.stack([torch.randperm(n) for _ in range(6)]).int() if with_perm else None for n in sizes)
    biases = (torch.randn(6, 72), torch.randn(6, 72).bfloat16(), torch.randn(6, 96).half())
    expert_map = torch.tensor([3, -1, 0, 5, 1, -1, 2, 4], dtype=torch.int32)
    block = experts(on_input=on_input, perms=perms, biases=biases, expert_map=expert_map, scaling=2.5)
    x, (ids, weights) = activations(21, 96, torch.bfloat16).float(), routing(21, 8, 4)
    ids[3], ids[4, 1], ids[5] = -1, -1, 7
    y = block.native(x, ids, weights, reduce=reduce, isa=isa)
    assert error(y, block.truth(x, ids, weights, reduce=reduce)) < 5e-6
    assert (y[3] == 0).all()
    if not reduce:
        assert (y[4, 1] == 0).all()


def test_mixed_schemes_in_one_block():
    block, other = experts(zero="mins"), experts(bits=8, zero="none", group=32)
    block.up, block.down = other.up, experts(zero="zeros", group=40).down
    x, (ids, weights) = activations(9, 96), routing(9, 6, 2)
    for isa in USABLE:
        assert error(block.native(x, ids, weights, isa=isa), block.truth(x, ids, weights)) < 5e-6


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_all_tokens_to_one_expert_and_none(tokens):
    block = experts()
    x, weights = activations(tokens, 96), torch.rand(tokens, 2)
    for one in (4, -1):
        ids = torch.full((tokens, 2), one, dtype=torch.int32)
        y = block.native(x, ids, weights)
        assert y.shape == (tokens, 96)
        assert error(y, block.truth(x, ids, weights)) < 5e-6


def test_no_slots():
    y = experts().native(activations(3, 96), torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, 0))
    assert torch.equal(y, torch.zeros(3, 96))


@pytest.mark.parametrize("isa", USABLE)
def test_token_does_not_depend_on_its_batch_or_on_threads(isa):
    block = experts(zero="mins")
    x, (ids, weights) = activations(40, 96, torch.bfloat16), routing(40, 6, 3)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = block.native(x, ids, weights, isa=isa)
        torch.set_num_threads(1)
        assert torch.equal(block.native(x, ids, weights, isa=isa), whole)
        for i in (0, 7, 39):
            assert torch.equal(block.native(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], isa=isa)[0], whole[i])
    finally:
        torch.set_num_threads(threads)


def test_turns_of_tokens_agree_with_one_by_one():
    # 8 slots of 3 x 8192 floats need more than the scratch memory for these tokens.
    block = experts(count=8, hidden=8192, inner=16, group=16)
    x, (ids, weights) = activations(300, 8192), routing(300, 8, 8)
    y = block.native(x, ids, weights)
    assert torch.equal(y[-2:], block.native(x[-2:].contiguous(), ids[-2:].contiguous(), weights[-2:].contiguous()))


@pytest.mark.parametrize("isa", USABLE)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_token_stays_alone_and_shows(bad, isa):
    block = experts()
    x, (ids, weights) = activations(20, 96), routing(20, 6, 3)
    clean = block.native(x, ids, weights, isa=isa)
    dirty = x.clone()
    dirty[7, 5] = bad
    y = block.native(dirty, ids, weights, isa=isa)
    assert not y[7].isfinite().any()
    keep = torch.arange(20) != 7
    assert torch.equal(y[keep], clean[keep])


def test_out_variant_fills_a_poisoned_tensor():
    block = experts()
    x, (ids, weights) = activations(5, 96, torch.bfloat16), routing(5, 6, 2)
    for reduce, shape in ((True, (5, 96)), (False, (5, 2, 96))):
        out = torch.full(shape, float("nan"))
        _native.ops.moe_out(*block.arguments(x, ids, weights, reduce=reduce), out)
        assert error(out, block.truth(x, ids, weights, reduce=reduce)) < 5e-6


@pytest.mark.parametrize("wrong", [6, -2, 10**6, -(2**31), 2**31 - 1])
def test_id_out_of_range_names_token_slot_and_id(wrong):
    block = experts()
    x, (ids, weights) = activations(5, 96), routing(5, 6, 2)
    ids[3, 1] = wrong
    with pytest.raises(RuntimeError, match=f"token 3, slot 1 has expert id {wrong}; expected -1 .* 0 to 5"):
        block.native(x, ids, weights)


@pytest.mark.parametrize("wrong", [6, -2])
def test_map_out_of_range_raises(wrong):
    block = experts(expert_map=torch.tensor([0, wrong], dtype=torch.int32))
    with pytest.raises(RuntimeError, match=rf"expert_map\[1\] is {wrong} \(token 0, slot 0\)"):
        block.native(activations(1, 96), torch.ones(1, 1, dtype=torch.int32), torch.ones(1, 1))


def test_perm_out_of_range_raises():
    for place, size in enumerate((96, 96, 72)):
        perms = [None, None, None]
        perms[place] = torch.full((6, size), size, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="perm of an expert"):
            experts(perms=tuple(perms)).native(activations(2, 96), *routing(2, 6, 2))


# Positions in the op's argument list.
X, IDS, WEIGHTS, GATE, GATE_SCALES, UP, DOWN, MAP, EXPERTS, INNER, GROUP, ACTIVATION, ALPHA, LIMIT, ISA = (
    0, 1, 2, 3, 4, 9, 15, 21, 22, 23, 24, 30, 31, 32, 36,
)  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (X, torch.zeros(4, 80), r"gate_packed has shape .* expected"),
        (X, torch.zeros(96), "expected .tokens, hidden"),
        (X, torch.zeros(96, 4).T, "x of shape .* not contiguous"),
        (X, torch.zeros(4, 96, dtype=torch.int32), "x is int32"),
        (IDS, torch.zeros(4, 2, dtype=torch.int64), "topk_ids is int64; expected int32"),
        (IDS, torch.zeros(3, 2, dtype=torch.int32), r"topk_ids has shape \[3, 2\]"),
        (IDS, torch.zeros(2, 4, dtype=torch.int32).T, "topk_ids .* not contiguous"),
        (WEIGHTS, torch.zeros(4, 2).bfloat16(), "topk_weights is bfloat16"),
        (WEIGHTS, torch.zeros(4, 3), "topk_weights has shape"),
        (GATE, None, "gate_packed is None but"),
        (GATE, torch.zeros(6, 5, 11, 16, dtype=torch.int32), "gate_packed has shape"),
        (GATE_SCALES, torch.zeros(6, 5, 3, 16), "gate_scales has shape"),
        (UP, torch.zeros(5, 5, 12, 16, dtype=torch.int32), "up_packed has shape"),
        (DOWN, torch.zeros(6, 6, 9, 16), "down_packed is float32"),
        (MAP, torch.zeros(6), "expert_map is float32"),
        (MAP, torch.zeros(2, 3, dtype=torch.int32), "expert_map has shape"),
        (EXPERTS, 7, "expected"),
        (EXPERTS, 0, "num_experts is 0"),
        (INNER, 88, "expected"),
        (INNER, 2**60, "n is"),
        (GROUP, 7, "gate_group 7"),
        (ACTIVATION, "tanh", "activation is 'tanh'"),
        (LIMIT, -1.0, "limit is -1"),
        (ISA, "avx1024", "isa is 'avx1024'"),
    ],
)
def test_wrong_arguments_raise_with_their_numbers(place, value, message):
    arguments = experts().arguments(activations(4, 96), *routing(4, 6, 2))
    arguments[place] = value
    with pytest.raises(RuntimeError, match=message):
        _native.ops.moe(*arguments)


def test_swiglu_oai_needs_a_gate_and_alpha_needs_a_sigmoid():
    x, (ids, weights) = activations(4, 96), routing(4, 6, 2)
    with pytest.raises(RuntimeError, match="needs a gate"):
        experts(activation="swiglu_oai", gated=False).native(x, ids, weights)
    with pytest.raises(RuntimeError, match="alpha belongs"):
        experts(activation="gelu", alpha=1.0).native(x, ids, weights)
