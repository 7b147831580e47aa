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

# The ends of what pyproject.toml allows, each in an environment of its own; say which Python if it is called otherwise.
# The newest torch comes from the package index, with its CUDA libraries: several gigabytes.
OLDEST_PYTHON ?= python3.10
NEWEST_PYTHON ?= python3.13
OVENV := .venv-oldest
NVENV := .venv-newest
DISTVENV := .venv-dist

# Those that need no data and no other arguments.
BENCHMARKS := $(addprefix benchmarks/,measure_speed.py population_coverage.py optim_speed.py scaling_estimate.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
# Without bytecode every process compiles all modules and rewrites all assertions anew: twice the time to collect tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format pytest test-integrations test-oldest test-newest crosscheck docs dist pins check-pins soak bench clean

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

# Lint takes what the tests leave idle; it speaks only if it finds something, so that pytest's summary comes last.
test: $(VENV)/.installed-dev  ## everything a change must pass: lint and pytest, side by side
	@mkdir -p build; nice $(MAKE) --no-print-directory lint > build/lint.txt 2>&1 & lint=$$!; \
		$(MAKE) --no-print-directory pytest; tests=$$?; \
		wait $$lint || { cat build/lint.txt; echo "lint failed"; exit 1; }; exit $$tests

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

$(OVENV)/.installed: pyproject.toml constraints-oldest.txt
	@echo "== creating $(OVENV) and installing the oldest versions into it (the first time takes minutes)"
	@$(OLDEST_PYTHON) -m venv --clear $(OVENV) || \
		{ echo "make test-oldest needs Python 3.10; say where it is with: make test-oldest OLDEST_PYTHON=/path/to/python"; exit 1; }
	@$(OVENV)/bin/python -m pip install -qq -c constraints-oldest.txt $(TESTING) -e '.[all]'
	@touch $@

test-oldest: $(OVENV)/.installed  ## the tests with the oldest versions pyproject.toml allows
	@$(OVENV)/bin/python -m pip list | grep -iE '^(matplotlib|numpy|pandas|rich|torch|transformers|typer) '
	@$(OVENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

$(NVENV)/.installed: pyproject.toml
	@echo "== creating $(NVENV) and installing the newest versions into it (several gigabytes)"
	@$(NEWEST_PYTHON) -m venv --clear $(NVENV) || \
		{ echo "make test-newest needs Python 3.13; say where it is with: make test-newest NEWEST_PYTHON=/path/to/python"; exit 1; }
	@$(NVENV)/bin/python -m pip install -qq --upgrade $(TESTING) -e '.[all]'
	@touch $@

test-newest: $(NVENV)/.installed  ## the tests with the newest versions the package index has
	@$(NVENV)/bin/python -m pip list | grep -iE '^(matplotlib|numpy|pandas|rich|torch|transformers|typer) '
	@$(NVENV)/bin/python -m pytest -n $(JOBS) $(ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed constraints-docs.txt
	@echo "== installing what the documentation is built with"
	@$(PIP) -c constraints-docs.txt -e '.[all,docs]' hypothesis
	@touch $@

docs: $(VENV)/.installed-docs  ## the documentation as a site, in build/site; warnings are errors
	@echo "== sphinx"
	@HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going -q -d build/doctrees docs build/site
	@echo "the site is in build/site: open build/site/index.html"

$(VENV)/.installed-dist: $(VENV)/.installed constraints-docs.txt
	@$(PIP) -c constraints-docs.txt build twine hatchling==1.33.0
	@touch $@

dist: $(VENV)/.installed-dist  ## wheel and sdist in dist/, checked, installed into an empty environment and tried
	@rm -rf dist $(DISTVENV)
	@echo "== building"
	@$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python tests/contents.py dist
	@echo "== installing the wheel into an empty environment"
	@$(PYTHON) -m venv $(DISTVENV)
	@$(DISTVENV)/bin/python -m pip install -qq -c constraints.txt "$$(ls $$PWD/dist/*.whl)[all]"
	@echo "== trying it from another folder"
	@root=$$PWD; trial=$$(mktemp -d) && cd $$trial && $$root/$(DISTVENV)/bin/python -I $$root/tests/smoke.py && \
		$$root/$(DISTVENV)/bin/kronscope demo --out demo > demo.txt && tail -n 12 demo.txt && ls demo && rm -r $$trial
	@rm -rf $(DISTVENV)
	@ls -l dist

pins: $(BIN)/python  ## constraints-hashed.txt from constraints.txt and the package index
	@$(BIN)/python tests/pins.py

check-pins: $(BIN)/python  ## download what is pinned, for this machine, and compare hashes
	@$(BIN)/python -m pip download -qq --require-hashes --no-deps -r constraints-hashed.txt -d build/pins
	@echo "$$(ls build/pins | wc -l) files have the hashes of constraints-hashed.txt"

crosscheck: $(VENV)/.installed-dev  ## only the comparisons with BackPACK and curvlinops
	@$(PIP) --no-deps $(CROSSCHECK)
	@$(BIN)/python -m pytest -m crosscheck $(ARGS)

format: $(VENV)/.installed-dev  ## rewrite the sources in the project's format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Runs that failed keep their output.
RUNS ?= 20
soak: $(VENV)/.installed-dev  ## the tests RUNS times in a row, counting flakes; ARGS selects
	@mkdir -p build/soak; rm -f build/soak/*; failed=0; for run in $$(seq $(RUNS)); do \
		if $(BIN)/python -m pytest -q -n $(JOBS) $(ARGS) > build/soak/$$run.txt 2>&1; \
		then rm build/soak/$$run.txt; else failed=$$((failed + 1)); grep -E '^(FAILED|ERROR)' build/soak/$$run.txt; fi; \
		echo "run $$run of $(RUNS): $$failed failed so far"; done; test $$failed = 0

bench: $(VENV)/.installed-dev  ## run the benchmark scripts
	@for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:  ## remove the environments, caches and build products
	rm -rf $(VENV) $(IVENV) $(OVENV) $(NVENV) $(DISTVENV) build dist docs/gallery .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

.NOTPARALLEL:
