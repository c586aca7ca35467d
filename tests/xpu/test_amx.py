"""Where the processor has AMX: the int8 product runs on it, at a rate that nothing else there reaches."""

from __future__ import annotations

import time

import pytest
import torch
from hal_backend_xpu import store
from hal_backend_xpu.layout import pack_bytes
from hal_backend_xpu.session import Session, session

from hal_core.machine import Machine

pytestmark = pytest.mark.skipif("amx_int8" not in Machine.detect().isa, reason="this processor has no AMX (amx_int8)")
CPU = torch.device("cpu")
ROWS, COLUMNS, INNER = 1024, 1024, 2048


def tdpbssd(binary: bytes) -> int:
    """How often the instruction stands in machine code: VEX, map 0F38, prefix F2, W 0, opcode 5E, between registers."""
    starts = (at for at in range(len(binary) - 4) if binary[at] == 0xC4 and binary[at + 3] == 0x5E)
    return sum(binary[at + 1] & 0x1F == 2 and binary[at + 2] & 0x87 == 3 and binary[at + 4] >= 0xC0 for at in starts)


def test_the_kept_binary_holds_amx_instructions(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path))
    here = Session(CPU)
    assert here.engine("int8").name == "joint_matrix"
    here.kernel("grouped_int8.hpp", "grouped_int8_0", "int8")
    (kept,) = (tmp_path / "xpu").glob("*.bin")
    assert sum(map(tdpbssd, store.read(kept.name) or ())) > 0


def test_a_long_input_reaches_400_giga_operations_a_second():
    here, rng = session(CPU), torch.Generator().manual_seed(1)
    a = torch.randint(-128, 128, (ROWS + 64, INNER), generator=rng, dtype=torch.int8)
    w = torch.randint(-128, 128, (COLUMNS, INNER), generator=rng, dtype=torch.int8)
    offsets, ones, out = torch.tensor([0, ROWS], dtype=torch.int32), torch.ones(ROWS + 64), torch.empty(ROWS, COLUMNS)
    kernel, words, best = here.kernel("grouped_int8.hpp", "grouped_int8_1", "int8"), pack_bytes(w)[None], float("inf")
    for _ in range(10):
        start = time.perf_counter()
        here.launch(kernel, (1, 1, 16), (1, 1, 64), (
            a, ones, offsets, 1, None, None, None, words, ones, None, COLUMNS, INNER, out, 0, 0, 0.0, float("inf"),
        ))  # fmt: skip
        here.finish()
        best = min(best, time.perf_counter() - start)
    assert torch.equal(out, (a[:ROWS].double() @ w.double().t()).float())
    rate = 2 * ROWS * COLUMNS * INNER / best / 1e12
    print(f"{rate:.2f} TOP/s on {here.facts.units} units")
    assert rate >= 0.4
