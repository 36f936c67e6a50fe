# Two commands do everything on a fresh machine: `make mnist` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
EPOCHS ?= 5
BIN    := $(VENV)/bin
# The stamps make each environment once per state of pyproject.toml; a broken one is mended by `make clean`.
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: help mnist test lint unit bench clean

help:
	@echo "make mnist [EPOCHS=n]   install, pack MNIST, train the example from a private dataserver"
	@echo "make test               unit, system and CUDA-on-CPU tests, ruff, mypy, import-linter"
	@echo "make bench BENCH=name   run bench/name.py beside its peers"

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "Renaissance needs Python 3.11 to 3.13; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(RUN_STAMP): pyproject.toml setup.py proto/dataserver.proto | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(DEV_STAMP): pyproject.toml setup.py proto/dataserver.proto | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet -e '.[dev,cuda12]'
	@touch $(RUN_STAMP) $@

mnist: $(RUN_STAMP)
	$(BIN)/renaissance pack mnist --input data/mnist --output data/mnist
	$(BIN)/python examples/mlp_mnist.py --epochs $(EPOCHS) --output runs/mnist

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(DEV_STAMP)
	$(BIN)/pytest tests/unit tests/footguns

test: lint
	$(BIN)/python tests/in_parts.py

bench: $(RUN_STAMP)
	@grep -qs __main__ "bench/$(BENCH).py" || { echo "say which: make bench BENCH=name, one of:"; grep -l __main__ bench/*.py | sed 's|bench/||; s|\.py||'; exit 2; }
	$(BIN)/python -m bench.$(BENCH)

clean:
	rm -rf .venv .venv-* build runs .pytest_cache .mypy_cache .ruff_cache
