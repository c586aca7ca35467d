"""Three words with one meaning for every kind of op."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal_core.errors import PolicyError, SettingError
from hal_core.policy import Policy, PolicyRule, current_policy, use_policy
from hal_core.spec import OPS

OPS_OF = {
    "cuda.humming_moe": "moe", "cuda.humming_dense": "linear", "cuda.marlin": "linear", "cpu.int4": "linear", "cpu.experts": "moe",
    "cpu.rows": "embedding", "reference.linear": "linear", "reference.moe": "moe",
}  # fmt: skip


def bound(text, op, broken=frozenset()):
    binding = Policy.parse(text).bind(op, OPS_OF, broken)
    if binding.word == "auto":
        return "auto"
    return {name for name in OPS_OF if binding.allows(name)}


@pytest.mark.parametrize(
    "text",
    [
        "auto",
        "prefer:cpu",
        "require:cuda.marlin",
        "require:moe=cuda.humming_*,linear=cuda.*",
        "prefer:cpu,cuda.marlin",
        "require:c[pu]*.int?",
        "require:kv=cuda",
        "require:*",
    ],
)
def test_text_is_its_inverse(text):
    assert str(Policy.parse(text)) == text
    assert Policy.parse(str(Policy.parse(text))) == Policy.parse(text)


def test_spaces_around_parts_are_allowed():
    assert Policy.parse(" require: moe = cuda.x , cpu ") == Policy.parse("require:moe=cuda.x,cpu")


@given(st.text(max_size=20) | st.from_regex(r"(auto|prefer|require)(:[a-z.=,*\[\]]{0,12})?", fullmatch=True))
def test_any_text_is_a_policy_or_a_policy_error(text):
    try:
        policy = Policy.parse(text)
    except PolicyError:
        return
    assert Policy.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", "unknown word"),
        ("fastest", "policy 'fastest': unknown word; use auto, prefer, require"),
        ("Require:cpu", "unknown word"),
        ("require", "a name is missing"),
        ("prefer", "a name is missing"),
        ("require:", "policy name ''"),
        ("require:cpu,", "policy name ''"),
        ("auto:cpu", "auto takes no name"),
        ("require:conv=cpu", "policy scope 'conv': not a kind of op; use one of linear, moe, embedding, kv"),
        ("require:=cpu", "policy scope ''"),
        ("require:moe=", "policy name ''"),
        ("require:a.b.c", "policy name 'a.b.c'"),
        ("require:../cpu", "policy name"),
        ("require:cpu;cuda", "policy name 'cpu;cuda'"),
        ("require:moe=cuda=x", "policy scope 'moe=cuda'"),
    ],
)
def test_texts_that_mean_nothing(text, shown):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    assert shown in str(caught.value)


@pytest.mark.parametrize("op", OPS)
def test_a_whole_backend_binds_every_kind_of_op(op):
    cpu = {"cpu.int4", "cpu.experts", "cpu.rows"}
    assert bound("require:cpu", op) == cpu
    assert bound("require:cpu.*", op) == cpu
    assert bound("require:cp?", op) == cpu


def test_a_kernels_name_binds_only_its_own_kind_of_op():
    assert bound("require:cuda.humming_moe", "moe") == {"cuda.humming_moe"}
    assert bound("require:cuda.humming_moe", "linear") == "auto"
    assert bound("require:cuda.humming_*", "linear") == {"cuda.humming_moe", "cuda.humming_dense"}
    assert bound("require:cuda.humming_*", "embedding") == "auto"
    assert bound("require:*.marlin", "linear") == {"cuda.marlin"}


def test_a_scope_limits_a_name_to_one_kind():
    text = "require:moe=cuda.humming_*,linear=cpu"
    assert bound(text, "moe") == {"cuda.humming_moe", "cuda.humming_dense"}
    assert bound(text, "linear") == {"cpu.int4", "cpu.experts", "cpu.rows"}
    assert bound(text, "embedding") == "auto"


def test_a_scope_for_a_kernel_of_another_kind_still_binds():
    assert bound("require:linear=cuda.humming_moe", "linear") == {"cuda.humming_moe"}
    assert bound("require:linear=cuda.humming_moe", "moe") == "auto"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("require:cuda.humming_mo", "'cuda.humming_mo' matches no registered kernel or backend; did you mean cuda.humming_moe"),
        ("require:cdua", "did you mean cuda"),
        ("require:zzz", "use one of the backends cpu, cuda, reference"),
        ("require:xpu", "backend 'xpu' is not installed; pip install hal-backend-xpu"),
        ("require:rocm.aiter", "backend 'rocm' is not installed; pip install hal-backend-rocm"),
        ("require:cpu,nothing", "'nothing' matches no registered kernel"),
        ("require:kv=cuda.turbo", "'cuda.turbo' matches no registered kernel"),
    ],
)
def test_require_of_what_is_not_there_is_an_error_whatever_the_op(op, text, shown):
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text).bind(op, OPS_OF)
    assert shown in str(caught.value)


def test_prefer_of_what_is_not_there_is_told_and_does_not_bind():
    policy = Policy.parse("prefer:cuda.humming_mo,cpu")
    assert bound(str(policy), "linear") == {"cpu.int4", "cpu.experts", "cpu.rows"}
    (sentence,) = policy.unmatched(OPS_OF)
    assert "did you mean cuda.humming_moe" in sentence


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("text", ["require:xpu", "require:xpu.onednn", "require:x*.onednn"])
def test_a_backend_that_could_not_be_loaded_still_binds(text, op):
    assert bound(text, op, frozenset({"xpu"})) == set()
    assert Policy.parse(text).unmatched(OPS_OF, frozenset({"xpu"})) == ()


def test_precedence_argument_context_environment_auto(monkeypatch):
    monkeypatch.delenv("HAL_POLICY", raising=False)
    assert current_policy() == Policy()
    monkeypatch.setenv("HAL_POLICY", "prefer:cpu")
    assert str(current_policy()) == "prefer:cpu"
    with use_policy("require:cuda"):
        assert str(current_policy()) == "require:cuda"
        with use_policy(Policy.parse("require:reference")):
            assert str(current_policy()) == "require:reference"
            assert str(current_policy("auto")) == "auto"
            assert str(current_policy(Policy.parse("prefer:xpu"))) == "prefer:xpu"
        assert str(current_policy()) == "require:cuda"
    assert str(current_policy()) == "prefer:cpu"


def test_the_context_is_left_when_it_raises_and_is_the_threads_own(monkeypatch):
    monkeypatch.delenv("HAL_POLICY", raising=False)
    seen = []

    def fail():
        with use_policy("require:cpu"):
            thread = threading.Thread(target=lambda: seen.append(str(current_policy())))
            thread.start()
            thread.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert str(current_policy()) == "auto"
    assert seen == ["auto"]


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("HAL_POLICY", "requires:cpu")
    with pytest.raises(SettingError, match="HAL_POLICY='requires:cpu'"):
        current_policy()
    assert current_policy("auto") == Policy()


def test_rules_know_what_they_name():
    assert PolicyRule("cuda").whole_backend
    assert PolicyRule("cuda.*").whole_backend
    assert not PolicyRule("cuda.h*").whole_backend
    assert str(PolicyRule("cuda", "moe")) == "moe=cuda"
