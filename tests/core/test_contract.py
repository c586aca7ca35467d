"""Registration: every question answered, nothing unknown, and the message names plugin and kernel."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
from core.fakes import kernel, manifest

from hal_core.contract import checked_kernels, kernel_problems
from hal_core.kernel import LinearEpilogue, SchemeSet, ShapeLimit
from hal_core.manifest import BackendManifest
from hal_core.numerics import Numerics
from hal_core.schemes import GranularityKind, ZeroKind

MANIFEST = BackendManifest.parse(json.dumps(manifest("cuda")))
SCHEMES = SchemeSet(("int4",), (GranularityKind.GROUP,), (ZeroKind.NONE,), False)
ANSWERS = (
    "name", "devices", "isa", "architectures", "schemes", "numerics", "dtypes", "out_dtypes", "limits", "m_range", "layout", "error_bound",
    "priority",
)  # fmt: skip


class Backend:
    manifest = MANIFEST

    def __init__(self, *kernels):
        self._kernels = kernels

    def devices(self, machine):
        return machine.devices

    def kernels(self):
        return self._kernels


def refused(backend):
    kernels, refusals = checked_kernels(backend, MANIFEST, "backend 'cuda' (hal-backend-cuda 1.0)")
    assert kernels == ()
    assert {refusal.code for refusal in refusals} == {"backend.invalid"}
    return " | ".join(map(str, refusals))


@pytest.mark.parametrize("op", ["linear", "moe", "embedding"])
def test_a_full_kernel_has_no_problem(op):
    assert kernel_problems(kernel(op=op)) == ()


@pytest.mark.parametrize("answer", ANSWERS)
def test_each_missing_answer_is_found(answer):
    assert kernel_problems(kernel(without=(answer,))) == (f"{answer} is not answered",)


@pytest.mark.parametrize(("op", "answer"), [("linear", "epilogue"), ("moe", "epilogue"), ("moe", "routing"), ("embedding", "tied_head")])
def test_each_kind_has_its_own_questions(op, answer):
    assert kernel_problems(kernel(op=op, without=(answer,))) == (f"{answer} is not answered",)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"devices": "cpu"}, "devices is 'cpu' (str), not a tuple"),
        ({"devices": ["cpu"]}, "not a tuple"),
        ({"isa": ("avx2", 3)}, "isa[1] is 3 (int), not str"),
        ({"isa": None}, "isa is None, not a tuple"),
        ({"priority": True}, "priority is True (bool), not int"),
        ({"priority": 1.0}, "priority is 1.0 (float), not int"),
        ({"error_bound": "1e-3"}, "not float"),
        ({"m_range": (1,)}, "m_range has 1 items, not 2"),
        ({"m_range": (1, "many")}, "m_range[1] is 'many' (str), not int or NoneType"),
        ({"numerics": "exact"}, "not Numerics"),
        ({"epilogue": {"bias": True, "lora": False}}, "not LinearEpilogue"),
        ({"epilogue": LinearEpilogue(bias=None, lora=False)}, "epilogue.bias is None, not bool"),
        ({"schemes": replace(SCHEMES, zeros=(None,))}, "schemes.zeros[0] is None, not ZeroKind"),
        ({"schemes": replace(SCHEMES, dtypes="int4")}, "schemes.dtypes is 'int4' (str), not a tuple"),
        ({"limits": ("n",)}, "limits[0] is 'n' (str), not ShapeLimit"),
        # Of the right type, and impossible.
        ({"name": "a.b"}, "must be letters, digits and underscores"),
        ({"name": "a*"}, "must be letters, digits and underscores"),
        ({"name": ""}, "must be letters"),
        ({"devices": ()}, "devices is empty"),
        ({"devices": ("gpu",)}, "devices has unknown 'gpu'; known: any, cpu"),
        ({"dtypes": ("bfloat16",)}, "dtypes has unknown 'bfloat16'"),
        ({"out_dtypes": ()}, "out_dtypes is empty"),
        ({"schemes": replace(SCHEMES, dtypes=("uint4",))}, "schemes.dtypes has unknown 'uint4'"),
        ({"devices": ("any",), "architectures": ("sm_90",)}, "architectures are limited"),
        ({"error_bound": 0.0}, "error_bound 0.0 is not a positive number"),
        ({"error_bound": float("nan")}, "error_bound nan"),
        ({"error_bound": float("inf")}, "error_bound inf"),
        ({"m_range": (5, 4)}, "holds no batch size"),
        ({"m_range": (0, 0)}, "holds no batch size"),
        ({"m_range": (-1, None)}, "holds no batch size"),
        ({"limits": (ShapeLimit("hidden"),)}, "limit on 'hidden', which LinearSpec does not have"),
        ({"limits": (ShapeLimit("n", multiple=0),)}, "limit on n serves no size"),
    ],
)
def test_answers_that_are_wrong(changes, shown):
    (problem, *_) = kernel_problems(kernel(**changes))
    assert shown in problem


def test_all_problems_of_a_kernel_are_given():
    assert len(kernel_problems(kernel(without=("name", "isa"), priority="high", epilog=1))) == 4


def test_a_misspelt_answer_is_unknown_and_helpers_are_not():
    (problem,) = kernel_problems(kernel(act_order=False))
    assert problem.startswith("unknown attribute 'act_order'; the contract knows architectures, devices,")
    helpers = {
        "tile": lambda self: 8,
        "width": property(lambda self: 8),
        "size": functools.cached_property(lambda self: 8),
        "_table": (1, 2),
    }
    assert kernel_problems(kernel(**helpers)) == ()
    instance = kernel()
    instance.bias = True
    (problem,) = kernel_problems(instance)
    assert "unknown attribute 'bias'" in problem


@pytest.mark.parametrize(
    ("thing", "shown"), [(object(), "is of type object"), (type(kernel()), "a class: register an instance"), (None, "of type NoneType")]
)
def test_things_that_are_no_kernel(thing, shown):
    (problem,) = kernel_problems(thing)
    assert shown in problem
    assert "LinearKernel, MoEKernel, EmbeddingKernel or KVKernel" in problem


def test_good_backend():
    fast, slow = kernel("fast"), kernel("slow", numerics=Numerics())
    assert checked_kernels(Backend(fast, slow), MANIFEST, "x") == ((fast, slow), ())


def test_the_message_names_plugin_and_kernel():
    message = refused(Backend(kernel("good"), kernel("humming", without=("isa",))))
    assert "backend 'cuda' (hal-backend-cuda 1.0)" in message
    assert "kernel humming: isa is not answered" in message
    assert "kernel FakeLinear: name is not answered" in refused(Backend(kernel(without=("name",))))


def test_a_name_registered_twice():
    assert "kernel fast: the name is registered 2 times" in refused(Backend(kernel("fast"), kernel("fast", op="moe")))


def test_an_op_that_the_manifest_does_not_name():
    assert "op 'embedding' is not among the manifest's ops (linear, moe)" in refused(Backend(kernel(op="embedding")))


def test_an_op_that_is_not_its_classes():
    odd = kernel()
    type(odd).op = "moe"
    assert kernel_problems(odd) == ("op is 'moe', but its class serves 'linear'",)


def test_things_that_are_no_backend():
    assert "names the class Backend: name an instance" in refused(Backend)
    message = refused(object())
    assert "no method devices()" in message
    assert "no method kernels()" in message
    assert "manifest is a NoneType" in message
    assert "manifest is a NoneType" in refused(None)


def test_a_manifest_that_differs_from_the_wheels():
    backend = Backend()
    backend.manifest = replace(MANIFEST, contract=7, isa=("avx2",))
    assert "differs from the wheel's hal_backend.json in contract, isa" in refused(backend)
