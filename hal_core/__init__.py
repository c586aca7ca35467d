"""A hardware abstraction layer for quantized LLM inference: one way to ask which kernel runs, why, and what else could."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from hal_core.api import backends, candidates, explain, load, open_checkpoint, policy, prepare, probe, refresh, select
from hal_core.check import check
from hal_core.errors import (
    CapacityError,
    ContractError,
    FormatError,
    HalError,
    HalWarning,
    MissingDependencyError,
    NoKernelError,
    PolicyError,
    SettingError,
    ShapeError,
    ValueDecodeError,
)
from hal_core.explain import Explanation
from hal_core.kernel import LinearWeights, MoEWeights
from hal_core.kv.scheme import KVScheme
from hal_core.machine import Device, Machine
from hal_core.manifest import BackendManifest
from hal_core.numerics import ActivationQuant, Numerics, numerics_from_word
from hal_core.policy import Policy
from hal_core.probe import Probe
from hal_core.refusal import Refusal
from hal_core.registry import BackendRow
from hal_core.schemes import ActivationScheme, Granularity, GranularityKind, WeightScheme, ZeroKind
from hal_core.selection import Candidate, Interval, Selection, diff
from hal_core.spec import Activation, EmbeddingSpec, KVCacheSpec, LinearSpec, MoESpec, Spec
from hal_core.version import __version__

if TYPE_CHECKING:
    from hal_core.canonical import QuantizedTensor
    from hal_core.kv.cache import PagedKVCache
    from hal_core.kv.make import kv_cache, kv_op
    from hal_core.kv.op import KVOp, KVParams
    from hal_core.ops import Batched, Grouped, MoEExperts, QuantEmbedding, QuantizedActivation, QuantLinear, Routed

#: Names whose modules import torch, which takes seconds that ``hal --help`` must not pay.
_NEEDS_TORCH = {
    "QuantizedTensor": "canonical",
    "PagedKVCache": "kv.cache",
    **dict.fromkeys(("kv_cache", "kv_op"), "kv.make"),
    **dict.fromkeys(("KVOp", "KVParams"), "kv.op"),
    **dict.fromkeys(("Batched", "Grouped", "MoEExperts", "QuantEmbedding", "QuantLinear", "QuantizedActivation", "Routed"), "ops"),
}

__all__ = [
    "Activation",
    "ActivationQuant",
    "ActivationScheme",
    "BackendManifest",
    "BackendRow",
    "Batched",
    "Candidate",
    "CapacityError",
    "ContractError",
    "Device",
    "EmbeddingSpec",
    "Explanation",
    "FormatError",
    "Granularity",
    "GranularityKind",
    "Grouped",
    "HalError",
    "HalWarning",
    "Interval",
    "KVCacheSpec",
    "KVOp",
    "KVParams",
    "KVScheme",
    "LinearSpec",
    "LinearWeights",
    "Machine",
    "MissingDependencyError",
    "MoEExperts",
    "MoESpec",
    "MoEWeights",
    "NoKernelError",
    "Numerics",
    "PagedKVCache",
    "Policy",
    "PolicyError",
    "Probe",
    "QuantEmbedding",
    "QuantLinear",
    "QuantizedActivation",
    "QuantizedTensor",
    "Refusal",
    "Routed",
    "Selection",
    "SettingError",
    "ShapeError",
    "Spec",
    "ValueDecodeError",
    "WeightScheme",
    "ZeroKind",
    "__version__",
    "backends",
    "candidates",
    "check",
    "diff",
    "explain",
    "kv_cache",
    "kv_op",
    "load",
    "numerics_from_word",
    "open_checkpoint",
    "policy",
    "prepare",
    "probe",
    "refresh",
    "select",
]

# An application decides where log records go; without this Python would print them beside the warnings.
logging.getLogger("hal_core").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(importlib.import_module(f"hal_core.{_NEEDS_TORCH[name]}"), name)
    raise AttributeError(f"module 'hal_core' has no attribute {name!r}")
