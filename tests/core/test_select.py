"""The choice is a pure function: deterministic, complete in its reasons, and obedient to the policy."""

from __future__ import annotations

import builtins
import os
import random
import threading
import warnings
from dataclasses import replace

import pytest
from core.fakes import INT4, LINEAR, MACHINE, MOE, kernel, reference, registered, row
from hypothesis import given
from hypothesis import strategies as st

import hal_core as hal
from hal_core import api, memo, notes
from hal_core.errors import ContractError, HalWarning, NoKernelError, PolicyError
from hal_core.kernel import ShapeLimit
from hal_core.machine import Device, Machine
from hal_core.memo import SelectionMemo
from hal_core.numerics import ActivationQuant, Numerics
from hal_core.policy import Policy
from hal_core.refusal import Refusal
from hal_core.registry import RegisteredKernel
from hal_core.schemes import WeightScheme
from hal_core.select import candidates_from, select_from
from hal_core.selection import Padding, Selection, Transform, diff
from hal_core.spec import EmbeddingSpec, LinearSpec

FAST, SLOW = registered("cpu.fast", priority=20), registered("cpu.slow", priority=10)
GPU = registered("cuda.marlin", priority=90, devices=("cuda",), isa=(), architectures=("sm_90",))
KERNELS = (FAST, SLOW, GPU, reference())
IMPORT = Refusal("backend.import", "an importable backend", "ImportError: undefined symbol", "pip install --force-reinstall")
ROWS = (
    row("cpu", "cpu.fast", "cpu.slow"), row("cuda", "cuda.marlin", status="no_device"), row("xpu", status="failed", refusals=(IMPORT,)),
    row("reference", "reference.linear"),
)  # fmt: skip


def select(spec=LINEAR, policy="auto", kernels=KERNELS, rows=ROWS, machine=MACHINE):
    return select_from(spec, machine, Policy.parse(policy), kernels, rows)


def codes(selection_or_candidates):
    candidates = getattr(selection_or_candidates, "candidates", selection_or_candidates)
    return {c.kernel: [r.code for r in c.refusals] for c in candidates}


def test_the_best_accepted_is_chosen_and_every_other_keeps_its_reasons():
    selection = select()
    assert (selection.kernel, selection.backend, selection.layout) == ("cpu.fast", "cpu", "fake.rows")
    assert [(i.m_min, i.m_max, i.kernel) for i in selection.intervals] == [(1, None, "cpu.fast")]
    assert codes(selection) == {
        "cpu.fast": [],
        "cpu.slow": [],
        "reference.linear": [],
        "cuda.marlin": ["device.missing"],
        "xpu": ["backend.import"],
    }
    assert [c.kernel for c in selection.candidates if c.chosen] == ["cpu.fast"]
    assert selection.notes == ()


def test_kernels_of_other_kinds_are_not_listed_and_a_backend_without_the_kind_is():
    candidates = codes(select(kernels=(*KERNELS, registered("rocm.experts", "moe")), rows=(*ROWS, row("rocm", "rocm.experts"))))
    assert "rocm.experts" not in candidates
    assert candidates["rocm"] == ["op.unsupported"]


def test_all_codes_of_a_kernel_are_kept():
    spec = LinearSpec(250, 500, WeightScheme.parse("mxfp4:tensor:min"), dtype="fp16", out_dtype="fp16", lora=True)
    limited = registered("cpu.picky", isa=("avx512f", "amx_int8"), numerics=Numerics((ActivationQuant("int8", "token"),)),
                         limits=(ShapeLimit("n", 64, least=1024), ShapeLimit("k", 128)))  # fmt: skip
    found = codes(candidates_from(spec, MACHINE, Policy(), (limited,)))["cpu.picky"]
    assert found == [
        "device.isa", "device.isa", "scheme.dtype", "scheme.granularity", "scheme.zero", "numerics.activations", "dtype.activation",
        "dtype.output", "epilogue.lora", "shape.multiple", "shape.range", "shape.multiple",
    ]  # fmt: skip


@given(st.randoms(use_true_random=False), st.sampled_from(["auto", "prefer:cuda", "require:cpu", "require:*.slow", "prefer:reference"]))
def test_the_order_of_plugins_does_not_matter(rng: random.Random, policy):
    equal = [registered(f"{backend}.k{i}", priority=10) for backend in ("b", "a") for i in range(3)]
    kernels, rows = [*KERNELS, *equal], [*ROWS, row("a", "a.k0"), row("b", "b.k0")]
    expected = select(policy=policy, kernels=tuple(kernels), rows=tuple(rows))
    rng.shuffle(kernels)
    rng.shuffle(rows)
    again = select(policy=policy, kernels=tuple(kernels), rows=tuple(rows))
    assert again == expected
    assert again.dumps() == expected.dumps()
    assert Selection.from_json(again.dumps()) == again


def test_equal_priorities_are_decided_by_name():
    kernels = [registered(name) for name in ("z.a", "b.z", "b.a", "c.a")]
    assert select(kernels=kernels, rows=()).kernel == "b.a"


def test_selection_is_pure(monkeypatch):
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(os, "environ", None)
        patch.setattr(builtins, "open", None)
        chosen = select(policy="prefer:cuda").kernel
    assert chosen == "cpu.fast"


def test_a_selection_for_a_machine_that_is_not_at_hand():
    h200 = Machine("linux_x86_64", (Device("cpu", "intel", "x86_64", "Xeon"), Device("cuda", "nvidia", "sm_90", "H200")), ("avx2",))
    assert select(machine=h200).kernel == "cuda.marlin"
    b200 = replace(h200, devices=(replace(h200.devices[1], architecture="sm_100"),))
    assert codes(select(machine=b200))["cuda.marlin"] == ["device.arch"]


# The policy's three words.


def test_a_kernel_on_a_device_for_tests_serves_only_who_names_it():
    bench = registered("xpu.bench", priority=500)
    bench.kernel.by_name_only = lambda spec, machine: True
    for policy in ("auto", "prefer:cpu"):
        selection = select(policy=policy, kernels=(*KERNELS, bench), rows=())
        assert selection.backend == "cpu"
        assert codes(selection)["xpu.bench"] == ["policy.unnamed"]
    for policy in ("require:xpu", "prefer:xpu.b*"):
        assert select(policy=policy, kernels=(*KERNELS, bench), rows=()).kernel == "xpu.bench"


def test_require_takes_what_it_names_or_nothing():
    assert select(policy="require:cpu.slow").kernel == "cpu.slow"
    assert select(policy="require:reference").kernel == "reference.linear"
    selection = select(policy="require:cpu.slow")
    assert codes(selection)["cpu.fast"] == ["policy.excluded"]
    assert codes(selection)["cuda.marlin"] == ["device.missing", "policy.excluded"]


@pytest.mark.parametrize("policy", ["require:cuda", "require:cuda.marlin", "require:linear=cuda", "require:xpu", "require:xpu.onednn"])
def test_require_never_falls_back(policy):
    with pytest.raises(NoKernelError) as caught:
        select(policy=policy)
    message = str(caught.value)
    assert f"under policy {policy}: no kernel accepts it" in message
    assert ("[device.missing]" if "cuda" in policy else "[backend.import]") in message
    assert "excluded by the policy: " in message
    assert message.endswith("policy auto would use cpu.fast")
    assert {name for name, _ in caught.value.refusals} == {"cpu.fast", "cpu.slow", "cuda.marlin", "reference.linear", "xpu"}
    assert all(reasons for _, reasons in caught.value.refusals)


def test_require_of_an_unknown_name_is_an_error_for_every_kind():
    for spec in (LINEAR, MOE):
        with pytest.raises(PolicyError, match=r"did you mean cpu\.fast"):
            select(spec, policy="require:cpu.fats", kernels=(*KERNELS, reference("moe")))


def test_a_required_moe_kernel_leaves_linears_free():
    kernels = (*KERNELS, registered("cuda.humming_moe", "moe", devices=("cuda",)), reference("moe"))
    assert select(policy="require:cuda.humming_moe", kernels=kernels).kernel == "cpu.fast"
    with pytest.raises(NoKernelError, match=r"device\.missing"):
        select(MOE, policy="require:cuda.humming_moe", kernels=kernels)


def test_a_required_backend_without_the_op_is_told_so():
    with pytest.raises(NoKernelError, match=r"cpu: \[op\.unsupported\] asked a kernel for embedding, found cpu has none"):
        select(EmbeddingSpec(64, 64, INT4), policy="require:cpu")


def test_prefer_goes_elsewhere_with_all_reasons():
    selection = select(policy="prefer:cuda")
    assert selection.kernel == "cpu.fast"
    (note,) = selection.notes
    assert note.startswith("prefer:cuda cannot serve linear 256x512 int4:g128 bf16 [exact], so cpu.fast does:")
    assert "cuda.marlin: [device.missing]" in note
    assert "xpu" not in note


def test_prefer_that_can_be_met_says_nothing():
    assert select(policy="prefer:cpu.slow").notes == ()
    assert select(policy="prefer:reference").notes == ()
    assert select(policy="prefer:reference").kernel == "reference.linear"


def test_prefer_of_an_unknown_name_is_told():
    (note,) = select(policy="prefer:cpu.fats").notes
    assert "did you mean cpu.fast" in note


def test_prefer_that_ends_at_the_reference_gives_every_reason():
    spec = replace(LINEAR, weights=WeightScheme.parse("int2:g128"))
    selection = select(spec, policy="prefer:cuda")
    assert selection.kernel == "reference.linear"
    (note,) = selection.notes
    for name in ("cuda.marlin: [device.missing]", "cuda.marlin, cpu.fast, cpu.slow: [scheme.dtype]", "xpu: [backend.import]"):
        assert name in note


def test_the_reference_is_last_whatever_its_priority_and_says_why():
    assert select(kernels=(SLOW, reference())).kernel == "cpu.slow"
    selection = select(replace(LINEAR, lora=True))
    assert selection.kernel == "reference.linear"
    (note,) = selection.notes
    for shown in ("runs on reference.linear", "cpu.fast, cpu.slow: [epilogue.lora]", "xpu: [backend.import]"):
        assert shown in note
    (note,) = select(kernels=(reference(),), rows=(row("reference", "reference.linear"),)).notes
    assert "pip install hal-backend-cpu" in note


# A library whose kernel refuses.

PROVIDED = registered("cpu.provided", priority=90, provider="libfast", limits=(ShapeLimit("n", 100),))


def test_a_selection_says_which_library_did_not_serve_and_why():
    selection = select(kernels=(*KERNELS, PROVIDED))
    assert selection.kernel == "cpu.fast"
    (note,) = selection.notes
    assert note.startswith("linear 256x512 int4:g128 bf16 [exact] runs on cpu.fast in place of libfast:\n  cpu.provided: [shape.multiple]")
    assert f"note:     {note.splitlines()[0][:-1]}" in str(selection)


def test_a_library_that_cannot_be_called_is_one_note_for_all_specs():
    absent = Refusal("backend.package", "libfast", "not installed", "pip install libfast")
    kernels = (*KERNELS, registered("cpu.provided", priority=90, provider="libfast", refusals=lambda *_: (absent,)))
    (note,), (other,) = (select(replace(LINEAR, n=n), kernels=kernels).notes for n in (256, 512))
    assert note == other
    assert note.startswith("libfast cannot be called, so other kernels of cpu serve in its place:\n  [backend.package]")


@pytest.mark.parametrize(
    ("provided", "policy"),
    [
        (registered("cpu.provided", priority=90, provider="libfast"), "auto"),
        (registered("cpu.provided", priority=1, provider="libfast", limits=PROVIDED.kernel.limits), "auto"),
        (registered("cpu.provided", priority=90, provider="libfast", numerics=Numerics((ActivationQuant("int8", "token"),))), "auto"),
        (registered("cpu.provided", priority=90, limits=PROVIDED.kernel.limits), "auto"),
        (PROVIDED, "prefer:cpu.fast"),
        (PROVIDED, "require:cpu.fast"),
    ],
    ids=["it serves", "it ranks lower", "made for another problem", "no library's", "another was preferred", "another was required"],
)
def test_a_library_that_was_not_to_serve_is_not_mentioned(provided, policy):
    assert select(policy=policy, kernels=(*KERNELS, provided)).notes == ()


# Intervals of M.


def sharing(*ranges, **changes):
    return [registered(f"cpu.k{i}", priority=50 - i, m_range=found, layout="shared", **changes) for i, found in enumerate(ranges)]


def spans(selection):
    return [(i.m_min, i.m_max, i.kernel) for i in selection.intervals]


def test_limited_kernels_that_share_a_layout_combine():
    assert spans(select(kernels=sharing((1, 32), (1, None)))) == [(1, 32, "cpu.k0"), (33, None, "cpu.k1")]
    assert spans(select(kernels=sharing((64, None), (1, None)))) == [(1, 63, "cpu.k1"), (64, None, "cpu.k0")]
    assert spans(select(kernels=sharing((8, 16), (1, None)))) == [(1, 7, "cpu.k1"), (8, 16, "cpu.k0"), (17, None, "cpu.k1")]
    assert spans(select(kernels=sharing((0, None)))) == [(1, None, "cpu.k0")]


def test_a_kernel_for_some_batches_alone_is_refused():
    kernels = [*sharing((1, 32), (40, None)), SLOW]
    selection = select(kernels=kernels)
    assert selection.kernel == "cpu.slow"
    assert codes(selection)["cpu.k0"] == ["shape.rows"]
    assert "serves M = 1 to 32" in str(selection)
    assert "serves M >= 40" in str(selection)
    with pytest.raises(NoKernelError, match=r"shape\.rows"):
        select(kernels=sharing((1, 32)))


def test_layouts_are_not_shared_across_backends_or_names():
    others = [
        registered("cpu.a", m_range=(1, 32), layout="x"),
        registered("cuda.b", layout="x", priority=5),
        registered("cpu.c", layout="y", priority=5),
    ]
    assert select(kernels=others).intervals[0].kernel in {"cpu.c", "cuda.b"}
    assert len(select(kernels=others).intervals) == 1


def test_require_of_one_kernel_does_not_borrow_another_for_the_rest():
    with pytest.raises(NoKernelError, match=r"shape\.rows"):
        select(kernels=sharing((1, 32), (1, None)), policy="require:cpu.k0")
    assert len(select(kernels=sharing((1, 32), (1, None)), policy="require:cpu.k*").intervals) == 2


def test_batch_invariance_forbids_a_change_of_kernel():
    spec = replace(LINEAR, numerics=Numerics(batch_invariant=True))
    assert spans(select(spec, kernels=sharing((1, 32), (1, None)))) == [(1, None, "cpu.k1")]


def test_numerics_are_those_at_every_batch_size():
    tolerant = replace(LINEAR, numerics=Numerics((ActivationQuant("int8", "token"),)))
    kernels = sharing((1, 32), (1, None))
    kernels[1] = registered("cpu.k1", priority=1, layout="shared", numerics=tolerant.numerics)
    assert select(tolerant, kernels=kernels).numerics.activations == tolerant.numerics.activations
    # A kernel that is exact only up to M = 32 does not make an exact request served.
    with pytest.raises(NoKernelError):
        select(kernels=kernels)


def test_changes_of_the_weights_are_in_the_selection():
    lossy = registered(
        "cpu.lossy", transforms=lambda self, spec: (Transform("rescale", 1e-3),), padding=lambda self, spec: (Padding("n", spec.n, 320),)
    )
    selection = select(kernels=(lossy,))
    assert selection.transforms == (Transform("rescale", 1e-3),)
    assert selection.padding == (Padding("n", 256, 320),)
    assert "rescale (adds at most 0.001 relative L2)" in str(selection)
    assert "n 256 to 320" in str(selection)


# Plugins that break while they are asked.


@pytest.mark.parametrize(
    ("verdict", "shown"),
    [
        (lambda self, spec, machine: 1 / 0, "refusals() raised ZeroDivisionError"),
        (lambda self, spec, machine: (False, "no"), "refusals() returned tuple"),
        (lambda self, spec, machine: True, "refusals() returned bool"),
        (lambda self, spec, machine: None, "refusals() returned NoneType"),
        (lambda self, spec, machine: [], "refusals() returned list"),
    ],
)
def test_a_kernel_without_a_proper_verdict_is_refused(verdict, shown):
    selection = select(kernels=(registered("bad.k", refusals=verdict, priority=99), SLOW))
    assert selection.kernel == "cpu.slow"
    assert codes(selection)["bad.k"] == ["backend.invalid"]
    assert shown in str(selection)


def test_two_wheels_of_one_name_are_both_candidates():
    twin = replace(row("cpu", status="refused", refusals=(IMPORT,)), distribution="other-cpu")
    assert codes(select(rows=(*ROWS, twin)))["cpu (other-cpu)"] == ["backend.import"]


# Text and difference.


def test_text_says_all():
    text = str(select(policy="prefer:cuda"))
    for shown in ("policy:   prefer:cuda",
                  "chosen:   cpu.fast (M >= 1)", "layout:   fake.rows", "accepted: cpu.slow (priority 10)",
                  "refused:  cuda.marlin",
                  "[device.missing] asked a cuda device, found devices: cpu; run on a machine with one"):  # fmt: skip
        assert shown in text


def test_difference_is_by_name_not_by_position():
    assert not diff(select(), select())
    assert str(diff(select(), select())) == "no difference"
    changes = {change.field: (change.before, change.after) for change in diff(select(), select(policy="require:cpu.slow")).changes}
    assert changes["intervals.0.kernel"] == ("cpu.fast", "cpu.slow")
    assert changes["policy"] == ("auto", "require:cpu.slow")
    assert changes["candidates.cpu.fast.refusals.policy.excluded.0.fix"][0] == ""
    assert not any(field.startswith("candidates.xpu.refusals.backend.import") for field in changes)
    assert "intervals.0.kernel: cpu.fast -> cpu.slow" in str(diff(select(), select(policy="require:cpu.slow")))


# The function of the package.


class FakeRegistry:
    def __init__(self, kernels=KERNELS, rows=ROWS):
        self._kernels, self._rows = kernels, rows

    def kernels(self):
        return self._kernels

    def rows(self):
        return self._rows

    def kernel(self, name):
        return next(k.kernel for k in self._kernels if k.name == name)


@pytest.fixture
def process(monkeypatch):
    """This process, with the fake kernels and machine."""
    monkeypatch.delenv("HAL_POLICY", raising=False)
    monkeypatch.setattr(api, "default_registry", FakeRegistry)
    monkeypatch.setattr(Machine, "detect", lambda: MACHINE)
    monkeypatch.setattr(api, "_memo", SelectionMemo())
    notes.forget_notes()
    yield
    notes.forget_notes()


def test_prefer_warns_once_with_all_reasons(process, caplog):
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("WARNING", "hal_core"):
        warnings.simplefilter("always")
        for _ in range(3):
            assert hal.select(LINEAR, policy="prefer:cuda").kernel == "cpu.fast"
        hal.select(replace(LINEAR, n=512), policy="prefer:cuda")
    assert [warning.category for warning in caught] == [HalWarning, HalWarning]
    assert "cuda.marlin: [device.missing]" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert [note.count for note in notes.told_notes()] == [3, 1]
    assert [record.name for record in caplog.records] == ["hal_core", "hal_core"]


def test_the_policy_of_the_context_and_the_environment_is_followed(process, monkeypatch):
    with hal.policy("require:cpu.slow"):
        assert hal.select(LINEAR).kernel == "cpu.slow"
        assert hal.select(LINEAR, policy="auto").kernel == "cpu.fast"
    monkeypatch.setenv("HAL_POLICY", "require:reference")
    assert hal.select(LINEAR).kernel == "reference.linear"
    assert codes(hal.candidates(LINEAR))["cpu.fast"] == ["policy.excluded"]


def test_prepare_gives_the_op_its_selection(process, monkeypatch):
    made = type("Op", (), {"selection": None})()
    able = RegisteredKernel("cpu.fast", "cpu", kernel("fast", prepare=lambda self, spec, weights: made))
    monkeypatch.setattr(api, "default_registry", lambda: FakeRegistry((able,), ()))
    assert hal.prepare(LINEAR, hal.LinearWeights(weight=None)) is made
    assert made.selection.kernel == "cpu.fast"


def test_an_op_that_runs_one_kernel_is_not_given_the_intervals_of_two(process, monkeypatch):
    made = type("Op", (), {"selection": None, "serves_intervals": False})()
    prepare = {"prepare": lambda self, spec, weights: made}
    pair = tuple(
        RegisteredKernel(f"cpu.{name}", "cpu", kernel(name, m_range=span, layout="shared", **prepare))
        for name, span in (("few", (1, 32)), ("many", (33, None)))
    )
    monkeypatch.setattr(api, "default_registry", lambda: FakeRegistry(pair, ()))
    with pytest.raises(ContractError, match="runs one kernel"):
        hal.prepare(LINEAR, hal.LinearWeights(weight=None))
    made.serves_intervals = True
    assert hal.prepare(LINEAR, hal.LinearWeights(weight=None)).selection.kernels == ("cpu.few", "cpu.many")


def test_a_note_names_the_layer_that_met_it_first_and_counts_the_others(process, caplog):
    with pytest.warns(HalWarning, match="^layer model.layers.0.mlp: prefer:cuda cannot serve"):
        hal.select(LINEAR, policy="prefer:cuda", layer="model.layers.0.mlp")
    for index in range(1, 4):
        hal.select(LINEAR, policy="prefer:cuda", layer=f"model.layers.{index}.mlp")
    assert len(caplog.records) == 1
    (note,) = notes.told_notes()
    assert (note.layer, note.count) == ("model.layers.0.mlp", 4)
    assert str(note).startswith("model.layers.0.mlp (and 3 more): prefer:cuda cannot serve")


def test_an_equal_question_is_answered_from_memory_until_the_registry_changes(process, monkeypatch):
    asked = []
    monkeypatch.setattr(memo, "select_from", lambda spec, *rest: asked.append(spec) or select_from(spec, *rest))
    first = hal.select(LINEAR)
    assert hal.select(replace(LINEAR)) is first
    assert asked == [LINEAR]
    others = (lambda: hal.select(LINEAR, policy="require:cpu.slow"), lambda: hal.select(LINEAR, replace(MACHINE, isa=("avx2",))))
    assert all(ask() is not first for ask in others)
    assert len(asked) == 3
    fewer = KERNELS[1:]
    monkeypatch.setattr(api, "default_registry", lambda: FakeRegistry(fewer, ROWS))
    assert hal.select(LINEAR) is not first
    assert len(asked) == 4


def test_errors_are_not_kept_and_memory_is_bounded(process):
    kept = SelectionMemo(most=3)
    for _ in range(2):
        with pytest.raises(NoKernelError):
            kept.select(LINEAR, MACHINE, Policy.parse("require:cuda"), KERNELS, ROWS)
    assert len(kept) == 0
    for n in range(1, 9):
        spec = replace(LINEAR, n=n * 32)
        assert kept.select(spec, MACHINE, Policy(), KERNELS, ROWS) == select_from(spec, MACHINE, Policy(), KERNELS, ROWS)
    assert len(kept) <= 3


def test_the_same_object_under_another_policy_or_machine_is_another_question(process):
    kept = SelectionMemo()
    spec, slow = replace(LINEAR), Policy.parse("require:cpu.slow")
    for _ in range(2):
        assert kept.select(spec, MACHINE, Policy(), KERNELS, ROWS).kernel == "cpu.fast"
        assert kept.select(spec, MACHINE, slow, KERNELS, ROWS).kernel == "cpu.slow"
        assert kept.select(spec, replace(MACHINE, isa=()), Policy(), KERNELS, ROWS).kernel == "reference.linear"
    assert len(kept) == 3


def test_threads_that_ask_at_once_get_equal_answers(process):
    kept, found = SelectionMemo(), []
    threads = [
        threading.Thread(
            target=lambda: found.extend(kept.select(replace(LINEAR, n=n * 32), MACHINE, Policy(), KERNELS, ROWS) for n in range(1, 30))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 * 29
    assert len({selection.spec for selection in found}) == 29
    assert all(selection == select_from(selection.spec, MACHINE, Policy(), KERNELS, ROWS) for selection in found)


@pytest.mark.parametrize("what", ["rank", "computes", "transforms", "padding"])
@pytest.mark.parametrize("answer", [lambda self, *_: 1 / 0, lambda self, *_: "nonsense"])
def test_a_kernel_that_breaks_while_asked_is_refused_and_hides_nobody(what, answer):
    broken = registered("cpu.broken", priority=99, **{what: answer})
    healthy = registered("cpu.healthy", priority=1)
    selection = select_from(LINEAR, MACHINE, Policy(), (broken, healthy))
    assert selection.kernel == "cpu.healthy"
    (verdict,) = [c for c in selection.candidates if c.kernel == "cpu.broken"]
    assert [r.code for r in verdict.refusals] == ["backend.invalid"]


@pytest.mark.parametrize("wrong", [None, 1, "linear", {}])
def test_what_is_no_spec_machine_or_policy_is_a_clear_error(wrong):
    for ask in (hal.select, hal.explain, hal.candidates):
        with pytest.raises(hal.HalError, match="not a spec"):
            ask(wrong)
    if wrong is not None:
        with pytest.raises(hal.HalError, match="not a Machine"):
            hal.select(LINEAR, machine=wrong)
    with pytest.raises(hal.HalError):
        hal.load(wrong if not isinstance(wrong, str) else "no such/path here")
