# planaria: `make demo` and `make test` do everything on a machine with Python 3.11 or newer.
#
# PYTHON  the Python that makes the environment.
# TORCH   what pip installs as torch. The plain version takes what the package index has for this
#         machine; another build is chosen with the options of PyTorch's own installation page.
#         It is read only when the environment is made; `make clean` first to change it.
# SEED, RUNS     of make sim: the first seed, and how many.
# SEED, MINUTES  of make chaos: which faults are drawn, and for how long.
# MINUTES        of make results: its time; what is missing then, the next call does.
# TORCHES        of make torches: versions of torch, instead of the oldest and the newest CPU build.
# PYTHON, WHEELS, RESULTS, MINUTES, OPTIONS  of make gpu-bits and make gpu-speed: the Python that runs
#         them, which needs torch; a folder with wheels of what it lacks; a folder for the results;
#         their time; further options of the script. No .venv is made. See docs/GPU.md.
# PYTHON, WHEELS, OPTIONS  of make gpu2: the same; its Python needs pytest, too.

PYTHON ?= python3
TORCH ?= torch==2.13.0
SEED ?= 0
RUNS ?= 1000
MINUTES ?= 30
TORCHES ?=
WHEELS ?=
RESULTS ?= benchmarks/results
OPTIONS ?=

# Where Python may not keep bytecode, every process that imports torch compiles it first.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# A file's tests stay with one worker, which then starts what they share once. The files go in their
# order: sorted by their number of tests, long ones with few tests would come last, one by one.
PYTEST := $(BIN)/python -m pytest
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# What code that decides is tested by: no process, no torch.
UNIT := $(addprefix tests/,core observe schedule estimator planner restorer policies coordinator)
# To collect the other files as well would take as long as one of these tests.
TIMED = $(shell grep --recursive --files-with-matches --include='test_*.py' 'mark\.timed' tests)
READY := .venv/ready
# torch goes in first and every version is pinned: whatever else needs torch would otherwise pull
# in its newest release. Wheels only: a clear error is better than twenty minutes of compiling.
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
	--only-binary=:all: --no-compile --constraint constraints.txt
SOURCES := src tests examples docs/draw_architecture.py $(if $(wildcard benchmarks/*.py),benchmarks)

.DELETE_ON_ERROR:
.PHONY: help demo unit test green sim soak sweep chaos hosts check docs profiles bench clean
.PHONY: gpu-bits gpu-speed gpu-site torches
.PHONY: gpu2 results clusters

help:
	@echo 'make demo     train on six nodes, kill two, compare the bits with a run without faults'
	@echo 'make unit     the tests that start no process and need no torch: within a minute'
	@echo 'make test     check the code, then run all tests but the long ones'
	@echo 'make green    make test until 20 runs in a row are green (RUNS=), over several sittings'
	@echo 'make sim      1,000 simulated jobs under faults; SEED=n RUNS=1 replays one'
	@echo 'make soak     100,000 of them; then a job of 3,500 iterations whose nodes die, its curves'
	@echo 'make sweep    the long tests: every pipeline shape for every model family, the planner'
	@echo 'make chaos    every loss: each node, each step, twice; then half an hour of drawn faults'
	@echo 'make hosts    jobs on several machines, made of namespaces: as root, or else without cuts;'
	@echo '              then six machines that lose nodes, and their downtimes beside one machine'
	@echo 'make clusters real schedulers start jobs on test hosts, and machines are lost'
	@echo 'make torches  the fast tests of the engine on the oldest and the newest torch (TORCHES=)'
	@echo 'make check    formatting, lint and types'
	@echo 'make docs     write the generated pages and the pictures in docs/'
	@echo 'make profiles write the shipped profiles, print what they cost'
	@echo 'make results  run every system on every trace for 100 seeds, write docs/RESULTS.md: two hours'
	@echo 'make bench    run every script in benchmarks/'
	@echo 'make gpu-bits   on one GPU: the same bits on six ranks, whatever dies (PYTHON=, WHEELS=)'
	@echo 'make gpu-speed  on one GPU: tokens per second beside a plain loop (PYTHON=, WHEELS=)'
	@echo 'make gpu2       on two GPUs: the transport nccl, which nobody has run on two yet (PYTHON=, WHEELS=)'
	@echo 'make clean    remove the environment, caches and reports'

demo: $(READY)
	$(BIN)/python examples/survive.py reports/demo

unit: $(READY)
	$(PYTEST) $(WORKERS) -m 'not timed and not long' $(UNIT)

# Tests that measure time have the machine to themselves; the others share its cores.
test: check
	$(PYTEST) $(WORKERS) -m 'not timed and not long'
	$(PYTEST) -m 'timed and not long' $(TIMED)

# A clone at HEAD runs; each result is kept in benchmarks/results/green.jsonl.
green: RUNS = 20
green: $(READY)
	$(BIN)/python tests/green.py --runs $(RUNS)

sim: $(READY)
	$(BIN)/python -m planaria.simulator --seed $(SEED) --runs $(RUNS)

soak: $(READY)
	$(BIN)/python -m planaria.simulator --seed $(SEED) --runs 100000
	$(BIN)/python benchmarks/curves.py --iterations 3500 --plot docs/curves.svg

sweep: $(READY)
	$(BIN)/python -m pytest -m 'long and not faults and not hosts and not clusters'

chaos: $(READY)
	$(BIN)/python -m pytest -m faults
	mkdir -p reports
	$(BIN)/planaria chaos examples/small.toml --minutes $(MINUTES) --seed $(SEED) \
		--report reports/chaos.json

hosts: $(READY)
	$(PYTEST) -m hosts
	$(BIN)/python tests/downtimes.py || [ $$? -eq 2 ]

# A real Slurm and a real Ray, and machines of a Kubernetes whose API alone is a fake; by root.
clusters: $(READY)
	@for program in munged slurmctld slurmd sbatch; do command -v $$program > /dev/null || { \
		echo "make clusters needs $$program: apt-get install slurm-wlm munge" >&2; exit 2; }; done
	@$(BIN)/python -c 'import ray, kubernetes_validate' 2> /dev/null || { \
		echo "make clusters needs $(BIN)/pip install ray kubernetes-validate" >&2; exit 2; }
	@PYTHONPATH=tests $(BIN)/python -c 'from helpers.host_networks import obstacle; \
		exit(f"make clusters needs hosts in namespaces, but {obstacle()}" if obstacle() else 0)' || exit 2
	$(PYTEST) -m clusters -rs

# An environment for each version is made in reports/torches and kept.
torches: $(READY)
	$(BIN)/python tests/torches.py $(TORCHES)

check: $(READY)
	$(BIN)/ruff format --check --quiet $(SOURCES)
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/mypy --num-workers 2 --no-error-summary $(SOURCES)

docs: $(READY)
	$(BIN)/python -m planaria.job.config > docs/JOB.md
	$(BIN)/python -m planaria.job.report_page > docs/REPORT.md
	$(BIN)/python docs/draw_architecture.py > docs/architecture.svg
	mkdir -p reports
	sed 's/"device_memory_bytes": 0/"device_memory_bytes": 3000/' examples/paced-profile.json \
		> reports/limited-profile.json
	$(BIN)/planaria plan reports/limited-profile.json --nodes 7 --plot docs/plan.svg

profiles: $(READY)
	$(BIN)/python -m planaria.profiles src/planaria/profiles

# Finished cells are kept in the file, so it goes on where it was stopped.
results: MINUTES = 115
results: $(READY)
	$(BIN)/python benchmarks/gallery.py --minutes $(MINUTES) \
		--results benchmarks/results/gallery.jsonl --page docs/RESULTS.md

# A script ends with 2, and a line that says so, if it needs an extra that is not installed.
bench: $(READY)
	@failed=0; for script in $(sort $(wildcard benchmarks/*.py)); do \
		echo "$(BIN)/python $$script"; $(BIN)/python "$$script" || [ $$? -eq 2 ] || failed=1; \
	done; \
	$(BIN)/python benchmarks/recovery.py --nodes 4,8,16,32 || failed=1; exit $$failed

# They use PYTHON as it is, on a machine that may have no network; without a GPU they end with 2.
GPU_SITE := $(CURDIR)/reports/gpu-site
GPU_RUN = PYTHONPATH="$(GPU_SITE):$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -u
gpu-site:
	@rm -rf $(GPU_SITE)
	@mkdir -p $(GPU_SITE)
	$(if $(WHEELS),@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
		--no-compile --no-cache-dir --target $(GPU_SITE) $(WHEELS)/*.whl)

gpu-bits gpu-speed: MINUTES = 8
gpu-bits gpu-speed: gpu-site
	$(GPU_RUN) benchmarks/$(subst -,_,$@).py --minutes $(MINUTES) --results $(RESULTS)/$@.json \
		$(OPTIONS)

gpu2: gpu-site
	$(GPU_RUN) benchmarks/gpu2.py $(OPTIONS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis reports

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'planaria needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@echo 'Installing planaria and its dependencies into .venv (once, a minute or two) ...'
	@$(PYTHON) -m venv .venv
	@$(INSTALL) $(TORCH)
	@$(INSTALL) hatchling
	@$(INSTALL) --no-build-isolation --editable '.[hf,plots,store,dev]'
	@touch $@
