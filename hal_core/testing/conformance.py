"""The kit as a pytest class: subclass it, name the backend, and every case is a test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hal_core.errors import MissingDependencyError

try:
    import pytest
except ImportError as _error:
    _FIX = 'pip install "hal-core[testing]", or run hal verify'
    raise MissingDependencyError("the conformance kit as tests", "pytest is not installed", _FIX) from _error

from hal_core.machine import Machine
from hal_core.testing.case import CHECKS, Case, Result, Status
from hal_core.testing.expectations import Expectations
from hal_core.testing.kit import Kit, kit_of
from hal_core.testing.plan import Plan, plan_of
from hal_core.testing.plugin import option
from hal_core.testing.run import run_case

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hal_core.kernel import Kernel

__all__ = ["BackendConformance"]


class BackendConformance:
    """Every case of a backend as a test, one method a check.

    Set ``backend`` to the name of an installed backend (``*`` for those of ``--hal-backend``, or all), or ``kernels`` to instances
    of kernel classes that are not installed; these are then named ``backend.kernel``.
    """

    backend: ClassVar[str] = ""
    kernels: ClassVar[tuple[Kernel[Any], ...]] = ()
    #: Case id or glob to reason; see :mod:`hal_core.testing.expectations`.
    unsupported: ClassVar[Mapping[str, str]] = {}
    expected_failures: ClassVar[Mapping[str, str]] = {}
    #: Few specs that show every behaviour once, in place of all pairs; --hal-full overrides it. For suites that run at every change.
    short: ClassVar[bool] = False

    _kit: ClassVar[Kit | None] = None

    @classmethod
    def kit(cls, config: Any) -> Kit:
        """What is tested; made once for each class and session."""
        cached: Kit | None = cls.__dict__.get("_kit")
        if cached is None:
            cached = cls._made(config)
            cls._kit = cached
        return cached

    @classmethod
    def _made(cls, config: Any) -> Kit:
        full, own = option(config, "hal_full"), Expectations(cls.unsupported, cls.expected_failures)
        short = cls.short and not full
        if cls.kernels:
            machine, prefix = Machine.detect(), cls.backend or "mine"
            plans = tuple(plan_of(f"{prefix}.{kernel.name}", kernel, machine, full=full, short=short) for kernel in cls.kernels)
            return Kit(plans, {prefix: own}, full)
        names = tuple(option(config, "hal_backend")) if cls.backend == "*" else (cls.backend,)
        kit = kit_of(names, full=full, short=short)
        return Kit(kit.plans, {name: expected.merged(own) for name, expected in kit.expected.items()}, full)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each case of the check that the method is named after."""
        if "case" not in metafunc.fixturenames or not (self.backend or self.kernels):
            return
        check = metafunc.function.__name__.removeprefix("test_")
        found = [(plan, case) for plan, case in self.kit(metafunc.config).cases() if case.check == check]
        metafunc.parametrize(("plan", "case"), found, ids=[case.id for _, case in found])

    def run(self, request: pytest.FixtureRequest, plan: Plan, case: Case) -> Result:
        """One case: passes, skips with the reason, or fails with what is wrong."""
        config: Any = request.config
        result = run_case(plan, case, option(config, "hal_seed"), self.kit(config).expectations(case.kernel))
        if not hasattr(config, "_hal_results"):
            config._hal_results = []
        config._hal_results.append((plan, result))
        self._settle(result, stale_ok=option(config, "hal_stale_ok"))
        return result

    @staticmethod
    def _settle(result: Result, *, stale_ok: bool) -> None:
        if result.status is Status.FAILED:
            pytest.fail(f"{result.reason}\n({CHECKS[result.check]})", pytrace=False)
        if result.status is Status.STALE and not stale_ok:
            pytest.fail(result.reason, pytrace=False)
        if result.status in {Status.UNSUPPORTED, Status.SKIPPED}:
            pytest.skip(result.reason)
        if result.status is Status.EXPECTED:
            pytest.xfail(result.reason)


def _method(check: str) -> Any:
    def test(self: BackendConformance, request: pytest.FixtureRequest, plan: Plan, case: Case) -> None:
        self.run(request, plan, case)

    test.__name__, test.__qualname__, test.__doc__ = f"test_{check}", f"BackendConformance.test_{check}", CHECKS[check]
    return test


for _check in CHECKS:
    setattr(BackendConformance, f"test_{_check}", _method(_check))
