"""One pass of every op with its routes and edges, on small sizes: for a memory checker around this program.

    compute-sanitizer --tool memcheck python tests/cuda/one_pass.py [PART[=KERNEL] ..]

Parts: integer, floats, fp8, torch, quantizers, flashinfer, flashinfer_moe, humming_linear, humming_moe; of the last two only one kernel
where it is named. Run it once without the checker first: what compiles is kept then.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time

import torch
import triton_cases as cases
import two_tiles
from hal_backend_cuda.kernels import KERNELS
from hal_backend_cuda.providers.flashinfer.attention import FlashInferKV
from hal_backend_cuda.providers.humming import runtime
from hal_backend_cuda.providers.kernels import KERNELS as PROVIDED

from hal_core.check import check
from hal_core.errors import ShapeError
from hal_core.kv.op import KVParams
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Machine
from hal_core.spec import KVCacheSpec
from hal_core.testing.case import Status
from hal_core.testing.plan import plan_of
from hal_core.testing.run import run_case
from hal_core.triton import launch
from hal_core.triton.declared import FP8_EXPERTS_BOUND

DEVICE = "cuda"
#: Slots that are not sorted, that one program sorts, and more.
TOKENS = (2, 40, 400)
BY_NAME = {kernel.name: kernel for kernel in (*KERNELS, *PROVIDED)}


def block(scheme: str, **options) -> None:
    for tokens in TOKENS:
        made = cases.Block(scheme, 128, 96, tokens, device=DEVICE, wrong=True, **options)
        found = made.run()
        try:
            check()
        except ShapeError:
            made.wrong = False
        assert not made.wrong, "a wrong id was not told"
        # two tokens may nearly cancel, which the bound that fp8 kernels declare has room for
        assert cases.distance(found, made.truth()) < (FP8_EXPERTS_BOUND if scheme.startswith("fp8") else made.bound)


def linear(scheme: str) -> None:
    for rows in (1, 17, 70, 700):
        found, wanted = cases.Linear(scheme, 72, 160, rows, bias=True).run(DEVICE)
        assert cases.distance(found, wanted) < (cases.FP8_BOUND if scheme.startswith("fp8") else cases.BOUND["bf16"])


def integer() -> None:
    for scheme in ("int4:g32", "int4:g32:zero:act_order", "int4:channel:min", "int8:g64"):
        linear(scheme)
    block("int4:g32")
    block("int8:channel", bias=True, mapped=True, scaling=2.0)
    block("int4:g32:zero", reduce=False)


def floats() -> None:
    linear("bf16")
    block("bf16", mapped=True)


def fp8() -> None:
    for scheme in ("fp8_e4m3:b128x128", "fp8_e4m3:channel"):
        linear(scheme)
        block(scheme)


def tried(names: list[str]) -> None:
    """The first problem that the conformance kit has for each kernel and form of routing, at all of its batch sizes."""
    machine = Machine.detect()
    for name in names:
        plan = plan_of(f"cuda.{name}", BY_NAME[name], machine)
        cases = [case for case in plan.cases() if case.check == "accuracy" and case.spec in plan.accepted]
        for case in {getattr(case.spec, "routing", ""): case for case in reversed(cases)}.values():
            result = run_case(plan, case)
            print(f"{result.case}: {result.status.value} {result.reason[:200]}", flush=True)
            # weights that do not fit a layout are refused; everything else must be right
            assert result.status in (Status.PASSED, Status.REFUSED)


def products() -> None:
    tried(["linear_scaled_mm", "moe_grouped_mm"])


def quantizers() -> None:
    for rows, k in itertools.product((1, 33), (64, 1000)):
        x = torch.randn(rows, k, device=DEVICE).to(torch.bfloat16)
        launch.quantize_int8(x)
        launch.quantize_fp8(x, 128)
        launch.quantize_fp8(x, None)


def humming(kind: str, only: str = "") -> None:
    runtime.Problem.table = two_tiles.table
    tried([name for name in BY_NAME if f"{kind}_humming" in name and only in name])


def flashinfer() -> None:
    for kind in ("bf16", "fp8"):
        scheme = KVScheme.parse(kind)
        op = FlashInferKV().prepare(KVCacheSpec(8, 2, 128, 16, scheme, scheme), KVParams())
        pages = torch.zeros(12, op.page_bytes, dtype=torch.uint8, device=DEVICE)
        table = torch.randperm(12, device=DEVICE).int().view(3, 4)
        k, v = (torch.randn(192, 2, 128, device=DEVICE).bfloat16() for _ in range(2))
        op.append(pages, k, v, torch.arange(192, device=DEVICE))
        lengths = torch.tensor([64, 0, 17], dtype=torch.int32, device=DEVICE)
        for counts in ((1, 1, 1), (3, 0, 5)):
            starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
            q = torch.randn(int(starts[-1]), 8, 128, device=DEVICE).bfloat16()
            out, _ = op.attend(q, pages, table, lengths, starts)
            assert bool(out.isfinite().all())


def flashinfer_moe() -> None:
    """Where FlashInfer's library of experts is built: it compiles for an hour."""
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    if torch.cuda.get_device_capability() == (9, 0) and gen_cutlass_fused_moe_sm90_module().is_compiled:
        tried(["moe_flashinfer_cutlass_bf16", "moe_flashinfer_cutlass_fp8_block"])
    else:
        print("FlashInfer's experts are left out: their library for this device is not built")


PARTS = {f.__name__: f for f in (integer, floats, fp8, quantizers, flashinfer, flashinfer_moe)} | {
    "torch": products, "humming_linear": functools.partial(humming, "linear"), "humming_moe": functools.partial(humming, "moe"),
}  # fmt: skip


def main() -> None:
    torch.manual_seed(0)  # of two tokens some draws nearly cancel
    for part in sys.argv[1:] or PARTS:
        begin = time.perf_counter()
        name, _, only = part.partition("=")
        PARTS[name](*([only] if only else []))
        torch.cuda.synchronize()
        print(f"{part} done in {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
