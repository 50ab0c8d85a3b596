# Two commands matter: `make demo` runs the main job, `make test` runs the tests. Both set up .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Not quiet: the first installation takes minutes.
CONSTRAINTS ?= constraints.txt
# Bytecode is written at the first import, of what is imported: to compile all of torch and transformers takes
# pip half a minute, and what tests and the demo import of them a third of that. torch's is written while pip
# installs what comes after it.
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# With another torch: make test VENV=.venv-oldest TORCH=torch==2.10.0 CONSTRAINTS=/dev/null
# Without a GPU: make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu", as PyTorch documents.
TORCH  ?= torch

# Some tests wait for processes, so there are more workers than cores: half as many again, at most eight. On two
# cores three take 287 s and four 296 to 317 s, since every worker imports torch and transformers.
# A file's tests run in one worker, as they share what is costly to make (tests/run_in_parallel.py).
WORKERS  ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 2 ? 2 : n > 5 ? 8 : n + n / 2)))
PARALLEL := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# The longest test takes 30 s beside others. One that hangs fails after five minutes and shows where; if native
# code holds it, its process ends after 16 minutes, and another one goes on with the next test.
LIMITS   := --timeout 300 -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true

.PHONY: demo test test-all test-deepspeed engines bench lint docs clean

demo: $(VENV)/.demo
	$(BIN)/acclimate generate "The most beautiful thing about mathematics is" --repetition_penalty 1.1 --max_new_tokens 28

test: $(VENV)/.dev engines
	$(BIN)/python tests/run_twice.py $(PARALLEL) $(LIMITS) -m "not slow" $(ARGS)

test-all: $(VENV)/.dev $(VENV)/.demo engines
	$(BIN)/python tests/run_twice.py $(PARALLEL) $(ARGS)

# DeepSpeed itself on our accelerator, in an environment of its own: where it is installed, other tests differ.
# DEEPSPEED=FOLDER, a clone of its repository: runs DeepSpeed's own unit tests too, and a second call those that
# are missing. A run that is killed while it compiles leaves a lock, for which torch waits without end.
DEEPSPEED_OPS := TORCH_EXTENSIONS_DIR=$(abspath $(VENV)-deepspeed/extensions)
test-deepspeed: $(VENV)-deepspeed/.ready
	rm -f $(VENV)-deepspeed/extensions/*/lock
	$(DEEPSPEED_OPS) $(VENV)-deepspeed/bin/python -m pytest tests/compat/test_deepspeed_training.py $(ARGS)
	$(if $(DEEPSPEED),$(DEEPSPEED_OPS) $(VENV)-deepspeed/bin/python tests/compat/deepspeed_unit.py $(DEEPSPEED) --results $(VENV)-deepspeed/unit.json)

$(VENV)-deepspeed/.ready: constraints.txt pyproject.toml
	$(MAKE) VENV=$(VENV)-deepspeed $(VENV)-deepspeed/.dev
	$(VENV)-deepspeed/bin/python -m pip install --quiet setuptools wheel ninja
	$(VENV)-deepspeed/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	touch $@

# The MPIs that tests start ranks with. Where they cannot be had, those tests skip.
engines: $(VENV)/bin/python
	bash .ci/install-engines $(BIN)/python

bench: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python benchmarks/run.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(VENV)/.dev
	$(BIN)/python docs/make_interface.py
	$(BIN)/python docs/make_conformance.py
	$(BIN)/python docs/make_port.py

clean:
	rm -rf $(VENV) .engines build dist src/*.egg-info tools/*/build tools/*/src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that no other package chooses its build.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "Installing torch into $(VENV), which takes minutes"
	$(PIP) $(TORCH)
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(wildcard tools/*/pyproject.toml)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import torch._dynamo" >/dev/null 2>&1 & \
	$(PIP) -e ".[dev]" -e "tools/acclimate-port[test]" -e tools/acclimate-conformance \
		-e "extensions/acclimate-sim[test]" && wait
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing acclimate and the demo's model (240 MB) into $(VENV)"
	$(PIP) -e ".[demo]"
	@touch $@
