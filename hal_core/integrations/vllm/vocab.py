"""Quantized embeddings and output heads of vLLM: rows of the table by rank, padding rows of the engine left out and answered with zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from hal_core.errors import FormatError
from hal_core.integrations.vllm import ops
from hal_core.integrations.vllm.layer import serve
from hal_core.sharding import Cut, RowsPart, rank_embedding, rank_linears
from hal_core.spec import EmbeddingSpec

if TYPE_CHECKING:
    from torch import Tensor

    from hal_core.integrations.vllm.config import HalConfig
    from hal_core.integrations.vllm.held import HeldLayer
    from hal_core.kernel import LinearWeights
    from hal_core.plan import PlannedOp
    from hal_core.spec import Spec

__all__ = ["HalTiedHeadMethod", "HalVocabMethod"]


class HalVocabMethod(QuantizeMethodBase):
    """Method of one embedding, or of one head."""

    def __init__(self, config: HalConfig, prefix: str, planned: PlannedOp) -> None:
        self.config, self.prefix, self.planned = config, prefix, planned
        self.held: HeldLayer | None = None
        self.key, self.n, self.dtype = "", 0, torch.float32

    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        spec = self.planned.spec
        rows, dim = (spec.rows, spec.dim) if isinstance(spec, EmbeddingSpec) else (spec.n, spec.k)  # type: ignore[union-attr]
        if (rows, dim) != (layer.org_vocab_size, layer.embedding_dim) or layer.num_added_embeddings:
            found = f"{rows}x{dim} in the checkpoint, {layer.num_embeddings}x{layer.embedding_dim} in the engine"
            raise FormatError(f"layer {self.prefix}", found, "check vocab_size in config.json; added embeddings are not served")
        if isinstance(layer, ParallelLMHead) == isinstance(spec, EmbeddingSpec):
            raise FormatError(f"layer {self.prefix}", f"a {type(layer).__name__} in the engine, {spec.op} in the checkpoint")
        self.n, self.dtype = layer.num_embeddings_per_partition, extra_weight_attrs["params_dtype"]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Read, cut, select, prepare.

        Raises:
            FormatError, ShapeError, NoKernelError: names the layer.
        """
        checkpoint, shard, numerics = self.config.ready().checkpoint, layer.shard_indices, self.config.options.numerics
        whole = layer.org_vocab_size
        rows = Cut(shard.org_vocab_start_index, shard.org_vocab_end_index, whole, whole if layer.tp_size == 1 else self.n)
        asked: list[tuple[Spec, LinearWeights]] = []
        if rows.size and isinstance(self.planned.spec, EmbeddingSpec):
            asked += [rank_embedding(checkpoint, self.planned, rows, numerics)]
        elif rows.size:
            asked += rank_linears(checkpoint, [RowsPart(self.planned, rows)], Cut.all_of(layer.embedding_dim), numerics, None)
        serve(self, layer, (layer.tp_rank, layer.tp_size), asked, pad=self.n - rows.size)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = ops.linear(x, self.key, self.n)
        return y if bias is None else y + bias

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.key, layer.embedding_dim, self.dtype)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        raise FormatError(f"layer {self.prefix}", "has weights of its own, and the config ties it to the embedding", "check the config")


class HalTiedHeadMethod(QuantizeMethodBase):
    """Method of a head that is the quantized embedding."""

    embedding_method: HalVocabMethod | None = None

    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        pass

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        self.embedding_method = embed_tokens.quant_method
        return layer

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.embedding_method is None:
            raise FormatError("layer lm_head", "has no weights, and the engine's model does not tie it", "check tie_word_embeddings")
        return self.embedding_method.apply(layer, x, bias)
