# make demo | test | search | lint | types | bench | clean. The first call makes .venv and installs; nothing else is needed.
# ARGS is handed on, e.g.: make demo ARGS="stage=2 debug=short"   make test ARGS="tests/engine -x"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

INSTALLED := $(VENV)/.installed
RUN := $(VENV)/bin/python

.PHONY: demo test search lint types bench clean

demo: $(INSTALLED)
	$(RUN) -m lightning_zero train $(ARGS)

test: $(INSTALLED)
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

# Random training programs against averaged gradients, for as long as there are: make search PROGRAMS=20000 SEED=1
PROGRAMS ?= 3000
SEED ?= 0
search: $(INSTALLED)
	$(RUN) -m pytest tests/search --programs $(PROGRAMS) --programs-seed $(SEED) $(ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .

types: $(INSTALLED)
	$(RUN) -m mypy

bench: $(INSTALLED)
	$(RUN) -m lightning_zero bench peers $(ARGS)
	$(RUN) benchmarks/overhead.py
	$(RUN) benchmarks/tiny.py

# The stamp is newer than the two files that say what is installed, so a second call does not install again.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
