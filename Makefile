# make demo and make test set up .venv by themselves; nothing but python3 (3.10 or newer, with venv) is needed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Tests run in this many processes, with one torch thread each; JOBS=0 runs them in one.
JOBS   ?= 2
PIP    := $(BIN)/python -m pip install -qq --no-warn-conflicts -c constraints.txt

# What the cross-check libraries need beyond the other groups. They are installed without their declared dependencies
# because BackPACK declares torchvision, which only its example data need and which may replace the installed torch.
CROSSCHECK := backpack-for-pytorch curvlinops-for-pytorch einconv einops linear-operator opt-einsum unfoldnd

# The frameworks our optimizers are tried in, in an environment of their own. timm comes without its dependencies: one of
# them is torchvision, which would replace the installed torch; huggingface-hub, pyyaml and safetensors are there anyway.
FRAMEWORKS := transformers accelerate lightning peft tensorboard wandb
TESTING    := pytest pytest-timeout pytest-xdist hypothesis
IVENV      := .venv-integrations
IPIP       := $(IVENV)/bin/python -m pip install -qq --no-warn-conflicts -c constraints.txt -c constraints-integrations.txt

# Those that need no data and no other arguments.
BENCHMARKS := $(addprefix benchmarks/,measure_speed.py population_coverage.py optim_speed.py scaling_estimate.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format pytest test-integrations crosscheck bench clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "kronscope needs Python 3.10 or newer; say which with: make PYTHON=/path/to/python3"; exit 1; }
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "python3 -m venv failed; on Debian and Ubuntu install python3-venv"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "== installing kronscope with its extras into $(VENV) (the first time takes minutes: torch is large)"
	@$(PIP) -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing the development tools"
	@$(PIP) -e '.[all,dev]'
	@echo "== installing the libraries to cross-check with"
	@$(PIP) --no-deps $(CROSSCHECK) || \
		echo "   that failed; tests marked 'crosscheck' will be skipped ('make crosscheck' tries again)"
	@touch $@

install: $(VENV)/.installed  ## the library and its extras, in .venv

demo: $(VENV)/.installed  ## measure small networks on embedded data
	@$(BIN)/kronscope demo

test: lint pytest  ## everything a change must pass

lint: $(VENV)/.installed-dev  ## formatting, lint, types, import layers
	@echo "== ruff format"
	@$(BIN)/ruff format --check .
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== import-linter"
	@$(BIN)/lint-imports --no-logo

pytest: $(VENV)/.installed-dev  ## tests, doctests, code blocks of README and docs; ARGS="-k name" selects
	@echo "== pytest"
	@$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

$(IVENV)/.installed: pyproject.toml constraints.txt constraints-integrations.txt
	@echo "== creating $(IVENV) and installing the frameworks into it (the first time takes minutes)"
	@$(PYTHON) -m venv $(IVENV)
	@$(IPIP) torch
	@$(IPIP) $(FRAMEWORKS) $(TESTING) -e .
	@$(IPIP) --no-deps timm
	@touch $@

test-integrations: $(IVENV)/.installed  ## our optimizers inside Transformers, Lightning, Accelerate, peft and timm
	@echo "== pytest tests/integrations"
	@HF_HUB_OFFLINE=1 KRONSCOPE_INTEGRATIONS=1 $(IVENV)/bin/python -m pytest -n $(JOBS) --dist loadfile \
		tests/integrations tests/test_examples.py::test_example_trains src/kronscope/integrations $(ARGS)

crosscheck: $(VENV)/.installed-dev  ## only the comparisons with BackPACK and curvlinops
	@$(PIP) --no-deps $(CROSSCHECK)
	@$(BIN)/python -m pytest -m crosscheck $(ARGS)

format: $(VENV)/.installed-dev  ## rewrite the sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev  ## run the benchmark scripts
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## remove the environments, caches and build products
	rm -rf $(VENV) $(IVENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# test runs lint and pytest one after the other even under make -j, so that pytest's summary comes last.
.NOTPARALLEL:
