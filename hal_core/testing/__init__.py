"""The conformance kit: proves that a backend's kernels are what they say they are.

Three ways in: ``hal verify``, which needs no pytest; ``pytest --pyargs hal_core.testing --hal-backend NAME``; and a subclass of
:class:`BackendConformance` in a backend's own tests. ``import hal_core`` does not import it. See docs/conformance.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal_core.testing.case import CHECKS, Case, Result, Status
    from hal_core.testing.conformance import BackendConformance
    from hal_core.testing.expectations import Expectations
    from hal_core.testing.kit import Kit, Report, kit_of
    from hal_core.testing.plan import Plan, plan_of
    from hal_core.testing.run import run_case, run_plan

__all__ = [
    "CHECKS",
    "BackendConformance",
    "Case",
    "Expectations",
    "Kit",
    "Plan",
    "Report",
    "Result",
    "Status",
    "kit_of",
    "plan_of",
    "run_case",
    "run_plan",
]

# torch and pytest are imported when they are needed: the plugin of this package is loaded into every pytest session.
_MODULES = {
    **dict.fromkeys(("CHECKS", "Case", "Result", "Status"), "case"), "BackendConformance": "conformance", "Expectations": "expectations",
    **dict.fromkeys(("Kit", "Report", "kit_of"), "kit"), **dict.fromkeys(("Plan", "plan_of"), "plan"),
    **dict.fromkeys(("run_case", "run_plan"), "run"),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"hal_core.testing.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'hal_core.testing' has no attribute {name!r}")
