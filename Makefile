# Every target sets up its own virtual environment in .venv first.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

.PHONY: demo check fast test test-slow lint docs pictures notebooks examples lowest newest extras bench intervals reproduce quick clean
demo: .venv/.demo         ## train, calibrate, print the table, draw the intervals
	$(BIN)/ffcp demo

check: .venv/.ready       ## lint, types and the fast tests side by side, in under 90 seconds
	$(MAKE) --jobs=2 --output-sync=target lint fast

fast: .venv/.ready        ## the fast tests
	$(PYTEST) -m "not slow and not long and not heavy" tests src

test: lint                ## lint, types, doctests and all that a user relies on
	$(PYTEST) -m "not slow and not heavy" --cov=src/ffcp --cov-report=
	$(BIN)/python tools/covered.py
	$(PYTEST) -m "heavy and not slow"

test-slow: .venv/.ready   ## long fuzzing, browsers, killed processes, and `make quick`
	$(PYTEST) -m slow
	cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && FFCP_CACHE=$$cache $(MAKE) quick

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

lowest:                   ## the tests with the lowest versions that pyproject.toml names
	$(PYTHON) -m venv .lowest
	$(PYTHON) tools/lowest.py > .lowest/constraints.txt
	.lowest/bin/pip install --quiet --constraint .lowest/constraints.txt --editable ".[dev]" --editable "./paper[dev]"
	.lowest/bin/python -m pytest -n 2 -m "not slow"

newest:                   ## the tests with whatever is newest
	$(PYTHON) -m venv .newest
	.newest/bin/pip install --quiet --upgrade --editable ".[dev]" --editable "./paper[dev]"
	.newest/bin/python -m pytest -n 2 -m "not slow"

extras:                   ## sdist and wheel; each extra alone in a clean environment, and used
	$(PYTHON) tools/extras.py

docs: .venv/.ready        ## the documentation site, in site/; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d .venv/doctrees docs site
	@echo "open site/index.html"

pictures: .venv/.ready    ## the pictures of the site, drawn again
	$(BIN)/python docs/pictures.py

notebooks: .venv/.ready   ## the notebooks, run again; keeps their outputs
	$(BIN)/python tools/notebooks.py

examples: .venv/.ready    ## the scripts of examples/, on real data, a few minutes on one core
	@bad=0; for script in examples/*.py; do echo "== $$script"; $(BIN)/python $$script || bad=1; done; exit $$bad

bench: .venv/.ready       ## time and memory, as ratios to hand-written code
	$(BIN)/python -m benchmarks.core
	$(BIN)/python -m benchmarks.levels
	$(BIN)/python -m benchmarks.latency
	$(BIN)/python -m benchmarks.stored
	$(BIN)/python -m benchmarks.outputs
	$(BIN)/python -m benchmarks.bounds
	$(BIN)/python -m benchmarks.fcp
	$(BIN)/python -m benchmarks.localized
	$(BIN)/python -m benchmarks.sets
	$(BIN)/python -m benchmarks.rows
	$(BIN)/python -m benchmarks.stacked
	$(BIN)/python -m benchmarks.export
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.ray_rows

intervals: .venv/.ready   ## Auto beside its candidates and other libraries; writes docs/bands.md
	$(BIN)/python -m benchmarks.intervals.sources --seeds 10,11 --jobs 2
	$(BIN)/python -m benchmarks.intervals --seeds 10,11,12,13,14 --jobs 2 --time --write

reproduce: .venv/.ready   ## every table and figure of the paper, and one page of them
	$(BIN)/pip install --quiet --constraint constraints.txt --editable "./paper[vision]"
	$(BIN)/ffcp-paper reproduce
	$(BIN)/ffcp-paper report reproduced

quick: .venv/.ready       ## the same in small, within 3 minutes: does all of it work?
	$(BIN)/ffcp-paper reproduce --quick --out reproduced/quick
	$(BIN)/ffcp-paper report reproduced/quick

clean:
	rm -rf .venv .lowest .newest

# What the demonstration needs is enough for it; all other targets install the rest.
.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[cli]"
	touch $@

.venv/.ready: .venv/.demo paper/pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]" --editable "./paper[dev]"
	touch $@
