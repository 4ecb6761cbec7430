# make demo | test | test-all | docs | docs-test | search | lint | types | hooks | bench | clean. The first call creates
# .venv. ARGS is passed on: make demo ARGS="stage=2 debug=short"   make test ARGS="tests/engine -x"
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# `make demo` installs what a demo needs, all others the development environment, which contains it.
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(or $(wildcard $(INSTALLED)),$(VENV)/.installed-demo)
RUN := $(VENV)/bin/python

.PHONY: demo test test-all docs docs-test search lint types hooks bench clean

demo: $(DEMO_INSTALLED)
	$(RUN) -m lightning_zero train $(ARGS)

# The specification: every behaviour at every stage.
test: $(INSTALLED)
	$(RUN) -m pytest -n 2 --dist loadfile $(ARGS)

# The specification with all cases of its matrices, and the slow tests.
test-all: $(INSTALLED)
	$(RUN) -m pytest -n 2 --dist loadfile --all $(ARGS)

# Compares random training programs with plain modules and averaged gradients: make search PROGRAMS=20000 SEED=1
PROGRAMS ?= 3000
SEED ?= 0
search: $(INSTALLED)
	$(RUN) -m pytest tests/search tests/emulated/test_programs.py --all -o faulthandler_timeout=0 --programs $(PROGRAMS) --programs-seed $(SEED) $(ARGS)

# The documentation, into site/: a dead link, anchor or reference is an error. For a live preview: ARGS=serve
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs $(or $(ARGS),build --quiet)

# Opens the site and reports in headless Chromium: navigation, search, copying, phones. Needs chromium and chromedriver.
docs-test: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m pytest docs/site $(ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(INSTALLED)
	$(RUN) -m mypy

# Runs ruff and mypy before each commit.
hooks: $(INSTALLED)
	$(RUN) -m pre_commit install

# One benchmark with its options: make bench ARGS="peers --models 25m --rounds 3". docs/development/benchmarks.md lists them.
bench: $(INSTALLED)
ifeq ($(ARGS),)
	$(RUN) benchmarks/peers.py
	$(RUN) benchmarks/overhead.py
	$(RUN) benchmarks/tiny.py
else
	set -- $(ARGS); script=$$1; shift; $(RUN) benchmarks/$$script.py "$$@"
endif

# Versions other than those in constraints.txt, in a separate environment:
# make test VENV=.venv-2.11 PINS="torch==2.11.0 setuptools==81.0.0"
PINS ?=
ifneq ($(PINS),)
ifeq ($(VENV),.venv)
$(error PINS needs a separate environment: make ... VENV=.venv-NAME PINS="$(PINS)")
endif
endif

# A stamp file is newer than the two files that determine what is installed, so a second call does not install again.
$(INSTALLED): EXTRA := dev
$(VENV)/.installed-demo: EXTRA := demo
$(INSTALLED) $(VENV)/.installed-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -v -e '^$$' $(foreach pin,$(PINS),-e '^$(firstword $(subst ==, ,$(pin)))==') constraints.txt >$(VENV)/constraints.txt
	printf '%s\n' $(foreach pin,$(PINS),'$(pin)') >>$(VENV)/constraints.txt
	$(RUN) -m pip install -c $(VENV)/constraints.txt -e ".[$(EXTRA)]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
