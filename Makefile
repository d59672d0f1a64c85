# The few commands that people and CI share. `make help` lists them.
SHELL := /bin/sh
.DEFAULT_GOAL := help
ENV := python3 scripts/environment.py
PY := .venv/bin/python

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: ## the main job, end to end, on a queue of its own; needs nothing but python3 and make
	@$(ENV) examples
	@$(PY) scripts/demo.py

test: ## all tests; what needs a tool or a right that is missing skips, naming it
	@$(ENV) dev,examples
	@$(PY) -m pytest -n 3 $(ARGS)

test-deps: ## installs the tools that some tests need (root, Debian)
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	  gcc libc6-dev lua-check redis-server pypy3 procps >/dev/null

lint: ## ruff, the floors between components, luacheck
	@$(ENV) dev,examples
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .
	@.venv/bin/lint-imports
	@if command -v luacheck >/dev/null; then luacheck -q broker/gpulayer_broker/lua; else echo "luacheck is missing: make test-deps"; fi

types: ## mypy --strict on code and tests
	@$(ENV) dev,examples
	@.venv/bin/mypy

docs: ## the documentation, every link checked, into site/
	@$(ENV) dev,examples
	@.venv/bin/mkdocs build --strict --quiet

mutants: ## one-line faults in rules and functions, each of which a named test must catch
	@$(ENV) dev,examples
	@$(PY) scripts/mutants.py $(ARGS)

SEED ?= 1
JOBS ?= 2000
GPUS ?= 0
stress: ## JOBS=2000 jobs under random kills, SEED=1 replays, GPUS=8 with stand-ins that jobs share
	@$(ENV) dev,examples
	@$(PY) -m tests.reliability.stress --jobs $(JOBS) --seed $(SEED) --gpus $(GPUS)

bench: ## benchmarks beside their peers, small; ARGS=--record: in full, into the docs, on a quiet machine
	@$(ENV) dev,examples
	@$(PY) -m benchmarks $(ARGS)

wheel: ## the built wheel, checked in an environment of its own
	@$(ENV) dev,examples
	@$(PY) scripts/check_wheel.py

clean: ## removes what these commands have made
	rm -rf .venv site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: help demo test test-deps lint types docs mutants stress bench wheel clean
