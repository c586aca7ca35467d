"""Every call into vllm-xpu-kernels and auto-round-lib fits the published wheels; what their limits rest on is where we say it is."""

from __future__ import annotations

import re
import sys
import types

import provider_wheels
import pytest
import torch
from hal_backend_xpu.providers.entries import LINEARS, MOES
from hal_backend_xpu.providers.libraries import ARK, VLLM, bound
from packaging.specifiers import SpecifierSet

from hal_core.calls import bind, resolve, schema_signature
from hal_core.errors import ContractError, MissingDependencyError

CALLS = sorted({call for entry in (*MOES, *LINEARS) for _, call in entry.calls}, key=lambda call: call.function)


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.function)
def test_every_call_binds_to_the_published_wheel(call):
    signature = provider_wheels.signature(call.through or call.function)
    taken = resolve(call, signature)
    assert set(call.keywords) - set(call.optional) <= taken
    given = dict.fromkeys(taken)
    signature.bind(**given, **({"self": None} if "self" in signature.parameters else {}))


def test_the_wheels_are_within_the_versions_served():
    assert SpecifierSet(VLLM.versions).contains("0.1.16.2")
    assert SpecifierSet(ARK.versions).contains("0.16.0")


def test_an_op_is_bound_by_its_schema():
    library = torch.library.Library("hal_test_schemas", "DEF")
    library.define("product(Tensor A, Tensor? B, int group, *, bool fast=False) -> Tensor")
    call = next(c for c in CALLS if c.function.endswith("fp8_gemm_w8a16"))
    with pytest.raises(ContractError, match="does not take B_scale_, bias_ and needs group"):
        bind(call, torch.ops.hal_test_schemas.product)
    assert [*schema_signature(torch.ops.hal_test_schemas.product.default._schema).parameters] == ["A", "B", "group", "fast"]


@pytest.mark.parametrize(("library", "entry"), [(VLLM, LINEARS[0]), (ARK, LINEARS[-1])], ids=["vllm", "ark"])
def test_what_is_missing_is_named(library, entry, monkeypatch):
    _, call = entry.calls[0]
    for module in library.loads:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=re.escape(library.install)):
        bound(library, call)
    for module in library.loads:
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.raises((ContractError, MissingDependencyError), match=re.escape(call.function)):
        bound(library, call)


#: What stands in the published sources where an entry's limits cite them.
CITED = {
    "fused_moe_interface.py": (provider_wheels.VLLM, "vllm_xpu_kernels/fused_moe_interface.py", r"only support default zero point now"),
    "_validate_moe_quant_args": (provider_wheels.ARK, "auto_round_kernel/__init__.py", r"if N % 16 != 0"),
    "qlinear.py": (
        provider_wheels.ARK,
        "auto_round_kernel/qlinear.py",
        r"infeatures // 32 \* self\.bits(.|\n)*outfeatures // 32 \* self\.bits",
    ),
    "post_init": (provider_wheels.ARK, "auto_round_kernel/qlinear.py", r"Asymmetric quantization is only supported on CPU devices"),
}


@pytest.mark.parametrize("place", CITED)
def test_limits_stand_where_they_are_cited(place):
    wheel, member, wanted = CITED[place]
    assert re.search(wanted, wheel.text(member))


@pytest.mark.parametrize(
    ("library", "wanted"),
    [("xe_default", b"only supports BFloat16 and Half dtypes"), ("xe_2", b"w4a16_policy")],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_quantized_experts_are_in_the_library_of_xe2_alone(library, wanted):
    found = provider_wheels.VLLM.wheel().read(f"vllm_xpu_kernels/libgrouped_gemm_{library}.so")
    assert wanted in found
    assert (b"w4a16_policy" in found) == (library == "xe_2")
