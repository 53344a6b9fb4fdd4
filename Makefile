# The two commands of the README are `make serve` and `make test`; both set up what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help setup serve test lint types check bench clean

help:            ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/ready   ## create the virtual environment

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

serve: setup     ## serve the built-in demo model on http://127.0.0.1:8000
	$(BIN)/relaxserve serve

lint: setup      ## format, lint and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup     ## the strict type checker
	$(BIN)/basedpyright

check: lint types

test: setup check  ## everything
	$(BIN)/pytest -n 2 -q

bench: setup     ## the figures of the README
	$(BIN)/relaxserve bench compiler

clean:
	rm -rf $(VENV) build *.egg-info
