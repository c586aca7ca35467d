"""The probes of `hal bench`: what they read is what is there, and bad arguments are told."""

from __future__ import annotations

import pytest
import torch

from hal_backend_cpu import _native

BYTES = 1 << 16


def peaks() -> dict[str, str]:
    return {name: kind for kind, _, name in (item.partition(":") for item in _native.ops.probe_peaks().split(","))}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("streams", [1, 3, 4])
def test_reading_sees_every_byte_of_whole_lines(threads, streams):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer = torch.randint(0, 256, (BYTES,), dtype=torch.uint8)
        start, size = 64, threads * streams * 128 * 5
        words = buffer[start : start + size].view(torch.int64).tolist()
        expected = 0
        for word in words:
            expected ^= word
        assert _native.ops.probe_read(buffer, start, size, streams) == expected & 0x7FFFFFFFFFFFFFFF
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("start", "size", "streams", "message"),
    [(-1, BYTES, 1, "from -1"), (0, BYTES + 1, 1, "of a buffer of"), (BYTES, 1, 1, "of a buffer of"), (0, BYTES, 0, "streams is 0"),
     (0, BYTES, 65, "streams is 65"), (0, 100, 1, "expected at least")],
)  # fmt: skip
def test_reading_outside_the_buffer_is_refused(start, size, streams, message):
    with pytest.raises(RuntimeError, match=message):
        _native.ops.probe_read(torch.zeros(BYTES, dtype=torch.uint8), start, size, streams)


def test_a_buffer_of_another_type_is_refused():
    with pytest.raises(RuntimeError, match="buffer"):
        _native.ops.probe_read(torch.zeros(BYTES), 0, BYTES, 1)


def test_every_peak_of_this_machine_runs_and_counts_in_proportion():
    found = peaks()
    assert set(found.values()) <= {"float", "int8"}
    assert "avx2 fp32 fma" in found
    for name in found:
        once = _native.ops.probe_peak(name, 10)
        assert once > 0
        assert _native.ops.probe_peak(name, 30) == 3 * once


@pytest.mark.parametrize(("name", "steps"), [("no such unit", 1), ("avx2 fp32 fma", 0), ("avx2 fp32 fma", -5)])
def test_unknown_peaks_and_counts_are_refused(name, steps):
    with pytest.raises(RuntimeError, match="hal_cpu"):
        _native.ops.probe_peak(name, steps)
