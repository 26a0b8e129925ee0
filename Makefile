# make demo · make test: each builds .venv first if it is missing.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
REQUIREMENTS := $(if $(shell command -v nvidia-smi 2>/dev/null),requirements.txt,requirements-cpu.txt)

.PHONY: setup demo test test-slow mutate lint clean

setup: .venv/installed

.venv/installed: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q torch==2.13.0
	.venv/bin/pip install -q -r $(REQUIREMENTS)
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	.venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec  # CUDA builds; vLLM's import fails with them
endif
	touch $@

demo: setup  ## the built-in task, the whole recipe: about 2 minutes on 2 cores
	.venv/bin/python train.py --output_dir runs/demo --overwrite true

test: setup  ## fast tests, real vLLM among them
	.venv/bin/python -m pytest -m "not slow"

test-slow: setup  ## what takes minutes
	.venv/bin/python -m pytest -m slow

mutate: setup  ## breaks the code on purpose, one place at a time; every mutation must fail a test
	.venv/bin/python tools/mutate.py

lint: setup
	.venv/bin/ruff check .

clean:
	rm -rf .venv runs
