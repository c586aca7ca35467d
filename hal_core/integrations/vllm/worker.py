"""What every rank says of itself: ``LLM(worker_extension_cls="hal_core.integrations.vllm.worker.WorkerExtension")``."""

from __future__ import annotations

from typing import Any

from hal_core.integrations.vllm import held

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Methods for ``llm.collective_rpc(name)``, which returns the answers of all ranks."""

    def hal_explain(self) -> list[dict[str, Any]]:
        """For each layer of this rank: spec after sharding, kernel, layout, numerics, notes, and how often it ran."""
        return held.reports()

    def hal_counters(self) -> dict[str, int]:
        """Calls by layer."""
        return held.counters()
