"""Hypothesis strategies for the values of hal_core, with their rules respected."""

from __future__ import annotations

from hypothesis import strategies as st

from hal_core.kv.scheme import KV_SCHEMES, KVScheme
from hal_core.machine import DEVICE_KINDS, Denied, Device, FactMark, Machine, Mark, Version
from hal_core.manifest import BackendManifest
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.processor import Cache, NumaNode, Processor
from hal_core.refusal import CODES, Refusal
from hal_core.registry import BackendRow
from hal_core.schemes import DTYPES, FLOAT_DTYPES, ActivationScheme, Granularity, GranularityKind, WeightScheme, ZeroKind
from hal_core.selection import Candidate, Interval, Padding, Parameter, Selection, Transform
from hal_core.spec import (
    ACTIVATIONS,
    FLOATS,
    KV_SCALES,
    OPS,
    ROUTING_FORMS,
    Activation,
    EmbeddingSpec,
    KVCacheSpec,
    LinearSpec,
    MoESpec,
)

sizes = st.integers(1, 1 << 20)
words = st.text(min_size=1, max_size=12)
positive = st.floats(min_value=1e-9, max_value=1e9)
finite = st.floats(allow_nan=False, allow_infinity=False)
floats = st.sampled_from(FLOATS)

granularities = st.one_of(
    st.just(Granularity.tensor()),
    st.just(Granularity.channel()),
    st.builds(Granularity.groups, sizes),
    st.builds(Granularity.blocks, sizes, sizes),
)
superblocks = st.builds(lambda group, count: Granularity.superblocks(group, group * count), sizes, st.integers(1, 1 << 10))
activation_granularities = st.one_of(granularities, st.just(Granularity.token()))


@st.composite
def weight_schemes(draw: st.DrawFn) -> WeightScheme:
    dtype = draw(st.sampled_from(tuple(DTYPES)))
    if dtype in FLOAT_DTYPES:
        return WeightScheme(dtype)
    if dtype.startswith(("int", "iq")) and draw(st.booleans()):
        return WeightScheme(dtype, draw(superblocks), draw(st.sampled_from((ZeroKind.NONE, ZeroKind.MINIMUM))))
    granularity = draw(granularities)
    act_order = granularity.kind is GranularityKind.GROUP and draw(st.booleans())
    return WeightScheme(dtype, granularity, draw(st.sampled_from(ZeroKind)), act_order)


schemes = weight_schemes()
activation_schemes = st.builds(ActivationScheme, st.sampled_from(tuple(DTYPES)), activation_granularities, st.booleans(), st.booleans())
activation_quants = st.builds(ActivationQuant, st.sampled_from(tuple(DTYPES)), activation_granularities.map(str))
numerics = st.builds(
    Numerics,
    st.lists(activation_quants, max_size=3).map(lambda found: tuple(sorted(set(found)))),
    st.sampled_from(("as_stored", "rescaled")),
    st.sampled_from(("own", "fp32", "tf32", "bf16", "fp16")),
    st.sampled_from(("fp32", "tf32", "bf16", "fp16")),
    st.booleans(),
    st.booleans(),
)
optional = st.none() | activation_schemes
linear_specs = st.builds(LinearSpec, sizes, sizes, schemes, optional, numerics, floats, st.none() | floats, st.booleans(), st.booleans())
embedding_specs = st.builds(EmbeddingSpec, sizes, sizes, schemes, numerics, floats, st.booleans())
activations = st.builds(Activation, st.sampled_from(ACTIVATIONS), st.none(), st.none() | positive) | st.builds(
    Activation, st.just("swiglu_oai"), positive, st.none() | positive
)


@st.composite
def moe_spec(draw: st.DrawFn) -> MoESpec:
    experts = draw(st.integers(1, 512))
    activation = draw(activations)
    gates = {"swiglu_oai": schemes, "relu2": st.none()}.get(activation.kind, st.none() | schemes)
    return MoESpec(
        experts, draw(st.integers(1, experts)), draw(sizes), draw(sizes), draw(schemes), draw(schemes), draw(gates),
        activation, draw(optional), draw(numerics), draw(floats), draw(st.none() | floats), draw(st.sampled_from(ROUTING_FORMS)),
        draw(st.none() | st.integers(1, experts)), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), draw(finite),
        draw(st.integers(0, 4)), draw(st.booleans()),
    )  # fmt: skip


kv_schemes: st.SearchStrategy[KVScheme] = st.sampled_from(KV_SCHEMES)


@st.composite
def kv_spec(draw: st.DrawFn) -> KVCacheSpec:
    kv_heads = draw(st.integers(1, 64))
    heads = kv_heads * draw(st.integers(1, 16))
    window = draw(st.none() | sizes)
    return KVCacheSpec(
        heads, kv_heads, 16 * draw(st.integers(1, 16)), 32 * draw(st.integers(1, 64)), draw(kv_schemes), draw(kv_schemes),
        draw(numerics), draw(floats), draw(st.none() | st.integers(1, 16).map(lambda size: 16 * size)), window,
        draw(st.integers(0, 8)) if window else 0, draw(st.booleans()), draw(st.none() | positive), draw(st.sampled_from(KV_SCALES)),
        draw(st.integers(0, (1 << 63) - 1)),
    )  # fmt: skip


specs = st.one_of(linear_specs, embedding_specs, moe_spec(), kv_spec())
devices = st.builds(
    Device, st.sampled_from(DEVICE_KINDS), words, words, words, st.none() | st.integers(1, 1000), st.none() | st.integers(1, 1 << 45)
)
counts = st.none() | st.integers(0, 1 << 16)
processors = st.builds(
    Processor,
    counts,
    counts,
    st.lists(st.builds(NumaNode, st.integers(0, 64), st.integers(0, 256), st.none() | sizes), max_size=2).map(tuple),
    st.lists(st.builds(Cache, st.integers(0, 4), st.sampled_from(("data", "unified")), sizes, st.integers(0, 64)), max_size=2).map(tuple),
    st.lists(words, max_size=2).map(tuple),
)
machines = st.builds(
    Machine,
    words,
    st.lists(devices, max_size=3).map(tuple),
    st.lists(words, max_size=3).map(tuple),
    st.lists(st.builds(Denied, words, words, words), max_size=2).map(tuple),
    st.lists(st.builds(Version, words, words), max_size=2).map(tuple),
    st.lists(st.builds(FactMark, words, st.sampled_from(Mark), words), max_size=2).map(tuple),
    processors,
)
refusals = st.builds(Refusal, st.sampled_from(tuple(CODES)), words, words, words)
plain = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_]{0,12}", fullmatch=True)
manifests = st.builds(
    BackendManifest,
    name=st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True),
    distribution=plain.map(lambda word: word.strip("_")),
    contract=st.integers(-5, 100),
    torch=st.sampled_from(("", ">=2.11", "==2.8.*", ">=2.11,<3")),
    ops=st.lists(st.sampled_from(OPS), max_size=2).map(tuple),
    install=plain.map(lambda word: f"pip install {word}"),
    platforms=st.lists(plain, max_size=2).map(tuple),
    isa=st.lists(plain, max_size=2).map(tuple),
    architectures=st.lists(plain, max_size=2).map(tuple),
)
rows = st.builds(
    BackendRow, words, words, words, st.sampled_from(("ready", "no_device", "refused", "failed")),
    st.lists(refusals, max_size=2).map(tuple), st.none() | manifests, st.lists(words, max_size=2).map(tuple),
)  # fmt: skip


@st.composite
def candidate(draw: st.DrawFn) -> Candidate:
    reasons = tuple(draw(st.lists(refusals, max_size=2)))
    chosen = not reasons and draw(st.booleans())
    return Candidate(draw(words), draw(words), not reasons, chosen, draw(st.integers(-10, 10)), reasons)


parameters = st.builds(Parameter, words, st.one_of(words, st.integers(), finite, st.booleans()))


@st.composite
def selection(draw: st.DrawFn) -> Selection:
    ends = [*sorted(draw(st.sets(st.integers(1, 10_000), max_size=3))), None]
    starts = [1, *(end + 1 for end in ends if end is not None)]
    intervals = tuple(
        Interval(start, end, draw(words), tuple(draw(st.lists(parameters, max_size=2)))) for start, end in zip(starts, ends, strict=True)
    )
    transforms = st.lists(st.builds(Transform, words, finite), max_size=1)
    paddings = st.lists(st.builds(Padding, words, sizes, sizes), max_size=1)
    few = st.lists(words, max_size=1)
    return Selection(
        draw(specs), draw(words), draw(words), intervals, tuple(draw(st.lists(candidate(), max_size=3))), draw(numerics),
        tuple(draw(transforms)), tuple(draw(paddings)), tuple(draw(few)), draw(st.none() | words), tuple(draw(few)),
    )  # fmt: skip
