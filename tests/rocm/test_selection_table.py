"""What is selected on an MI300X and an MI355X, from stored facts: with AITER, without it, with a wrong one, with another torch.

Each row: machine, what is installed, spec, the kernel chosen, and the reason for which AITER's kernel or the expected one is not.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from aiter_source import CITED, LINES
from hal_backend_rocm.aiter_provider.kernels import KERNELS as PROVIDED
from hal_backend_rocm.kernels import KERNELS

from hal_core.errors import NoKernelError
from hal_core.kv.scheme import parse_pair
from hal_core.machine import Version
from hal_core.numerics import ActivationQuant, Numerics, numerics_from_word
from hal_core.policy import Policy
from hal_core.probe import probe_from
from hal_core.registry import BackendRow, RegisteredKernel
from hal_core.schemes import WeightScheme
from hal_core.select import candidates_from, select_from
from hal_core.spec import Activation, KVCacheSpec, LinearSpec, MoESpec
from hal_core.stored import load_facts

PLACE = r"(?:aiter|csrc|3rdparty)/[\w/.]+:[\d-]+"
ALL = tuple(RegisteredKernel(f"rocm.{kernel.name}", "rocm", kernel) for kernel in (*KERNELS, *PROVIDED))
ROCM, AITER = Version("torch", "2.11.0+rocm7.1"), Version("amd-aiter", "0.1.7.post2.dev18")
SOFTWARE = {
    "aiter": (ROCM, AITER),
    "plain": (ROCM,),
    "old": (ROCM, Version("amd-aiter", "0.1.5")),
    "newer": (ROCM, Version("amd-aiter", "0.1.9")),
    "cuda torch": (Version("torch", "2.13.0"), AITER),
}


def moe(scheme, word="exact", hidden=2048, inner=768, **more):
    s, numerics = WeightScheme.parse(scheme), FOUR if word == "mxfp4" else numerics_from_word(word)
    return MoESpec(128, 8, hidden, inner, s, s, s, numerics=numerics, **more)


def linear(scheme, word="exact", n=4096, k=2048, **more):
    return LinearSpec(n, k, WeightScheme.parse(scheme), numerics=numerics_from_word(word), **more)


def cache(scheme="bf16", head_dim=128, page_size=16, **more):
    return KVCacheSpec(32, 8, head_dim, page_size, *parse_pair(scheme), **more)


#: What a checkpoint with MXFP4 weights and activations asks.
FOUR = Numerics((ActivationQuant("mxfp4", "g32"),))
PTPC, BLOCK, BF16, INT8 = moe("fp8_e4m3:channel", "fp8"), moe("fp8_e4m3:b128x128", "fp8"), moe("bf16"), moe("int8:channel", "int8")
GPT_OSS = moe("mxfp4:g32", hidden=2880, inner=2880, activation=Activation("swiglu_oai", 1.702, 7.0), bias=True)
#: machine, software, spec, chosen (None: nothing), the kernel asked about and the code of its first reason ("": it could serve too).
ROWS = (
    ("mi300x", "aiter", BF16, "moe_aiter_bf16", "moe_bf16_triton", ""),
    ("mi300x", "aiter", PTPC, "moe_aiter_fp8_ptpc", "moe_fp8_rows_fnuz_triton", ""),
    ("mi300x", "aiter", BLOCK, "moe_aiter_fp8_block", "moe_fp8_triton", "device.arch"),
    ("mi300x", "aiter", INT8, "moe_aiter_int8", "moe_triton", ""),
    ("mi300x", "aiter", moe("int8:channel"), "moe_triton", "moe_aiter_int8", "numerics.activations"),
    ("mi300x", "aiter", moe("int4:g32"), "moe_triton", "moe_aiter_int8", "scheme.dtype"),
    ("mi300x", "aiter", moe("fp8_e4m3:channel", "fp8", inner=192), "moe_fp8_rows_fnuz_triton", "moe_aiter_fp8_ptpc", "shape.multiple"),
    ("mi300x", "aiter", moe("fp8_e4m3:b128x128", "fp8", inner=704), "moe_fp8_fnuz_triton", "moe_aiter_fp8_block", "shape.multiple"),
    ("mi300x", "aiter", moe("bf16", inner=760), "moe_bf16_triton", "moe_aiter_bf16", "shape.multiple"),
    ("mi300x", "aiter", moe("bf16", bias=True), "moe_bf16_triton", "moe_aiter_bf16", "epilogue.bias"),
    ("mi300x", "aiter", moe("bf16", activation=Activation("gelu")), "moe_bf16_triton", "moe_aiter_bf16", "epilogue.activation"),
    ("mi300x", "aiter", moe("bf16", router_weight_on_input=True), "moe_bf16_triton", "moe_aiter_bf16", "epilogue.router_weight_on_input"),
    ("mi300x", "aiter", moe("bf16", expert_map=True, local_experts=64), "moe_bf16_triton", "moe_aiter_bf16", "epilogue.expert_map"),
    ("mi300x", "aiter", moe("fp8_e4m3:tensor", "fp8"), "moe_fp8_rows_fnuz_triton", "moe_aiter_fp8_ptpc", "scheme.granularity"),
    ("mi300x", "aiter", moe("fp16", dtype="fp16"), "moe_fp16_triton", "moe_aiter_bf16", "scheme.dtype"),
    ("mi300x", "aiter", moe("fp8_e4m3:channel"), None, "moe_aiter_fp8_ptpc", "numerics.activations"),
    ("mi300x", "plain", BF16, "moe_bf16_triton", "moe_aiter_bf16", "backend.package"),
    ("mi300x", "plain", PTPC, "moe_fp8_rows_fnuz_triton", "moe_fp8_rows_triton", "device.arch"),
    ("mi300x", "plain", BLOCK, "moe_fp8_fnuz_triton", "moe_aiter_fp8_block", "backend.package"),
    ("mi300x", "old", PTPC, "moe_fp8_rows_fnuz_triton", "moe_aiter_fp8_ptpc", "backend.package"),
    ("mi300x", "cuda torch", PTPC, None, "moe_aiter_fp8_ptpc", "backend.torch"),
    ("mi300x", "cuda torch", moe("int4:g128"), None, "moe_triton", "backend.torch"),
    ("mi355x", "aiter", BF16, "moe_aiter_bf16", "moe_bf16_triton", ""),
    ("mi355x", "aiter", PTPC, "moe_aiter_fp8_ptpc", "moe_fp8_rows_triton", ""),
    ("mi355x", "aiter", BLOCK, "moe_aiter_fp8_block", "moe_fp8_fnuz_triton", "device.arch"),
    ("mi355x", "aiter", INT8, "moe_triton", "moe_aiter_int8", "device.arch"),
    ("mi355x", "aiter", moe("mxfp4:g32"), None, "moe_triton", "scheme.dtype"),
    ("mi355x", "plain", PTPC, "moe_fp8_rows_triton", "moe_fp8_rows_fnuz_triton", "device.arch"),
    ("mi355x", "plain", BLOCK, "moe_fp8_triton", "moe_aiter_fp8_block", "backend.package"),
    ("mi355x", "cuda torch", BF16, None, "moe_bf16_triton", "backend.torch"),
    ("mi300x", "aiter", linear("int8:channel", "int8"), "linear_aiter_a8w8_int8", "linear_triton", ""),
    ("mi300x", "aiter", linear("int8:channel"), "linear_triton", "linear_aiter_a8w8_int8", "numerics.activations"),
    ("mi300x", "aiter", linear("fp8_e4m3:channel", "fp8"), "linear_aiter_a8w8_fp8", "linear_fp8_rows_triton", "device.arch"),
    ("mi300x", "aiter", linear("fp8_e4m3:channel", "fp8", n=4100), "linear_fp8_rows_fnuz_triton", "linear_aiter_a8w8_fp8",
     "shape.multiple"),
    ("mi300x", "aiter", linear("fp8_e4m3:channel", "fp8", bias=True), "linear_fp8_rows_fnuz_triton", "linear_aiter_a8w8_fp8",
     "epilogue.bias"),
    ("mi300x", "aiter", linear("fp8_e4m3:b128x128", "fp8", k=2000), "linear_fp8_fnuz_triton", "linear_aiter_a8w8_fp8_block",
     "shape.multiple"),
    ("mi300x", "plain", linear("int4:g128"), "linear_triton", "linear_aiter_a8w8_int8", "scheme.dtype"),
    ("mi355x", "aiter", linear("fp8_e4m3:b128x128", "fp8"), "linear_aiter_a8w8_fp8_block", "linear_fp8_triton", ""),
    ("mi355x", "plain", linear("fp8_e4m3:channel", "fp8"), "linear_fp8_rows_triton", "linear_aiter_a8w8_fp8", "backend.package"),
    ("mi355x", "aiter", linear("bf16"), None, "linear_triton", "scheme.dtype"),
    ("mi300x", "aiter", moe("int4:channel", "fp8"), "moe_aiter_int4_fp8", "moe_triton", ""),
    ("mi355x", "aiter", moe("int4:channel", "fp8"), "moe_aiter_int4_fp8", "moe_aiter_fp8_ptpc", "scheme.dtype"),
    ("mi300x", "aiter", moe("int4:channel"), "moe_triton", "moe_aiter_int4_fp8", "numerics.activations"),
    ("mi300x", "aiter", moe("int4:channel", "fp8", inner=704), "moe_triton", "moe_aiter_int4_fp8", "shape.multiple"),
    ("mi355x", "aiter", moe("int4:g128", "fp8"), "moe_triton", "moe_aiter_int4_fp8", "scheme.granularity"),
    ("mi355x", "aiter", moe("mxfp4:g32", "mxfp4"), "moe_aiter_mxfp4", "moe_aiter_mxfp4_bf16", "epilogue.activation"),
    ("mi355x", "aiter", moe("mxfp4:g32", "mxfp4", inner=704), "moe_aiter_mxfp4", "moe_triton", "scheme.dtype"),
    ("mi355x", "aiter", moe("mxfp4:g32"), None, "moe_aiter_mxfp4", "numerics.activations"),
    ("mi300x", "aiter", moe("mxfp4:g32", "mxfp4"), None, "moe_aiter_mxfp4", "device.arch"),
    ("mi355x", "aiter", GPT_OSS, "moe_aiter_mxfp4_bf16", "moe_aiter_mxfp4", "epilogue.bias"),
    ("mi355x", "newer", GPT_OSS, None, "moe_aiter_mxfp4_bf16", "backend.package"),
    ("mi300x", "aiter", GPT_OSS, None, "moe_aiter_mxfp4_bf16", "device.arch"),
    ("mi300x", "aiter", cache(), "kv_aiter", "", ""),
    ("mi355x", "aiter", cache("fp16", 64, 32, dtype="fp16"), "kv_aiter", "", ""),
    ("mi300x", "plain", cache(), None, "kv_aiter", "backend.package"),
    ("mi355x", "aiter", cache(head_dim=256), None, "kv_aiter", "kv.head_dim"),
    ("mi355x", "aiter", cache(page_size=64), None, "kv_aiter", "shape.range"),
    ("mi300x", "aiter", cache(window=4096), None, "kv_aiter", "epilogue.window"),
    ("mi300x", "aiter", cache("fp8"), None, "kv_aiter", "kv.scheme"),
)  # fmt: skip


def chosen(machine, spec):
    candidates = candidates_from(spec, machine, Policy.parse("auto"), ALL)
    try:
        (interval,) = select_from(spec, machine, Policy.parse("auto"), ALL).intervals
    except NoKernelError:
        return None, candidates
    return interval.kernel.removeprefix("rocm."), candidates


@pytest.mark.parametrize(("name", "software", "spec", "wanted", "other", "code"), ROWS, ids=lambda v: v if isinstance(v, str) else None)
def test_selection_is_as_the_table_says(name, software, spec, wanted, other, code):
    machine = replace(load_facts(name), versions=SOFTWARE[software])
    found, candidates = chosen(machine, spec)
    assert found == wanted
    if not other:
        return
    (asked,) = (c for c in candidates if c.kernel == f"rocm.{other}")
    codes = [reason.code for reason in asked.refusals]
    assert (code in codes) if code else not codes, codes


def test_the_table_covers_both_machines_and_every_kernel():
    assert len(ROWS) >= 30
    named = {name for row in ROWS for name in (row[3], row[4])}
    assert {kernel.name for kernel in PROVIDED} <= named
    assert {kernel.name for kernel in KERNELS} <= named


def test_aiters_reasons_cite_its_own_lines():
    machine = replace(load_facts("mi300x"), versions=SOFTWARE["aiter"])
    _, candidates = chosen(machine, moe("fp8_e4m3:channel", "fp8", inner=192))
    (asked,) = (c for c in candidates if c.kernel == "rocm.moe_aiter_fp8_ptpc")
    (reason,) = asked.refusals
    assert reason.asked == "intermediate=192"
    assert "asm_moe_2stage.cu:187" in reason.found


@pytest.mark.parametrize(
    ("software", "told"),
    [
        ("aiter", []),
        ("plain", ["amd-aiter", "not installed"]),
        ("newer", ["moe_aiter_mxfp4_bf16", "version 0.1.9"]),
        ("cuda torch", ["every kernel", "torch built for ROCm"]),
    ],
)
def test_probe_says_what_is_missing(software, told):
    machine = replace(load_facts("mi300x"), versions=SOFTWARE[software])
    hints = probe_from(machine, (BackendRow("rocm", "hal-backend-rocm", "1", "ready"),), ALL).hints
    found = [hint for hint in hints if hint.startswith("rocm: ")]
    assert bool(found) == bool(told)
    assert all(part in "".join(found) for part in told)


@pytest.mark.parametrize(
    ("software", "spec", "told"),
    [
        ("aiter", moe("bf16", bias=True), "in place of amd-aiter:\n  rocm.moe_aiter_bf16: [epilogue.bias]"),
        ("plain", PTPC, "amd-aiter cannot be called, so other kernels of rocm serve in its place:\n  [backend.package]"),
        ("aiter", moe("int4:g128"), None),
    ],
)
def test_a_selection_says_that_aiter_did_not_serve(software, spec, told):
    machine = replace(load_facts("mi300x"), versions=SOFTWARE[software])
    notes = select_from(spec, machine, Policy.parse("auto"), ALL).notes
    assert len(notes) == (told is not None)
    assert told is None or told in notes[0]


def cited(name, software, spec, wanted, other, code) -> str:
    """Where AITER states what the row rests on; empty where it is not asked. Of a kernel that was taken, its first condition."""
    machine = replace(load_facts(name), versions=SOFTWARE[software])
    asked = next((kernel for kernel in PROVIDED if kernel.name == (other if code else wanted)), None)
    if asked is None or code.startswith("backend."):
        asked, code = next((kernel for kernel in PROVIDED if kernel.name == wanted), None), ""
    if asked is None:
        return ""
    told = [reason.found for reason in asked.refusals(spec, machine) if reason.code == code]
    entry = getattr(asked, "_entry", None)
    told += [condition.source for condition in entry.conditions if not code] if entry else []
    told.append(LINES[spec.op].get(code, ""))
    return next((match[0] for match in (re.search(PLACE, text) for text in told) if match), "")


def test_rows_rest_on_lines_of_aiter():
    found = [place for place in (cited(*row) for row in ROWS) if place]
    assert len(found) >= 30
    assert set(found) <= set(CITED), "lines that test_aiter_calls.py looks at"


def row_of_docs(name, software, spec, wanted, other, code) -> str:
    """The row as docs/backend-rocm.md lists it."""
    place = cited(name, software, spec, wanted, other, code)
    told = str(spec).replace("moe E128 k8 H2048 ", "experts ")
    machine = {"mi300x": "MI300X", "mi355x": "MI355X"}[name]
    served = f"`{wanted}`" if wanted else "nothing"
    instead = f"`{other}`: {f'`{code}`' if code else 'lower priority'}" if other else "no other is there"
    return f"| {machine} | {software} | {told} | {served} | {instead} | {place or '-'} |"


def test_docs_list_every_row(repository):
    lines = (repository / "docs" / "backend-rocm.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in (row_of_docs(*row) for row in ROWS) if line not in lines] == []
