# Two commands: `make demo` and `make test`. Both make .venv first; nothing outside this folder and
# the user's cache directory is touched.
PYTHON ?= python3
MODEL ?= smollm2-135m
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check full-matrix test-vllm clean

demo: $(VENV)/.cpu
	$(BIN)/headrace models pull $(MODEL)
	$(BIN)/headrace run --model $(MODEL) --route compare --max-tokens 32 \
		--prompt-file examples/pride_and_prejudice.txt

test: check
	$(BIN)/python -m pytest

# The rules that are not tests: style, types, who may import whom, each core module covered by its
# own test file.
check: $(VENV)/.test
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.own_coverage

# The whole exactness matrix on the two real models, and the slow doubles of the suites; more than an
# hour on two cores.
full-matrix: $(VENV)/.test
	$(BIN)/python -m pytest -m full_matrix --timeout 7200

# What needs vLLM itself: pairs and faults, about a quarter of an hour on two cores. It runs in the
# environment that `headrace vllm-env --for-tests` made, or that HEADRACE_VLLM_PYTHON names, and its
# torch sources run with this folder's Python, or with HEADRACE_TORCH_PYTHON. One file of it:
# make test-vllm TESTS=tests/vllm/test_pairs.py
TESTS ?= tests/vllm
test-vllm: $(VENV)/.test
	$(BIN)/python -m tests.vllm.run $(TESTS)

$(VENV)/.cpu: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/.cpu

clean:
	rm -rf $(VENV) build dist src/*.egg-info .coverage .hypothesis .*_cache
