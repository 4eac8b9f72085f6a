# make demo | make test | make slow | make finetune | make soak | make gpu | make lint | make clean
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
DEMO := runs/demo
JOBS ?= 2  # tests that run at once
# One process, said in full so that the launcher has nothing to warn about.
LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.PHONY: demo setup test slow finetune soak gpu lint clean

demo: setup ## digits from nothing: train, sample, score
	$(LAUNCH) train.py model=tread run_name=demo
	$(LAUNCH) sample.py run=$(DEMO) num_samples=500 output=$(DEMO)/samples/demo.npz overwrite=true
	$(LAUNCH) fid.py suite=digits samples=$(DEMO)/samples/demo.npz reference=latents/digits overwrite=true
	@echo "The picture is $(DEMO)/samples/demo.png, the scores are $(DEMO)/samples/demo.scores.json, the run is $(DEMO)."

setup: $(VENV)/.complete

$(VENV)/.complete: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed, this is %s; set PYTHON=python3.x' % sys.version.split()[0] if sys.version_info < (3, 11) else 0)"
	@echo "Installing into $(VENV): about 6 GB, a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -r requirements.txt
	@touch $@

# Tests that run at once must not share cores: a thread that waits for a busy core makes all others wait.
test slow: export OMP_NUM_THREADS = 1
test slow: export LOKY_MAX_CPU_COUNT = 1

test: setup ## the tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

slow: setup ## the tests that take longer
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(PYTEST_ARGS)

finetune: setup ## what fine-tuning with adapters needs beside, and its tests
	$(BIN)/python -m pip install --progress-bar on -r requirements-finetune.txt
	$(BIN)/python -m pytest tests/routing/test_finetuning.py tests/test_finetune.py $(PYTEST_ARGS)

soak: setup ## kill runs at random moments, 100 times each way (an hour), and count what was lost
	$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

gpu: setup ## all that only a GPU can tell, into OUT (an estimated hour on an H200); ARGS=--tiny rehearses it on a CPU
	$(BIN)/python -m benchmarks.gpu $(OUT) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean: ## remove what tests and tools leave behind; runs, latents and the environment stay
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
