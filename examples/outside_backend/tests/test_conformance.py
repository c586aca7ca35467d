"""All of the conformance kit on this backend, which must be installed."""

from __future__ import annotations

from hal_core.testing import BackendConformance


class TestExample(BackendConformance):
    backend = "example"
