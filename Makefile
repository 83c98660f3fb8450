# Two commands do everything from a fresh clone, set-up included: `make race` and `make test`.
# `make help` lists all of them.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := race

# TensorFlow and JAX want other versions of some packages, and 3 GB: an environment of their own.
FRONT       := .venv-frontends
FRONT_READY := $(FRONT)/.ready

.PHONY: help race test quick tests lint types docs setup clean test-frontends frontends-setup

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 17

race: setup  ## one script, ten ways to train over a simulated link: which reaches the target first?
	$(BIN)/farandole race -n 2 --pretend-hosts 2 --link 200mbit,1ms --serial \
	  --lane allreduce --lane allreduce:codec=int8 --lane local:every=8 --lane postlocal:at=0.3 \
	  --lane adacomm:start=16,steps=22 --lane daso --lane lagged --lane server:staleness=2 \
	  --lane stages=2,microbatches=2 --stop-at-target --target accuracy=0.95 examples/link_race.py

test: setup lint  ## ruff, mypy and every test; mypy runs beside the tests
	$(MAKE) --no-print-directory -j 2 types tests

quick: setup lint  ## ruff, and about a minute of the tests of what has changed since main (SINCE=commit)
	$(BIN)/python -m tests.support.quick $(SINCE)

tests: setup  ## every test
	$(BIN)/pytest

lint: setup  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy
	$(BIN)/mypy

docs: setup  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

setup: $(READY)  ## .venv, with all that is pinned

# Setuptools goes in first, so that our own package builds with the pinned one, not a fetched one.
$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt pip setuptools torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

test-frontends: frontends-setup  ## the tests of the front-ends for TensorFlow, Keras and JAX
	$(FRONT)/bin/pytest tests/frontends

frontends-setup: $(FRONT_READY)  ## .venv-frontends, with TensorFlow, Keras and JAX, pinned

$(FRONT_READY): pyproject.toml constraints-frontends.txt
	test -d $(FRONT) || $(PYTHON) -m venv $(FRONT)
	$(FRONT)/bin/pip install --quiet -c constraints-frontends.txt pip setuptools torch==2.13.0
	$(FRONT)/bin/pip install --quiet -c constraints-frontends.txt --no-build-isolation -e '.[frontends]'
	touch $@

clean:  ## removes .venv, .venv-frontends and whatever was made
	rm -rf $(VENV) $(FRONT) runs site build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
