# Every target sets up its own virtual environment in .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench reproduce quick clean
demo: .venv/.ready        ## train, calibrate, print the table, draw the bands
	$(BIN)/ffcp demo

test: lint                ## ruff, mypy, doctests and the test suite
	$(BIN)/python -m pytest -n 2

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/.ready       ## time and memory, as ratios to hand-written code
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.bounds
	$(BIN)/python -m benchmarks.fcp
	$(BIN)/python -m benchmarks.localized
	$(BIN)/python -m benchmarks.sets
	$(BIN)/python -m benchmarks.rows
	$(BIN)/python -m benchmarks.stacked

reproduce: .venv/.ready   ## every table and figure of the paper, and one page of them
	$(BIN)/ffcp reproduce
	$(BIN)/ffcp report reproduced

quick: .venv/.ready       ## the same in small, within 3 minutes: does all of it work?
	$(BIN)/ffcp reproduce --quick --out reproduced/quick
	$(BIN)/ffcp report reproduced/quick

clean:
	rm -rf .venv

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
