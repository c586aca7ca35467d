"""The pytest plugin: options of the conformance kit. Installed wheels register it; otherwise ``-p hal_core.testing.plugin``.

It is imported in every pytest session of an environment that has hal-core, so it imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

__all__ = ["DEFAULTS", "option", "pytest_addoption", "pytest_sessionfinish"]

#: Options by destination, for sessions without this plugin.
DEFAULTS: dict[str, Any] = {"hal_backend": [], "hal_seed": 0, "hal_full": False, "hal_report": None, "hal_stale_ok": False}


def option(config: Any, name: str) -> Any:
    """An option's value, also where the plugin is not loaded."""
    return config.getoption(name, DEFAULTS[name])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the kit."""
    group = parser.getgroup("hal", "hal-core conformance kit")
    add = group.addoption
    add("--hal-backend", action="append", default=[], metavar="NAME", help="an installed backend to verify; may be repeated (default: all)")
    add("--hal-seed", type=int, default=0, metavar="N", help="seed of the random weights and inputs (default: 0)")
    add("--hal-full", action="store_true", default=False, help="all combinations instead of every pair")
    add("--hal-report", default=None, metavar="FILE", help="write the support matrix and all results: .md or .json")
    add("--hal-stale-ok", action="store_true", default=False, help="let an expected failure pass without failing the run")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what ``--hal-report`` asks for."""
    path = option(session.config, "hal_report")
    collected = getattr(session.config, "_hal_results", None)
    if not path or not collected:
        return
    from pathlib import Path

    from hal_core.testing.kit import Report
    from hal_core.testing.writers import write

    plans = tuple({plan.name: plan for plan, _ in collected}.values())
    results = tuple(result for _, result in collected)
    write(Report(option(session.config, "hal_seed"), option(session.config, "hal_full"), plans, results), Path(path))
