# Each target sets everything up by itself: a virtual environment in .venv, once per change of what it is made from.
# Needs Python 3.11 or later, pip, gcc and git; no root, no GPU.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow bench lint format clean

# A node is killed at step 20, a fresh one joins at step 40; then the same seed runs undisturbed, to compare the bits.
demo: $(READY)
	$(BIN)/elastic3d demo --kill 1@20 --join @40

test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

slow: $(READY)
	$(BIN)/python -m pytest -m slow

bench: $(READY)
	$(BIN)/python -m chaos.bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo-out build dist *.egg-info .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no python3 on PATH; install Python 3.11 or set PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# torch first and by itself, so that pip takes the build at hand; resolved with all the rest it may take another.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
