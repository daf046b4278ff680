# Everything starts from a clean machine with Python 3.11 or later and make: the first target called makes
# .venv and installs into it; later calls do so again only when the dependencies have changed.
#
#   make demo    one swarm learns on this machine        make test       lint, types and all tests
#   make lint    ruff, formatting, mypy                  make interop    other libp2p implementations
#   make model   a language model of 135 M parameters, once, into the user's cache (93 MB, then 271 MB of disk)
#
# WORKERS=0 runs the tests one after the other in one process, WORKERS=N in N of them; else as many as there are
# cores, four at most.
# TORCH_INDEX=URL takes torch from another package index, for example one of CPU-only builds.
# ARGS="..." is handed to the demo: make demo ARGS="--seed 1 --json out.json"

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test lint interop model clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
EXTRAS := torch,hf,dev
ARGS ?=
WORKERS ?= auto
# The tests of real processes are one unit of about a third of all (tests/conftest.py): a fifth worker has nothing to do.
MAX_WORKERS := 4
TORCH_INDEX ?=

# One thread per process: several torch processes at torch's default number of threads are 20 times slower.
export OMP_NUM_THREADS ?= 1

demo: $(STAMP)
	$(PYTHON) -m roles.demo $(ARGS)

# The tests of the real model skip by name where it cannot be had.
test: $(STAMP)
	-@$(PYTHON) -m roles.models.fetch smollm2 >/dev/null
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest -q -n $(WORKERS) --maxprocesses $(MAX_WORKERS)

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

model: $(STAMP)
	$(PYTHON) -m roles.models.fetch smollm2

interop: $(STAMP)
	cd tests/interop/js && npm install --silent --no-audit --no-fund
	$(PYTHON) -m pytest -q tests/interop

$(STAMP): pyproject.toml constraints.txt
	@set -e; for name in $(PYTHON_FROM) python3.11 python3.12 python3.13 python3.14 python3 python; do \
	  if command -v $$name >/dev/null 2>&1 && \
	     $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    found=$$name; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then echo "Shoal needs Python 3.11 or later (with venv); none was found" >&2; exit 1; fi; \
	if [ ! -x $(PYTHON) ]; then echo "making $(VENV) with $$found"; $$found -m venv $(VENV); fi
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
