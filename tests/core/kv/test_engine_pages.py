"""Pages that belong to an engine: what may be asked for, their bytes, scales of a rank, and the op on an engine's tensors."""

import pytest
import torch

import hal_core as hal
from hal_core.errors import HalError, SettingError, ShapeError
from hal_core.integrations.vllm.kv import CacheRequest, LayerPages, rank_params
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KV_SCHEMES
from hal_core.policy import Policy

REFERENCE = Policy.parse("require:reference")


@pytest.mark.parametrize("scheme", ["int8", "int4", "k=int8,v=turboquant:4"])
def test_keys_that_wait_outside_the_pages_are_refused_with_what_to_ask_for_instead(scheme):
    with pytest.raises(SettingError, match=r"wait outside the pages.*use int[48]:token"):
        CacheRequest.parse(scheme)


@pytest.mark.parametrize("text", [8, None, ["int8"], "int9", "", "turboquant"])
def test_what_is_no_scheme_is_refused(text):
    with pytest.raises(HalError):
        CacheRequest.parse(text)


def test_values_that_mean_tokens_anyway_are_taken():
    request = CacheRequest.parse("k=turboquant:4,v=int8")
    assert (str(request), request.token_bytes(128, 64)) == ("k=turboquant:4,v=int8:token", 66 + 66)


def test_a_page_of_any_scheme_is_its_tokens_and_nothing_else():
    for scheme in (each for each in KV_SCHEMES if not each.grouped):
        request = CacheRequest(scheme, scheme.for_values(), REFERENCE)
        spec = hal.KVCacheSpec(6, 3, 80, 48, request.keys, request.values, value_dim=32)
        op = hal.kv_op(spec, KVParams(torch.ones(1), torch.ones(1), "calibrated") if request.scaled else None, policy=REFERENCE)
        assert (op.page_bytes, op.tail_bytes) == (48 * 3 * request.token_bytes(80, 32), 0), scheme


def test_a_rank_gets_the_scales_of_its_heads():
    scales = torch.arange(1.0, 5.0)
    one = KVParams(torch.tensor([2.0]), torch.tensor([3.0]), "calibrated")
    assert rank_params(None, 4, 1, 2) is None
    assert rank_params(one, 4, 1, 2).key_scale.tolist() == [2.0]
    many = KVParams(scales, scales * 10, "calibrated")
    assert [rank_params(many, 4, rank, 2).value_scale.tolist() for rank in range(2)] == [[10, 20], [30, 40]]
    assert [rank_params(many, 4, rank, 8).key_scale.tolist() for rank in range(8)] == [[1], [1], [2], [2], [3], [3], [4], [4]]


@pytest.fixture
def filled():
    """Two requests of 40 and 17 tokens that share no page, in pages of 16 in any order, and the cache of ours that says what is right."""
    request = CacheRequest.parse("k=int8:token,v=turboquant:3", REFERENCE)
    spec = hal.KVCacheSpec(4, 2, 32, 16, request.keys, request.values, dtype="fp32")
    pages = LayerPages(spec, None, REFERENCE, "layers.0")
    cache = torch.full((8, 2, 16, request.token_bytes(32, 32)), 255, dtype=torch.uint8)
    k, v = torch.randn(2, 57, 2, 32)
    table = torch.tensor([[6, 1, 4], [3, 7, 0]], dtype=torch.int32)
    slots = torch.cat([table[row].long()[torch.arange(n) // 16] * 16 + torch.arange(n) % 16 for row, n in enumerate((40, 17))])
    own = hal.kv_cache(spec, policy=REFERENCE)
    own.append(k, v, [own.new(), own.new()], [40, 17])
    return pages, cache, k, v, slots, table, own


def test_attention_over_an_engines_pages_is_that_of_our_own_cache(filled):
    pages, cache, k, v, slots, table, own = filled
    # rows beyond the mapping are padding, and a slot of -1 is skipped
    more = torch.cat([k, k.new_full((3, 2, 32), float("nan"))])
    pages.append(cache, more, torch.cat([v, more[:3]]), torch.cat([slots, torch.tensor([-1])]))
    q, out = torch.randn(6, 4, 32), torch.full((6, 4, 32), float("nan"))
    lengths, starts = torch.tensor([40, 17], dtype=torch.int32), torch.tensor([0, 5, 6], dtype=torch.int32)
    pages.attend(q, cache, table, lengths, starts, scale=0.3, causal=True, sinks=None, out=out)
    assert torch.equal(out, own.attend(q, own.ids, [5, 1], scale=0.3)[0])


def test_pages_of_another_shape_or_type_are_refused_and_not_written(filled):
    pages, cache, k, v, slots, _, _ = filled
    for wrong in (cache[..., :-1].contiguous(), cache.view(torch.int8), cache[:, :, ::2], cache.transpose(1, 2).contiguous()):
        with pytest.raises(ShapeError, match="contiguous uint8"):
            pages.append(wrong, k, v, slots)
    assert bool((cache == 255).all())


def test_a_policy_that_cannot_be_met_is_an_error_when_the_layer_is_made():
    keys, values = hal.KVScheme.pair("turboquant:4")
    with pytest.raises(HalError, match="nowhere"):
        LayerPages(hal.KVCacheSpec(4, 2, 32, 16, keys, values), None, Policy.parse("require:kv=nowhere.*"), "layers.3")
