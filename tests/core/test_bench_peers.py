"""Peers of `hal bench`: a good runner is a row; a missing, crashing, hanging or babbling one is a line, and hides nobody."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hal_core.bench import peers
from hal_core.bench.contestants import ContestantError
from hal_core.bench.lineup import Options, bench
from hal_core.bench.peers import PeerContestant, PeerEntry, find_peers, peer_entries
from hal_core.bench.problem import Problem
from hal_core.bench.run import Plan
from hal_core.bench.shapes import experts_shape, matrix_shape
from hal_core.cli.main import app_main
from hal_core.errors import SettingError
from hal_core.numerics import Numerics
from hal_core.schemes import WeightScheme

RUNNERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
ABOUT = {"about": {"name": "fake", "numerics": "exact", "kind": "float", "weight_bytes": 100.0, "versions": {"fake": "9"}}}

#: Answers each request by its word; what the test puts in stands before.
FAKE = """
import json, os, signal, sys, time
answers = {answers}
for line in sys.stdin:
    request = json.loads(line)
    answer = answers.get(request["do"])
    if callable(answer):
        answer = answer(request)
    print(answer if isinstance(answer, str) else json.dumps(answer), flush=True)
"""


def folder_of(tmp_path: Path, answers: str, *, environment: str | None = None) -> Path:
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE).replace("{answers}", answers))
    entry = {"script": "fake.py", "variant": "v", "environment": environment, "what": "made up"}
    (tmp_path / "peers.json").write_text(json.dumps({"fake": entry}))
    return tmp_path


def problem(text: str = "4,64,32,2", scheme: str = "int4:g32") -> Problem:
    return Problem(experts_shape(text).spec(WeightScheme.parse(scheme), Numerics(), "bf16"), 1)


def contestant(tmp_path: Path, answers: str) -> PeerContestant:
    entry = peer_entries(folder_of(tmp_path, answers))["fake"]
    return PeerContestant(entry, 1, tmp_path)


GOOD = f"""{{
    "prepare": {ABOUT!r}, "load": {{"loaded": True}},
    "run": lambda r: {{"seconds": [0.001] * r["calls"], "disturbed": [False] * r["calls"]}},
}}"""


def test_a_runner_that_answers_well(tmp_path):
    peer = contestant(tmp_path, GOOD)
    about = peer.prepare(problem(), 2)
    assert (about.name, about.role, about.kind, about.weight_bytes) == ("fake: fake", "peer", "float", 100.0)
    assert peer.versions == {"fake": "9"}
    peer.load(problem().batch(3))
    assert [sample.seconds for sample in peer.run(0, 4)] == [0.001] * 4
    process = peer._process
    peer.close()
    assert process.poll() is not None
    with pytest.raises(ContestantError, match="no longer running"):
        peer.run(0, 1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("lambda r: os.kill(os.getpid(), signal.SIGILL)", "was ended by SIGILL"),
        ("lambda r: os._exit(3)", "ended with exit code 3"),
        ("lambda r: (print('the last words', file=sys.stderr), os._exit(3))", "it last said: the last words"),
        ("'Segmentation fault, probably'", "which is no JSON object"),
        ("'[1, 2]'", "which is no JSON object"),
        ("{'seconds': [0.1]}", "as the times of 2 calls"),
        ("{'seconds': [0.1, -1]}", "as the times of 2 calls"),
        ("{'seconds': [0.1, float('nan')]}", "as the times of 2 calls"),
        ("{'seconds': 'soon'}", "without 'seconds'"),
        ("{'seconds': [0.1, True]}", "as the times of 2 calls"),
        ("None", "which is no JSON object"),
        ("lambda r: time.sleep(60)", "did not answer 'run' within"),
    ],
)
def test_a_runner_that_misbehaves_is_a_clear_line(tmp_path, answer, message, monkeypatch):
    if "within" in message:
        monkeypatch.setattr(peers, "_ANSWER", 0.5)
    peer = contestant(tmp_path, f"{{'prepare': {ABOUT!r}, 'run': {answer}}}")
    peer.prepare(problem(), 1)
    with pytest.raises(ContestantError, match=message):
        peer.run(0, 2)
    assert not peer.alive
    peer.close()


@pytest.mark.parametrize(
    "about",
    [{}, {"name": "x"}, {**ABOUT["about"], "weight_bytes": 0}, {**ABOUT["about"], "weight_bytes": "many"}, {**ABOUT["about"], "kind": 3}],
)
def test_a_runner_must_say_what_it_is(tmp_path, about):
    peer = contestant(tmp_path, f"{{'prepare': {{'about': {about!r}}}}}")
    with pytest.raises(ContestantError, match="about itself"):
        peer.prepare(problem(), 1)
    peer.close()


def test_an_output_that_is_no_tensor_is_a_line(tmp_path):
    write = "lambda r: open(r['to'], 'w').write('junk') and {'written': True}"
    peer = contestant(tmp_path, f"{{'prepare': {ABOUT!r}, 'output': {write}}}")
    peer.prepare(problem(), 1)
    with pytest.raises(ContestantError, match="output that cannot be read"):
        peer.distance(0, torch.zeros(1, 1), torch.arange(1))
    peer.close()


def report_with(folder: Path, names: tuple[str, ...] = ("fake",)):
    spec = experts_shape("4,64,32,2").spec(WeightScheme.parse("int4:g32"), Numerics(), "bf16")
    return bench(
        Options("4,64,32,2", spec, Plan((1, 2), rounds=2), "require:reference", against=names, peers=folder, threads=1, ceilings=False)
    )


def test_a_refusal_and_a_crash_leave_the_others_in_the_run(tmp_path):
    crash = f"{{'prepare': {ABOUT!r}, 'load': {{'loaded': True}}, 'run': lambda r: os.kill(os.getpid(), signal.SIGSEGV)}}"
    report = report_with(folder_of(tmp_path, crash))
    assert [(row.m, row.name) for row in report.rows] == [(1, "reference.moe"), (2, "reference.moe")]
    lines = [line for line in report.absent if line.name.startswith("fake")]
    assert [(line.m, "SIGSEGV" in line.reason) for line in lines] == [(1, True)]
    report = report_with(folder_of(tmp_path, "{'prepare': {'refused': 'only on Sundays'}}"))
    assert ("fake", "only on Sundays") in [(line.name, line.reason) for line in report.absent]
    assert len(report.rows) == 2


def test_a_batch_size_that_a_runner_refuses_is_a_line_of_that_size(tmp_path):
    some = f"""{{'prepare': {ABOUT!r}, 'load': lambda r: {{'refused': 'too few'}} if 'rows1.' in r['inputs'] else {{'loaded': True}},
               'run': lambda r: {{'seconds': [0.001] * r['calls']}}, 'output': {{'refused': 'shy'}}}}"""
    report = report_with(folder_of(tmp_path, some))
    assert [(line.name, line.m, line.reason) for line in report.absent if "fake" in line.name] == [
        ("fake: fake", 1, "too few"), ("fake: fake", 2, "shy"),
    ]  # fmt: skip


def test_a_missing_environment_names_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    report = report_with(folder_of(tmp_path, GOOD, environment="elsewhere"))
    (line,) = [line for line in report.absent if line.name == "fake"]
    assert "setup.py elsewhere" in line.reason
    assert report.rows


def test_unknown_peers_and_folders_without_a_list_are_refused(tmp_path, monkeypatch, capsys):
    folder_of(tmp_path, GOOD)
    with pytest.raises(SettingError, match="known: fake"):
        report_with(tmp_path, ("nobody",))
    with pytest.raises(SettingError, match=r"peers\.json"):
        find_peers(tmp_path / "nowhere")
    (tmp_path / "peers.json").write_text("{nonsense")
    with pytest.raises(SettingError, match="cannot be read"):
        peer_entries(tmp_path)
    with pytest.raises(SystemExit) as stop:
        app_main(["bench", "moe", "--against", "torch", "--peers", str(tmp_path)])
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_without_any_runners_a_peer_is_a_line(monkeypatch):
    monkeypatch.setattr("hal_core.bench.lineup.find_peers", lambda given: None)
    report = report_with(None)
    assert any(line.name == "fake" and "checkout" in line.reason for line in report.absent)


def test_the_list_of_the_repository_names_scripts_and_environments_that_exist():
    entries = peer_entries(RUNNERS)
    assert set(entries) >= {"torch", "torch-bf16", "vllm-cpu"}
    recipes = (RUNNERS / "setup.py").read_text(encoding="utf-8")
    for entry in entries.values():
        assert entry.script.is_file()
        assert entry.environment is None or f'"{entry.environment}": Recipe(' in recipes
    assert entries["torch"] == PeerEntry("torch", RUNNERS / "torch_ops.py", "int4", None, entries["torch"].what)
    assert entries["torch"].python == Path(sys.executable)


@pytest.mark.parametrize(("variant", "least"), [("torch", 44), ("torch-bf16", 42)])
@pytest.mark.parametrize("scheme", ["int4:g32", "int4:g32:zero", "int4:g32:min"])
@pytest.mark.parametrize("op", ["moe", "linear"])
def test_torch_as_a_peer_computes_the_same_problem(tmp_path, variant, least, scheme, op):
    shape = experts_shape("4,64,32,2") if op == "moe" else matrix_shape("48,64")
    given = Problem(shape.spec(WeightScheme.parse(scheme), Numerics(), "bf16"), 5)
    peer = PeerContestant(peer_entries(RUNNERS)[variant], 1, tmp_path)
    try:
        about = peer.prepare(given, 2)
        assert about.weight_bytes > 0
        batch = given.batch(7)
        peer.load(batch)
        assert len(peer.run(0, 3)) == 3
        for routing in range(min(2, batch.pool)):
            assert peer.distance(routing, given.truth(batch, routing), given.checked(7)).snr_db > least
    finally:
        peer.close()


def test_torch_refuses_what_it_does_not_serve(tmp_path):
    peer = PeerContestant(peer_entries(RUNNERS)["torch"], 1, tmp_path)
    with pytest.raises(ContestantError, match="int8"):
        peer.prepare(problem(scheme="int8:channel"), 1)
    assert peer.alive
    peer.close()
