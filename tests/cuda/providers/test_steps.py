"""Sort, activation and weighted sum around a provider's products: plain torch here, Triton's in the interpreter."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hal_backend_cuda.providers.fused_steps import TritonSteps
from hal_backend_cuda.providers.steps import Route, TorchSteps
from step_cases import check_activation, check_reduce, check_sort, random_route

from hal_core.check import device_flag

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mapped", [False, True])
def test_sort(seed, mapped):
    check_sort(TorchSteps(), random_route(seed, mapped=mapped), block=(8, 16, 24)[seed % 3])


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_activation(kind, limit):
    check_activation(TorchSteps(), kind, limit, gated=True)
    if kind != "swiglu_oai":
        check_activation(TorchSteps(), kind, limit, gated=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("summed", [False, True])
def test_reduce(seed, summed):
    check_reduce(TorchSteps(), random_route(seed, mapped=seed % 2 == 1), summed=summed)


def test_unpickled_steps_write_to_the_flag_of_their_device():
    steps = pickle.loads(pickle.dumps(TritonSteps(torch.device("cpu"), 4)))
    assert steps.flag is device_flag(torch.device("cpu"))


def test_ids_out_of_range_are_skipped():
    ids = torch.tensor([[0, 99], [-1, -7], [2**31 - 1, 1]], dtype=torch.int32)
    route = Route(ids, torch.ones(3, 2), 4, 4)
    assert route.local().tolist() == [[0, -1], [-1, -1], [-1, 1]]
    check_sort(TorchSteps(), route, block=8)


@pytest.mark.parametrize("part", ["sort", "many", "bounds", "activation", "reduce"])
def test_triton_steps_in_the_interpreter(part):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    # read at import of triton: a process of its own
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run([sys.executable, str(HERE / "step_cases.py"), part], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
