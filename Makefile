# Everything runs in .venv, which `make bootstrap` makes; a second bootstrap takes no time.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
PY := $(VENV)/bin/python
# Several ranks share the cores: one OpenMP thread each is faster than many that wait for one another.
export OMP_NUM_THREADS ?= 1
PYTEST_ARGS ?=

.PHONY: help bootstrap demo demo-moe test lint format bench soak supported te-check clean

help:  ## Show this list
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

bootstrap:  ## Find Python >= 3.12, make .venv, install pinned versions
	@bash scripts/bootstrap.sh

demo: bootstrap  ## Train a small GPT on 4 CPU ranks through 4 changes of layout and compare with a run without
	@$(PY) scripts/demo.py demo

demo-moe: bootstrap  ## The same for a mixture of experts, through 7 changes: also of cp, ep, etp and vpp
	@$(PY) scripts/demo.py demo_moe

test: bootstrap  ## Run all tests except the long ones; say which were skipped and why
	$(PY) -m pytest tests -m "not soak" -rs $(PYTEST_ARGS)

lint: bootstrap  ## ruff, ruff format, mypy --strict on the pure layers, codespell
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/codespell

format: bootstrap  ## Let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: bootstrap  ## Measure on this machine: preparation in the background (ends with one JSON line)
	@$(PY) -m benchmarks.elastic

soak: bootstrap  ## Run the long tests (many switches in one set of processes)
	$(PY) -m pytest tests -m soak -rs $(PYTEST_ARGS)

supported: bootstrap  ## Run every row of the table of pairs, write docs/supported.md and the README's tables (long)
	ORACLE_RESULTS=1 $(PY) -m pytest tests/oracle/test_pairs.py $(PYTEST_ARGS)
	$(PY) -m tests.oracle.supported
	$(PY) scripts/write_tables.py

te-check: bootstrap  ## Move the states of Transformer Engine's layers and optimizer; writes docs/te_check.md (builds it once: 15 min)
	@. scripts/te_venv.sh && .venv-te/bin/python -W ignore scripts/te_check.py

clean:  ## Remove caches and demo output (keeps .venv and .venv-te)
	rm -rf demo-out demo-moe-out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
