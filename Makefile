# Everything runs in .venv, which `make venv` fills from PyPI with the versions that
# requirements/ci.txt pins; nothing else is touched.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINNED := $(VENV)/.pinned
QUIET := --quiet --disable-pip-version-check --no-compile
# Instead of pip, which compiles one file after another; some files compile in no Python version.
ON_ALL_CORES := -q -j 0 -x '/tests?/'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help help-all venv demo demo-ranks docs docs-look test test-testbed test-ptx-fast machine-code test-slow lint check check-package \
	dist wheels clean

# A first target has ### before its description, any other ##.
LIST = @awk -F ':.*$(1) ' '/^[a-z-]+:.*$(1) / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
help:
	$(call LIST,\#\#\#)
	@printf '\n  make help-all lists all targets\n'

help-all: ## list all targets
	$(call LIST,\#\#+)

# --- environment ---------------------------------------------------------------------------

venv: $(STAMP) ### create .venv with the tools, and install gradkit in editable mode (2 min)

$(PINNED): pyproject.toml requirements/ci.txt
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
	@touch $@

# gradkit itself, with its C++ for CPUs: a second time only what has changed is compiled.
$(STAMP): $(PINNED) CMakeLists.txt $(wildcard kernels/cpu/*) kernels/clip_coefficient.cuh kernels/random_rounding.cuh kernels/updates.cuh
	@$(BIN)/python -m pip install $(QUIET) --no-deps --no-build-isolation \
		--config-settings build-dir=build/cpu --editable .
	@$(BIN)/python -c 'from gradkit import _host; of = _host.describe()["compiled"]; print( \
		"CPU backend: compiled for {instruction_set}, {threads} threads".format(**of) if of["available"] \
		else "CPU backend: NumPy, without compiled code: " + of["reason"])'
	@touch $@

# --- first steps --------------------------------------------------------------------

demo: $(STAMP) ### train a network on handwritten digits; writes demo.png (1 min)
	$(BIN)/python examples/train_digits.py

demo-ranks: .venv-frameworks/.installed ## the same on four MPI ranks, compared with one process (1 min)
	.venv-frameworks/bin/mpiexec -n 4 .venv-frameworks/bin/python examples/mpi_training.py

# On all cores; tests that measure time run alone (tests/alone.py).
PYTEST := $(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal $(if $(CI),--durations 12)
# CI runs what is short in the order of a seed, ORDER=1. `make test` keeps its order: mutation tests are of the
# lines that it records, and of some only the first test to come runs all.
ORDER := 1
SHUFFLED = $(if $(CI),--shuffle $(ORDER))

# The run records the lines that each test runs, for `make mutants`.
test: $(STAMP) ### the test suite and the doctests, on the CPU (5 min)
	HYPOTHESIS_PROFILE=quick $(PYTEST) -p tests.mutants.plugin --covered build/mutants/tests \
		-m 'not slow and not ptx'

# Warnings are errors. tests/docs then checks the pages that were built.
docs: .venv-frameworks/.installed ### build the site, and check it: build/docs/index.html (3 min)
	rm -rf build/docs docs/generated
	.venv-frameworks/bin/python -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 -c docs . build/docs
	GRADKIT_SITE=build/docs .venv-frameworks/bin/python -m pytest --quiet --noconftest tests/docs/test_site.py

docs-look: docs ## test pages in headless Chromium; screenshots in build/docs-look
	GRADKIT_SITE=build/docs GRADKIT_LOOK=build/docs-look .venv-frameworks/bin/python -m pytest --quiet --noconftest \
		tests/docs/test_browser.py

# --- checks that a change must pass -----------------------------------------------------------------

lint: $(STAMP) ### ruff and mypy (1 min)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --ignore-missing-imports --allow-subclassing-any --allow-untyped-decorators examples

# A package of its own, which has its own settings for pytest. Nothing installs it: this directory is on the path.
test-testbed: $(STAMP) ## test the testbed, which runs CUDA without a GPU (1 min)
	$(PYTEST) testbed/tests

# The PTX that NVRTC compiles from the kernels for one architecture, run on the CPU: testbed/ptx.
test-ptx-fast: $(STAMP) ## run every kernel's compiled code in every dtype, on the CPU (3 min)
	GRADKIT_PTX=80 $(PYTEST) -m 'ptx and not slow' tests/ptx tests/values/test_golden.py

# RECORD=1 writes tests/machine_code/*.csv; state the benefit of the change in the commit.
machine-code: $(STAMP) .venv-nvrtc13/.installed ## compare the kernels' machine code with the recorded tables (3 min)
	$(BIN)/python -m tests.machine_code --nvrtc $(NVRTC13) $(if $(RECORD),--record)

test-slow: $(STAMP) ## the slow tests, such as every kernel for every GPU
	HYPOTHESIS_PROFILE=further $(PYTEST) --hypothesis-seed 1 -p tests.mutants.plugin --covered build/mutants/slow -m '(slow or hypothesis) and not rare and not ptx'

# Every set of a test's parameters, though others have each two of its values together: tests/pairs.py.
test-every: $(STAMP) ## the slow tests with every set of parameters
	$(PYTEST) -m 'slow and not ptx'

check-package: $(STAMP) .venv-package/.installed ## test the release as users install it, on every Python found
	.venv-package/bin/python -m tests.check_package

dist: .venv-package/.installed ## build the sdist and the wheel that `make check-package` tests
	.venv-package/bin/python -m build --no-isolation --outdir dist .

# For ARM: apt install qemu-user, and tests/native/arm_root.sh.
wheels: .venv-wheels/.installed ## build manylinux wheels for x86-64 and ARM, and run them where nothing else is: dist
	.venv-wheels/bin/python -m tests.wheels

check: lint check-package test test-testbed test-ptx-fast machine-code test-slow ### lint and all tests (30 min)

# --- with a GPU, another framework or more time (in alphabetical order) ----------------------
# Packages that cannot share an environment are in separate ones: .venv-NAME.

.PHONY: bench bench-calls bench-gpu bench-gpu-compiled bench-host-torch bench-ranks bench-record fuzz lock mutants mutants-driver mutants-fast mutants-interop mutants-kernels pictures sanitize-cpu \
	sanitize-cpu-fast sanitize-gpu soak test-arm test-cudnn test-driver test-driver-fast test-driver-torch test-free-threaded test-gpu test-interop test-onnxruntime test-ptx test-ranks

MINUTES := 10
GPU_PYTHON ?= python3

# Results are written to benchmarks/out, or to $OUT if it is set: a run changes no tracked file.
bench: .venv-bench/.installed .venv-onnxruntime/.installed ## time every operation on the CPU, compared with other libraries
	GRADKIT_ORT_PYTHON=.venv-onnxruntime/bin/python .venv-bench/bin/python -m benchmarks

# No environment has both PyTorch and CuPy.
WITH_CUPY = OMP_NUM_THREADS=1 PYTHONPATH=$(wildcard .venv-cupy14/lib/python*/site-packages) .venv-frameworks/bin/python

bench-calls: .venv-frameworks/.installed .venv-cupy14/.installed ## count the Python calls of small calls, and time them by how arrays are passed (1 min)
	$(WITH_CUPY) -m benchmarks.calls $(BENCH)

# Like test-gpu, with the Python that has CuPy (and PyTorch, Triton, Liger-Kernel if installed).
bench-gpu: ## time every operation on a GPU, compared with other libraries (3 min)
	$(GPU_PYTHON) -m benchmarks --device cuda --seconds 0.15 --budget 150 $(BENCH)

COMPILED := layer_norm 16384x4096,layer_norm_grad 16384x4096 bf,layer_norm_grad 65536x1024,rms_norm_grad 16384x4096 bf,$\
	rms_norm_grad 65536x1024,add_rms_norm 16384x4096,batch_norm_grad 256x512x28x28 bf,group_norm_grad 256x512x28x28 bf
bench-gpu-compiled: ## the same of eight cases beside torch.compile, which takes seconds to compile each (1 min)
	$(GPU_PYTHON) -m benchmarks --device cuda --seconds 0.3 --budget 90 --peers torch,torch.compile --only '$(COMPILED)' \
		--out $${OUT:-benchmarks/out}/compiled.jsonl $(BENCH)

bench-host-torch: .venv-frameworks/.installed .venv-cupy14/.installed ## the host's time in calls on PyTorch's CUDA tensors, without a GPU (2 min)
	$(WITH_CUPY) -m benchmarks.host --on torch

bench-ranks: .venv-frameworks/.installed ## time norms over four processes, compared with PyTorch's on DTensors
	.venv-frameworks/bin/python -m benchmarks.ranks $(BENCH)

bench-record: $(STAMP) ## publish RUN=FILE.jsonl, a finished run: benchmarks/results, docs/performance.md, README
	@test -n "$(RUN)" || { echo "make: name the run: make bench-record RUN=FILE.jsonl" >&2; exit 1; }
	$(BIN)/python -m benchmarks.record $(RUN)
	$(BIN)/python -m benchmarks.gpu_model

# Then programs of PyTorch's and JAX's transformations, for as long.
fuzz: $(STAMP) .venv-frameworks/.installed ## test every property with a thousand examples, for twice MINUTES=10
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(FUZZ)
	.venv-frameworks/bin/python -m tests.fuzz --minutes $(MINUTES) tests/interop/test_gradkit_*_programs.py

LOCK := pip compile --quiet --upgrade --universal --python-version 3.11 --prerelease disallow \
	--no-config --no-annotate --custom-compile-command 'make lock'

lock: .venv-lock/.installed ## pin the newest versions of all packages that `make venv` and CI install
	.venv-lock/bin/uv $(LOCK) --generate-hashes --extra demo --extra test --extra lint \
		pyproject.toml requirements/ci.in --output-file requirements/ci.txt
	.venv-lock/bin/uv $(LOCK) --extra demo --extra test \
		pyproject.toml requirements/frameworks.in --output-file requirements/frameworks.txt
	for cupy in cupy13 cupy14; do .venv-lock/bin/uv $(LOCK) --generate-hashes --extra test \
		pyproject.toml requirements/$$cupy.in --output-file requirements/$$cupy.txt; done
	.venv-lock/bin/uv $(LOCK) --generate-hashes requirements/nvrtc13.in --output-file requirements/nvrtc13.txt
	for tools in package wheels; do .venv-lock/bin/uv $(LOCK) --generate-hashes requirements/$$tools.in \
		--output-file requirements/$$tools.txt; done

# The lines that each test runs, as recorded by `make test`.
build/mutants/tests/main.json: $(shell find gradkit -name '*.py')
	$(MAKE) test

build/mutants/interop/main.json: .venv-frameworks/.installed $(shell find gradkit -name '*.py')
	-HYPOTHESIS_PROFILE=quick .venv-frameworks/bin/python -m pytest --quiet --numprocesses auto \
		-m 'interop or not (slow or ptx)' -p tests.mutants.plugin --covered build/mutants/interop \
		tests/interop tests/distributed

ON_DRIVER := tests/gpu tests/values/test_steps.py --ignore tests/gpu/test_examples.py -k 'not 20000'
build/mutants/driver/main.json: .venv-cupy14/.installed $(shell find gradkit -name '*.py')
	-HYPOTHESIS_PROFILE=quick .venv-cupy14/bin/python -m pytest --quiet --numprocesses auto -m gpu \
		-p testbed.driver.plugin -p tests.mutants.plugin --covered build/mutants/driver $(ON_DRIVER)

mutants: $(STAMP) build/mutants/tests/main.json ## run all mutation tests (a day; it resumes)
	$(BIN)/python -m tests.mutants $(MUTANTS)

mutants-driver: build/mutants/driver/main.json ## run the mutation tests of what calls CuPy, on the testbed's driver
	.venv-cupy14/bin/python -m tests.mutants --driver $(MUTANTS)

mutants-fast: $(STAMP) build/mutants/tests/main.json ## run a fixed sample of the mutation tests of Python code (4 min)
	$(BIN)/python -m tests.mutants --each 1 --seconds 120 --cap 80 --only gradkit/

mutants-kernels: $(STAMP) build/mutants/tests/main.json ## the same of the kernels, after `make test-slow` (20 min)
	$(BIN)/python -m tests.mutants --each 1 --cap 400 --only kernels/

mutants-interop: build/mutants/interop/main.json ## run the mutation tests of gradkit.torch and gradkit.jax
	.venv-frameworks/bin/python -m tests.mutants --interop $(MUTANTS)

pictures: $(STAMP) ## redraw the README's pictures: docs/pictures
	PYTHONPATH=. $(BIN)/python docs/pictures.py

# Without what measures memory, which the sanitizer's own is part of.
OF_COMPILED := tests/cpu/test_compiled*.py --deselect tests/cpu/test_compiled.py::test_working_memory

sanitize-cpu: $(STAMP) ## the compiled CPU backend under address, behaviour and thread sanitizers
	for march in native $(if $(filter x86_64,$(shell uname -m)),x86-64); do \
		MARCH=$$march tests/native/sanitize.sh $(BIN)/python $(OF_COMPILED) -k 'compiled or test_compiled' \
			tests/values/test_normalization.py tests/values/test_residual_norms.py \
			tests/calls/test_strided_rows.py tests/values/test_oracle.py || exit 1; \
	done

sanitize-cpu-fast: $(STAMP) ## a part of it: layouts, 16-bit numbers, long rows
	tests/native/sanitize.sh $(BIN)/python $(OF_COMPILED) -m 'not slow' -k 'layouts or across or otherwise or 16_bit or as_many or instruction'

test-arm: $(STAMP) ## the compiled CPU backend on 64-bit ARM, in an emulated processor (Debian: tests/native/arm.sh says what it needs)
	tests/native/arm.sh $(BIN)/python $(OF_COMPILED) --numprocesses auto --dist worksteal \
		-k '(compiled or test_compiled) and not forked' tests/values/test_oracle.py

# Without what collects garbage in each step: there are no generations, and each collection is a whole one.
test-free-threaded: ## the CPU backends on Python without the GIL, which it compiles (Debian; the script says what it needs)
	tests/native/free_threaded.sh tests/cpu tests/values tests/calls tests/bad_input --ignore tests/calls/test_sequences.py

# With the Python that has CuPy, without .venv: a GPU machine may have no network.
sanitize-gpu: ## compute-sanitizer's four tools over every kernel, side by side, where it is installed (3 min)
	tests/sanitize.sh $(GPU_PYTHON)

soak: $(STAMP) ## repeat every operation for MINUTES=10, and check for memory leaks
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(SOAK)

ON_CUPY := tests/cudnn tests/cuda/test_cupy_device.py tests/calls/test_faults.py
test-cudnn: .venv-cudnn8/.installed .venv-cudnn9/.installed ## test both cuDNN versions, with CuPy 13.6 and 14, without a GPU (5 GB of downloads)
	GRADKIT_CUDNN=8 .venv-cudnn8/bin/python -m pytest $(ON_CUPY)
	GRADKIT_CUDNN=9 .venv-cudnn9/bin/python -m pytest $(ON_CUPY)
	.venv-cudnn8/bin/python -m pytest -p testbed.driver.plugin tests/cudnn/test_driver.py
	.venv-cudnn9/bin/python -m pytest -p testbed.driver.plugin tests/cudnn/test_driver.py

# CuPy 13.6 and 14 on a CUDA driver of the testbed, whose kernels run on the CPU: testbed/driver.
# Each is a target too, such as `make test-driver-cupy14 DRIVER_TESTS=tests/values/test_clipping.py`.
DRIVER_TESTS := tests
test-driver: test-driver-cupy13 test-driver-cupy14 ## the tests of GPUs on CuPy itself, without a GPU (hours; 20 min without the longest rows: DRIVER_TESTS="tests -k 'not 20000'")
test-driver-fast: ## what CuPy does for gradkit, without a GPU: streams, graphs, memory (2 min)
	$(MAKE) --no-print-directory test-driver DRIVER_TESTS="$(ON_DRIVER)"
	TESTBED_DRIVER_ARCHITECTURE=90 $(MAKE) --no-print-directory test-driver DRIVER_TESTS=tests/gpu/test_dependent.py

test-driver-%: .venv-%/.installed
	HYPOTHESIS_PROFILE=quick $(<D)/bin/python -m pytest --quiet --numprocesses auto --dist worksteal \
		-p testbed.driver.plugin -m gpu $(SHUFFLED) $(DRIVER_TESTS)

# No environment has both PyTorch and CuPy.
test-driver-torch: .venv-frameworks/.installed .venv-cupy14/.installed ## PyTorch's CUDA tensors on CuPy, without a GPU (2 min)
	HYPOTHESIS_PROFILE=quick PYTHONPATH=$(wildcard .venv-cupy14/lib/python*/site-packages) \
		.venv-frameworks/bin/python -m pytest --quiet -p testbed.driver.plugin $(SHUFFLED) tests/interop/test_torch_on_driver.py

# All files that have such tests, as tests/package/test_directories.py checks: no others are collected.
# The sanitizers take four of the cores.
ON_GPU := tests/bad_input tests/calls tests/cuda/test_every_kernel.py tests/cudnn/test_gpu.py tests/distributed \
	tests/gpu tests/interop/test_devices.py tests/interop/test_gradkit_jax_gpu.py \
	tests/interop/test_gradkit_torch_gpu.py tests/values
WORKERS = $(shell cores=$$(nproc); echo $$((cores > 8 ? cores - 4 : (cores + 1) / 2)))
test-gpu: ## the test suite on CuPy, beside it `make sanitize-gpu` (3 min on 16 cores)
	@$(MAKE) --no-print-directory --keep-going --jobs 2 suite-gpu sanitize-gpu

.PHONY: suite-gpu
suite-gpu:
	GRADKIT_REQUIRE_GPU=1 HYPOTHESIS_PROFILE=quick OMP_NUM_THREADS=1 $(GPU_PYTHON) -m pytest --quiet --tb short -m gpu \
		-p no:benchmark $$($(GPU_PYTHON) -c 'import xdist' 2>/dev/null && echo --numprocesses $(WORKERS) --dist worksteal) \
		$(or $(GPU_TESTS),$(ON_GPU))

test-interop: $(STAMP) .venv-frameworks/.installed .venv-package/.installed ## test with PyTorch, JAX, TensorFlow, optax and thinc, on the CPU
	GRADKIT_REQUIRE_FRAMEWORKS=1 .venv-frameworks/bin/python -m pytest --numprocesses auto --dist worksteal \
		-m 'not rare' tests/interop
	$(BIN)/mypy --python-executable .venv-frameworks/bin/python --follow-imports silent tests/typing/frameworks.py
	.venv-package/bin/pyright --project tests/interop --pythonpath .venv-frameworks/bin/python

test-onnxruntime: $(STAMP) .venv-onnxruntime/.installed ## compare results with ONNX Runtime Training's operators
	GRADKIT_ORT_PYTHON=$(CURDIR)/.venv-onnxruntime/bin/python $(BIN)/python -m pytest tests/onnxruntime

test-ranks: .venv-frameworks/.installed ## test with processes of MPI, torch.distributed and JAX, on the CPU (2 min)
	GRADKIT_REQUIRE_RANKS=1 .venv-frameworks/bin/python -m pytest -p no:xdist --durations 5 $(SHUFFLED) tests/processes

# All tests that take a backend or launch kernels, on four architectures, with the NVRTC of CUDA 12 and
# of CUDA 13. The tests of lists run also with every fusion that ptxas may make, which does not change
# other kernels (tests/ptx/test_kernels.py). Each part is a target, such as
# `make test-ptx-sm_90-nvrtc13-fused`, and writes its row of tests/ptx/PASSED.md. The last step lists
# the lines that no test reached: each needs a reason.
PTX_ARCHITECTURES := sm_80 sm_90 sm_100 sm_120
PTX_LISTS := tests/cuda/test_every_kernel.py tests/cuda/test_lists.py tests/distributed/test_cut_lists.py \
	tests/distributed/test_groups.py tests/values/test_block_clipping.py \
	tests/values/test_clipping.py tests/values/test_golden.py tests/values/test_regressions.py
NVRTC13 = $(shell echo .venv-nvrtc13/lib/python*/site-packages/nvidia/*/lib/libnvrtc.so.13)
PTX_NVRTC13 := $(PTX_ARCHITECTURES:=-nvrtc13)
PTX_PLAIN := $(PTX_ARCHITECTURES) $(PTX_NVRTC13)
PTX_PARTS := $(PTX_PLAIN) $(PTX_PLAIN:=-fused)
test-ptx: $(PTX_PARTS:%=test-ptx-%) ## the whole test suite on the kernels' compiled code (hours)
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

.venv-bench/.installed: PACKAGES = $(EDITABLE) --requirement benchmarks/requirements.txt
.venv-cudnn8/.installed: PACKAGES = $(EDITABLE)[test] cupy-cuda12x==13.6.0 nvidia-cudnn-cu12==8.9.7.29 \
	'nvidia-cuda-runtime-cu12==12.9.*'
.venv-cudnn9/.installed: PACKAGES = $(EDITABLE)[test] 'cupy-cuda12x==14.*' 'nvidia-cudnn-cu12==9.*'
.venv-cupy13/.installed .venv-cupy14/.installed: .venv-%/.installed: requirements/%.txt
.venv-cupy13/.installed: PACKAGES := --require-hashes --requirement requirements/cupy13.txt
.venv-cupy14/.installed: PACKAGES := --require-hashes --requirement requirements/cupy14.txt
.venv-cupy14/.installed: OUR_OWN = $(EDITABLE)
.venv-frameworks/.installed: PACKAGES = $(EDITABLE)[demo,test] --requirement requirements/frameworks.in \
	--constraint requirements/frameworks.txt
.venv-lock/.installed: PACKAGES := uv
.venv-nvrtc13/.installed: PACKAGES := --require-hashes --requirement requirements/nvrtc13.txt
.venv-onnxruntime/.installed: PACKAGES := --requirement tests/onnxruntime/requirements.txt
.venv-package/.installed: PACKAGES := --require-hashes --requirement requirements/package.txt
.venv-wheels/.installed: PACKAGES := --require-hashes --requirement requirements/wheels.txt

.venv-bench/.installed: benchmarks/requirements.txt
.venv-frameworks/.installed: requirements/frameworks.in requirements/frameworks.txt
.venv-onnxruntime/.installed: tests/onnxruntime/requirements.txt
.venv-nvrtc13/.installed: requirements/nvrtc13.txt
.venv-package/.installed: requirements/package.txt
.venv-wheels/.installed: requirements/wheels.txt
# What `make venv` has compiled, for other environments: each of them would take a minute and a half.
EDITABLE = $(shell echo build/editable/*.whl)
.venv-bench/.installed .venv-cudnn8/.installed .venv-cudnn9/.installed .venv-cupy14/.installed \
	.venv-frameworks/.installed: | build/editable/.made
build/editable/.made: $(STAMP)
	@rm -rf $(@D)
	@$(BIN)/python -c "from scikit_build_core.build import build_editable as build; \
		build('$(@D)', {'build-dir': 'build/cpu'})" >/dev/null
	@touch $@

.venv-%/.installed: pyproject.toml
	@echo "Installing into $(@D) ..."
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install $(QUIET) $(PACKAGES)
	@$(if $(OUR_OWN),$(@D)/bin/python -m pip install $(QUIET) --no-deps $(OUR_OWN))
	@$(@D)/bin/python -m compileall $(ON_ALL_CORES) $(@D)/lib >/dev/null || true
	@touch $@

# --- housekeeping ----------------------------------------------------------------------------

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) .venv-* build dist testbed/build testbed/*.egg-info docs/generated demo.png spike_guard.png .hypothesis .mypy_cache .ruff_cache
	find . \( -name __pycache__ -o -name .pytest_cache \) -type d -prune -exec rm -rf {} +
