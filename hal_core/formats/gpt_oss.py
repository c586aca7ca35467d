"""gpt-oss: experts of all layers fused and stored as MXFP4 blocks, everything else plain.

``mlp.experts.gate_up_proj_blocks`` uint8 ``[E, 2I, H/32, 16]`` with ``.._scales`` uint8 ``[E, 2I, H/32]``, ``down_proj`` alike; byte j
of a block holds elements 2j (low) and 2j+1. Rows of gate and up alternate. The published parameter is ``[E, H, 2I]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hal_core.canonical import QuantizedTensor
from hal_core.codes import E8M0_NAN
from hal_core.errors import FormatError
from hal_core.formats.module_names import ModuleList
from hal_core.formats.packing import Decision, Packing, Plan, Rule, expect, expect_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.formats.quant_config import QuantConfig
    from hal_core.formats.safetensors_file import TensorInfo

__all__ = ["FusedBlocks", "GptOssRules"]

_GROUP, _BYTES = 32, 16


class FusedBlocks(Packing):
    """The layout above, for one of the two parameters."""

    name = "mxfp4"
    suffixes = ("_blocks", "_scales")
    fused = True

    def plan(self, module: str, parts: Mapping[str, TensorInfo], rule: Rule) -> Plan:
        missing = next((suffix for suffix in self.suffixes if suffix not in parts), None)
        if missing is not None:
            raise FormatError(f"tensor {module}{missing}", "missing", "the checkpoint is incomplete: fetch it again")
        blocks, scales = expect_part(module, parts, "_blocks"), expect_part(module, parts, "_scales")
        last = module.rpartition(".")[2]
        if last not in ("gate_up_proj", "down_proj"):
            raise FormatError(f"tensor {blocks.name}", "is no parameter of a known kind", "served: gate_up_proj and down_proj of experts")
        if len(blocks.shape) != 4 or not all(blocks.shape) or (last == "gate_up_proj" and blocks.shape[1] % 2):
            raise FormatError(f"tensor {blocks.name}", f"shape {list(blocks.shape)} is not [experts, rows, blocks, 16]", "check the file")
        experts, n, groups, _ = blocks.shape
        why = f"{experts} experts of {n} rows, {groups} blocks of {_GROUP}"
        expect(blocks, "U8", (experts, n, groups, _BYTES), why)
        expect(scales, "U8", (experts, n, groups), why)
        k = groups * _GROUP
        return Plan(module, rule, parts, (experts, n, k), rule.scheme(k))

    def unpack(self, tensors: Mapping[str, Tensor], plan: Plan) -> QuantizedTensor:
        scales = tensors["_scales"]
        bad = int(torch.count_nonzero(scales == E8M0_NAN))
        if bad:
            raise FormatError(f"tensor {plan.module}_scales", f"{bad} of {scales.numel()} scales are NaN", "the checkpoint is damaged")
        return QuantizedTensor(plan.scheme, plan.shape, tensors["_blocks"].flatten(-2), scales)

    def pack(self, weight: QuantizedTensor, rule: Rule) -> dict[str, Tensor]:
        assert weight.scales is not None  # every mxfp4 weight has scales
        return {"_blocks": weight.values.unflatten(-1, (-1, _BYTES)).clone(), "_scales": weight.scales.clone()}  # type: ignore[no-untyped-call]


class GptOssRules:
    """Modules by `modules_to_not_convert`, whose entries may hold wildcards; the tensors tell which parameters are quantized."""

    def __init__(self, config: QuantConfig) -> None:
        self.config = config
        self.base = Rule(FusedBlocks(), 4, _GROUP, True, element="mxfp4")
        self._left_alone = ModuleList(config.texts("modules_to_not_convert"), config.where)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Names of the tensors of quantized modules."""
        return self.base.packing.suffixes

    def decide(self, module: str) -> Decision:
        if self._left_alone.holds(module):
            return Decision(self.base, False, "modules_to_not_convert")
        return Decision(self.base, None, f"{self.config.where}: quant_method mxfp4")
