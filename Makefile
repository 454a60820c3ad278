# Every target works on a machine with only python3, venv and pip; all of them share one .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One stamp for each set of requirements, so that a second `make test` installs nothing.
STAMPS := $(VENV)/.stamps
INPUTS := pyproject.toml constraints.txt
# pytest-xdist: one process a core, and torch may not start threads of its own in each of them.
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept: without them every process that a test starts compiles the whole package again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo deploy-demo docs test test-fast install lint bench wheel-check image-check release-check clean

# Both algorithms on one data set, and a table of what they cost. Half a minute at most.
demo: $(STAMPS)/run
	$(BIN)/python examples/demo.py

# Four organisations as processes on this machine, from their keys to charged predictions. About 100 s.
deploy-demo: $(STAMPS)/deploy
	$(BIN)/python examples/four_organisations.py build/deploy-demo

# The documentation site on http://127.0.0.1:8000, rebuilt when a page changes. A test builds it strictly.
docs: $(STAMPS)/test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:8000

# Three processes on two cores: tests of federations between processes wait more than they work. A file is one process's,
# so that what its tests share is made once; tests/conftest.py has put slow files first.
test: $(STAMPS)/test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Without slow files (tests/support/slow_files.py): for a quick look while working, not instead of `make test`.
test-fast: $(STAMPS)/test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow"

install: $(STAMPS)/dev

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What a user gets: the wheel in an empty environment, from a self-test to a page about charged predictions.
wheel-check:
	rm -rf build/wheel && mkdir -p build/wheel
	$(PYTHON) -m venv build/wheel/env
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	build/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build/wheel/*.whl
	cd build/wheel && env/bin/pbmvfl doctor && env/bin/pbmvfl train digits --out run && env/bin/pbmvfl predict run \
		&& env/bin/pbmvfl report run --out report.html

# The steps of the Dockerfile's first stage in an empty environment, where there is no Docker.
image-check:
	rm -rf build/image && mkdir -p build/image
	cp -r pyproject.toml README.md LICENSE constraints.txt src build/image/
	$(PYTHON) -m venv build/image/env
	cd build/image && env/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ".[deploy]"
	cd build/image && env/bin/pbmvfl doctor && env/bin/pbmvfl federation dashboard > /dev/null

# What is published: wheel and source archive, their metadata and files, and a README whose links work on a package index.
release-check: $(STAMPS)/release
	rm -rf build/release
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir build/release
	$(BIN)/python -m twine check --strict build/release/*
	$(BIN)/python .ci/check_release.py build/release

bench: $(STAMPS)/run
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(STAMPS)/run: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/deploy: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[deploy]"
	mkdir -p $(STAMPS) && touch $@ $(STAMPS)/run

$(STAMPS)/test: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,deploy,docs]"
	mkdir -p $(STAMPS) && touch $@ $(STAMPS)/run

$(STAMPS)/release: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[release]"
	mkdir -p $(STAMPS) && touch $@ $(STAMPS)/run

$(STAMPS)/dev: $(INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,deploy,docs,dev]"
	mkdir -p $(STAMPS) && touch $@ $(STAMPS)/run $(STAMPS)/test
