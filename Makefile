# Every target makes its own environment in .venv; nothing but Python 3.11+ and pip has to be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAIN := $(VENV)/.train
ALL := '.[train,dev,docs]'
READY := $(VENV)/.ready

# uv knows which build of torch fits this machine: PyPI's brings 4 GB of CUDA where there is no GPU. Where its index
# can't be reached, and without uv, pip takes PyPI's.
UV ?= $(shell command -v uv)
install = $(if $(UV),$(UV) pip install --python $(BIN)/python --torch-backend=auto -q -c constraints.txt -e $(1) || \
	,) $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e $(1)

FAST = $(BIN)/python -m pytest -m "not slow" -n auto --dist loadfile --durations=10
# Only their files are collected: to collect all takes 8 s.
ALONE = $(BIN)/python -m pytest --durations=10 $$(grep -rl 'pytest.mark.alone' tests --include='test_*.py')
.PHONY: demo fleet-demo test test-all test-fast test-stock check bench gpu errors wheel docs format clean

$(TRAIN): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "farpipe needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(call install,'.[train]')
	touch $(TRAIN)

$(READY): $(TRAIN)
	$(call install,$(ALL))
	touch $(READY)

demo: $(TRAIN)  ## train a small model over two emulated sites, farpipe's plan against plain 1F1B
	$(BIN)/python recipes/demo.py

fleet-demo: $(TRAIN)  ## a fleet of two sites on this machine: four trainings, a site that is cut off and comes back
	$(BIN)/python recipes/fleet_demo.py

# Without the compiled forms of sources and tests every process would compile them again.
test test-all test-fast: export PYTHONDONTWRITEBYTECODE =

test: $(READY)  ## tests of every kind; of long combinations a chosen few, of random examples half
	$(FAST) --examples 0.5
	$(BIN)/python -m pytest -m "slow and not alone and not nightly" -n auto --dist loadfile --durations=25 --examples 0.5
	$(ALONE) -m "alone and not nightly"

test-all: $(READY)  ## all tests, every combination; those that measure time have the machine to themselves
	$(FAST)
	$(BIN)/python -m pytest -m "slow and not alone" -n auto --dist loadfile --durations=25
	$(ALONE) -m alone

test-fast: $(READY)  ## without the tests that start processes or take long, and a fifth of the random examples of the others
	$(FAST) --examples 0.2

test-stock:  ## all tests as on a machine of somebody else: a new environment of 5.9 GB with PyPI's own build of torch
	rm -rf build/stock
	env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null $(MAKE) VENV=build/stock UV= test-all

check: $(READY)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

bench: $(READY)  ## all benchmarks that print their figures; writes docs/reference/benchmarks/raw/
	$(BIN)/python -m benchmarks.run_all

gpu: $(TRAIN)  ## twelve checks on this host's GPUs, ten minutes; a table for an issue
	$(BIN)/python -m benchmarks.gpu

errors: $(READY)  ## ranges and tables of errors after a change of the cost model, and the pages that show them; FARPIPE_DATA=FOLDER
	$(BIN)/python -m benchmarks.cost_model.error_ranges --write
	$(BIN)/python tests/test_printed_output.py README.md docs/tutorial/index.md docs/how-to/plan-over-your-own-sites.md \
		docs/how-to/begin-with-what-you-have.md docs/how-to/two-nodes-slower-than-one.md
	$(BIN)/python tests/test_frozen_output.py

wheel:  ## a wheel with compiled kernels for this platform and Python, in dist/, from an environment without torch; two minutes of CPU
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt setuptools wheel .
	FARPIPE_KERNELS=1 build/wheel/bin/python -m pip wheel --no-deps --no-build-isolation --quiet -w dist .

docs: $(READY)  ## the documentation as a site, in build/site; broken links and anchors are errors
	$(BIN)/python -m mkdocs build --strict --quiet

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
