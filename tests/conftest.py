"""Settings of every test run: no caller's environment leaks in, no model hub is asked."""

from __future__ import annotations

import os
import pathlib
import secrets
import sys
import zlib

import pytest
from hypothesis import settings

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Variables that point at data or tell where the tests run; every other HAL_* would change what is selected.
KEPT = ("HAL_GOLDEN_DIR", "HAL_TEST_INSTALLED", "HAL_TEST_SEED")

# Before anything imports transformers: it reads them once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
for _name in [name for name in os.environ if name.startswith("HAL_") and name not in KEPT]:
    del os.environ[_name]

# CI draws the same examples every time: it judges a change, not a day's luck. Anywhere else new ones are tried.
# No deadline for one example: a machine that has other work to do would fail it.
settings.register_profile("ci", derandomize=True, print_blob=True, deadline=None)
settings.register_profile("anywhere", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "anywhere")


@pytest.fixture(autouse=True)
def random_inputs(request: pytest.FixtureRequest) -> None:
    """Fresh inputs in every run, the same in every run of CI; a failure prints the seed, and HAL_TEST_SEED repeats it."""
    base = int(os.environ.get("HAL_TEST_SEED") or (0 if os.environ.get("CI") else secrets.randbits(31)))
    print(f"HAL_TEST_SEED={base}")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(base ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The folder of the checkout."""
    return ROOT
