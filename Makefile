# Needs python3 (3.11 or newer) and nothing else. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The constraint is in every call of pip: without it, torch may come with gigabytes of CUDA libraries.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST_ARGS ?=
CHOSEN := -m "not slow and not thorough"
# Each worker has as many threads as the machine has cores: those that wait must not spin.
export OMP_WAIT_POLICY := PASSIVE
# MKL would take fewer threads while the machine is busy, and round otherwise then.
export MKL_DYNAMIC := FALSE
# Hundreds of tests start Python, which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# A file runs in one process, which has what its tests share.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

COLAB := .venv-colab
COLAB_TESTS := $(addprefix tests/shell/test_,extension.py transparency.py mempeak.py cell_growth.py) tests/views/test_views_panel.py

CUDA := .venv-cuda
CUDA_PIP := $(CUDA)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-cuda.txt
CUDA_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.gpu' tests)
# The driver and NVML are loaded by name. A context takes memory, as on a real device.
ON_STUB = LD_LIBRARY_PATH=$$(echo $(CURDIR)/$(CUDA)/lib/python3*/site-packages/nvidia/cu13/lib) STUBCUDA_COMPUTE=1 \
  STUBCUDA_CONTEXT=400MiB

# Jittor compiles itself when it is imported first, which takes ten minutes, and its operators when they are used first.
JITTOR := .venv-jittor
JITTOR_ENV = JITTOR_HOME=$(CURDIR)/$(JITTOR)/home use_mkl=0 nvcc_path=

SITE := .venv-site
# Of its successor and its maker's plans, in every build.
export NO_MKDOCS_2_WARNING := 1

TORCH ?= 2.4.1
# PyTorch's own, where the builds for the CPU alone are; with none, torch comes with CUDA's libraries.
TORCH_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
TORCH_VENV := .venv-torch-$(TORCH)

.PHONY: help demo demo-ranks test test-ci test-all test-colab test-cuda test-jittor test-torch check docs site pages examples gallery images new clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo ## Run the demo notebook in a real kernel; leaves demo-output/
	$(BIN)/oomdoctor demo

demo-ranks: $(VENV)/.installed-dev ## Heal a job of two ranks on this machine, and hold it against a fresh one
	$(BIN)/python benchmarks/ranks.py --worlds 2 backward

test: $(VENV)/.installed-dev ## Run the tests that take less than a second (PYTEST_ARGS="-k word" for some of them)
	$(BIN)/python -m pytest $(WORKERS) $(CHOSEN) $(PYTEST_ARGS)

test-ci: CHOSEN := -m "not thorough"
test-ci: test ## Run the slow ones as well, which take a second or more

test-all: CHOSEN :=
test-all: test ## Run all tests: those that take five seconds, and all rows of tables, too

test-colab: $(COLAB)/.installed ## Run the kernel tests with the IPython, ipykernel and ipywidgets of Google Colab
	$(COLAB)/bin/python -m pytest $(WORKERS) -p no:cacheprovider $(COLAB_TESTS) $(PYTEST_ARGS)

test-cuda: $(CUDA)/.installed ## Run the tests marked gpu on PyTorch's CUDA build, over a stub of NVIDIA's libraries
	@$(CUDA)/bin/python tests/stubcuda/build.py $(CUDA)
	$(ON_STUB) $(CUDA)/bin/python -m pytest $(WORKERS) -m gpu -p no:cacheprovider $(CUDA_TESTS) $(PYTEST_ARGS)

test-jittor: $(JITTOR)/.installed ## Run the tests marked jittor, on its CPU build, and its notebook
	$(JITTOR_ENV) $(JITTOR)/bin/python -m pytest -m jittor -p no:cacheprovider tests/jittor $(PYTEST_ARGS)

test-torch: $(TORCH_VENV)/.installed ## Run the quick tests with another torch: make test-torch TORCH=2.4.1, or TORCH=newest
	$(TORCH_VENV)/bin/python -m pytest $(WORKERS) $(CHOSEN) -p no:cacheprovider $(PYTEST_ARGS)

check: $(VENV)/.installed-dev ## Format, lint, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev ## Write docs/: a page each of all rules, fixes, settings and JSON, and every text by room
	$(BIN)/python tools/rules_page.py
	$(BIN)/python tools/fixes_page.py
	$(BIN)/python tools/configuration_page.py
	$(BIN)/python tools/json_page.py
	$(BIN)/python tools/texts_page.py
	$(BIN)/python tools/translations.py
	$(BIN)/python tools/badges.py

site: $(SITE)/.installed ## Build the documentation as a site, in site/; a dead link is an error
	$(SITE)/bin/python -m mkdocs build --quiet --strict
	@$(SITE)/bin/python tools/check_links.py site

pages: $(VENV)/.installed-dev ## Run the commands on README, the tutorial and the how-to pages, and write their output
	$(BIN)/python tools/page_sessions.py

examples: $(VENV)/.installed-dev ## Write the diff that each fix makes to a program of the tests, for its page
	$(BIN)/python tools/fix_examples.py

gallery: $(VENV)/.installed-dev ## Execute the notebooks in place
	$(BIN)/python tools/execute_gallery.py

images: $(VENV)/.installed-dev ## Take the pictures of docs/images anew, in a real browser
	$(BIN)/python tools/images.py

new: ## Scaffold a fix: make new FIX=name [RULE=family/symptom]
	@$(PYTHON) tools/new_fix.py "$(FIX)" $(if $(RULE),--rule "$(RULE)")

clean: ## Remove what the targets made, the virtual environment too
	rm -rf $(VENV) $(COLAB) $(CUDA) $(JITTOR) $(SITE) .venv-torch-* site demo-output build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "oomdoctor needs Python 3.11 or newer; choose one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The package is installed editable: the stamps hold until its metadata changes.
$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV); the first time this takes a few minutes.'
	@$(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing into $(VENV); the first time this takes a few minutes.'
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

$(COLAB)/.installed: pyproject.toml constraints-colab.txt
	$(PYTHON) -m venv $(COLAB)
	@$(COLAB)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-colab.txt \
	  -e '.[demo]' pytest pytest-timeout pytest-xdist tqdm
	@touch $@

$(SITE)/.installed: requirements-site.txt
	$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-site.txt
	@touch $@

$(JITTOR)/.installed: pyproject.toml constraints-jittor.txt
	@echo 'Installing into $(JITTOR), and compiling Jittor: ten minutes.'
	@$(PYTHON) -m venv $(JITTOR)
	@$(JITTOR)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-jittor.txt \
	  -e '.[demo]' jittor pytest pytest-timeout pytest-xdist
	@mkdir -p $(JITTOR)/home
	@$(JITTOR_ENV) $(JITTOR)/bin/python -c 'import jittor'
	@touch $@

$(TORCH_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	  $(TORCH_INDEX) '$(if $(filter newest,$(TORCH)),torch,torch==$(TORCH))' -e '.[dev]'
	@touch $@

# Torch comes without what it says that it needs of NVIDIA's: 2 GB, in whose place the stub is. With the lines gone, pip
# fetches none of it for other packages either.
$(CUDA)/.installed: pyproject.toml constraints-cuda.txt
	@echo 'Installing into $(CUDA): the CUDA build of torch, 0.5 GB.'
	@$(PYTHON) -m venv $(CUDA)
	@$(CUDA_PIP) --no-deps torch
	@$(CUDA)/bin/python tests/stubcuda/build.py --check $(CUDA)
	@sed -i -E '/^Requires-Dist: (nvidia|cuda|triton)/d' $(CUDA)/lib/python3*/site-packages/torch-*.dist-info/METADATA
	@$(CUDA_PIP) -e '.[demo]' accelerate hypothesis pytest pytest-timeout pytest-xdist tqdm transformers
	@touch $@
