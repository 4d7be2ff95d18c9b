# make serve    builds .venv, fetches the default model and serves it on 127.0.0.1:8000
# make test     builds the same .venv and runs every test that needs no GPU
# make test-long  those of them that CI bounds, at full length: 75 minutes
# make install  builds .venv alone
# make gpu-test   tests of the GPU's kernels and engine; make gpu-bench   its figures
# make check    format, lint, types, import contracts, fast tests; make lint the same without tests

PYTHON ?= python3
# Exact, and installed before the rest: an open range may replace a CPU build that is at hand by a
# newer release with gigabytes of CUDA libraries. Name another with: make TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
MODEL ?= smollm2-135m
PORT ?= 8000
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: serve test test-long install check lint clean gpu-test gpu-bench

serve: .venv/.installed
	@echo "Fetching $(MODEL) where it is not here yet ..."
	@$(BIN)/octavo pull $(MODEL) >/dev/null
	@exec $(BIN)/octavo serve $(MODEL) --port $(PORT)

test: .venv/.installed-dev
	$(BIN)/python -m pytest

# What reads --long. The soak takes an hour: more than a test may otherwise.
test-long: .venv/.installed-dev
	$(BIN)/python -m pytest --long --timeout=7200 \
	  tests/engine/test_virtual.py tests/engine/test_resizing.py tests/execution/pages/test_memfd.py \
	  tests/execution/gpu/test_slots_churn.py tests/execution/gpu/test_page_faults.py \
	  tests/server/test_schemathesis.py tests/server/test_soak.py

install: .venv/.installed

check: .venv/.installed-dev
	scripts/check

lint: .venv/.installed-dev
	scripts/check --no-tests

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	  { echo "Octavo needs Python 3.11 to 3.13; name one with: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "Installing into .venv: PyTorch, then the rest; a minute or a few ..."
	$(PIP) "$(TORCH)"
	$(PIP) --editable .
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable ".[dev]"
	@touch $@

# On a machine with a GPU, with its own PyTorch: no virtual environment is made.
gpu-test:
	PYTHON="$(PYTHON)" scripts/gpu-test

gpu-bench:
	PYTHON="$(PYTHON)" scripts/gpu-bench

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
