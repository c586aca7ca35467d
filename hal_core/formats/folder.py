"""A checkpoint folder: file tensors grouped into modules, each decided by the tensors that exist and by the configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hal_core.errors import FormatError
from hal_core.formats.base import Checkpoint, Entry
from hal_core.formats.cache_scales import CACHE_SCALES, cache_notes, cache_params
from hal_core.formats.fused_parts import check_parts
from hal_core.formats.layers import check_layers
from hal_core.schemes import WeightScheme

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from hal_core.canonical import QuantizedTensor
    from hal_core.formats.packing import Decision, Plan, Rules
    from hal_core.formats.safetensors_file import TensorInfo
    from hal_core.formats.tensor_store import TensorStore
    from hal_core.kv.op import KVParams

__all__ = ["FolderCheckpoint"]

_FLOATS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
#: Modules that every method here quantizes unless its config says otherwise. Embeddings, norms and routers are not among them.
_LINEAR = re.compile(r"(.*_proj|fc[12]|w[123]|query_key_value|dense_h_to_4h|dense_4h_to_h|c_attn|c_proj|c_fc)")
_IN_BLOCKS = re.compile(r"(.*?\.)\d+\.")


class FolderCheckpoint(Checkpoint):
    """Safetensors with or without a quantization method. ``rules`` is None for a checkpoint without one."""

    def __init__(
        self, format_name: str, store: TensorStore, config: Mapping[str, Any], rules: Rules | None, suffixes: frozenset[str]
    ) -> None:
        self.format = format_name
        self.path = store.path
        self.config = config
        self.files = store.files
        self._infos = store.infos
        self._plans: dict[str, Plan] = {}
        self._rules, self._suffixes = rules, suffixes
        self._tails = tuple(suffix for suffix in suffixes if suffix.startswith("_"))
        self.entries: dict[str, Entry] = {}
        self._cache_scales: list[TensorInfo] = []
        self._collect()
        self.notes = cache_notes(len(self._cache_scales), config)
        check_layers(self.entries, config)

    def _collect(self) -> None:
        owners = self._owners()
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, (module, suffix) in owners.items():
            modules.setdefault(module, {})[suffix] = self._infos[name]
        plain: dict[str, TensorInfo] = {}
        for name, info in self._infos.items():
            if name in owners:
                module = owners[name][0]
                if modules[module]:
                    self._add_quantized(module, modules[module])
                    modules[module] = {}
            elif self._rules is not None and name.rpartition(".")[2] in CACHE_SCALES:
                self._cache_scales.append(info)  # no parameters of the published checkpoint
            else:
                plain[name] = info
                self.entries[name] = self._plain_entry(name, info)
        blocks = {match[1] for match in map(_IN_BLOCKS.match, modules) if match}
        for name, info in plain.items():
            self._check_plain(name, info, blocks)

    def _owners(self) -> dict[str, tuple[str, str]]:
        """Module and suffix of every tensor of a quantized module. A ``weight`` is one when its type or its neighbours say so."""
        owners: dict[str, tuple[str, str]] = {}
        for name in self._infos:
            module, _, suffix = name.rpartition(".")
            tail = next((tail for tail in self._tails if name.endswith(tail)), None)
            if module and suffix in self._suffixes and suffix != "weight":
                owners[name] = module, suffix
            elif tail is not None:
                owners[name] = name[: -len(tail)], tail
        if "weight" in self._suffixes:
            for name, info in self._infos.items():
                module, _, suffix = name.rpartition(".")
                if module and suffix == "weight" and info.dtype not in _FLOATS:
                    owners[name] = module, suffix
        return owners

    def _add_quantized(self, module: str, parts: Mapping[str, TensorInfo]) -> None:
        if f"{module}.weight" in self._infos and "weight" not in parts:
            raise FormatError(f"tensor {module}.weight", f"stored beside {', '.join(sorted(parts))}", "a module has one or the other")
        assert self._rules is not None  # suffixes are empty without rules
        decision = self._rules.decide(module)
        first = next(iter(parts.values()))
        if decision.quantized is False:
            raise FormatError(
                f"tensor {first.name}", f"the config says module {module} is not quantized ({decision.reason})",
                "correct the config, or store the module's plain weight",
            )  # fmt: skip
        check_parts(module, decision, self._rules)
        packing = decision.rule.packing
        foreign = next((info.name for suffix, info in parts.items() if suffix not in packing.suffixes), None)
        if foreign is not None:
            raise FormatError(
                f"tensor {foreign}", f"the config says the module is {packing.name} ({decision.reason})", "correct the config"
            )
        plan = packing.plan(module, parts, decision.rule)
        name = module if packing.fused else f"{module}.weight"
        shape = (*plan.shape[:-2], plan.shape[-1], plan.shape[-2]) if packing.fused else plan.shape
        if name in self.entries or (name in self._infos and "weight" not in parts):
            raise FormatError(f"tensor {first.name}", f"parameter {name} is stored twice", "a parameter is plain or quantized")
        self._plans[name] = plan
        self.entries[name] = Entry(name, shape, plan.scheme, plan.nbytes, plan.rule.activations, fused=packing.fused)

    def _plain_entry(self, name: str, info: TensorInfo) -> Entry:
        if info.dtype not in _FLOATS:
            known = f"{self.format} checkpoints hold such a tensor in no place that is known"
            if self._rules is None:
                known = "the config has no quantization_config that would explain it"
            raise FormatError(
                f"tensor {name}",
                f"unexpected dtype {info.dtype} ({known})",
                "the file or its config is damaged, or of a kind not served yet",
            )
        return Entry(name, info.shape, WeightScheme(_FLOATS[info.dtype]), info.nbytes)

    def _check_plain(self, name: str, info: TensorInfo, blocks: set[str]) -> None:
        """A plain weight where the config wants a quantized one. Only known linear layers can be told from other matrices."""
        module, _, suffix = name.rpartition(".")
        if self._rules is None or suffix != "weight" or len(info.shape) != 2:
            return
        decision: Decision = self._rules.decide(module)
        inside = _IN_BLOCKS.match(module)
        linear = _LINEAR.fullmatch(module.rpartition(".")[2]) and inside and inside[1] in blocks
        if decision.quantized and (linear or decision.explicit):
            raise FormatError(
                f"tensor {name}", f"a plain {info.dtype} weight, but the config says the module is quantized ({decision.reason})",
                "list the module as not quantized in the config, or store its quantized tensors",
            )  # fmt: skip

    def stored_names(self, name: str) -> tuple[str, ...]:
        plan = self._plans.get(name)
        return (name,) if plan is None else tuple(info.name for info in plan.parts.values())

    def read(self, name: str) -> QuantizedTensor:
        plan = self._plans.get(name)
        if plan is None:
            raise self._wrong_call(name, "quantized", "load")
        return plan.rule.packing.read(plan)

    def load(self, name: str) -> Tensor:
        if name not in self.entries or name in self._plans:
            raise self._wrong_call(name, "plain", "read")
        return self._infos[name].read()

    def kv_params(self) -> dict[int, KVParams]:
        return cache_params(self._cache_scales, self.config)

    def _wrong_call(self, name: str, kind: str, other: str) -> FormatError:
        if name in self.entries:
            return FormatError(f"tensor {name}", f"is not {kind} in this checkpoint", f"use {other}()")
        return FormatError(f"tensor {name}", f"not in the checkpoint {self.path}", "ask for one of its entries")
