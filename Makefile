# Each target sets up what it needs by itself: a virtual environment in .venv, once per change of what it is made from.
# Needs Python 3.11 or later, pip, gcc and git; no root, no GPU.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
TO_RUN := $(VENV)/.ready-to-run
TO_DEVELOP := $(VENV)/.ready-to-develop
# Tests wait more than they compute: some more of them at a time than there are cores. Those of a file share what they
# set up, and run one after another; the files that take longest begin first.
BESIDE = 1
PYTEST = $(BIN)/python -m pytest --durations=20 --numprocesses=$(shell echo $$(($$(nproc) + $(BESIDE)))) \
	--dist=loadfile --no-loadscope-reorder

# Where nothing may be written beside sources, every process would compile anew what it imports: seconds for torch alone.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check slow matrix bench lint format docs reference lock lock-check clean

# A node is killed at step 20, a fresh one joins at step 40; then the same seed runs undisturbed, to compare the bits.
demo: $(TO_RUN)
	$(BIN)/elastic3d demo --kill 1@20 --join @40

# The core promises, on real parts. Most of these play no job.
test: BESIDE = 2
test: $(TO_DEVELOP)
	$(PYTEST) -m "not slow and not long"

# What test leaves out: more layouts, more histories, more ways to fail.
check: $(TO_DEVELOP)
	$(PYTEST) -m "long and not slow"

# Hours, and thousands of cases. Properties are tried on examples drawn anew each time.
slow: $(TO_DEVELOP)
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=drawn

# The fast tests and those of several ranks on every supported torch of which there is a build for CPUs; hours.
# `make matrix MATRIX="--only 2.12,2.13 --json"` chooses; `--help` says more.
matrix: $(TO_DEVELOP)
	@$(BIN)/python -m tools.matrix $(MATRIX)

# Measurements with their peers; hours. `make bench BENCH="--only health --json"` chooses; `--help` says more.
bench: $(TO_DEVELOP)
	$(BIN)/python -m chaos.bench $(BENCH)

lint: $(TO_DEVELOP) lock-check docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(TO_DEVELOP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Into site/. The build fails for any link that leads nowhere, the check after it also for what pages load from outside.
docs: $(TO_DEVELOP)
	$(BIN)/zensical build --clean --strict
	$(BIN)/python -m tools.site site

# The pages of the documentation that are written from the code, and the dashboard for Grafana.
reference: $(TO_DEVELOP)
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.grafana

# The locks, with every version and hash. `make lock UPGRADE=--upgrade` takes the newest versions.
COMPILE = $(BIN)/uv pip compile --quiet pyproject.toml requirements/torch.in --universal --python-version 3.11 \
	--constraint constraints.txt --override requirements/without-torch.txt --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(UPGRADE)

lock: $(TO_DEVELOP)
	$(COMPILE) --extra dev --output-file requirements/dev.txt
	$(COMPILE) --extra demo --constraint requirements/dev.txt --output-file requirements/demo.txt

# A lock is current when making it again, from the versions it has, changes nothing.
lock-check: $(TO_DEVELOP)
	@for name in dev demo; do \
		cp requirements/$$name.txt $(VENV)/$$name.txt && \
		$(COMPILE) --extra $$name --constraint requirements/dev.txt --output-file $(VENV)/$$name.txt && \
		cmp requirements/$$name.txt $(VENV)/$$name.txt || \
		{ echo "make: requirements/$$name.txt is not what pyproject.toml asks for; run: make lock" >&2; exit 1; }; \
	done

clean:
	rm -rf $(VENV) demo-out site build dist *.egg-info .cache .mypy_cache .ruff_cache .hypothesis

# Everything but torch comes from a lock, so that nothing is resolved: by uv, which is fetched if it is not there, or by
# pip where it cannot be. torch comes from pip, which knows the indexes and the builds at hand; one that is there stays.
define install
	@test -n "$(PYTHON)" || { echo "make: no python3 on PATH; install Python 3.11 or set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $< into $(VENV)"
	@uv=$$(command -v uv) || { $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv \
		&& uv=$(BIN)/uv; } || uv=; \
	test -n "$$uv" && "$$uv" pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes --no-deps -r $< || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@$(BIN)/python -c "import importlib.metadata as m; m.version('torch')" 2>/dev/null || { echo "installing torch" && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
endef

$(TO_RUN): requirements/demo.txt constraints.txt pyproject.toml
	$(install)

$(TO_DEVELOP): requirements/dev.txt constraints.txt pyproject.toml
	$(install)
	@touch $(TO_RUN)
