# make demo   compare the five parameterizations on embedded data, three minutes, with a report
# make test   lint, types and all tests
# make docs   build the documentation site in build/site
# make tables update the tables and figures of the documents from docs/results
# make test-gpu    check the kernels on a GPU, and measure
# make dist   build the source distribution and the wheel, check both, and try the wheel
# make test-versions  test the library with every supported torch and Python
# Each but the last two sets up .venv first, and again when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo docs tables conformance bench browser test lint types unit format dist test-gpu test-versions clean

demo: $(READY)
	$(BIN)/weightnorm demo --out out

# The documentation site, from README.md, docs/ and the docstrings. A warning is an error.
docs: $(READY)
	$(BIN)/python -m sphinx -c docs -W --keep-going -n -q -d build/doctrees . build/site

# Tables and figures of README.md and docs/, from the records in docs/results.
tables: $(READY)
	$(BIN)/weightnorm tables .

# The table of docs/conformance.md.
conformance: $(READY)
	PYTHONPATH=tests $(BIN)/python -m conformance --write docs/conformance.md

# Measure the cost again, up to 90 minutes on an otherwise idle machine, and update the documents.
bench: $(READY)
	$(BIN)/weightnorm bench --out docs/results/bench
	$(BIN)/weightnorm tables .

test: lint types unit

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Two workers of one thread each use two cores better than one worker of two.
unit: $(READY) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

# The report is tested in a browser. CI installs one; without a browser these tests are skipped.
browser:
	@if [ -n "$$CI" ] && ! command -v chromium > /dev/null; then \
	    apt-get update -qq && apt-get install -y -qq chromium > /dev/null \
	    || echo "chromium cannot be installed: the browser tests of the report will be skipped"; \
	fi

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel is tried in a new virtual environment: with torch alone, then with the extra `files`.
TOOLS := build/tools
dist:
	rm -rf dist
	test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet build twine check-wheel-contents
	$(TOOLS)/bin/python -m build --outdir dist
	$(TOOLS)/bin/python -m twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl
	$(TOOLS)/bin/python tests/check_dist.py dist constraints.txt

# On a machine with a GPU: correctness of the kernels, then the record of the benchmarks to send us.
test-gpu: $(READY)
	PYTHONPATH=tests $(BIN)/python -m pytest -q -p no:cacheprovider tests/gpu_cases.py
	$(BIN)/weightnorm bench step vocoder recurrent op mean-only optimizer --device cuda --out gpu

# One environment after the other, each with gigabytes of torch; `python tests/versions.py --help`.
# Environments that have a record in docs/results/versions are not tested again.
test-versions:
	$(PYTHON) tests/versions.py $(if $(ONLY),--only $(ONLY)) $(if $(AGAIN),--again)

# timm requires torchvision, of which a package index may have builds for CUDA only. Beside a CPU build
# of torch, importing one raises an error, and transformers imports it wherever it is installed. So it
# is in a directory of its own, which the tests that use timm add to the path (tests/frameworks.py).
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab,ray,dev,docs,frameworks]'
	$(BIN)/python -m pip install --quiet --no-deps timm
	$(BIN)/python -m pip install --quiet --no-deps --upgrade -c constraints.txt \
	    --target $(VENV)/torchvision torchvision
	touch $@

clean:
	rm -rf $(VENV) out build dist
