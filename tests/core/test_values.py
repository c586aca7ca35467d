"""Every value: JSON there and back, hashable, and its own rules."""

from __future__ import annotations

import json

import pytest
from core import strategies as gen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal_core.errors import ContractError, ValueDecodeError
from hal_core.explain import Explanation
from hal_core.jsonable import dumps, from_json, loads
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Device, Machine
from hal_core.manifest import BackendManifest
from hal_core.probe import Probe
from hal_core.refusal import CODES, Refusal
from hal_core.registry import BackendRow
from hal_core.schemes import ActivationScheme, Granularity, WeightScheme, ZeroKind
from hal_core.selection import Interval, Selection
from hal_core.spec import Activation, EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec, spec_from_json, spec_to_json

INT8 = WeightScheme("int8")
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
VALUES = {
    WeightScheme: gen.schemes,
    ActivationScheme: gen.activation_schemes,
    LinearSpec: gen.linear_specs,
    EmbeddingSpec: gen.embedding_specs,
    MoESpec: gen.moe_spec(),
    KVCacheSpec: gen.kv_spec(),
    Machine: gen.machines,
    BackendManifest: gen.manifests,
    BackendRow: gen.rows,
    Refusal: gen.refusals,
    Selection: gen.selection(),
}


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
@FEW
@given(data=st.data())
def test_json_round_trip(cls, data):
    value = data.draw(VALUES[cls])
    text = dumps(value)
    again = loads(cls, text)
    assert again == value
    assert hash(again) == hash(value)
    assert dumps(again) == text


@pytest.mark.parametrize("cls", VALUES, ids=lambda cls: cls.__name__)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_an_unknown_field_is_an_error(cls, data):
    plain = json.loads(dumps(data.draw(VALUES[cls])))
    with pytest.raises(ValueDecodeError, match=f"surprise: unknown field of {cls.__name__}"):
        from_json(cls, {**plain, "surprise": 1})


@FEW
@given(spec=gen.specs)
def test_specs_round_trip_with_their_op(spec):
    assert spec_from_json(json.loads(json.dumps(spec_to_json(spec)))) == spec
    assert str(spec)


@FEW
@given(scheme=gen.schemes)
def test_scheme_text_is_its_inverse(scheme):
    assert WeightScheme.parse(str(scheme)) == scheme


@FEW
@given(granularity=gen.activation_granularities)
def test_granularity_text_is_its_inverse(granularity):
    assert Granularity.parse(str(granularity)) == granularity


@FEW
@given(selection=gen.selection(), candidates=st.lists(gen.candidate(), max_size=2))
def test_explanations_round_trip(selection, candidates):
    for value in (
        Explanation(selection.spec, "auto", selection.candidates, selection),
        Explanation(selection.spec, "require:x", tuple(candidates), None, "why"),
    ):
        assert Explanation.from_json(value.dumps()) == value
        assert str(value)


@FEW
@given(machine=gen.machines, rows=st.lists(gen.rows, max_size=3), hints=st.lists(gen.words, max_size=2))
def test_probes_round_trip(machine, rows, hints):
    value = Probe("1.0", machine, tuple(rows), tuple(hints))
    assert Probe.from_json(value.dumps()) == value
    assert str(value)


@pytest.mark.parametrize(
    "text",
    [
        "", "int4:", "int4:g", "int4:g0", "int4:g-1", "int4:g+1", "int4:g1_0", "int4:g 32", "int4:g32:g64", "int4:zero:g32", "int9:g32",
        "int4:b128", "int4:b0x1", "int4:act_order", "int4:token", "bf16:g128", "fp32:zero", "int4:g99999999999", "int4:g٣", "INT4:g32",
    ],
)  # fmt: skip
def test_scheme_texts_that_mean_nothing(text):
    with pytest.raises(ValueDecodeError):
        WeightScheme.parse(text)


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        (lambda: Granularity.parse("row"), "granularity 'row'"),
        (lambda: WeightScheme("int4", Granularity.token()), "weights have no tokens"),
        (lambda: WeightScheme("bf16", zero=ZeroKind.INTEGER), "unquantized weight has none"),
        (lambda: WeightScheme("int4", act_order=True), "give a group size"),
        (lambda: ActivationScheme("float", Granularity.token()), "activation dtype 'float'"),
        (lambda: LinearSpec(0, 8, WeightScheme("int8")), "LinearSpec.n: 0 is not between"),
        (lambda: LinearSpec(8, 1 << 31, WeightScheme("int8")), "LinearSpec.k"),
        (lambda: LinearSpec(8, 8, WeightScheme("int8"), dtype="int8"), "LinearSpec.dtype"),
        (lambda: EmbeddingSpec(8, -1, WeightScheme("int8")), "EmbeddingSpec.dim"),
        (lambda: MoESpec(4, 5, 8, 8, INT8, INT8), "exceeds num_experts 4"),
        (lambda: MoESpec(4, 1, 8, 8, INT8, INT8, local_experts=5), "exceeds num_experts 4"),
        (lambda: MoESpec(4, 1, 8, 8, INT8, INT8, routing="top"), "MoESpec.routing"),
        (lambda: KVCacheSpec(6, 4, 8, 8, KVScheme("fp8"), KVScheme("fp8")), "not a multiple of num_kv_heads 4"),
        (lambda: Activation("swish"), "activation.kind"),
        (lambda: Activation(limit=0.0), "activation.limit"),
        (lambda: Device("tpu", "v", "a", "n"), "device.kind"),
        (lambda: Device("cpu", "v", "a", "n", units=0), "device.units"),
        (lambda: Device("cpu", "v", "a", "n", memory_bytes=1 << 60), "device.memory_bytes"),
        (lambda: Interval(0, 3, "a.b"), "holds no batch size"),
        (lambda: Interval(4, 3, "a.b"), "holds no batch size"),
    ],
)
def test_values_that_cannot_be(build, shown):
    with pytest.raises(ValueDecodeError, match=shown):
        build()


def test_refusal_codes_are_documented():
    with pytest.raises(ContractError, match="not a documented code"):
        Refusal("made.up", "a", "b", "c")
    assert all(sentence.endswith(".") for sentence in CODES.values())
    assert str(Refusal("shape.multiple", "k=3", "needs a multiple of 2", "pad")) == (
        "[shape.multiple] asked k=3, found needs a multiple of 2; pad"
    )


@pytest.mark.parametrize("size", [1.5, True, "8", 0, -1, 2**31])
def test_a_dimension_is_a_whole_number_in_range(size):
    with pytest.raises(ValueDecodeError):
        LinearSpec(n=size, k=8, weights=WeightScheme.parse("int4:g32"))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_limit_or_scaling_that_is_no_number_is_refused(wrong):
    with pytest.raises(ValueDecodeError):
        Activation("silu", limit=wrong)
    if wrong != -1.0:
        scheme = WeightScheme.parse("int4:g32")
        with pytest.raises(ValueDecodeError):
            MoESpec(8, 2, 64, 96, scheme, scheme, scheme, routed_scaling=wrong)
