# Most targets first install missing dependencies. LEEWAY_EXTRA=gpu installs CUDA builds; .venv stores the choice.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv/bin
PYTEST := $(VENV)/python -m pytest
# One worker runs all tests of a file, because these tests share processes. Three workers run on two cores, because tests
# often wait. Unit tests run at a lower priority than tests with engines. `make full` and `make faults` run tests with
# engines or faults one at a time, because these tests measure times.
FILE_BY_FILE := --dist loadfile --no-loadscope-reorder
# LEEWAY_FAULTS=all repeats tests with full counts. A test then takes minutes, so the timeout is longer.
FULL_COUNTS := LEEWAY_FAULTS=all $(PYTEST) -o timeout=1800
PART ?= unit faults-1 faults-2 e2e
# Fault tests of the buffer and of whole clusters. They take about as long as the other fault tests together.
FAULTS_1 := $(wildcard tests/faults/test_buffer_*.py tests/faults/test_cluster_*.py)
# Tests use small tensors on few cores. With more than one thread per process, processes would compete for cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests start hundreds of processes, which share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test full full-unit full-faults-1 full-faults-2 full-e2e unit faults lint format docs-check bench install clean

demo: install  ## train the demo: under 2 minutes on 2 cores
	@echo "Training the demo: under 2 minutes on 2 cores"
	@$(VENV)/leeway train examples/demo.toml

test: install  ## run the unit, integration, property, fault and end-to-end tests (about 12 minutes)
	@echo "Running the tests: about 12 minutes on 2 cores"
	$(PYTEST) -n 3 $(FILE_BY_FILE) tests/e2e tests/unit
	$(PYTEST) -n 3 $(FILE_BY_FILE) tests/integration tests/faults tests/property

full: install  ## run all tests with full counts, and runs that `make test` skips; or one PART (up to 90 minutes each)
	@for part in $(PART); do echo "Running $$part with full counts"; $(MAKE) --no-print-directory full-$$part || exit 1; done

full-unit:
	$(FULL_COUNTS) -n 3 $(FILE_BY_FILE) tests/unit tests/integration tests/property

full-faults-1:
	$(FULL_COUNTS) $(FAULTS_1)

full-faults-2:
	$(FULL_COUNTS) $(filter-out $(FAULTS_1),$(wildcard tests/faults/test_*.py))

full-e2e:
	$(FULL_COUNTS) tests/e2e

unit: install  ## run the unit tests that start no processes: 2 minutes on 2 cores
	$(PYTEST) -n 3 $(FILE_BY_FILE) tests/unit -m "not process"

faults: install  ## run the fault matrix with full counts; writes docs/results/faults.md (all faults need root and the apt packages strace iptables iproute2 faketime)
	@echo "Injecting every fault: one and a half to three hours on 2 cores"
	LEEWAY_FAULTS_PAGE=docs/results/faults.md $(FULL_COUNTS) tests/faults -m fault -rs

lint: install  ## run ruff, mypy --strict, import contracts, and shellcheck if installed
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	$(VENV)/python -m tests.prose
	@if command -v shellcheck >/dev/null; then shellcheck launch/*.sh launch/slurm.sbatch benchmarks/gpu/*.sh .ci/run; \
		else for file in launch/*.sh launch/slurm.sbatch benchmarks/gpu/*.sh; do bash -n $$file || exit 1; done; fi

format: install  ## apply the fixes and formatting of ruff
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

docs-check: install  ## check that every command in README.md and docs/ exists, and run those that start no processes
	$(VENV)/python -m tests.docs_check

bench: install  ## run all benchmarks; each prints one JSON line last
	@for file in benchmarks/*.py; do echo "== $$file"; $(VENV)/python $$file || exit 1; done

install:  ## install missing dependencies into .venv; `make install` does so even if nothing has changed
	@$(PYTHON) launch/bootstrap.py $(if $(filter install,$(MAKECMDGOALS)),--repair)

clean:  ## remove caches; runs/ and .venv/ stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
