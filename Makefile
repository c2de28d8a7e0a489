# Everything a fresh machine needs, in two commands:
#   make demo   see it work: the paper's comparison on embedded data, with a report at the end
#   make test   lint, types and every test
# Both set up .venv first, and only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo tour docs conformance bench browser test lint types unit format clean

demo: $(READY)
	$(BIN)/weightnorm demo --out out

# Tables and figures of README.md and docs/, from the records in docs/results.
docs: $(READY)
	$(BIN)/weightnorm report --docs .

# The library alone, step by step, with a picture.
tour: $(READY)
	$(BIN)/python examples/tour.py --out out

# The table of docs/conformance.md.
conformance: $(READY)
	PYTHONPATH=tests $(BIN)/python -m conformance --write docs/conformance.md

# The table and charts of docs/performance.md, measured anew: a quarter of an hour, nothing else running.
bench: $(READY)
	$(BIN)/weightnorm bench --out docs/results/bench --page docs/performance.md

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Two workers of one thread each use two cores better than one worker of two.
unit: $(READY) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# The report is tested in a real browser: CI gets one, elsewhere those tests skip without it.
browser:
	@if [ -n "$$CI" ] && ! command -v chromium > /dev/null; then \
	    apt-get update -qq && apt-get install -y -qq chromium > /dev/null \
	    || echo "no chromium to be had: the report's browser tests will be skipped"; \
	fi

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab,ray,dev]'
	touch $@

clean:
	rm -rf $(VENV) out
