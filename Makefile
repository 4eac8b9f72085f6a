# `make help` lists the targets. ARGS are options of the program: `make demo ARGS="train.total_steps=200"` passes them
# to train.py.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
TASK ?= digits
DEMO = runs/tread_tiny_$(TASK)_seed0
OF_scenes = num_steps=15 labels=balanced
TWINS ?= runs/twins
JOBS ?= 2  # parallel tests

.PHONY: demo help setup test slow finetune sweeps browser slurm twins soak gpu lint clean

demo: setup ## train on digits, draw samples and score them; TASK=scenes: captions; ARGS="train.total_steps=200"
	$(BIN)/python train.py model=tread data=$(TASK) run_name=$(notdir $(DEMO)) $(ARGS)
	$(BIN)/python sample.py run=$(DEMO) num_samples=500 out=$(DEMO)/samples/demo.npz overwrite=true $(OF_$(TASK))
	$(BIN)/python fid.py suite=$(TASK) samples=$(DEMO)/samples/demo.npz reference=latents/$(TASK) overwrite=true
	@echo "The picture is $(DEMO)/samples/demo.png, the scores are $(DEMO)/samples/demo.scores.json, the run is $(DEMO)."

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-9s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.complete ## install the requirements into .venv

$(VENV)/.complete: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed, this is %s; set PYTHON=python3.x' % sys.version.split()[0] if sys.version_info < (3, 11) else 0)"
	@echo "Installing into $(VENV): about 6 GB, a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -r requirements.txt
	@touch $@

# One thread per parallel test: a thread that waits for a busy core delays all others.
test slow sweeps: export OMP_NUM_THREADS = 1
test slow sweeps: export LOKY_MAX_CPU_COUNT = 1

test: setup ## the tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

slow: setup ## the tests that take longer
	$(BIN)/python -m pytest -n $(JOBS) -m slow --ignore tests/slurm $(PYTEST_ARGS)

finetune: setup ## install the requirements of fine-tuning, and run its tests
	$(BIN)/python -m pip install --progress-bar on -r requirements-finetune.txt
	$(BIN)/python -m pytest tests/routing/test_finetuning.py tests/test_finetune.py tests/data/test_rae.py tests/data/test_captions.py $(PYTEST_ARGS)

sweeps: setup ## install the requirements of launchers and sweepers, and run their tests
	$(BIN)/python -m pip install --progress-bar on -r requirements-sweeps.txt
	$(BIN)/python -m pytest tests/test_sweeps.py $(PYTEST_ARGS)

browser: setup ## test the report page in headless Chromium, which is installed with apt if it is missing
	$(BIN)/python -m pip install --progress-bar on -r requirements-browser.txt
	command -v chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || echo "no chromium: install it"
	$(BIN)/python -m pytest tests/reports/test_browser.py $(PYTEST_ARGS)

twins: setup ## run or resume the twin study and write its page (days on two cores); ARGS="digits-200 --arms dense routed"
	$(BIN)/python -m study.twins $(TWINS) $(ARGS)
	$(BIN)/python -m study.baselines $(TWINS)
	$(BIN)/python -m study.claims $(TWINS)

slurm: setup ## run the job file on a SLURM cluster of two nodes on this machine; installs SLURM with apt if it is missing
	command -v slurmctld || { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge; } || echo "no SLURM: install slurm-wlm and munge"
	$(BIN)/python -m pip install --progress-bar on -r requirements-sweeps.txt
	$(BIN)/python -m pytest tests/slurm -rs $(PYTEST_ARGS)

soak: setup ## kill trainings of four kinds 100 times each at random moments, and check that they resume (an hour)
	$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

gpu: setup ## run checks, benchmarks and twins on a GPU, results in OUT (about an hour on an H200); ARGS=--tiny: on a CPU
	$(BIN)/python -m benchmarks.gpu $(OUT) $(ARGS)

lint: setup ## run ruff and basedpyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

clean: ## remove caches; runs, latents and the environment stay
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
