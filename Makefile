# make demo · make test: each builds its environment first if it is missing. `make -C lab` lists what the lab has.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
TORCH_CPU := https://download.pytorch.org/whl/cpu
# Tests always run on the CPU build of vLLM: where .venv holds the NVIDIA build they have an environment of their own.
TESTS := $(if $(NVIDIA),.venv-cpu,.venv)
BUILD = $(if $(findstring cpu,$(@D)),cpu,$(if $(NVIDIA),gpu,cpu))
# vLLM with a faster scheduler; on a GPU the built-in model is faster without vLLM.
FAST := $(if $(NVIDIA),,--engine lab.fast_vllm:FastEngine)
# FLAGS="--seed 1 --max_steps 30" changes flags of train.py.
FLAGS ?=
test test-deep: export CUDA_VISIBLE_DEVICES =

.PHONY: setup demo test test-deep lint

setup: .venv/installed  ## vLLM and all that a run needs, in .venv: 4 GB

.venv/installed .venv-cpu/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(if $(findstring cpu,$(BUILD)),$(@D)/bin/pip install -q --no-deps torch==2.13.0 --index-url $(TORCH_CPU) --timeout 15 --retries 1)
	$(@D)/bin/pip install -q ".[$(BUILD)]"
	$(if $(findstring cpu,$(BUILD)),$(@D)/bin/pip uninstall -q -y torchvision torchaudio torchcodec triton)  # CUDA builds: vLLM's import fails, or complains
	rm -rf build scalerl.egg-info
	touch $@

%/installed-dev: %/installed
	$(@D)/bin/pip install -q ".[dev]"
	rm -rf build scalerl.egg-info
	touch $@

demo: setup  ## the graded task with the complete recipe: FLAGS="--loss dapo" OUT=runs/dapo
	.venv/bin/python train.py --overwrite true $(FAST) $(if $(OUT),--output_dir $(OUT)) $(FLAGS)

test: $(TESTS)/installed-dev  ## the tests that are lessons, and one with real vLLM: a minute
	$(TESTS)/bin/python -m pytest -n 2 tests --ignore tests/deep

test-deep: $(TESTS)/installed-dev  ## properties, faults, several ranks, real vLLM, a short demo that must learn
	$(TESTS)/bin/python -m pytest -n 2 tests/deep -m "not slow"

lint: $(TESTS)/installed-dev  ## style and types
	$(TESTS)/bin/ruff check .
	$(TESTS)/bin/ruff format --check .
	$(TESTS)/bin/mypy
