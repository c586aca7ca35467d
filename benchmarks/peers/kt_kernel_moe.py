"""Peer: KTransformers' experts on the CPU (kt-kernel), GPTQ form: symmetric int4.

Its pool of threads polls: with as many threads as cores it waits for the scheduler, so on a small machine compare it with one thread.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch
from runner import Matrix, Peer, Problem, RefusedError, bf16, pack_words, serve
from torch import Tensor

MOST_ROWS = 4096
#: Classes over the same tensors, with what they compute.
KINDS = {"AVXVNNI256GPTQInt4Packed_MOE": ("int8 activations", "int8"), "AVX2GPTQInt4_MOE": ("exact", "float")}


class KtKernel(Peer):
    def prepare(self, problem: Problem) -> dict[str, Any]:
        problem.need(problem.op == "moe", "has no linear of its own")
        problem.need_int4()
        problem.need(problem.zero == "none", "serves symmetric weights")
        problem.need((problem.group or 0) % 32 == 0 and problem.group is not None, "serves groups of multiples of 32")
        problem.need(problem.hidden % 32 == 0 and problem.intermediate % 32 == 0, "serves sizes of multiples of 32")
        try:
            import kt_kernel
        except (ImportError, OSError) as error:
            raise RefusedError(f"its library does not load: {error}") from error
        self.problem, self.library = problem, kt_kernel.kt_kernel_ext
        pool = self.library.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [problem.threads]
        self.pool_of_threads = self.library.CPUInfer(pool)
        tensors = {}
        for role, m in problem.matrices().items():
            tensors[f"{role}_proj"], tensors[f"{role}_scale"] = gptq(m), m.scales.transpose(-1, -2).contiguous()
        size = problem.parameters * (0.5 + 4 / problem.group)
        self.copies = problem.copies_of(size)
        name, kind = self.best()
        self.sets = [self.packed(kind, tensors) for _ in range(self.copies)]
        versions = {"kt-kernel": importlib.metadata.version("kt-kernel")}
        return {
            "name": name, "numerics": KINDS[name][0], "kind": KINDS[name][1], "weight_bytes": size / problem.experts, "versions": versions,
        }  # fmt: skip

    def best(self) -> tuple[str, Any]:
        """The class for this processor; making one that it lacks the instructions for breaks the process's memory."""
        name = "AVXVNNI256GPTQInt4Packed_MOE" if "avx_vnni" in Path("/proc/cpuinfo").read_text().split() else "AVX2GPTQInt4_MOE"
        kind = getattr(self.library.moe, name, None)
        self.problem.need(kind is not None, "its build for this processor has no experts of the GPTQ form")
        return name, kind

    def packed(self, kind: Any, tensors: dict[str, Tensor]) -> Any:
        p = self.problem
        config = self.library.moe.MOEConfig(p.experts, p.top_k, p.hidden, p.intermediate, 0)
        config.max_len, config.pool = MOST_ROWS, self.pool_of_threads.backend_
        for name, tensor in tensors.items():
            setattr(config, name, tensor.data_ptr())
        config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, p.group, False
        experts = kind(config)
        places = torch.arange(p.experts, dtype=torch.int64)
        self.done(experts.load_weights_task(places.data_ptr()))
        return experts

    def done(self, task: Any) -> None:
        self.pool_of_threads.submit(task)
        self.pool_of_threads.sync()

    def load(self, x: Tensor, ids: Tensor | None, scores: Tensor | None) -> None:
        self.problem.need(len(x) <= MOST_ROWS, f"is set up for {MOST_ROWS} rows")
        assert ids is not None
        self.x, self.ids, self.scores = x.to(bf16).contiguous(), ids.long().contiguous(), scores.contiguous()
        self.rows, self.out = torch.tensor([len(x)], dtype=torch.int32), torch.empty_like(self.x)

    def bind(self, copy: int, routing: int):
        self.out.fill_(float("nan"))
        experts, ids, scores = self.sets[copy], self.ids[routing], self.scores[routing]
        places = (ids.data_ptr(), scores.data_ptr(), self.x.data_ptr(), self.out.data_ptr())

        def call() -> Tensor:
            self.done(experts.forward_task(self.rows.data_ptr(), self.problem.top_k, *places, False))
            return self.out

        return call


def gptq(m: Matrix) -> Tensor:
    """int32 [E, K/8, N]."""
    return torch.stack([pack_words(codes).T.contiguous() for codes in m.codes])


if __name__ == "__main__":
    serve(KtKernel())
