# Two commands are enough: `make demo` and `make test`. Both build .venv first; nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint format clean

.venv/requirements: requirements.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/requirements-dev: requirements-dev.txt .venv/requirements
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

test: .venv/requirements-dev
	$(BIN)/python -m pytest

lint: .venv/requirements-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/requirements-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache
