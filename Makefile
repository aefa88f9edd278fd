# The entrances of the project. `make` alone lists them.
VENV := .venv
BIN := $(VENV)/bin
# Two share the suite out as tests/conftest.py says; 0 runs it in one process.
TEST_WORKERS ?= 2
# Images for containers often set it; hundreds of processes would compile 300 modules each.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-wfm test check bench bench-gpu test-gpu standalone clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## create .venv with everything in it (a second call returns at once)
	@PYTHON="$(PYTHON)" scripts/setup.sh

demo: setup ## train a tiny model with asynchronous RL; DEMO_ARGS="--rollouts 1 seed=2"
	@$(BIN)/cosmos-app run configs/quickstart.toml $(DEMO_ARGS)

demo-wfm: setup ## teach a tiny SD3 colours by reward; DEMO_ARGS="--seed 1"
	@OMP_NUM_THREADS=1 $(BIN)/cosmos-app wfm demo configs/wfm/tiny_shapes_sft.toml \
		configs/wfm/tiny_shapes_nft.toml $(DEMO_ARGS)

test: setup ## all tests that need no GPU; PYTEST_ARGS="tests/unit -x" TEST_WORKERS=0
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadscope \
		--no-loadscope-reorder $(PYTEST_ARGS)

check: setup ## format, lint, layers, types, spelling, unit tests: before every commit
	@scripts/check.sh

bench: setup ## write benchmarks/RESULTS.md; BENCH_ARGS="--quick"
	@$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

bench-gpu: setup ## half an hour of a GPU: what is wanted of one, into benchmarks/RESULTS.md
	@$(BIN)/python benchmarks/gpu.py $(BENCH_ARGS)

test-gpu: setup ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)

standalone: ## each package alone in an empty environment; PACKAGES="core rollout"
	@scripts/check_standalone.sh $(PACKAGES)

clean: ## remove caches and build outputs; keeps .venv and runs
	@rm -rf build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find packages apps tests -name __pycache__ -type d -prune -exec rm -rf {} +
