"""Every checkpoint layout is a bijection with the canonical tensor."""

from __future__ import annotations

import pytest
import torch
from checkpoints import random_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_core.canonical import QuantizedTensor, pack_nibbles
from hal_core.errors import FormatError
from hal_core.formats.gguf_blocks import block_scheme
from hal_core.formats.gptq_tensors import add_one, subtract_one
from hal_core.layouts import LAYOUTS, layout
from hal_core.schemes import Granularity, WeightScheme, ZeroKind


@st.composite
def schemes(draw) -> WeightScheme:
    granularity = draw(st.sampled_from([Granularity.tensor(), Granularity.channel(), *map(Granularity.groups, (8, 32, 64, 128))]))
    zero = draw(st.sampled_from(list(ZeroKind)))
    bits = draw(st.sampled_from([2, 3, 4, 8]))
    return WeightScheme(f"int{bits}", granularity, zero, act_order=granularity.group is not None and draw(st.booleans()))


@pytest.mark.parametrize("name", list(LAYOUTS))
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_unpack_of_pack_is_the_weight_itself(name, data):
    chosen = layout(name)
    scheme = data.draw(schemes())
    if name.startswith("gguf"):
        scheme = block_scheme(name.removeprefix("gguf:"))
    n, k = data.draw(st.integers(1, 9)) * data.draw(st.sampled_from([1, 8, 16])), data.draw(st.integers(1, 300))
    if data.draw(st.booleans()):
        step = 256 if scheme.granularity.superblock else 32
        n, k = -(-n // 32) * 32, -(-k // step) * step
    seed = data.draw(st.integers(0, 2**32))
    weight = random_weight(
        scheme, n, k, seed, data.draw(st.sampled_from([torch.float16, torch.bfloat16])) if "gguf" not in name else torch.float16
    )
    if chosen.obstacle(scheme, (n, k)):
        with pytest.raises(FormatError, match=f"layout {name}"):
            chosen.pack(weight)
        return
    packed = chosen.pack(weight)
    before = {suffix: tensor.clone() for suffix, tensor in packed.items()}
    again = chosen.unpack(packed, scheme, (n, k))
    assert again.tensors().keys() == weight.tensors().keys()
    for field, tensor in weight.tensors().items():
        assert again.tensors()[field].dtype == tensor.dtype
        assert torch.equal(again.tensors()[field], tensor), field
    assert all(torch.equal(packed[suffix], tensor) for suffix, tensor in before.items()), "unpack changed its input"


@pytest.mark.parametrize(
    ("bits", "version", "word"),
    [(2, "gptq", 0x55555555), (4, "gptq", 0x77777777), (8, "gptq", 0x7F7F7F7F), (4, "gptq_v2", 0x88888888), (2, "gptq_v2", 0xAAAAAAAA)],
)
def test_symmetric_zero_words_are_the_tools_own(bits, version, word):
    weight = random_weight(WeightScheme(f"int{bits}", Granularity.groups(32)), 32, 64, seed=1)
    qzeros = layout(version).pack(weight)["qzeros"]
    assert set(qzeros.flatten().tolist()) == {word - 2**32 if word >= 2**31 else word}


def test_symmetric_3_bit_zero_words_are_the_tools_own():
    qzeros = layout("gptq").pack(random_weight(WeightScheme("int3", Granularity.groups(32)), 32, 32, seed=1))["qzeros"]
    assert [value & 0xFFFFFFFF for value in qzeros[0].tolist()] == [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_plus_one_goes_on_whole_words_so_that_a_zero_point_of_zero_survives(bits):
    count = 32 // bits
    zeros = torch.arange(count).remainder(4).to(torch.uint8).view(1, -1)  # 0, 1, 2, 3, ..: each 0 borrows
    words = subtract_one(zeros, bits)
    fields = torch.tensor([(int(words) >> (bits * i)) + 1 & ((1 << bits) - 1) for i in range(count)], dtype=torch.uint8)
    assert torch.equal(add_one(words, bits, count), zeros.t())
    assert not torch.equal(fields, zeros[0]), "adding field by field would not have done"


def test_awq_columns_interleave():
    codes = torch.arange(8, dtype=torch.uint8).expand(2, 8).t().contiguous()  # row n holds code n
    weight = QuantizedTensor(
        WeightScheme("int4", Granularity.channel(), ZeroKind.INTEGER), (8, 2), pack_nibbles(codes),
        torch.ones(8, 1), zeros=torch.zeros(8, 1, dtype=torch.uint8),
    )  # fmt: skip
    assert layout("awq:gemm").pack(weight)["qweight"].tolist() == [[0x75316420], [0x75316420]]


def test_a_float_weight_has_no_integer_layout():
    weight = QuantizedTensor(WeightScheme("bf16"), (8, 8), torch.zeros(8, 8, dtype=torch.bfloat16))
    for each in LAYOUTS.values():
        with pytest.raises(FormatError):
            each.pack(weight)


def test_unknown_layouts_are_refused_with_the_list():
    with pytest.raises(FormatError, match="gptq_v2"):
        layout("gptq_v3")
