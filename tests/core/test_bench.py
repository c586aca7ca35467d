"""`hal bench`: the turns, the figures, the refusals, the value that is printed. Times come from a clock that the tests wind."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import types
import weakref

import pytest
import torch

from hal_core.bench.contestants import About, ContestantError, KernelContestant
from hal_core.bench.lineup import Options, bench
from hal_core.bench.problem import Distance, Problem, distance_of, quantized, snr_db
from hal_core.bench.report import SCHEMA, Report, rate_of, spread_of
from hal_core.bench.run import Plan, measure
from hal_core.bench.shapes import EXPERTS, experts_shape, matrix_shape, parse_rows
from hal_core.bench.timer import GraphTimer, Sample, WallTimer, timer_of
from hal_core.cli.main import app_main
from hal_core.errors import SettingError
from hal_core.numerics import Numerics
from hal_core.registry import RegisteredKernel, default_registry
from hal_core.schemes import WeightScheme

INT4 = WeightScheme.parse("int4:g32")
TINY = ("--shape", "4,64,32,2", "--scheme", "int4:g32", "--m", "1,5", "--rounds", "2", "--rotate", "0", "--seed", "7")

LITTLE = ("--shape", "64,96", "--scheme", "int4:g32", "--m", "2", "--rounds", "1", "--rotate", "0")


@pytest.fixture
def hal(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            app_main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return run


class FakeTimer:
    """Gives each bound call its own duration, whatever it does."""

    name = "fake"

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.settled = list(seconds), 0

    def bind(self, call):
        seconds = self.seconds.pop(0)

        def run() -> Sample:
            call()
            return Sample(seconds, False)

        return run

    def settle(self) -> None:
        self.settled += 1


class Fake:
    """A contestant with a script: durations in order, and at which batch sizes it gives up."""

    alive = True

    def __init__(self, name, role, seconds, *, kind="float", size=1e6, fails_at=(), snr=40.0, log=None):
        self.about = About(name, role, "exact", kind, size)
        self.seconds, self.fails_at, self.decibels, self.log, self.closed = seconds, fails_at, snr, log if log is not None else [], False

    def prepare(self, problem, copies):
        return self.about

    def load(self, batch):
        self.rows = batch.rows
        if batch.rows in self.fails_at:
            raise ContestantError("this size", "not served")

    def run(self, start, calls):
        self.log.append((self.about.name, start, calls))
        return [Sample(self.seconds, index % 2 == 0) for index in range(calls)]

    def distance(self, index, truth, rows):
        return Distance(self.decibels, 1.0, 0.0)

    def close(self):
        self.closed = True


def tiny(scheme=INT4, seed=3, **changes) -> Problem:
    return Problem(experts_shape("4,64,32,2").spec(scheme, Numerics(), "bf16"), seed, **changes)


def test_shapes_by_name_and_by_numbers():
    assert experts_shape("qwen3-30b-a3b").spec(INT4, Numerics(), "bf16").num_experts == 128
    assert matrix_shape("4096,256").k == 256
    assert parse_rows("4, 1,4") == (4, 1)
    for name in EXPERTS:
        assert experts_shape(name).top_k <= experts_shape(name).experts
    for bad in ("nonsense", "1,2,3", "4,64,32,5", "4,64,32,0", "4,64,32,-2", "4,64,32,2,1", "4,64,99999999999,2"):
        with pytest.raises(SettingError):
            experts_shape(bad)
    for bad in ("", "0", "1,x", "-1", "1;2", "99999999999"):
        with pytest.raises(SettingError):
            parse_rows(bad)


@pytest.mark.parametrize(
    "scheme", ["int4:g32", "int4:g32:zero", "int4:g32:min", "int8:channel", "int8:g64:zero", "int3:g32", "int2:channel"]
)
def test_rounded_weights_are_near_the_gaussian_ones(scheme):
    scheme = WeightScheme.parse(scheme)
    rng, same = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    weight = quantized(scheme, (48, 128), rng)
    assert weight.scales.dtype == torch.bfloat16
    wanted = torch.randn((48, 128), generator=same) * 128**-0.5
    error = float((weight.dequantize() - wanted).norm() / wanted.norm())
    assert error < 3.2 / 2**scheme.bits
    assert torch.equal(weight.scales.half().float(), weight.scales.float())


@pytest.mark.parametrize("scheme", ["mxfp4:g32", "fp8_e4m3:channel", "int4:g32:act_order", "int4:tensor", "bf16", "int4:g24"])
def test_other_schemes_have_weights_too(scheme):
    weight = quantized(WeightScheme.parse(scheme), (32, 64), torch.Generator().manual_seed(1))
    assert bool(torch.isfinite(weight.dequantize()).all())


def test_the_truth_is_that_of_the_stored_weights():
    problem = tiny()
    batch = problem.batch(9)
    got = problem.truth(batch, 2)
    ids, scores = batch.ids[2], batch.scores[2]
    w = {name: part.dequantize() for name, part in problem.parts.items()}
    for token in range(9):
        x = batch.x[token].float()
        terms = [
            s * (w["down"][e] @ (torch.nn.functional.silu(w["gate"][e] @ x) * (w["up"][e] @ x)))
            for e, s in zip(ids[token], scores[token], strict=True)
        ]
        assert torch.allclose(got[token], sum(terms), atol=1e-5)


def test_routing_is_fresh_and_of_distinct_experts():
    batch = tiny().batch(3)
    assert batch.pool >= 4
    assert all(len(set(row.tolist())) == 2 for row in batch.ids.flatten(0, 1))
    assert len({tuple(ids.flatten().tolist()) for ids in batch.ids}) > 1
    assert torch.allclose(batch.scores.sum(-1), torch.ones(batch.pool, 3))
    assert {batch.experts_hit(i) for i in range(batch.pool)} <= {2, 3, 4}


def test_outliers_are_in_the_inputs_only_when_asked():
    assert float(tiny().batch(200).x.abs().max()) < 8
    loud = tiny(outliers=True).batch(200).x.float().abs()
    assert 0.005 < float((loud > 19).float().mean()) < 0.02


def test_decibels():
    truth = torch.randn(4, 4)
    assert snr_db(truth * 1.01, truth) == pytest.approx(40, abs=0.1)
    assert snr_db(truth, truth) is None
    assert snr_db(truth * float("nan"), truth) is None
    assert distance_of(truth * float("nan"), truth) is None
    assert distance_of(truth * -2, truth).cosine == pytest.approx(-1)
    assert distance_of(truth * 1.01, truth).largest == pytest.approx(0.01, rel=1e-4)


def test_spread_and_rates():
    spread = spread_of([Sample(s, s > 3) for s in (4.0, 1.0, 2.0, 3.0, 5.0)])
    assert (spread.least, spread.lower, spread.median, spread.upper, spread.most, spread.undisturbed) == (1, 2, 3, 4, 5, 3)
    rate = rate_of(spread, 60.0)
    assert (rate.least, rate.lower, rate.median, rate.upper, rate.most) == (12, 15, 20, 30, 60)
    assert spread_of([Sample(2.0)]).undisturbed is None


def test_everybody_takes_turns_and_ratios_are_to_the_peers():
    log = []
    field = [
        Fake("slow", "peer", 4e-3, log=log), Fake("quick", "peer", 2e-3, log=log), Fake("ours", "kernel", 1e-3, kind="int8", log=log),
        Fake("memory", "ceiling", 1e-3, kind="read", size=4e7, log=log), Fake("dots", "ceiling", 1e-3, kind="int8", size=1e9, log=log),
        Fake("faster dots", "ceiling", 1e-3, kind="int8", size=2e9, log=log),
    ]  # fmt: skip
    problem, timer = tiny(), FakeTimer()
    found = measure(problem, [(f.about.name, f) for f in field], Plan((2,), rounds=3), timer)
    by_name = {row.name: row for row in found.rows}
    assert list(by_name) == ["slow", "quick", "ours"]
    ours = by_name["ours"]
    assert ours.times_first_peer == pytest.approx(4)
    assert ours.times_best_peer == pytest.approx(2)
    assert ours.bytes_read == pytest.approx(ours.experts_hit * 1e6)
    assert ours.of_read == pytest.approx(ours.bytes_read / 1e-3 / 4e10)
    assert ours.operations == problem.flops(2) == 6 * 2 * 2 * 64 * 32
    assert ours.of_peak == pytest.approx(ours.operations / 1e-3 / 2e12)
    assert by_name["slow"].of_peak is None  # nobody measured a float ceiling
    assert ours.bits_per_weight == pytest.approx(1e6 * 8 * 4 / (4 * 64 * 32 * 3))
    turns = [name for name, start, _ in log if start]
    assert sorted(turns) == sorted([f.about.name for f in field] * 3)
    assert all(set(turns[i : i + 6]) == {f.about.name for f in field} for i in (0, 6, 12))
    assert timer.settled == 18
    assert all(f.closed for f in field)


def test_one_that_gives_up_is_a_line_and_comes_back_for_the_next_size():
    fake, other = Fake("picky", "kernel", 1e-3, fails_at=(2,)), Fake("calm", "kernel", 1e-3)
    found = measure(tiny(), [("picky", fake), ("calm", other)], Plan((2, 3), rounds=1), FakeTimer())
    assert [(row.m, row.name) for row in found.rows] == [(2, "calm"), (3, "picky"), (3, "calm")]
    assert [(line.name, line.m, line.reason) for line in found.absent] == [("picky", 2, "this size: not served")]


def test_time_is_limited():
    log = []
    measure(tiny(), [("slow", Fake("slow", "kernel", 10.0, log=log))], Plan((1,), rounds=50, seconds=1.0), FakeTimer())
    assert len(log) == 1 + 3


class Broken:
    """A kernel of a plugin that does not do what it should."""

    name, devices, m_range = "broken", ("cpu",), (1, 4)

    def __init__(self, how):
        self.how = how

    def computes(self, spec):
        return Numerics()

    def prepare(self, spec, weights):
        if self.how == "prepare":
            raise RuntimeError("no such instruction")
        how = self.how

        class Op(torch.nn.Module):
            def apply(self, x, routed, out):
                if how == "raise":
                    raise ValueError("cannot")
                if how == "half":
                    out[0] = 1.0

        return Op()


@pytest.mark.parametrize(
    ("how", "rows", "reason"),
    [("prepare", 2, "RuntimeError: no such instruction"), ("raise", 2, "ValueError: cannot"), ("half", 2, "poisoned output"),
     ("half", 5, "serves M = 1 to 4")],
)  # fmt: skip
def test_broken_kernels_are_lines(how, rows, reason):
    contestant = KernelContestant(RegisteredKernel("x.broken", "x", Broken(how)), torch.device("cpu"), WallTimer())
    found = measure(tiny(), [("x.broken", contestant)], Plan((rows,), rounds=1), FakeTimer())
    assert found.rows == ()
    assert len(found.absent) == 1
    assert reason in found.absent[0].reason


def test_a_kernel_is_called_with_every_copy_and_measured_against_the_truth():
    registered = next(k for k in default_registry().kernels() if k.name == "reference.moe")
    contestant = KernelContestant(registered, torch.device("cpu"), FakeTimer(1.0, 2.0, 3.0))
    problem = tiny()
    about = contestant.prepare(problem, 3)
    assert about.weight_bytes == sum(part.nbytes for part in problem.parts.values()) / 4
    batch = problem.batch(6)
    contestant.load(batch)
    assert [sample.seconds for sample in contestant.run(4, 4)] == [2.0, 3.0, 1.0, 2.0]
    assert contestant.distance(1, problem.truth(batch, 1), problem.checked(6)).snr_db > 48
    assert contestant.distance(1, problem.truth(batch, 2), problem.checked(6)).snr_db < 20


def test_the_clock_of_the_host():
    timer = timer_of(torch.device("cpu"))
    done = []
    sample = timer.bind(lambda: done.append(sum(range(20000))))()
    assert len(done) == 1
    assert 0 < sample.seconds < 5
    timer.settle()


def test_the_report_reads_back_and_says_everything(hal):
    code, out, _ = hal("bench", "moe", *TINY, "--policy", "require:reference", "--json")
    assert code == 0
    data = json.loads(out)
    report = Report.from_json(out)
    assert report.to_json() == data
    assert data["schema"] == SCHEMA
    assert data["command"].startswith("hal bench moe --shape 4,64,32,2 --m 1,5 --scheme int4:g32 --numerics int8")
    assert "--seed 7" in data["command"]
    assert data["spec"]["op"] == "moe"
    assert {version["name"] for version in data["versions"]} >= {"hal-core", "torch"}
    assert data["machine"]["devices"]
    assert [(row["m"], row["name"]) for row in data["rows"]] == [(1, "reference.moe"), (5, "reference.moe")]
    for row in data["rows"]:
        assert 48 < row["snr_db"] < 70
        assert row["cosine"] > 0.9999
        assert 0 < row["largest_error"] < 0.01
        assert (
            row["seconds"]["least"]
            <= row["seconds"]["lower"]
            <= row["seconds"]["median"]
            <= row["seconds"]["upper"]
            <= row["seconds"]["most"]
        )
        assert math.isclose(row["gb_per_s"], row["bytes_read"] / row["seconds"]["median"] / 1e9)
    assert {c["kind"] for c in data["ceilings"]} == {"read", "float", "int8"}
    assert all(c["per_second"]["median"] > 0 for c in data["ceilings"])


def test_tables_and_reasons(hal):
    code, out, _ = hal("bench", "linear", *LITTLE, "--verbose", "--numerics", "exact", "--policy", "require:reference")
    assert code == 0
    assert "M = 2" in out
    assert "reference.linear" in out
    assert "dB" in out
    assert "limits in the same turns: read memory" in out or "torch" in out


def test_without_verbose_refused_kernels_are_only_counted(hal):
    code, out, _ = hal("bench", "linear", *LITTLE, "--policy", "require:reference.linear")
    assert code == 0
    assert "policy.excluded" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moe", "--shape", "4,64"), "--shape 4,64"), (("moe", "--m", "0"), "--m 0"), (("linear", "--kernels", "some"), "--kernels some"),
        (("moe", "--scheme", "int99"), "int99"), (("moe", "--numerics", "vague"), "vague"),
        (("linear", "--plot", "roof.txt"), "no picture"),
        (("moe", "--shape", "100000,100000,100000,8"), "are free"), (("linear", "--dtype", "fp12"), "fp12"),
        (("linear", "--policy", "require:nobody"), "nobody"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(hal, arguments, message, monkeypatch):
    if "are free" in message:
        monkeypatch.setattr("hal_core.bench.lineup.Problem", Enormous)
    code, _, err = hal("bench", *arguments)
    assert code == 2
    assert len(err.strip().splitlines()[-1:]) == 1
    assert message in err


class Enormous:
    """Weights that nobody can make."""

    def __init__(self, spec, seed, *, outliers):
        self.spec = spec
        self.parts = {"up": type("Part", (), {"nbytes": 1 << 50})()}


def test_memory_bounds_the_copies(monkeypatch):
    monkeypatch.setattr("hal_core.bench.lineup._free_bytes", lambda device: 400_000)
    options = Options(
        "64,96", matrix_shape("64,96").spec(INT4, Numerics(), "bf16"), Plan((1,), rounds=1), "require:reference", ceilings=False
    )
    report = bench(options)
    assert 1 <= report.copies <= 400_000 * 0.6 / (64 * 96 / 2)
    assert report.rows


def test_kernels_are_compared_with_by_name_and_are_the_peer_of_ratios(hal):
    code, out, _ = hal("bench", "moe", *TINY, "--policy", "require:reference", "--against", "reference.m*", "--json")
    assert code == 0
    assert {(row["name"], row["role"], row["times_first_peer"]) for row in json.loads(out)["rows"]} == {("reference.moe", "peer", 1.0)}
    code, _, err = hal("bench", "linear", "--shape", "48,64", "--m", "1", "--policy", "require:reference", "--against", "reference.moe")
    assert code != 0
    assert "none of its kernels serves" in err


def test_a_captured_graph_keeps_the_tensors_that_it_reads():
    stream = types.SimpleNamespace(wait_stream=lambda _: None)
    timer = GraphTimer.__new__(GraphTimer)
    timer._module = types.SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: stream, stream=contextlib.nullcontext, graph=contextlib.nullcontext,
        CUDAGraph=lambda: types.SimpleNamespace(replay=lambda: None),
    )  # fmt: skip
    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    bound = timer.bind(lambda tensor=tensor: tensor.sum())
    del tensor
    gc.collect()
    assert held() is not None
    del bound
    gc.collect()
    assert held() is None
