# Two commands for a newcomer:  make demo   make test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DIR ?= demo-rig

.PHONY: demo test lint soak clean

demo: $(VENV)/demo.stamp
	$(BIN)/rigbook demo --dir $(DIR)

test: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/mypy && $(BIN)/lint-imports

# Minutes to hours: hundreds of kills, long runs. By hand; the output goes to benchmarks/results/.
soak: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m slow --timeout 3600 -s tests

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rigbook needs Python 3.11 or newer: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/test.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/demo.stamp

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
