"""What every rank says of itself: ``LLM(worker_extension_cls="hal_core.integrations.vllm.worker.WorkerExtension")``."""

from __future__ import annotations

from typing import Any

from hal_core.integrations.vllm.held import HeldLayer

__all__ = ["WorkerExtension"]


class WorkerExtension:
    """Methods for ``llm.collective_rpc(name)``, which returns the answers of all ranks."""

    def hal_explain(self) -> list[dict[str, Any]]:
        """For each layer of this rank: spec after sharding, kernel, layout, numerics, notes, and how often it ran."""
        return [held.report() for held in self._hal_layers()]

    def hal_counters(self) -> dict[str, int]:
        """Calls by layer."""
        return {held.layer: held.calls for held in self._hal_layers()}

    def _hal_layers(self) -> list[HeldLayer]:
        """Those of this worker's model: other engines of the process, gone or not, do not count."""
        model: Any = self.get_model()  # type: ignore[attr-defined]  # vLLM mixes this class into its worker
        owners = (getattr(module, name, None) for module in model.modules() for name in ("quant_method", "impl"))
        found = {id(held): held for held in (getattr(owner, "held", None) for owner in owners) if isinstance(held, HeldLayer)}
        return list(found.values())
