"""One process that tunes one shape and saves it; run by test_tuner_cache.py, several at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from hal_backend_cuda.providers.tuner_cache import TunerCache


def tuner():
    from flashinfer.autotuner import AutoTuner

    return AutoTuner.get()


def runner_of(name):
    from flashinfer.autotuner import TunableRunner

    class Runner(TunableRunner):
        def get_valid_tactics(self, inputs, profile):
            return [0]

        def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
            return inputs[0]

    Runner.__name__ = Runner.__qualname__ = name
    return Runner()


def question(op, name="SyntheticRunner"):
    """What the tuner is asked for one shape of ``op``: its own arguments."""
    from flashinfer.autotuner import TuningConfig

    return op, [runner_of(name)], (torch.Size([4, 8]),), TuningConfig()


def remember(op, tactic, name="SyntheticRunner"):
    """A result as the tuner itself keeps it after measuring."""
    from flashinfer.autotuner import AutoTuner

    found, runners, shapes, config = question(op, name)
    own = tuner()
    key = AutoTuner._get_cache_key(found, runners[0], shapes, config, ())
    own.profiling_cache[key] = (0, tactic, None) if isinstance(key, tuple) else (tactic, None)
    own._dirty = True


def known(op, name="SyntheticRunner"):
    """The tactic that the tuner would run ``op`` with, or None where it has no result."""
    hit, _, tactic, _ = tuner().search_cache(*question(op, name))
    return tactic if hit else None


if __name__ == "__main__":
    path, start, *operations = sys.argv[1:]
    tuner()
    while time.time() < float(start):
        time.sleep(0.001)
    for number, each in enumerate(operations):
        remember(each, number)
        TunerCache(Path(path)).save()
