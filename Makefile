# Two commands do everything from a fresh clone, set-up included: `make race` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: race test lint types docs setup clean

race: setup  ## the same script under each strategy: which reaches the target first?
	$(BIN)/farandole race -n 2 --sync allreduce --sync allreduce:bucket_mib=0.05 --serial \
	  --target accuracy=0.95 examples/digits.py

test: setup lint types  ## ruff, mypy and every test
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

setup: $(READY)

# Setuptools goes in first, so that our own package builds with the pinned one, not a fetched one.
$(READY): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt pip setuptools torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs site build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
