# Everything runs from .venv, which is made once and again when its inputs change.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
STAMP := .venv/.installed

.PHONY: help .venv quickstart test test-all check format benchmarks docs wheel clean

help: ## what can be made
	@sed -n 's/^\([a-z.-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

.venv: $(STAMP) ## the environment: fedsweep, editable, with the pinned dependencies and tools

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fedsweep needs Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

quickstart: $(STAMP) ## a first comparison, in a few minutes on a laptop
	.venv/bin/python scripts/quickstart.py

test: $(STAMP) ## all that CI checks: format, lint, types, every test, the wheel
	scripts/check

test-all: $(STAMP) ## and the exhaustive tests: each method on actors, each network, each kill
	scripts/check --all

check: $(STAMP) ## the fast part: format, lint, types, quick tests
	scripts/check --fast

format: $(STAMP) ## rewrites the sources in the common format
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

benchmarks: $(STAMP) ## speed on this machine: beside plain PyTorch, then of single parts
	-.venv/bin/fedsweep bench
	for bench in tests/benchmarks/bench_*.py; do echo "==> $$bench"; .venv/bin/python $$bench; done

docs: $(STAMP) ## the documentation as a site: build/site/index.html; a link that leads nowhere is an error
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

wheel: $(STAMP) ## dist/fedsweep-*.whl
	rm -rf build dist
	.venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build
	@ls dist

clean: ## removes what tools made, the environment included; runs stay
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis platform/*.egg-info *.egg-info
	find platform algorithms tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
