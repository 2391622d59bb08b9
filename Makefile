# Everything runs in .venv, which `make venv` fills from PyPI; nothing else is touched.

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && \
	echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environment ---------------------------------------------------------------------------

venv: $(STAMP) ## make .venv and install gradkit into it, editable, with its tools

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: gradkit needs Python 3.11 or newer and found none;" \
		"install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: gradkit" \
		"needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) cannot make" \
		"virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[demo,test,lint]'
	@touch $@

# --- what a newcomer runs --------------------------------------------------------------------

demo: $(STAMP) ## train a network on handwritten digits; writes demo.png
	$(BIN)/python examples/train_digits.py

test: $(STAMP) ## the whole suite and the doctests, on the CPU
	$(BIN)/python -m pytest

# --- what a change must pass -----------------------------------------------------------------

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --ignore-missing-imports examples

check: lint test ## lint and test

# --- with a GPU, another framework or more time (in alphabetical order) ----------------------

# --- housekeeping ----------------------------------------------------------------------------

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) build dist demo.png .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
