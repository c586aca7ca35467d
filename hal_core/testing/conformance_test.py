"""``pytest --pyargs hal_core.testing --hal-backend NAME``: the kit on installed backends."""

from __future__ import annotations

from hal_core.testing.conformance import BackendConformance


class TestInstalledBackends(BackendConformance):
    """All of ``--hal-backend``, or all that are installed."""

    backend = "*"
