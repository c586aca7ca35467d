"""Triton's interpreter, repaired where it computes other numbers than a GPU does.

Set TRITON_INTERPRET=1 before triton is imported, then call ``repair`` before the first launch. Repaired: products and sums of bfloat16,
which the interpreter holds as 16-bit integers and computes with as such; conversions between floats, which truncate where a GPU
rounds to nearest, ties to even; and constants of bfloat16, which Triton 3.6 has none of.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_FLOATS = {
    tl.float64: torch.float64, tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.float8e4b8: torch.float8_e4m3fnuz,
}  # fmt: skip
_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32), 8: (torch.int64, np.uint64)}
_convert = interpreter._convert_float


def _tensor(data: np.ndarray, dtype: tl.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=_FLOATS[dtype]).element_size()
    raw = np.ascontiguousarray(data).view(_BITS[size][1])
    return torch.from_numpy(raw.view(np.uint8 if size == 1 else f"int{8 * size}").copy()).view(_FLOATS[dtype])


def _array(values: torch.Tensor) -> np.ndarray:
    torch_bits, numpy_bits = _BITS[values.element_size()]
    return values.contiguous().view(torch_bits).numpy().view(numpy_bits)


def _converted(data, source, target, rounding_mode=None):
    if source not in _FLOATS or target not in _FLOATS:
        return _convert(data, source, target, rounding_mode)
    data = np.asarray(data)
    return _array(_tensor(data.reshape(-1), source).to(_FLOATS[target])).reshape(data.shape)


def _single(handle) -> np.ndarray:
    dtype = handle.dtype.scalar
    return handle.data if dtype not in _FLOATS else _tensor(np.asarray(handle.data), dtype).float().numpy()


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    whole = a.dtype.scalar.is_int()
    product = np.matmul(*(handle.data.astype(np.int32) if whole else _single(handle) for handle in (a, b)))
    return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)


def _rounded(name: str, operation):
    plain = getattr(interpreter.InterpreterBuilder, name)

    def compute(self, left, right):
        if left.dtype.scalar is not tl.bfloat16:
            return plain(self, left, right)
        result = np.asarray(operation(_single(left), _single(right)), dtype=np.float32)
        return interpreter.TensorHandle(_converted(result, tl.float32, tl.bfloat16), left.dtype.scalar)

    return compute


def _bfloat16(self, value):
    bits = _converted(np.array([value], dtype=np.float32), tl.float32, tl.bfloat16)
    return interpreter.TensorHandle(bits, tl.bfloat16)


def repair() -> None:
    """Replace what is wrong, in this process."""
    interpreter._convert_float = _converted
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot
    builder.get_bf16 = _bfloat16
    for name, operation in (("create_fadd", np.add), ("create_fsub", np.subtract), ("create_fmul", np.multiply)):
        setattr(builder, name, _rounded(name, operation))
