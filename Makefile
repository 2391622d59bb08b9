# Everything runs in .venv, which `make venv` fills from PyPI with the versions that
# requirements/ci.txt pins; nothing else is touched.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
QUIET := --quiet --disable-pip-version-check --no-compile
# In pip's place, which compiles one file after another; there are files that no Python compiles.
ON_ALL_CORES := -q -j 0 -x '/tests?/'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo demo-ranks docs docs-look test test-ptx-fast machine-code test-slow lint check check-package \
	dist clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environment ---------------------------------------------------------------------------

venv: $(STAMP) ## make .venv and install gradkit into it, editable, with its tools

$(STAMP): pyproject.toml requirements/ci.txt
	@test -n "$(PYTHON)" || { echo "make: gradkit needs Python 3.11 or newer and found none;" \
		"install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: gradkit" \
		"needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make" \
		"virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install $(QUIET) --require-hashes --requirement requirements/ci.txt
	@$(BIN)/python -m compileall $(ON_ALL_CORES) $(VENV)/lib >/dev/null || true
	@$(BIN)/python -m pip install $(QUIET) --no-deps --no-build-isolation --editable .
	@touch $@

# --- what a newcomer runs --------------------------------------------------------------------

demo: $(STAMP) ## train a network on handwritten digits; writes demo.png
	$(BIN)/python examples/train_digits.py

demo-ranks: .venv-ranks/.installed ## the same on four ranks of MPI, against one process (1 min)
	.venv-ranks/bin/mpiexec -n 4 .venv-ranks/bin/python examples/mpi_training.py

# On all cores; tests that measure time run while no other does (tests/alone.py).
PYTEST := $(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal --durations 12

# It records which test runs which line, for `make mutants`.
test: $(STAMP) ## the suite and the doctests, on the CPU (4 min on two cores)
	HYPOTHESIS_PROFILE=quick $(PYTEST) -p tests.mutants.plugin --covered build/mutants/tests \
		-m 'not slow and not ptx'

# Warnings are errors. Then the pages are read as a reader would: tests/docs.
docs: .venv-docs/.installed ## build the site and read it: build/docs/index.html (2 min)
	rm -rf build/docs docs/generated
	.venv-docs/bin/python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 -c docs . build/docs
	GRADKIT_SITE=build/docs .venv-docs/bin/python -m pytest --quiet --noconftest tests/docs/test_site.py

docs-look: docs ## open pages in headless Chromium; screenshots in build/docs-look
	GRADKIT_SITE=build/docs GRADKIT_LOOK=build/docs-look .venv-docs/bin/python -m pytest --quiet --noconftest \
		tests/docs/test_browser.py

# --- what a change must pass -----------------------------------------------------------------

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --ignore-missing-imports --allow-subclassing-any --allow-untyped-decorators examples

# What NVRTC makes of the kernels for one architecture, run on the CPU: testbed/ptx.
test-ptx-fast: $(STAMP) ## every kernel's compiled code in every dtype, on the CPU (3 min)
	GRADKIT_PTX=80 $(PYTEST) -m 'ptx and not slow' testbed/tests tests/ptx tests/test_golden.py

# RECORD=1 writes tests/machine_code/*.csv; then say in the commit what the change buys.
machine-code: $(STAMP) .venv-nvrtc13/.installed ## the kernels' machine code against the recorded tables (3 min)
	$(BIN)/python -m tests.machine_code --nvrtc $(NVRTC13) $(if $(RECORD),--record)

test-slow: $(STAMP) ## what `make test` shows by a part, in full: every kernel for every GPU
	$(PYTEST) -m '(slow or hypothesis) and not ptx'

check-package: $(STAMP) .venv-package/.installed ## the release as its users get it, on every Python here
	.venv-package/bin/python -m tests.check_package

dist: .venv-package/.installed ## build the sdist and the wheel that `make check-package` tries
	.venv-package/bin/python -m build --no-isolation --outdir dist .

check: lint check-package test test-ptx-fast machine-code test-slow ## lint and all tests

# --- with a GPU, another framework or more time (in alphabetical order) ----------------------
# Each set of packages that cannot share an environment has one of its own: .venv-NAME.

.PHONY: bench bench-gpu bench-ranks bench-record fuzz lock mutants mutants-fast mutants-interop pictures sanitize-gpu soak test-cudnn test-gpu \
	test-interop test-onnxruntime test-ptx test-ranks

MINUTES := 10

# Results go to benchmarks/out, or into $OUT if it is set: a run changes no tracked file.
bench: .venv-bench/.installed .venv-onnxruntime/.installed ## time every operation on the CPU against its peers
	GRADKIT_ORT_PYTHON=.venv-onnxruntime/bin/python .venv-bench/bin/python -m benchmarks

# As test-gpu: with the Python that has CuPy (and PyTorch, Triton, Liger-Kernel if installed).
bench-gpu: ## time every operation on a GPU against its peers (8 min)
	$(or $(GPU_PYTHON),python3) -m benchmarks --device cuda --seconds 1 --budget 450 $(BENCH)

bench-ranks: .venv-ranks/.installed ## norms over four processes against PyTorch's on DTensors
	.venv-ranks/bin/python -m benchmarks.ranks $(BENCH)

bench-record: $(STAMP) ## publish RUN=FILE.jsonl, a finished run: benchmarks/results, docs/performance.md
	@test -n "$(RUN)" || { echo "make: name the run: make bench-record RUN=FILE.jsonl" >&2; exit 1; }
	$(BIN)/python -m benchmarks.record $(RUN)

fuzz: $(STAMP) ## every property with a thousand examples, for MINUTES=10
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ)

LOCK := pip compile --quiet --upgrade --universal --python-version 3.11 --prerelease disallow \
	--no-config --no-annotate --custom-compile-command 'make lock'

lock: .venv-lock/.installed ## pin the newest versions of all that `make venv` and CI install
	.venv-lock/bin/uv $(LOCK) --generate-hashes --extra demo --extra test --extra lint \
		pyproject.toml requirements/ci.in --output-file requirements/ci.txt
	.venv-lock/bin/uv $(LOCK) --extra demo \
		pyproject.toml docs/requirements.txt --output-file requirements/docs.txt
	.venv-lock/bin/uv $(LOCK) --extra test \
		pyproject.toml tests/interop/requirements.txt --output-file requirements/interop.txt
	.venv-lock/bin/uv $(LOCK) --extra demo --extra test \
		pyproject.toml tests/processes/requirements.txt --output-file requirements/ranks.txt
	.venv-lock/bin/uv $(LOCK) --generate-hashes requirements/nvrtc13.in --output-file requirements/nvrtc13.txt
	.venv-lock/bin/uv $(LOCK) --generate-hashes requirements/package.in --output-file requirements/package.txt

# Which test runs which line: `make test` has recorded it.
build/mutants/tests/main.json: $(shell find gradkit -name '*.py')
	$(MAKE) test

build/mutants/interop/main.json: .venv-interop/.installed $(shell find gradkit -name '*.py')
	-HYPOTHESIS_PROFILE=quick .venv-interop/bin/python -m pytest --quiet --numprocesses auto -m interop \
		-p tests.mutants.plugin --covered build/mutants/interop tests/interop

mutants: $(STAMP) build/mutants/tests/main.json ## plant faults one by one; each must make a test fail (a day; it resumes)
	$(BIN)/python -m tests.mutants $(MUTANTS)

mutants-fast: $(STAMP) build/mutants/tests/main.json ## one or two faults of each rule and kind, always the same (4 min)
	$(BIN)/python -m tests.mutants --each 2 --seconds 200 --cap 40

mutants-interop: build/mutants/interop/main.json ## those in gradkit.torch and gradkit.jax
	.venv-interop/bin/python -m tests.mutants --interop $(MUTANTS)

pictures: $(STAMP) ## draw the README's pictures anew: docs/pictures
	PYTHONPATH=. $(BIN)/python docs/pictures.py

sanitize-gpu: ## compute-sanitizer's four tools over every kernel (at most 10 min)
	tests/sanitize.sh $(or $(GPU_PYTHON),python3)

soak: $(STAMP) ## every operation over and over for MINUTES=10; no memory may be lost
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(SOAK)

ON_CUPY := tests/cudnn tests/test_cupy_device.py tests/test_faults.py
test-cudnn: .venv-cudnn8/.installed .venv-cudnn9/.installed ## both cuDNN stacks, CuPy 13.6 and 14, no GPU needed (5 GB of downloads)
	GRADKIT_CUDNN=8 .venv-cudnn8/bin/python -m pytest $(ON_CUPY)
	GRADKIT_CUDNN=9 .venv-cudnn9/bin/python -m pytest $(ON_CUPY)

# With the Python that has CuPy, and nothing of ours: a GPU machine may have no network.
test-gpu: ## the suite on CuPy, and compute-sanitizer where it is found
	GRADKIT_REQUIRE_GPU=1 $(or $(GPU_PYTHON),python3) -m pytest -m gpu tests
	$(MAKE) --no-print-directory sanitize-gpu

test-interop: $(STAMP) .venv-interop/.installed .venv-package/.installed ## PyTorch, JAX, TensorFlow, optax and thinc, on the CPU
	GRADKIT_REQUIRE_FRAMEWORKS=1 .venv-interop/bin/python -m pytest --numprocesses auto --dist worksteal tests/interop
	$(BIN)/mypy --python-executable .venv-interop/bin/python --follow-imports silent tests/typing/frameworks.py
	.venv-package/bin/pyright --project tests/interop --pythonpath .venv-interop/bin/python

test-onnxruntime: $(STAMP) .venv-onnxruntime/.installed ## agreement with ONNX Runtime Training's operators
	GRADKIT_ORT_PYTHON=$(CURDIR)/.venv-onnxruntime/bin/python $(BIN)/python -m pytest tests/onnxruntime

test-ranks: .venv-ranks/.installed ## real processes of MPI, torch.distributed and JAX, on the CPU (2 min)
	GRADKIT_REQUIRE_RANKS=1 .venv-ranks/bin/python -m pytest -p no:xdist --durations 5 tests/processes

# All tests that take a backend or launch kernels, on four architectures, from the NVRTC of CUDA 12 and
# of CUDA 13; those of lists also with every fusion that ptxas may make, which leaves all other kernels
# as they are (tests/ptx/test_kernels.py). Each part is a target by itself, such as
# `make test-ptx-sm_90-nvrtc13-fused`, and writes its row of tests/ptx/PASSED.md. At the end, what no
# test reached: each line needs a reason.
PTX_ARCHITECTURES := sm_80 sm_90 sm_100 sm_120
PTX_LISTS := tests/test_block_clipping.py tests/test_clipping.py tests/test_cuda_lists.py \
	tests/test_distributed.py tests/test_every_kernel.py tests/test_golden.py tests/test_groups.py \
	tests/test_regressions.py
NVRTC13 = $(shell echo .venv-nvrtc13/lib/python*/site-packages/nvidia/*/lib/libnvrtc.so.13)
PTX_NVRTC13 := $(PTX_ARCHITECTURES:=-nvrtc13)
PTX_PLAIN := $(PTX_ARCHITECTURES) $(PTX_NVRTC13)
PTX_PARTS := $(PTX_PLAIN) $(PTX_PLAIN:=-fused)
test-ptx: $(PTX_PARTS:%=test-ptx-%) ## the whole suite on the kernels' compiled code (hours)
	$(BIN)/python -m tests.ptx.unreached $(PTX_ARCHITECTURES:%=build/ptx/%.json)
	$(BIN)/python -m tests.ptx.unreached $(PTX_NVRTC13:%=build/ptx/%.json)

.PHONY: $(PTX_PARTS:%=test-ptx-%)
$(PTX_NVRTC13:%=test-ptx-%) $(PTX_NVRTC13:%=test-ptx-%-fused): .venv-nvrtc13/.installed
$(PTX_NVRTC13:%=test-ptx-%) $(PTX_NVRTC13:%=test-ptx-%-fused): export GRADKIT_NVRTC_LIBRARY = $(NVRTC13)
$(PTX_PLAIN:%=test-ptx-%-fused): export GRADKIT_PTX_CONTRACTED = 1
$(PTX_PLAIN:%=test-ptx-%-fused): PTX_TESTS := $(PTX_LISTS)
$(PTX_PARTS:%=test-ptx-%): test-ptx-sm_%: $(STAMP)
	@mkdir -p build/ptx
	HYPOTHESIS_PROFILE=quick GRADKIT_PTX=$(firstword $(subst -, ,$*)) GRADKIT_PTX_REPORT=build/ptx/sm_$*.json \
		$(PYTEST) -m ptx --junitxml build/ptx/sm_$*.xml $(or $(PTX_TESTS),tests)
	$(BIN)/python -m tests.ptx.passed sm_$* build/ptx/sm_$*.xml

.venv-bench/.installed: PACKAGES := --editable . --requirement benchmarks/requirements.txt
.venv-cudnn8/.installed: PACKAGES := --editable '.[test]' cupy-cuda12x==13.6.0 nvidia-cudnn-cu12==8.9.7.29
.venv-cudnn9/.installed: PACKAGES := --editable '.[test]' 'cupy-cuda12x==14.*' 'nvidia-cudnn-cu12==9.*'
.venv-docs/.installed: PACKAGES := --editable '.[demo]' --requirement docs/requirements.txt \
	--constraint requirements/docs.txt
.venv-interop/.installed: PACKAGES := --editable '.[test]' --requirement tests/interop/requirements.txt \
	--constraint requirements/interop.txt
.venv-lock/.installed: PACKAGES := uv
.venv-nvrtc13/.installed: PACKAGES := --require-hashes --requirement requirements/nvrtc13.txt
.venv-onnxruntime/.installed: PACKAGES := --requirement tests/onnxruntime/requirements.txt
.venv-package/.installed: PACKAGES := --require-hashes --requirement requirements/package.txt
.venv-ranks/.installed: PACKAGES := --editable '.[demo,test]' --requirement tests/processes/requirements.txt \
	--constraint requirements/ranks.txt

.venv-bench/.installed: benchmarks/requirements.txt
.venv-docs/.installed: docs/requirements.txt requirements/docs.txt
.venv-interop/.installed: tests/interop/requirements.txt requirements/interop.txt
.venv-onnxruntime/.installed: tests/onnxruntime/requirements.txt
.venv-nvrtc13/.installed: requirements/nvrtc13.txt
.venv-package/.installed: requirements/package.txt
.venv-ranks/.installed: tests/processes/requirements.txt requirements/ranks.txt
.venv-%/.installed: pyproject.toml
	@echo "Installing into $(@D) ..."
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install $(QUIET) $(PACKAGES)
	@$(@D)/bin/python -m compileall $(ON_ALL_CORES) $(@D)/lib >/dev/null || true
	@touch $@

# --- housekeeping ----------------------------------------------------------------------------

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) .venv-* build dist docs/generated demo.png spike_guard.png .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
