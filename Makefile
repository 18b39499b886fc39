# swapq: `make demo` shows it, `make test` tests it. Both make their own environment in .venv first.
VENV ?= .venv
PYTHON ?= python3.11
PY := $(VENV)/bin/python
# The demonstration and the tests use tiny models: a second thread gains little, and beside other work its barriers cost a lot.
OMP_NUM_THREADS ?= 1
export VENV PYTHON OMP_NUM_THREADS

.DEFAULT_GOAL := help
.PHONY: help env demo ablation notebooks test test-all test-gpu lint clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

env: ## Create .venv with everything pinned (once; does nothing when it is up to date)
	@bash scripts/env.sh

demo: env ## The main job: train a tiny MoE with GRPO and vLLM rollouts, write runs/arithmetic/nvfp4-rl/report.html
	$(PY) examples/grpo_arithmetic.py $(ARGS)

ablation: env ## Nine configurations over three seeds, about 45 minutes on two cores; runs/ablation/report.html
	$(PY) examples/ablation.py $(ARGS)

notebooks: env ## Run examples/notebooks and keep what they show
	$(PY) scripts/notebooks.py --write $(ARGS)

test: env ## Fast tests, real vLLM included
	$(PY) -m pytest -m "not slow and not gpu" $(ARGS)

test-all: env ## Slow tests too
	$(PY) -m pytest -m "not gpu" $(ARGS)

test-gpu: ## Tests that need a CUDA device, in the Python named by GPU_PYTHON
	$(or $(GPU_PYTHON),python3) -m pytest -m gpu $(ARGS)

lint: env ## Style, formatting and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## Remove runs and caches, keep .venv
	rm -rf runs .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
