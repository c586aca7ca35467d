"""A checkpoint explained for any machine and degree; saved explanations and what differs between them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from core.fakes import INT4, LINEAR, MACHINE, MOE, reference, registered, row
from golden import goldens

import hal_core
from hal_core.cli.main import app_main
from hal_core.errors import ValueDecodeError
from hal_core.explain import explain_from
from hal_core.explain_checkpoint import CheckpointExplanation, explain_checkpoint, weight_bytes
from hal_core.explain_diff import ExplanationDiff, diff_explanations, read_explanation
from hal_core.jsonable import dumps, loads
from hal_core.kv.scheme import KVScheme
from hal_core.policy import Policy
from hal_core.schemes import WeightScheme
from hal_core.select import select_from
from hal_core.selection import Padding
from hal_core.spec import EmbeddingSpec, KVCacheSpec

MOE_CKPT = "ar_sym_int4_g32_moe"
KERNELS = (
    registered("cpu.fast", priority=20, padding=lambda self, spec: (Padding("n", spec.n, spec.n + 8),)), registered("cpu.experts", "moe"),
    reference(), reference("moe"),
)  # fmt: skip
ROWS = (row("cpu", "cpu.fast", "cpu.experts"), row("reference", "reference.linear", "reference.moe"))


@pytest.fixture(scope="module")
def checkpoint():
    return hal_core.open_checkpoint(goldens.folder(MOE_CKPT))


@pytest.fixture
def hal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            app_main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


def explain(checkpoint, machine=MACHINE, policy="auto", **options):
    found = explain_checkpoint(checkpoint, machine, Policy.parse(policy), KERNELS, ROWS, **options)
    assert loads(CheckpointExplanation, dumps(found)) == found
    return found


def by_layer(found):
    return {layer: group for group in found.groups for layer in group.layers}


def test_every_layer_is_in_one_group_with_its_kernel_bytes_and_reasons(checkpoint):
    found = explain(checkpoint)
    assert found.served
    modules = [module for group in found.groups for module in group.modules]
    assert len(modules) == len(set(modules)) == 10
    experts = by_layer(found)["model.layers.*.mlp.experts"]
    assert experts.selection.kernel == "cpu.experts"
    # 8 experts of three 96x64 matrices in int4 with a two-byte scale for each 32: 4.5 bits a weight.
    assert experts.rank_bytes == 2 * 8 * 3 * 96 * 64 * 4.5 / 8
    assert sum(group.file_bytes for group in found.groups) == sum(e.nbytes for e in checkpoint.entries.values() if e.quantized)
    q = by_layer(found)["model.layers.*.self_attn.q_proj"]
    assert q.selection.padding == (Padding("n", 64, 72),)
    assert q.rank_bytes == q.count * 72 * 64 * 4.5 / 8


def test_a_sharded_checkpoint_asks_for_what_one_rank_holds(checkpoint):
    found = by_layer(explain(checkpoint, tp=2))
    assert (found["model.layers.*.self_attn.q_proj"].shard, found["model.layers.*.self_attn.q_proj"].selection.spec.n) == (
        "columns (n)",
        32,
    )
    assert found["model.layers.*.self_attn.o_proj"].selection.spec.k == 32
    experts = found["model.layers.*.mlp.experts"]
    asked = experts.explanation.spec
    assert (asked.intermediate, str(asked.down), experts.count) == (48, "int4:g16", 2)
    assert experts.notes == ("int4:g32 cut through groups, held as int4:g16 (exact)",)
    experts = by_layer(explain(checkpoint, tp=16))["model.layers.*.mlp.experts"]
    assert (experts.explanation, experts.count, experts.shard) == (None, 2, "refused")
    (refusal,) = experts.refusals
    assert "model.layers.*.mlp.experts down: intermediate=96 in 16 shards" in refusal.asked
    assert refusal.found == "parts of 6 cut groups of 32 into groups of 2"
    assert not explain(checkpoint, tp=16).served
    assert by_layer(explain(checkpoint, tp=3))["model.layers.*.mlp.experts"].selection.spec.intermediate == 32


@pytest.mark.parametrize("policy", ["require:cpu.fats", "require:cuda", "prefer:cpu"])
def test_what_cannot_be_served_is_part_of_the_answer(checkpoint, policy):
    found = explain(checkpoint, policy=policy)
    for group in found.groups:
        assert group.explanation.served or group.explanation.problem


def test_bytes_follow_the_scheme():
    def size(spec):
        kernels = (registered("cpu.linear"), registered("cpu.experts", "moe"), registered("cpu.rows", "embedding"))
        for k in kernels:
            type(k.kernel).schemes = reference().kernel.schemes
        return weight_bytes(select_from(spec, MACHINE, Policy(), kernels))

    assert size(LINEAR) == 256 * 512 // 2 + 256 * 4 * 2
    assert size(replace(LINEAR, weights=WeightScheme.parse("int8:channel"))) == 256 * 512 + 256 * 2
    assert size(replace(LINEAR, weights=WeightScheme.parse("int8:tensor"))) == 256 * 512 + 2
    assert size(replace(LINEAR, weights=WeightScheme.parse("int4:g128:zero"))) == 256 * 512 // 2 + 256 * 4 * 3
    assert size(replace(LINEAR, weights=WeightScheme.parse("int8:b128x128"))) == 256 * 512 + 2 * 4 * 2
    assert size(EmbeddingSpec(100, 128, INT4)) == 100 * 64 + 100 * 2
    assert size(MOE) == 8 * 3 * (128 * 256 // 2) + 8 * (2 * 256 * 1 * 2 + 128 * 2 * 2)
    cache = select_from(LINEAR, MACHINE, Policy(), (registered("cpu.fast"),))
    assert weight_bytes(replace(cache, spec=KVCacheSpec(8, 2, 64, 16, KVScheme("bf16"), KVScheme("bf16")))) == 0


# Differences


def test_equal_explanations_do_not_differ(checkpoint):
    found = explain(checkpoint)
    assert not diff_explanations(found, explain(checkpoint))
    assert str(diff_explanations(found, found)) == "no difference"


def test_layers_that_change_alike_are_one_part(checkpoint):
    diff = diff_explanations(explain(checkpoint), explain(checkpoint, policy="require:reference"))
    parts = {part.layers: part for part in diff.parts}
    assert {change.field: (change.before, change.after) for change in parts["whole",].changes} == {"policy": ("auto", "require:reference")}
    moe = parts["model.layers.*.mlp.experts",]
    assert moe.count == 2
    changes = {change.field: (change.before, change.after) for change in moe.changes}
    assert changes["kernel"] == ("cpu.experts (M >= 1)", "reference.moe (M >= 1)")
    assert changes["layout"] == ("fake.rows", "canonical")
    assert changes["candidates.cpu.experts.verdict"] == ("chosen", "refused")
    assert changes["candidates.cpu.experts.refusals.policy.excluded"][0] == ""
    assert "kernel: cpu.experts (M >= 1) -> reference.moe (M >= 1)" in str(diff)
    assert loads(ExplanationDiff, dumps(diff)) == diff


def test_shards_and_refusals_and_missing_layers_are_changes(checkpoint):
    before, after = explain(checkpoint), explain(checkpoint, tp=16)
    parts = {part.layers: part for part in diff_explanations(before, after).parts}
    changes = {change.field: change.after for change in parts["model.layers.*.mlp.experts",].changes}
    assert changes["shard"] == "refused"
    assert changes["refusals.0"].startswith("[shape.shard]")
    fewer = replace(before, groups=before.groups[1:])
    (part,) = diff_explanations(before, fewer).parts
    assert part.layers == before.groups[0].layers
    assert all(change.after == "" for change in part.changes)


def test_specs_that_read_alike_and_differ_are_told():
    spec = replace(MOE, routed_scaling=2.0)
    before, after = (explain_from(s, MACHINE, Policy(), KERNELS, ROWS) for s in (MOE, spec))
    assert str(MOE) == str(spec)
    assert "spec.routed_scaling: 1.0 -> 2.0" in str(diff_explanations(before, after))


def test_one_op_and_a_checkpoint_cannot_be_compared(checkpoint):
    with pytest.raises(ValueDecodeError, match="one explanation is of a checkpoint, the other of one op"):
        diff_explanations(explain(checkpoint), explain_from(LINEAR, MACHINE, Policy(), KERNELS, ROWS))


# The command


def test_facts_policy_numerics_and_degree_of_the_command(hal):
    code, out, err = hal(
        "explain", goldens.folder(MOE_CKPT), "--facts", "avx2-laptop", "--tp", "3", "--policy", "prefer:reference", "--json"
    )
    assert code == 0, err
    data = json.loads(out)
    assert (data["tp"], data["policy"], data["numerics"]) == (3, "prefer:reference", "checkpoint")
    assert "i7-10510U" in data["machine"]
    code, out, _ = hal("explain", goldens.folder(MOE_CKPT), "--tp", "2", "--policy", "require:reference")
    assert code == 0
    for shown in ("each of 2 ranks", "columns (n)", "rows (k)", "int4:g32 cut through groups, held as int4:g16 (exact)", "in the files"):
        assert shown in out
    code, out, _ = hal("explain", goldens.folder(MOE_CKPT), "--tp", "16", "--policy", "require:reference")
    assert code == 0
    for shown in ("cannot be cut: parts of 6 cut groups of 32 into groups of 2", "shape.shard", "use one of the degrees 1, 2, 3, 4, 6, 8"):
        assert shown in out
    code, out, _ = hal("explain", "--op", "linear", "--facts", "h200", "--scheme", "int3:g128")
    assert code == 0


def test_diff_of_two_files(hal, tmp_path):
    names = []
    for policy in ("require:reference", "auto"):
        _, out, _ = hal("explain", goldens.folder(MOE_CKPT), "--policy", policy, "--facts", "avx2-laptop", "--json")
        names.append(tmp_path / f"{policy.partition(':')[0]}.json")
        names[-1].write_text(out)
    code, out, err = hal("explain", "--diff", *names)
    assert code == 0, err
    assert "policy: require:reference -> auto" in out
    code, out, _ = hal("explain", "--diff", *names, "--json")
    assert json.loads(out)["parts"][0]["layers"] == ["whole"]
    _, out, _ = hal("explain", "--diff", names[0], names[0])
    assert out == "no difference\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain", "--op", "linear", "--tp", "2"), "without a checkpoint"),
        (("explain", "--op", "linear", "--tp", "0"), "not between 1 and 1024"),
        (("explain", "--op", "linear", "--facts", "h2000"), "nor a stored name"),
        (("explain", "--op", "linear", "--facts", "../facts/h200"), "no such file"),
        (("explain", "--op", "linear", "--facts", "/dev/zero"), "a folder or a device"),
        (("explain", "--diff", "/no/a.json", "/no/b.json"), "no such file"),
        (("explain", "--diff", "/no/a.json"), "requires 2 arguments"),
        (("explain", "--diff", "a", "b", "--op", "linear"), "not both"),
        (("probe", "--isolated", "--facts", "h200"), "on this machine only"),
        (("probe", "--isolated", "--limit", "0"), "not above zero"),
        (("facts", "--facts", "nothing"), "nor a stored name"),
    ],
)
def test_errors_of_the_command_are_one_line(hal, arguments, words):
    code, _, err = hal(*arguments)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_facts_and_probe_of_another_machine(hal):
    code, out, _ = hal("facts", "--stored")
    assert code == 0
    assert "mi355x" in out
    assert json.loads(hal("facts", "--stored", "--json")[1])["h200"]["facts_version"] == 1
    assert json.loads(hal("facts", "--facts", "b200")[1])["devices"][0]["units"] == 148
    code, out, _ = hal("probe", "--facts", "mi300x")
    assert "gfx942 seen (AMD Instinct MI300X), and no rocm backend is installed: pip install hal-backend-rocm" in " ".join(out.split())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        '{"groups": 1}',
        '{"groups": []}',
        "[" * 200_000,
        '{"spec": {"op": "conv"}}',
        "1" * 5000,
        '{"groups": ' + "[" * 50_000,
        '"x"',
    ],
)
def test_files_that_are_no_explanations(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueDecodeError, match=r"explanation .*a\.json") as caught:
        read_explanation(tmp_path / "a.json")
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


def test_explanations_of_another_version_or_with_contradictions(checkpoint, tmp_path):
    path = tmp_path / "a.json"
    data = json.loads(explain(checkpoint).dumps())
    for change, shown in (
        ({"explanation_version": 9}, "9, this hal-core reads 1"),
        ({"tp": "2"}, r"\$\.tp: expected int"),
        ({"groups": [{**data["groups"][0], "count": 7}]}, "contradict"),
        ({"groups": [{**data["groups"][0], "explanation": None}]}, "contradict"),
        ({"extra": 1}, "unknown field"),
    ):
        path.write_text(json.dumps({**data, **change}))
        with pytest.raises(ValueDecodeError, match=shown):
            read_explanation(path)
    text = json.dumps(data)
    for cut in (1, len(text) // 2, len(text) - 1):
        path.write_text(text[:cut])
        with pytest.raises(ValueDecodeError):
            read_explanation(path)
