"""The cases of a kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_core.errors import ValueDecodeError
from hal_core.kernel import EmbeddingKernel, KVKernel, LinearKernel, MoEKernel
from hal_core.spec import Activation, EmbeddingSpec, LinearSpec, MoESpec
from hal_core.testing.bench import device_refusals, of_machine
from hal_core.testing.brief import brief, meetings
from hal_core.testing.case import CHECKS, Case
from hal_core.testing.checks.caches import CACHE_FUNCTIONS
from hal_core.testing.checks.experts import ROUTINGS, STRAY_IDS
from hal_core.testing.outside import outside_specs
from hal_core.testing.space import fitted, specs_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hal_core.kernel import Kernel
    from hal_core.machine import Machine

__all__ = ["Plan", "plan_of"]

#: How many different specs the checks of state, memory and promises run on, besides those that need only one.
_SAMPLES = 8


class Plan:
    """All cases of one kernel, and the specs that it accepts. short: only as many as show every behaviour once."""

    def __init__(self, name: str, kernel: Kernel[Any], machine: Machine, full: bool, short: bool = False) -> None:
        self.name, self.kernel, self.machine, self.full, self.short = name, kernel, machine, full, short
        self._tried = tuple(specs_of(kernel, full))
        self._taken = tuple(each for each in self._tried if self._takes(each[0]))
        self.accepted = tuple(spec for spec, _, _ in self._taken)
        if short:
            # Of the accepted specs those that show all that they show; of the refused ones, one for each set of reasons.
            refused = [each for each in self._tried if self._against(each[0])]
            self._taken = brief(self._taken, lambda each: meetings(each[0], each[1]))
            self._tried = (*self._taken, *brief(refused, lambda each: {self._against(each[0])}))
        self._cases: tuple[Case, ...] | None = None

    def _takes(self, spec: Any) -> bool:
        return not self._against(spec)

    def _against(self, spec: Any) -> frozenset[str]:
        """Codes of what stands against it besides the machine; a kernel that raises is told by its ``declaration``."""
        try:
            return frozenset(reason.code for reason in self.kernel.refusals(spec, self.machine) if not of_machine(reason))
        except Exception:  # noqa: BLE001 - a kernel may raise anything
            return frozenset(("raised",))

    def device_reason(self) -> str:
        """Why nothing can run here; empty when it can."""
        if not self.accepted:
            return ""
        return "; ".join(str(reason) for reason in device_refusals(self.kernel, self.accepted[0], self.machine))

    def cases(self) -> tuple[Case, ...]:
        """In the order of the reports."""
        if self._cases is None:
            made = self._by_check()
            self._cases = tuple(case for check in CHECKS for case in made.get(check, ()))
        return self._cases

    def _case(self, check: str, detail: str, spec: Any, word: str = "", scales: str = "fp16") -> Case:
        return Case(self.name, check, detail, spec, word, scales)

    def _by_check(self) -> dict[str, Iterator[Case]]:
        if not self._tried:
            return {}
        n = self.kernel.numerics
        if isinstance(self.kernel, KVKernel):
            return self._cache_cases(self.kernel)
        return {
            "declaration": iter([self._case("declaration", "all", self._tried[0][0])]),
            "refusals": self._refusals(),
            "accuracy": self._accuracy(),
            "effects": self._effects(),
            "routing": self._routing(),
            "layout": self._sampled("layout", _SAMPLES * 2),
            "update": self._sampled("update", _SAMPLES),
            "memory": self._sampled("memory", _SAMPLES),
            "rows": self._rows(),
            "determinism": self._sampled("determinism", 3) if n.deterministic else iter(()),
            "batch_invariance": self._sampled("batch_invariance", 3) if n.batch_invariant else iter(()),
            "threads": self._sampled("threads", 2),
            "module": self._sampled("module", 3),
            "compile": self._sampled("compile", 1),
            "opcheck": self._sampled("opcheck", 1),
            "errors": self._sampled("errors", 2),
        }

    def _cache_cases(self, kernel: KVKernel) -> dict[str, Iterator[Case]]:
        """Of a cache: the same names, other functions."""
        n, counts = kernel.numerics, {"determinism": 3, "batch_invariance": 3, "threads": 2, "module": 3, "compile": 1, "opcheck": 1}
        made = {name: self._sampled(name, counts.get(name, _SAMPLES)) for name in CACHE_FUNCTIONS}
        made |= {
            "declaration": iter([self._case("declaration", "all", self._tried[0][0])]), "refusals": self._refusals(),
            "accuracy": self._accuracy(), "effects": self._cache_effects(), "rows": self._cache_rows(),
            "update": (case for case in self._accuracy_of("update") if case.spec.keys.scaled or case.spec.values.scaled),
        }  # fmt: skip
        unpromised = [name for name, on in (("determinism", n.deterministic), ("batch_invariance", n.batch_invariant)) if not on]
        return {name: cases for name, cases in made.items() if name not in unpromised}

    def _accuracy_of(self, check: str) -> Iterator[Case]:
        return (self._case(check, label, spec) for spec, _, label in self._taken)

    def _cache_rows(self) -> Iterator[Case]:
        for word in ("nan", "inf", "huge"):
            for spec, _, label in self._taken[:: max(1, len(self._taken) // 4)][:4]:
                yield self._case("rows", f"{word},{label}", spec, word)

    def _cache_effects(self) -> Iterator[Case]:
        """Each part of the attention on its own, for each dtype."""
        asks = {
            "window": lambda s: s.window is not None and not s.sink_tokens, "sink_tokens": lambda s: s.sink_tokens > 0 and not s.sinks,
            "sinks": lambda s: s.sinks and s.window is None, "soft_cap": lambda s: s.soft_cap is not None and s.window is None,
        }  # fmt: skip
        for word, wanted in asks.items():
            for dtype in self.kernel.dtypes:
                found = self._first(lambda s, w=wanted, d=dtype: w(s) and s.dtype == d and s.page_size > 16)
                if found is not None:
                    yield self._case("effects", f"{word},{dtype}", found, word)

    def _refusals(self) -> Iterator[Case]:
        base = self.accepted[0] if self.accepted else None
        if base is not None:
            for label, code, spec in outside_specs(self.kernel, base):
                yield self._case("refusals", label, spec, code)

    def _accuracy(self) -> Iterator[Case]:
        """Also the refused ones: their refusals must be clean."""
        for spec, scales, label in self._tried:
            for word in self._words(spec):
                yield self._case("accuracy", f"{word},{label}" if word else label, spec, word, scales)

    def _words(self, spec: Any) -> tuple[str, ...]:
        if not isinstance(spec, EmbeddingSpec):
            return ("",)
        return ("lookup", "head") if spec.tied_head else ("lookup",)

    def _sampled(self, check: str, count: int) -> Iterator[Case]:
        """Spread over the accepted specs; all schemes of a full run."""
        count *= 6 if self.full else 1
        for spec, scales, label in self._taken[:: max(1, len(self._taken) // count)][:count]:
            for word in self._words(spec):
                yield self._case(check, f"{word},{label}" if word else label, spec, word, scales)

    def _rows(self) -> Iterator[Case]:
        if isinstance(self.kernel, EmbeddingKernel) and not self.kernel.tied_head:
            return
        routed = isinstance(self.kernel, MoEKernel) and "routed" in self.kernel.routing
        words = ("nan", "inf", "huge", *(["nan_score"] if routed else []))
        for turn, word in enumerate(words):
            for index, (label, spec) in enumerate(self._plain_specs()):
                if not self.short or index % len(words) == turn:
                    yield self._case("rows", f"{word},{label}", spec, word)

    def _plain_specs(self) -> Iterator[tuple[str, Any]]:
        """One handy spec for each dtype, and for experts each activation, that the kernel takes."""
        seen = set()
        for spec in self.accepted:
            key = (spec.dtype, getattr(spec, "activation", None), getattr(spec, "routing", ""))
            if isinstance(spec, EmbeddingSpec) and not spec.tied_head:
                continue
            big = min(_sizes(spec)) >= 8 and getattr(spec, "num_experts", 2) > 1 and getattr(spec, "routing", "routed") == "routed"
            if key not in seen and big:
                seen.add(key)
                yield ",".join(str(part).replace(" ", "") for part in key if part), spec

    def _effects(self) -> Iterator[Case]:
        if isinstance(self.kernel, LinearKernel) and self.kernel.epilogue.bias:
            for dtype in self.kernel.dtypes:
                base = self._first(lambda s, d=dtype: s.bias and s.dtype == d and min(_sizes(s)) >= 8)
                if base is not None:
                    yield self._case("effects", f"bias,{dtype}", base, "bias")
        if isinstance(self.kernel, MoEKernel) and "routed" in self.kernel.routing:
            yield from self._expert_effects(self.kernel)

    def _first(self, wanted: Any) -> Any:
        return next((spec for spec in self.accepted if wanted(spec)), None)

    def _expert_base(self, **changes: Any) -> MoESpec | None:
        """A routed spec of enough experts with ``changes``, if the kernel takes it."""
        for spec in self.accepted:
            if spec.num_experts < 2 or spec.routing != "routed" or min(_sizes(spec)) < 8:
                continue
            plain = {"expert_map": False, "local_experts": None, "router_weight_on_input": False, "routed_scaling": 1.0, "bias": False}
            try:
                changed: MoESpec = fitted(self.kernel, replace(spec, **{**plain, **changes}))
            except ValueDecodeError:
                continue
            if self._takes(changed):
                return changed
        return None

    def _expert_effects(self, kernel: MoEKernel) -> Iterator[Case]:
        e = kernel.epilogue
        wanted: list[tuple[str, bool, dict[str, Any]]] = [
            ("router_weight", True, {}), ("bias", e.bias, {"bias": True}), ("routed_scaling", e.routed_scaling, {}),
            ("router_weight_on_input", e.router_weight_on_input, {}), ("expert_map", e.expert_map, {"expert_map": True}),
            ("alpha", e.alpha and "swiglu_oai" in e.activations, {"activation": Activation("swiglu_oai", alpha=1.0)}),
        ]  # fmt: skip
        wanted += [("limit", e.limit, {"activation": Activation(kind, limit=1.0)}) for kind in e.activations]
        for word, on, changes in wanted:
            base = self._expert_base(**changes) if on else None
            if base is not None:
                kind = f",{base.activation.kind}" if word == "limit" else ""
                yield self._case("effects", f"{word}{kind}", base, word)

    def _routing(self) -> Iterator[Case]:
        if not isinstance(self.kernel, MoEKernel) or "routed" not in self.kernel.routing:
            return
        mapped = self._expert_base(expert_map=True) if self.kernel.epilogue.expert_map else None
        for label, spec in (("", self._expert_base()), (",expert_map", mapped)):
            if spec is not None:
                extra = ("none_local", "map_past_the_end") if label else ()
                for word in (*ROUTINGS, *STRAY_IDS, *extra):
                    yield self._case("routing", f"{word}{label}", spec, word)


def _sizes(spec: Any) -> tuple[int, ...]:
    if isinstance(spec, LinearSpec):
        return spec.n, spec.k
    if isinstance(spec, EmbeddingSpec):
        return spec.rows, spec.dim
    return spec.hidden, spec.intermediate


def plan_of(name: str, kernel: Kernel[Any], machine: Machine, *, full: bool = False, short: bool = False) -> Plan:
    """The plan of a kernel under its full name ``backend.kernel``."""
    return Plan(name, kernel, machine, full, short)
