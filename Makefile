# SPDX-License-Identifier: MIT
# `make demo` and `make test` set everything up on a fresh machine; see README.md.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# An index with other builds of torch, e.g. https://download.pytorch.org/whl/cpu (PyPI's carries CUDA on Linux).
TORCH_INDEX ?=
# Byte code is written when a module is first imported; compiling all of torch would take longer than the demo's start.
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

.PHONY: demo test lint clean

# .venv/.cli and .venv/.dev: the package with that extra is installed.
$(VENV)/.%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch triton
	$(PIP) --editable '.[$*]'
	touch $@

demo: $(VENV)/.cli
	$(BIN)/fla demo

# One thread per worker: two workers with two threads each would wait for each other on two cores.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo-run
