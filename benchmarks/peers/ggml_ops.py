"""Peer: ggml's matrix products, as llama.cpp runs them: through the shared libraries that llama-cpp-python carries, without a model."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import torch
from runner import Matrix, Peer, Problem, RefusedError, serve
from torch import Tensor

F32, Q4_0, Q4_1, Q8_0, I32 = 0, 2, 3, 8, 26
BLOCK = 32
CPU_DEVICE = 0


class InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


#: Functions by library: arguments, and what they return where it is no pointer.
SIGNATURES: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "ggml_init": ("base", (InitParams,), c_void_p),
    "ggml_free": ("base", (c_void_p,), None),
    "ggml_nbytes": ("base", (c_void_p,), c_size_t),
    "ggml_new_tensor_2d": ("base", (c_void_p, c_int, c_int64, c_int64), c_void_p),
    "ggml_new_tensor_3d": ("base", (c_void_p, c_int, c_int64, c_int64, c_int64), c_void_p),
    "ggml_view_2d": ("base", (c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t), c_void_p),
    "ggml_mul_mat": ("base", (c_void_p, c_void_p, c_void_p), c_void_p),
    "ggml_mul_mat_id": ("base", (c_void_p, c_void_p, c_void_p, c_void_p), c_void_p),
    "ggml_silu": ("base", (c_void_p, c_void_p), c_void_p),
    "ggml_mul": ("base", (c_void_p, c_void_p, c_void_p), c_void_p),
    "ggml_add": ("base", (c_void_p, c_void_p, c_void_p), c_void_p),
    "ggml_cont": ("base", (c_void_p, c_void_p), c_void_p),
    "ggml_new_graph": ("base", (c_void_p,), c_void_p),
    "ggml_build_forward_expand": ("base", (c_void_p, c_void_p), None),
    "ggml_graph_n_nodes": ("base", (c_void_p,), c_int),
    "ggml_graph_node": ("base", (c_void_p, c_int), c_void_p),
    "ggml_backend_supports_op": ("base", (c_void_p, c_void_p), c_bool),
    "ggml_backend_get_default_buffer_type": ("base", (c_void_p,), c_void_p),
    "ggml_backend_alloc_ctx_tensors": ("base", (c_void_p, c_void_p), c_void_p),
    "ggml_backend_alloc_ctx_tensors_from_buft": ("base", (c_void_p, c_void_p), c_void_p),
    "ggml_backend_buffer_free": ("base", (c_void_p,), None),
    "ggml_backend_tensor_set": ("base", (c_void_p, c_void_p, c_size_t, c_size_t), None),
    "ggml_backend_tensor_get": ("base", (c_void_p, c_void_p, c_size_t, c_size_t), None),
    "ggml_backend_graph_compute": ("base", (c_void_p, c_void_p), c_int),
    "ggml_backend_dev_backend_reg": ("base", (c_void_p,), c_void_p),
    "ggml_backend_reg_get_proc_address": ("base", (c_void_p, c_char_p), c_void_p),
    "ggml_backend_dev_by_type": ("ggml", (c_int,), c_void_p),
    "ggml_backend_cpu_init": ("cpu", (), c_void_p),
    "ggml_backend_cpu_set_n_threads": ("cpu", (c_void_p, c_int), None),
}


class Ggml:
    """The functions, with their types."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise RefusedError("llama_cpp is not in the environment")
        folder = Path(spec.origin).parent / "lib"
        names = {"base": "libggml-base.so", "cpu": "libggml-cpu.so", "ggml": "libggml.so"}
        libraries = {key: ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for key, name in names.items()}
        for name, (library, arguments, result) in SIGNATURES.items():
            function = getattr(libraries[library], name)
            function.argtypes, function.restype = arguments, result
            setattr(self, name.removeprefix("ggml_"), function)

    def context(self, tensors: int = 512) -> int:
        # ggml_tensor_overhead() and a graph's own bookkeeping, generously
        return self.init(InitParams(tensors * 512 + (1 << 20), None, True))

    def buffer_types(self, backend: int) -> list[int]:
        """Of weights, the best first: those that lay them out anew, then plain memory."""
        device = self.backend_dev_by_type(CPU_DEVICE)
        address = self.backend_reg_get_proc_address(self.backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts")
        found, index = [], 0
        if address:
            extra = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(device)
            while extra and extra[index]:
                found.append(extra[index])
                index += 1
        return [*found, self.backend_get_default_buffer_type(backend)]


def blocks(m: Matrix, kind: int) -> Tensor:
    """ggml's blocks of 32 numbers, uint8 [.., bytes]; the same scale in each block of a longer group."""
    scale = m.scales.repeat_interleave(m.group // BLOCK, -1).half()[..., None].view(torch.uint8)
    codes = m.codes.unflatten(-1, (-1, BLOCK))
    if kind == Q8_0:
        return torch.cat([scale, codes ^ 128], -1)
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    if kind == Q4_0:
        return torch.cat([scale, packed], -1)
    low = -m.zeros * m.scales if m.mins is None else m.mins
    return torch.cat([scale, low.repeat_interleave(m.group // BLOCK, -1).half()[..., None].view(torch.uint8), packed], -1)


class GgmlOps(Peer):
    def prepare(self, problem: Problem) -> dict[str, Any]:
        self.problem, self.g = problem, Ggml()
        parts = problem.matrices()
        first = next(iter(parts.values()))
        problem.need(not problem.act_order and first.group % BLOCK == 0, "serves groups of multiples of 32 without act-order")
        problem.need(problem.bits == 4 or first.symmetric, "serves int8 without zero points")
        self.kind = Q8_0 if problem.bits == 8 else Q4_0 if first.symmetric else Q4_1
        self.backend = self.g.backend_cpu_init()
        self.g.backend_cpu_set_n_threads(self.backend, problem.threads)
        data = {role: blocks(m, self.kind).contiguous() for role, m in parts.items()}
        size = sum(t.numel() for t in data.values())
        self.copies = problem.copies_of(size)
        shapes = {role: tuple(m.codes.shape) for role, m in parts.items()}
        self.sets = [self.weights(data, shapes) for _ in range(self.copies)]
        self.graphs: list[tuple[int, ...]] = []
        name = {Q4_0: "Q4_0", Q4_1: "Q4_1", Q8_0: "Q8_0"}[self.kind]
        op = "MUL_MAT_ID" if problem.op == "moe" else "MUL_MAT"
        versions = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
        return {
            "name": f"{op} {name}", "numerics": "int8 activations per 32", "kind": "int8", "weight_bytes": size / problem.experts,
            "versions": versions,
        }  # fmt: skip

    def weights(self, data: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> list[int]:
        """Tensors in the first kind of memory whose products the backend takes."""
        for buffer_type in self.g.buffer_types(self.backend):
            context = self.g.context()
            tensors = []
            for shape in shapes.values():
                *lead, n, k = shape
                new = self.g.new_tensor_3d(context, self.kind, k, n, lead[0]) if lead else self.g.new_tensor_2d(context, self.kind, k, n)
                tensors.append(new)
            buffer = self.g.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            if buffer and self.serves(tensors):
                for tensor, content in zip(tensors, data.values(), strict=True):
                    self.g.backend_tensor_set(tensor, content.data_ptr(), 0, content.numel())
                return tensors
            if buffer:
                self.g.backend_buffer_free(buffer)
            self.g.free(context)
        raise RefusedError("no memory of ggml's holds these weights")

    def serves(self, tensors: list[int]) -> bool:
        context = self.g.context()
        graph, *_ = self.graph(context, tensors, 1)
        nodes = [self.g.graph_node(graph, i) for i in range(self.g.graph_n_nodes(graph))]
        good = all(self.g.backend_supports_op(self.backend, node) for node in nodes)
        self.g.free(context)
        return good

    def graph(self, context: int, w: list[int], rows: int) -> tuple[int, ...]:
        """Graph, inputs and output."""
        g, p = self.g, self.problem
        graph = g.new_graph(context)
        if p.op == "linear":
            x = g.new_tensor_2d(context, F32, p.k, rows)
            out = g.mul_mat(context, w[0], x)
            g.build_forward_expand(graph, out)
            return graph, x, 0, 0, out
        x = g.new_tensor_3d(context, F32, p.hidden, 1, rows)
        ids, scores = g.new_tensor_2d(context, I32, p.top_k, rows), g.new_tensor_3d(context, F32, 1, p.top_k, rows)
        gate, up = (g.mul_mat_id(context, t, x, ids) for t in w[:2])
        down = g.mul_mat_id(context, w[2], g.mul(context, g.silu(context, gate), up), ids)
        each = g.mul(context, down, scores)
        step = p.hidden * 4
        views = [g.view_2d(context, each, p.hidden, rows, step * p.top_k, step * slot) for slot in range(p.top_k)]
        out = views[0] if len(views) > 1 else g.cont(context, views[0])
        for view in views[1:]:
            out = g.add(context, out, view)
        g.build_forward_expand(graph, out)
        return graph, x, ids, scores, out

    def load(self, x: Tensor, ids: Tensor | None, scores: Tensor | None) -> None:
        for _graph, context, buffer in getattr(self, "_held", []):
            self.g.backend_buffer_free(buffer)
            self.g.free(context)
        self._held, self.graphs = [], []
        self.ids, self.scores = (None if t is None else t.contiguous() for t in (ids, scores))
        wide = x.float().contiguous()
        for w in self.sets:
            context = self.g.context()
            made = self.graph(context, w, len(x))
            self._held.append((made[0], context, self.g.backend_alloc_ctx_tensors(context, self.backend)))
            self.g.backend_tensor_set(made[1], wide.data_ptr(), 0, wide.numel() * 4)
            self.graphs.append(made)
        self.y = torch.empty(len(x), self.problem.hidden or self.problem.n)

    def bind(self, copy: int, routing: int):
        graph, _x, ids, scores, out = self.graphs[copy]
        if self.ids is not None:
            for tensor, value in ((ids, self.ids[routing]), (scores, self.scores[routing])):
                self.g.backend_tensor_set(tensor, value.data_ptr(), 0, value.numel() * 4)
        self.y.fill_(float("nan"))
        self.g.backend_tensor_set(out, self.y.data_ptr(), 0, self.y.numel() * 4)
        compute, backend = self.g.backend_graph_compute, self.backend

        def call() -> int:
            if compute(backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")
            return out

        return call

    def result(self, out: int) -> Tensor:
        self.g.backend_tensor_get(out, self.y.data_ptr(), 0, self.y.numel() * 4)
        return self.y


if __name__ == "__main__":
    serve(GgmlOps())
