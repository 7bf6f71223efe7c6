# Every verb installs what is missing first. LEEWAY_EXTRA=gpu installs for a CUDA machine; .venv remembers it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv/bin
PYTEST := $(VENV)/python -m pytest
# A file is one worker's, for its tests share what it starts: three on two cores, for tests wait for a good part of their
# time. Unit tests let a run with engines go first, and take what it leaves of the cores. In `make full` and `make faults`
# runs with engines and faults go one by one, for their times are measured.
FILE_BY_FILE := --dist loadfile --no-loadscope-reorder
# Full counts take minutes, on a slow machine three times as many: a test that hangs is ended later there.
FULL_COUNTS := LEEWAY_FAULTS=all $(PYTEST) -o timeout=1800
PART ?= unit faults-1 faults-2 e2e
# Of the buffer and of whole clusters; the two parts of the faults take about as long as each other.
FAULTS_1 := $(wildcard tests/faults/test_buffer_*.py tests/faults/test_cluster_*.py)
# Small tensors on few cores: one thread per process, or the processes fight.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Tests start some hundreds of processes: one compiles what all of them import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test full full-unit full-faults-1 full-faults-2 full-e2e unit faults lint format docs-check bench install clean

demo: install  ## train the demo: under 2 minutes on 2 cores
	@echo "Training the demo: under 2 minutes on 2 cores"
	@$(VENV)/leeway train examples/demo.toml

test: install  ## unit, integration, property, faults and end to end (about 12 minutes)
	@echo "Running the tests: about 12 minutes on 2 cores"
	$(PYTEST) -n 3 $(FILE_BY_FILE) tests/e2e tests/unit
	$(PYTEST) -n 3 $(FILE_BY_FILE) tests/integration tests/faults tests/property

full: install  ## the same with full counts, and runs that `make test` leaves out, or one PART of it (each up to 90 minutes)
	@for part in $(PART); do echo "Running $$part with full counts"; $(MAKE) --no-print-directory full-$$part || exit 1; done

full-unit:
	$(FULL_COUNTS) -n 3 $(FILE_BY_FILE) tests/unit tests/integration tests/property

full-faults-1:
	$(FULL_COUNTS) $(FAULTS_1)

full-faults-2:
	$(FULL_COUNTS) $(filter-out $(FAULTS_1),$(wildcard tests/faults/test_*.py))

full-e2e:
	$(FULL_COUNTS) tests/e2e

unit: install  ## each part by itself, without a process of ours: 2 minutes on 2 cores
	$(PYTEST) -n 3 $(FILE_BY_FILE) tests/unit -m "not process"

faults: install  ## the fault matrix with full counts; writes docs/results/faults.md (for all of it: root, and apt's strace iptables iproute2 faketime)
	@echo "Injecting every fault: one and a half to three hours on 2 cores"
	LEEWAY_FAULTS_PAGE=docs/results/faults.md $(FULL_COUNTS) tests/faults -m fault -rs

lint: install  ## ruff, mypy --strict, import directions, shellcheck where it is installed
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	@if command -v shellcheck >/dev/null; then shellcheck launch/*.sh launch/slurm.sbatch benchmarks/gpu/*.sh .ci/run; \
		else for file in launch/*.sh launch/slurm.sbatch benchmarks/gpu/*.sh; do bash -n $$file || exit 1; done; fi

format: install  ## apply ruff's fixes and format
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

docs-check: install  ## every command in README.md and docs/ is one that exists; those that start nothing are run
	$(VENV)/python -m tests.docs_check

bench: install  ## each benchmark prints one JSON line last
	@for file in benchmarks/*.py; do echo "== $$file"; $(VENV)/python $$file || exit 1; done

install:  ## what is missing, into .venv; asked for by name, pip looks for it also where nothing has changed
	@$(PYTHON) launch/bootstrap.py $(if $(filter install,$(MAKECMDGOALS)),--repair)

clean:  ## remove caches; runs/ and .venv/ stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
