# Every target makes the environment it needs in .venv, pinned by constraints.txt.
.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench embedded clean

PYTHON ?= python3
BIN := .venv/bin
# torch is installed by itself and first, so that the pinned build is the one everything else finds.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/pip: constraints.txt
	@echo "Making .venv (once; this takes a few minutes)"
	$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@touch $@

.venv/local: .venv/pip pyproject.toml
	$(INSTALL) torch
	$(INSTALL) --editable ".[local]"
	@touch $@

.venv/dev: .venv/local
	$(INSTALL) --editable ".[local,notebooks]" --group dev
	@touch $@

demo: .venv/local ## Answer a question plainly and point by point, side by side (QUESTION="..." optional)
	@$(BIN)/python examples/demo.py $(if $(QUESTION),"$(QUESTION)")

test: .venv/dev ## Run the tests
	$(BIN)/python -m pytest

test-all: .venv/dev ## Run the tests, slow ones too
	$(BIN)/python -m pytest -m "slow or not slow"

check: .venv/dev ## Lint, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_arrows.py

bench: .venv/dev ## Run the benchmarks and keep their results under benchmarks/results
	$(BIN)/python -m benchmarks.sot_latency --save

embedded: .venv/dev ## Rebuild the embedded model from its corpus (about half an hour on 2 cores)
	$(BIN)/python -m local_backend.embedded.build

clean: ## Remove the environment and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
