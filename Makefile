# `make help` lists the targets. Needs only Python 3.11 or later with pip, and make.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
# The version of JAX to install. Empty: the oldest that mpx supports on Python 3.11, and
# on later Pythons the newest. To change it, name another VENV as well.
JAX    ?=
# Whether calls of mpx are checked against its annotations, which doubles the time.
TYPED  ?=
# More arguments for pytest, such as ARGS="tests/test_cast.py -k bf16 -x".
ARGS   ?=

OLDEST_JAX := 0.10.1
BIN        := $(VENV)/bin
# Python compiles the third of the files that is imported; pip would compile all, in 30 s.
INSTALL     = $(BIN)/python -m pip install --quiet --no-compile --constraint $(VENV)/constraints.txt
# Compiled programs are kept from run to run: measured, a test run that spends 18 s in
# compilation spends 3 s the second time. The log level hides the complaint of older XLAs
# that a program read from there names "prefer-no-gather", which no processor has.
CACHE       = JAX_COMPILATION_CACHE_DIR=$(abspath $(VENV))/jax-cache \
              JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 TF_CPP_MIN_LOG_LEVEL=3
# Some systems forbid Python to keep the modules that it has compiled, which pip has not
# compiled here: to import JAX takes 4.4 s then, and 1.4 s otherwise.
export PYTHONDONTWRITEBYTECODE :=
# The tower: an `int` may be passed for a `float`, as in every static checker.
CHECKER     = mpx,beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
PYTEST      = $(CACHE) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=20 \
              $(if $(TYPED),'--jaxtyping-packages=$(CHECKER)')

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test rooms breaks oldest dist wheel gpu-compile gpu-tests zoo zoo-run check lint types layers docs pages format clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/demo.done  ## Train a small model in five precisions and compare them.
	$(BIN)/python examples/digits.py

test: $(VENV)/test.done  ## Run the tests and the docstring examples.
	$(PYTEST) $(ARGS)

rooms: $(VENV)/test.done  ## Draw the rooms of src/mpx into CONTRIBUTING.md.
	$(BIN)/python tests/rooms.py

breaks: $(VENV)/test.done  ## Break mpx on purpose, in about 90 places, and see a test fail for each.
	$(CACHE) $(BIN)/python tests/breaks.py $(ARGS)

# Both environments see the packages of $(VENV), behind their own: only what differs is
# installed. A `.pth` file of another environment, such as that of mpx itself, has no effect.
define beside
	@$(BIN)/python -m venv --clear --without-pip $(1)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
endef

# Packages that old use names which JAX deprecates.
OLDEST_VENV  := .venv-oldest
OLDEST_TESTS := --thin 4 -W ignore::DeprecationWarning -k 'import or nnx or linen or optax or restored' \
                $(patsubst %,tests/test_%.py,import nnx optax checkpoint flash_frameworks)
oldest: $(VENV)/test.done  ## Run some tests with the oldest packages that pyproject.toml allows.
	$(call beside,$(OLDEST_VENV))
	@echo "Installing the lower bounds of pyproject.toml"
	@$(OLDEST_VENV)/bin/python -m pip install --quiet --no-compile \
	  $$($(BIN)/python tests/lower_bounds.py) jaxlib==$(OLDEST_JAX)
	$(CACHE) PYTHONPATH=src $(OLDEST_VENV)/bin/python -m pytest -q -n $(JOBS) $(OLDEST_TESTS) $(ARGS)

dist: $(VENV)/release.done  ## Build the sdist and, from it, the wheel; check what an index would show.
	@rm -rf dist && $(BIN)/python -m build --outdir dist . > dist.log 2>&1 \
	  || { cat dist.log; exit 1; }
	@rm dist.log
	$(BIN)/twine check --strict dist/*

WHEEL_VENV := .venv-wheel
wheel: dist $(VENV)/test.done  ## Build and install the wheel, and use it outside of the sources.
	$(call beside,$(WHEEL_VENV))
	@$(WHEEL_VENV)/bin/python -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	@cd $(WHEEL_VENV) && $(CACHE) bin/python -P $(CURDIR)/tests/check_wheel.py $(CURDIR)/dist

# Compile-only devices take e4m3 algorithms from jaxlib 0.11, not from 0.12. That version
# needs Python 3.12.
GPU_VENV    := .venv-gpu
GPU_JAX     := 0.11.2
gpu-compile:  ## Compile fp8, experts and optimizer steps for an H200, without having one (Linux).
	$(call with_newer_python,VENV=$(GPU_VENV) JAX=$(GPU_JAX) gpu-tests)

# The first Python that runs and is new enough, of $(PYTHON) and those that are usual.
NEWER_PYTHONS = $(PYTHON) python3.12 python3.13 python3.14 \
                $(wildcard $(HOME)/.pyenv/versions/3.1[234].*/bin/python3)
define with_newer_python
	@for python in $(NEWER_PYTHONS); do \
	  if $$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    exec $(MAKE) PYTHON=$$python $(1); \
	  fi; \
	done; \
	echo "$@ needs Python 3.12 or later: make $@ PYTHON=python3.12"; exit 1
endef

# By file: the programs of one are compiled in one go.
gpu-tests: $(VENV)/gpu.done
	$(PYTEST) --dist loadfile -m gpu_compile $(shell grep -l mark.gpu_compile tests/test_*.py) $(ARGS)

# Packages of others break with some new version of JAX or another: this one is tried.
ZOO_VENV := .venv-zoo
ZOO_JAX  := 0.12.0.1
zoo:  ## Train models of other people's packages through every route of mpx.
	$(call with_newer_python,VENV=$(ZOO_VENV) JAX=$(ZOO_JAX) zoo-run)

zoo-run: $(VENV)/zoo.done
	$(CACHE) $(BIN)/python benchmarks/zoo.py --jobs $(JOBS) $(ARGS)

check: lint types layers docs pages  ## Check style, types, layers, docs and the code in the docs.

lint: $(VENV)/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/dev.done
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/dev.done
	$(BIN)/lint-imports

docs: $(VENV)/dev.done  ## Build the documentation into site/ and check links, pictures and titles.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tests/check_site.py site

pages: $(VENV)/dev.done
	$(PYTEST) -m page tests/test_docs.py $(ARGS)
	$(PYTEST) tests/test_docs_site.py

format: $(VENV)/dev.done  ## Format the code and repair what the linter can.
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

clean:  ## Remove everything that these targets made.
	rm -rf __pycache__ .venv .venv-new .venv-oldest .venv-wheel .venv-gpu .venv-zoo build dist site out .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# One environment for all targets; each target installs only what it needs.

# Some systems ship Python without the pip that `venv` would copy: then lend it theirs.
# The upgrade is for `--group`, which pip knows since 25.1.
$(VENV)/constraints.txt:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "mpx needs Python 3.11 or later: make PYTHON=python3.11 ..."; exit 1; }
	@echo "Making the environment $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@jax="$(JAX)"; \
	  [ -n "$$jax" ] || $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
	    || jax=$(OLDEST_JAX); \
	  if [ -n "$$jax" ]; then echo "jax==$$jax"; fi > $@

$(VENV)/demo.done: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing what the demo needs (once, a few minutes)"
	@$(INSTALL) --editable '.[examples]'
	@touch $@

$(VENV)/test.done: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing what the tests need (once, a few minutes)"
	@$(INSTALL) --editable . --group test
	@touch $@

$(VENV)/gpu.done: pyproject.toml $(VENV)/test.done
	@echo "Installing XLA's compiler for GPUs (once, half a gigabyte)"
	@$(INSTALL) --group gpu-compile jax-cuda13-plugin==$(JAX)
	@touch $@

$(VENV)/zoo.done: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing other people's packages (once, a few minutes)"
	@$(INSTALL) --editable . --group zoo
	@$(INSTALL) --no-deps --group zoo-without-deps
	@touch $@

$(VENV)/release.done: pyproject.toml $(VENV)/constraints.txt
	@$(INSTALL) --group release
	@touch $@

$(VENV)/dev.done: pyproject.toml $(VENV)/constraints.txt
	@echo "Installing the development tools (once, a few minutes)"
	@$(INSTALL) --editable . --group dev
	@touch $@ $(VENV)/test.done  # whose packages are among these
