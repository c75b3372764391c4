# make TARGET              in an environment of its own, .venv, made once
# make TARGET VENV=none    with the python3 of this shell, which has torch (and the tools that the target runs)
# make test TORCH=2.11.0 VENV=.venv-2.11    with another torch
VENV ?= .venv
TORCH ?= 2.13.0

ifeq ($(VENV),none)
PYTHON := python3
READY :=
# fxamp need not be installed there. Child processes of the tests inherit the path.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready-$(TORCH)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-ops test-deep mutants lint types examples readme size ops optimizers bench zoo ci

help:  ## this list
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "%-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a tiny model and print what fxamp did
	$(PYTHON) -m fxamp demo

test: $(READY)  ## all but slow, deep and GPU-only tests
	$(PYTHON) -m pytest --durations=10

test-all: $(READY)  ## slow and deep tests too
	$(PYTHON) -m pytest --slow --deep --durations=20

test-ops: $(READY)  ## PyTorch's whole operator database through fxamp, and the table; writes tests/ops/RESULTS.md
	$(PYTHON) -m tests.ops --write

test-deep: $(READY)  ## 20,000 random programs, half an hour; what is found is tried first the next time
	$(PYTHON) -m pytest --deep tests/testing/test_random_programs.py --durations=10

mutants: $(READY)  ## take out one rule at a time: do the tests notice? writes docs/mutants.md
	$(PYTHON) tools/mutants.py --write docs/mutants.md

lint: $(READY)  ## style
	$(PYTHON) -m ruff check .

# pyright looks for a python on PATH unless it is told which one has torch.
PYRIGHT = $(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"
types: $(READY)  ## pyright: strict for the package, basic for the rest
	$(PYRIGHT)
	$(PYRIGHT) --project tools/pyright-basic.json

examples: $(READY)  ## run main() of every example
	$(PYTHON) -m pytest --slow tests/house/test_examples.py

readme: $(READY)  ## run the snippets of README.md and compare what they print
	$(PYTHON) -m pytest --slow tests/house/test_readme.py

size: $(READY)  ## files, lines, public names, options, import time
	$(PYTHON) tools/size.py

ops: $(READY)  ## docs/ops.md from the table of operations
	$(PYTHON) tools/op_table.py

optimizers: $(READY)  ## the table of optimizers in docs/scaling.md
	$(PYTHON) tools/optimizer_table.py

bench: $(READY)  ## fxamp beside its peers on small models, three minutes; more: python -m bench --help
	$(PYTHON) -m bench --quick --fresh

zoo: $(READY)  ## tiny models of transformers through fxamp, beside autocast and float64; an hour on one core
	$(PYTHON) -m bench.zoo

ci:  ## everything that a change has to pass
	.ci/run

# torch by itself and pinned: left to the resolver, `torch>=2.11` takes whatever build is the newest.
# The second install then finds it satisfied.
$(VENV)/.ready-$(TORCH): pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet torch==$(TORCH)
	$(PYTHON) -m pip install --quiet -e '.[dev]'
	rm -f $(VENV)/.ready-* && touch $@
