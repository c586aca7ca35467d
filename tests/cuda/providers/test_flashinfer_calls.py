"""Every call into FlashInfer is bound against the installed version's real signatures; pages and plans are checked without a GPU."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from hal_backend_cuda.providers.flashinfer import attend_op
from hal_backend_cuda.providers.flashinfer.attention import FlashInferKV, FlashInferKVOp
from hal_backend_cuda.providers.flashinfer.plans import CALLS, Batch, Plan, planned

from hal_core.calls import Call, bind, find
from hal_core.errors import ContractError, MissingDependencyError, ShapeError
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.spec import KVCacheSpec


@pytest.mark.parametrize("name", CALLS)
def test_attention_calls_fit(name):
    pytest.importorskip("flashinfer", reason="needs flashinfer-python")
    found = bind(CALLS[name])
    assert found.keywords == frozenset(CALLS[name].keywords), "no keyword of these is optional"


def takes(a, b, *, c=1):
    return a, b, c


def test_an_unknown_keyword_is_an_error_unless_it_is_optional():
    with pytest.raises(ContractError, match="does not take d"):
        bind(Call("x.takes", ("a", "b", "d")), takes)
    found = bind(Call("x.takes", ("a", "b", "d"), optional=("d",)), takes)
    assert found.arguments({"a": 1, "b": 2, "d": 3}) == {"a": 1, "b": 2}


def test_a_parameter_without_default_must_be_given():
    with pytest.raises(ContractError, match="needs b"):
        bind(Call("x.takes", ("a",)), takes)


def test_missing_libraries_and_names_are_told():
    with pytest.raises(MissingDependencyError, match="no_such_library"):
        find("no_such_library.thing")
    with pytest.raises(ContractError, match="has no nothing"):
        find("json.nothing")


def spec(kind="bf16", **changes):
    scheme = KVScheme.parse(kind)
    return KVCacheSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "keys": scheme, "values": scheme, **changes})


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8"])
def test_pages_keep_tokens(kind):
    """On the host: keys before values, token by token; out-of-range numbers saturate."""
    given = spec(kind, dtype="fp16" if kind == "fp16" else "bf16")
    params = KVParams(torch.tensor(0.02), torch.tensor([0.05])) if kind == "fp8" else KVParams()
    op = FlashInferKV().prepare(given, params)
    assert op.page_bytes == 2 * 16 * 2 * 64 * (1 if kind == "fp8" else 2)
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(40, 2, 64, generator=rng).to(dtype) for _ in range(2))
    k[3, 1, 5] = 1000.0
    pages = torch.full((5, op.page_bytes), 255, dtype=torch.uint8)
    row = torch.tensor([4, 0, 2], dtype=torch.int32)
    slots = row.long().repeat_interleave(16)[:40] * 16 + torch.arange(40) % 16
    slots[7] = -1
    op.append(pages, k, v, slots)
    found_k, found_v = op.materialize(pages, row, 40, dtype="fp32")
    kept = torch.arange(40) != 7
    if kind == "fp8":
        assert found_k[3, 1, 5] == pytest.approx(448 * 0.02)
        k[3, 1, 5] = 448 * 0.02
        assert ((found_k - k.float()).abs()[kept] <= k.float().abs()[kept] * 2**-4 + 0.02 * 2**-9).all()
        assert ((found_v - v.float()).abs()[kept] <= v.float().abs()[kept] * 2**-4 + 0.05 * 2**-9).all()
    else:
        assert torch.equal(found_k[kept], k.float()[kept])
        assert torch.equal(found_v[kept], v.float()[kept])
    assert (pages[1] == 255).all()
    assert (pages[3] == 255).all()


@pytest.mark.parametrize("slots", [[0, 80], [-2, 1]])
def test_slots_out_of_range_write_nothing(slots):
    op = FlashInferKV().prepare(spec(), KVParams())
    pages = torch.zeros(5, op.page_bytes, dtype=torch.uint8)
    x = torch.ones(2, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ShapeError, match="these run from -1 to 79"):
        op.append(pages, x, x, torch.tensor(slots))
    assert not pages.any()


def test_a_batch_as_flashinfer_takes_it():
    table = torch.tensor([[7, 3, 9], [1, 0, 0], [5, 5, 5], [2, 4, 0]])
    found = Batch.of(table, torch.tensor([40, 1, 0, 32]), torch.tensor([0, 1, 2, 3, 4]), 16, 10)
    assert found.indptr.tolist() == [0, 3, 4, 4, 6]
    assert found.indices.tolist() == [7, 3, 9, 1, 2, 4]
    assert found.last.tolist() == [8, 1, 0, 16]
    assert found.decode
    assert not Batch.of(table, torch.tensor([40, 3, 2, 32]), torch.tensor([0, 5, 6, 6, 7]), 16, 10).decode


@pytest.mark.parametrize(
    ("table", "lengths", "starts", "told"),
    [
        ([[0, 1]], [33], [0, 1], r"lengths\[0\]: 33"),
        ([[0, 1]], [-1], [0, 1], r"lengths\[0\]: -1"),
        ([[0, 9]], [32], [0, 1], "page 9; pages run from 0 to 4"),
        ([[0, 1]], [3], [0, 4], "queries are the last cached tokens"),
        ([[0, 1], [0, 1]], [3, 3], [0, 2, 1], "rising"),
        ([[0, 1]], [3], [1, 2], "rising from 0"),
    ],
)
def test_batches_that_cannot_be(table, lengths, starts, told):
    with pytest.raises(ShapeError, match=told):
        Batch.of(torch.tensor(table), torch.tensor(lengths), torch.tensor(starts), 16, 5)


def test_pages_of_another_form_are_refused():
    op = FlashInferKV().prepare(spec(), KVParams())
    for wrong in (
        torch.zeros(2, op.page_bytes),
        torch.zeros(2, op.page_bytes + 1, dtype=torch.uint8),
        torch.zeros(op.page_bytes, dtype=torch.uint8),
    ):
        with pytest.raises(ShapeError, match="pages"):
            op.cache(wrong)


def test_the_view_of_pages_does_not_keep_them():
    op = FlashInferKV().prepare(spec(), KVParams())
    pages = torch.zeros(2, op.page_bytes, dtype=torch.uint8)
    assert op.cache(pages) is op.cache(pages)
    del pages
    assert op.seen is None


def test_scales_of_each_head_are_refused():
    with pytest.raises(ShapeError, match="one scale for all heads"):
        FlashInferKV().prepare(spec("fp8"), KVParams(torch.ones(2), torch.ones(2)))


def test_the_host_is_not_attended_from():
    op = FlashInferKV().prepare(spec(), KVParams())
    pages = torch.zeros(2, op.page_bytes, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="CUDA device"):
        op.attend(torch.zeros(1, 8, 64, dtype=torch.bfloat16), pages, torch.zeros(1, 1), torch.ones(1), torch.tensor([0, 1]))


def test_the_launch_of_an_append_is_repeated_on_its_own_device_only():
    class OnDevice(torch.Tensor):
        is_cuda = True

    op, keys = FlashInferKV().prepare(spec(), KVParams()), []
    op.repeats = lambda key, tensors, launch: keys.append(key)
    pages, x = torch.zeros(5, op.page_bytes, dtype=torch.uint8).as_subclass(OnDevice), torch.ones(1, 2, 64, dtype=torch.bfloat16)
    op.append(pages, x, x, torch.tensor([9]))
    assert pages.device in keys[0]


def test_a_slot_given_twice_writes_nothing():
    op = FlashInferKV().prepare(spec(), KVParams())
    pages, x = torch.zeros(5, op.page_bytes, dtype=torch.uint8), torch.ones(3, 2, 64, dtype=torch.bfloat16)
    slots = torch.tensor([9, -1, -1])
    op.append(pages, x, x, slots)
    slots[2] = 9
    before = pages.clone()
    with pytest.raises(ShapeError, match="slot 9 given twice"):
        op.append(pages, x, x, slots)
    assert torch.equal(pages, before)


def test_reading_pages_that_are_not_there():
    op = FlashInferKV().prepare(spec(), KVParams())
    pages = torch.zeros(2, op.page_bytes, dtype=torch.uint8)
    with pytest.raises(ShapeError, match="pages run from 0 to 1"):
        op.materialize(pages, torch.tensor([0, 2]), 20)
    with pytest.raises(ShapeError, match="the row has 2 pages"):
        op.materialize(pages, torch.tensor([0, 1]), 33)


def test_a_copy_has_plans_of_its_own():
    op = FlashInferKV().prepare(spec("fp8"), KVParams(torch.tensor(0.5), torch.tensor(0.25)))
    op.own.plan = "a plan"
    for other in (copy.deepcopy(torch.nn.Sequential(op))[0], pickle.loads(pickle.dumps(op))):
        assert (other.spec, other.key_scale, other.value_scale, other.own.plan) == (op.spec, 0.5, 0.25, None)
        assert other.number != op.number


class Wrapper:
    """One of FlashInfer's, as far as a run goes: it works out arguments and hands them to its module."""

    def __init__(self, launches=1):
        self._cached_module, self.launches, self.worked_out, self.got = self, launches, 0, []

    def plan(self, **values):
        pass

    def paged_run(self, *args):
        self.got.append(args)

    def run(self, q, cache, *, k_scale, v_scale, out, lse, return_lse):
        self.worked_out += 1
        for _ in range(self.launches):
            self._cached_module.paged_run("plan", q, *cache, out, lse, 0.5 * k_scale)


@pytest.mark.parametrize(("launches", "v_scale", "direct"), [(1, 1.0, True), (2, 1.0, False), (1, 0.5, False)])
def test_later_runs_of_a_plan_go_to_flashinfers_module_with_their_own_tensors(monkeypatch, launches, v_scale, direct):
    wrapper = Wrapper(launches)
    monkeypatch.setattr(Plan, "_wrapper", lambda self, maker, pages: wrapper)
    plan = Plan(spec(), torch.device("cpu"), decode=True, graph=False)
    for turn in range(3):
        q, out, cache = torch.full((2, 8, 64), float(turn)), torch.empty(2, 8, 64), (torch.zeros(1), torch.ones(1))
        logs = plan.run(q, cache, 2.0, v_scale, out, lse=True)
        mark, *tensors, scale = wrapper.got[-1]
        assert (mark, scale) == ("plan", 1.0)
        assert all(one is two for one, two in zip(tensors, (q, *cache, out, logs), strict=True))
    assert wrapper.worked_out == (1 if direct else 3)
    assert wrapper._cached_module is wrapper
    batch = Batch.of(torch.tensor([[0], [0]]), torch.tensor([3, 4]), torch.tensor([0, 1, 2]), 16, 1)
    plan.set(batch, True, 1.0, torch.bfloat16, torch.bfloat16)
    plan.run(q, cache, 2.0, v_scale, out, lse=True)
    assert wrapper.worked_out == (2 if direct else 4)


def test_a_plan_knows_that_its_batch_was_written_to(monkeypatch):
    monkeypatch.setattr(Plan, "_wrapper", lambda self, maker, pages: Wrapper())
    op, plan = FlashInferKV().prepare(spec(), KVParams()), Plan(spec(), torch.device("cpu"), decode=True, graph=False)
    op.given, plan.scale, plan.queries = plan, 64**-0.5, 1
    pages, batch = torch.zeros(2, op.page_bytes, dtype=torch.uint8), [torch.zeros(1, 2), torch.ones(1), torch.tensor([0, 1])]
    plan.made_from(*batch)
    assert op._planned(pages, *batch, None, True) is plan
    batch[1] += 1
    with pytest.raises(ShapeError, match="changed after the plan"):
        op._planned(pages, *batch, None, True)
    assert op._planned(pages, batch[0], batch[1].clone(), batch[2], None, True) is plan
    with torch.inference_mode():
        plan.made_from(torch.ones(1), *batch[1:])
    assert op._planned(pages, *batch, None, True) is plan


def test_results_are_written_to_contiguous_memory_whatever_the_queries_strides():
    """FlashInfer's kernels write rows one after another, and do not look at the result's strides."""
    apart = torch.randn(8, 6, 64).bfloat16().transpose(0, 1)
    assert FlashInferKVOp._room(apart, None).is_contiguous()
    room = torch.empty(6, 8, 64, dtype=torch.bfloat16)
    assert FlashInferKVOp._room(apart, room) is room
    beyond = torch.empty(6 * 8 * 64 + 1, dtype=torch.bfloat16)[1:].view(6, 8, 64)
    for wrong, told in ((torch.empty_like(apart), "not contiguous"), (room[:5], "give contiguous"), (beyond, "multiple of 16 bytes")):
        with pytest.raises(ShapeError, match=told):
            FlashInferKVOp._room(apart, wrong)


def test_queries_that_flashinfer_cannot_read_as_they_lie_are_copied():
    fused, memory = torch.randn(6, 12, 64).bfloat16(), torch.randn(6 * 8 * 65 + 1).bfloat16()
    for q in (fused, fused[:, :8], fused[:, 4:].transpose(0, 1)):
        assert FlashInferKVOp._readable(q) is q, "any strides of tokens and heads"
    for q in (memory[: 6 * 8 * 65].view(6, 8, 65)[..., :64], memory[1 : 6 * 8 * 64 + 1].view(6, 8, 64), fused[..., ::2]):
        found = FlashInferKVOp._readable(q)
        assert torch.equal(found, q)
        assert found.is_contiguous()
        assert found.data_ptr() != q.data_ptr()


BATCH = torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)


@pytest.fixture
def host_plans(monkeypatch):
    """Plans on the host: what FlashInfer's wrappers were asked to plan, and a stream that may be another."""
    found = SimpleNamespace(planned=[], fails=False, stream=SimpleNamespace(cuda_stream=0))

    class Planner(Wrapper):
        def plan(self, **values):
            found.planned.append(values)
            if found.fails:
                raise ValueError("half-way")

    monkeypatch.setattr(Plan, "_wrapper", lambda self, maker, pages: Planner())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.stream)
    monkeypatch.setattr(FlashInferKVOp, "_device", staticmethod(lambda table: table.device))
    monkeypatch.setattr("hal_backend_cuda.providers.flashinfer.plans._WORKSPACE", 16)
    return found


def own_plan(op, pages=4):
    return op._planned(torch.zeros(pages, op.page_bytes, dtype=torch.uint8), *BATCH, None, True)


def test_a_plan_is_not_for_fewer_pages_nor_another_device(host_plans):
    op = FlashInferKV().prepare(spec(), KVParams())
    plan = op.plan(4, *BATCH)
    assert own_plan(op, 4) is own_plan(op, 5) is plan
    with pytest.raises(ShapeError, match="attend: 3 pages on cpu.*made for 4 pages on cpu.*plan again"):
        own_plan(op, 3)
    with pytest.raises(ShapeError, match="4 pages on meta.*plan again"):
        op._planned(torch.zeros(4, op.page_bytes, dtype=torch.uint8, device="meta"), *BATCH, None, True)
    elsewhere = planned(plan, op.spec, Batch.of(*(t.long() for t in BATCH), 16, 4), torch.device("meta"), False, 1, 2)
    assert (elsewhere.device.type, elsewhere is plan) == ("meta", False)


def test_the_same_batch_over_fewer_pages_is_planned_again(host_plans):
    op = FlashInferKV().prepare(spec(), KVParams())
    own_plan(op, 5)
    own_plan(op, 5)
    assert len(host_plans.planned) == 1
    own_plan(op, 4)
    assert len(host_plans.planned) == 2
    with pytest.raises(ShapeError, match="page 3; pages run from 0 to 2"):
        own_plan(op, 3)


def test_a_plan_that_failed_serves_nothing(host_plans):
    op = FlashInferKV().prepare(spec(), KVParams())
    plan = op.plan(4, *BATCH)
    plan.known["key"] = "the last batch's launch"
    host_plans.fails = True
    with pytest.raises(ValueError, match="half-way"):
        op.plan(4, *BATCH)
    assert not plan.known
    with pytest.raises(ShapeError, match="the last plan failed: plan again"):
        own_plan(op)
    op.forget()
    with pytest.raises(ValueError, match="half-way"):
        own_plan(op)
    host_plans.fails = False
    own = own_plan(op)
    assert (own.queries, own.pages, len(host_plans.planned)) == (1, 4, 4)


def test_ops_share_a_threads_workspace_which_is_gone_with_them_or_it(host_plans):
    one, two = (FlashInferKV().prepare(spec(), KVParams()) for _ in range(2))
    first, mine = own_plan(one), own_plan(two).workspace
    assert first.workspace is mine
    assert one.plan(4, *BATCH).workspace is not mine, "a plan of the caller's may run beside others"
    one.forget()
    made = []

    def work(op, other):
        plan = own_plan(op)
        made.append((weakref.ref(plan), weakref.ref(plan.workspace), plan.workspace is other))

    thread = threading.Thread(target=work, args=(one, mine))
    thread.start()
    thread.join()
    del thread
    gc.collect()
    ((plan, workspace, same),) = made
    assert (plan(), workspace(), same) == (None, None, False)
    host_plans.stream = SimpleNamespace(cuda_stream=7)
    assert own_plan(one).workspace is not mine, "launches on two streams may overlap"
    held = weakref.ref(mine)
    del one, two, first, mine
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("logs", [True, False])
def test_attention_is_one_op_of_a_compiled_graph(monkeypatch, logs):
    op = FlashInferKV().prepare(spec(), KVParams())
    pages, q = torch.zeros(2, op.page_bytes, dtype=torch.uint8), torch.randn(8, 3, 64).bfloat16().transpose(0, 1)
    attend = op.attend if logs else op.attend_only
    graph = torch.compile(lambda q, *batch: attend(q, pages, *batch, scale=3.0), fullgraph=True, backend="aot_eager")

    class Other:
        def attend_now(self, q, pages, table, lengths, starts, scale, causal, logs, out):
            assert causal
            assert out is None
            return q.contiguous() * scale, q.new_ones(q.shape[:2], dtype=torch.float32) if logs else None

    other = Other()  # in the op's place once the graph runs: attention itself needs a GPU
    monkeypatch.setitem(attend_op._NUMBERED, op.number, other)
    found = graph(q, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32))
    assert torch.equal(found[0] if logs else found, q * 3.0)
    assert not logs or bool((found[1] == 1).all())
