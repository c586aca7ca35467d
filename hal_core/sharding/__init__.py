"""Tensor and expert parallelism without an engine: what one rank asks of its kernels, and its part of canonical weights."""

from hal_core.sharding.cuts import Cut, cut_scheme, cut_weight, join_rows, rank_cut
from hal_core.sharding.layers import ExpertsShare, RowsPart, linear_spec, rank_embedding, rank_experts, rank_linears
from hal_core.sharding.rules import MOST_SHARDS, Heads, Shard, check_degree, legal_degrees, shard

__all__ = [
    "MOST_SHARDS",
    "Cut",
    "ExpertsShare",
    "Heads",
    "RowsPart",
    "Shard",
    "check_degree",
    "cut_scheme",
    "cut_weight",
    "join_rows",
    "legal_degrees",
    "linear_spec",
    "rank_cut",
    "rank_embedding",
    "rank_experts",
    "rank_linears",
    "shard",
]
