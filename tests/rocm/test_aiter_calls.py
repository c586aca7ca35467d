"""Every call into AITER fits the published release and our table of a newer source; what it rests on is where we say it is."""

from __future__ import annotations

import inspect
import re
import sys
import types

import aiter_source
import pytest
from aiter_source import CITED
from hal_backend_rocm.aiter_provider import VERSIONS
from hal_backend_rocm.aiter_provider.attention import ATTEND, STORE, attention_refusals
from hal_backend_rocm.aiter_provider.calls import NEWER, bind, signature_from
from hal_backend_rocm.aiter_provider.entries import LINEARS, MOES
from packaging.specifiers import SpecifierSet

from hal_core.calls import Call, resolve
from hal_core.errors import ContractError, MissingDependencyError
from hal_core.kv.scheme import KVScheme
from hal_core.spec import KVCacheSpec

BF16 = KVScheme("bf16")
ENTRIES = (*MOES, *LINEARS)
CALLS = {**{entry.name: entry.call for entry in ENTRIES}, "store": STORE, "attend": ATTEND}
MOE = MOES[1].call


@pytest.mark.parametrize("name", CALLS)
def test_every_call_binds_to_the_published_release(name):
    call = CALLS[name]
    signature = aiter_source.signature(call.function)
    taken = resolve(call, signature)
    assert set(call.keywords) - set(call.optional) <= taken
    signature.bind(**dict.fromkeys(taken))


@pytest.mark.parametrize("name", CALLS)
def test_every_call_binds_to_the_newer_source(name):
    signature = signature_from(NEWER[CALLS[name].function])
    signature.bind(**dict.fromkeys(resolve(CALLS[name], signature)))


@pytest.mark.parametrize("path", NEWER)
def test_the_newer_source_only_adds(path):
    """A parameter that goes away, or one without a default that comes, is a difference to be looked at."""
    older, newer = aiter_source.signature(path), signature_from(NEWER[path])
    assert set(older.parameters) - set(newer.parameters) == set()
    assert {n for n in newer.parameters if newer.parameters[n].default is inspect.Parameter.empty} == {
        n for n in older.parameters if older.parameters[n].default is inspect.Parameter.empty
    }


def test_the_release_is_within_the_versions_served():
    assert SpecifierSet(VERSIONS).contains(aiter_source.RELEASE, prereleases=True)
    assert not SpecifierSet(VERSIONS).contains("0.1.5", prereleases=True)


def test_optional_keywords_alone_may_be_dropped():
    names = [name for name in MOE.keywords if name not in MOE.optional]
    assert resolve(MOE, signature_from(" ".join(names))) == set(names)
    with pytest.raises(ContractError, match="does not take w2_scale"):
        resolve(MOE, signature_from(" ".join(name for name in names if name != "w2_scale")))
    with pytest.raises(ContractError, match="does not take dtype and needs topk_scale"):
        resolve(MOE, signature_from(" ".join([*(name for name in names if name != "dtype"), "topk_scale"])))


def module_with(monkeypatch, function) -> None:
    found = types.ModuleType("aiter.fused_moe")
    if function is not None:
        found.fused_moe = function
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", found)


def test_a_bound_call_passes_what_is_taken(monkeypatch):
    module_with(monkeypatch, lambda a, b=1: (a, b))
    call = Call("aiter.fused_moe.fused_moe", ("a", "b", "c"), ("c",))
    assert bind(call)({"a": 4, "b": 5, "c": 6}) == (4, 5)
    with pytest.raises(ContractError, match="does not take c"):
        bind(Call(call.function, ("a", "c")))


def test_a_function_that_hides_its_parameters_is_judged_by_the_table(monkeypatch):
    module_with(monkeypatch, lambda *a, **k: k)
    assert bind(MOE).keywords == set(MOE.keywords)
    with pytest.raises(ContractError, match="does not take nothing_known"):
        bind(Call(MOE.function, (*MOE.keywords, "nothing_known")))


def test_what_is_missing_is_named(monkeypatch):
    module_with(monkeypatch, None)
    with pytest.raises(ContractError, match=r"aiter\.fused_moe has no fused_moe"):
        bind(MOE)
    monkeypatch.setitem(sys.modules, "aiter.fused_moe", None)
    with pytest.raises(MissingDependencyError, match="pip install --pre amd-aiter"):
        bind(MOE)


def test_conditions_stand_where_they_are_cited():
    cited = " ".join(text for e in ENTRIES for text in (e.target_source, e.activation_source, *(c.source for c in e.conditions)))
    cited += "".join(reason.found for reason in attention_refusals(KVCacheSpec(17, 1, 64, 16, BF16, BF16), "gfx942"))
    assert set(re.findall(r"(?:aiter|csrc|3rdparty)/[\w/.]+:[\d-]+", cited)) <= set(CITED)
    for place, wanted in CITED.items():
        name, _, lines = place.rpartition(":")
        first, _, last = lines.partition("-")
        member = name if name.startswith("aiter/") else f"aiter_meta/{name}"
        shown = "\n".join(aiter_source.text(member).splitlines()[int(first) - 1 : int(last or first)])
        assert re.search(wanted, shown), f"{place}: {shown}"


def test_every_tile_of_the_first_stage_divides_the_multiple_that_is_asked():
    wheel = aiter_source.wheel()
    names = [n for n in wheel.namelist() if re.search(r"fmoe_2stages/fmoe_stage1_bf16_pertoken(Fp8|Int8|Fp8_blockscale)_g1u1\.csv$", n)]
    assert len(names) == 6
    for name in names:
        rows = [line.split(",") for line in wheel.read(name).decode().split()]
        sizes = {int(row[rows[0].index("tile_n")]) for row in rows[1:]}
        assert any(128 % size == 0 for size in sizes), name
