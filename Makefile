# make demo | make test | make slow | make finetune | make sweeps | make browser | make twins | make soak | make gpu
# make lint | make clean
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
DEMO := runs/tread_tiny_digits_seed0
TWINS ?= runs/twins
JOBS ?= 2  # tests that run at once

.PHONY: demo setup test slow finetune sweeps browser twins soak gpu lint clean

demo: setup ## digits from nothing: train, sample, score
	$(BIN)/python train.py model=tread
	$(BIN)/python sample.py run=$(DEMO) num_samples=500 out=$(DEMO)/samples/demo.npz overwrite=true
	$(BIN)/python fid.py suite=digits samples=$(DEMO)/samples/demo.npz reference=latents/digits overwrite=true
	@echo "The picture is $(DEMO)/samples/demo.png, the scores are $(DEMO)/samples/demo.scores.json, the run is $(DEMO)."

setup: $(VENV)/.complete

$(VENV)/.complete: requirements.txt
	@$(PYTHON) -c "import sys; sys.exit('Python 3.11 or newer is needed, this is %s; set PYTHON=python3.x' % sys.version.split()[0] if sys.version_info < (3, 11) else 0)"
	@echo "Installing into $(VENV): about 6 GB, a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -r requirements.txt
	@touch $@

# Tests that run at once must not share cores: a thread that waits for a busy core makes all others wait.
test slow sweeps: export OMP_NUM_THREADS = 1
test slow sweeps: export LOKY_MAX_CPU_COUNT = 1

test: setup ## the tests that take seconds
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

slow: setup ## the tests that take longer
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(PYTEST_ARGS)

finetune: setup ## what fine-tuning with adapters needs beside, and its tests
	$(BIN)/python -m pip install --progress-bar on -r requirements-finetune.txt
	$(BIN)/python -m pytest tests/routing/test_finetuning.py tests/test_finetune.py tests/benchmarks/test_finetuning.py $(PYTEST_ARGS)

sweeps: setup ## what launchers and the sweeper of sweeps need beside, and their tests
	$(BIN)/python -m pip install --progress-bar on -r requirements-sweeps.txt
	$(BIN)/python -m pytest tests/test_sweeps.py $(PYTEST_ARGS)

browser: setup ## test the report page in headless Chromium; installs one where it is missing and apt can
	$(BIN)/python -m pip install --progress-bar on -r requirements-browser.txt
	command -v chromium || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || echo "no chromium: install it"
	$(BIN)/python -m pytest tests/reports/test_browser.py $(PYTEST_ARGS)

twins: setup ## the twin study and its page, a day or two of two cores: the same command goes on; ARGS="digits --arms dense routed"
	$(BIN)/python -m study.twins $(TWINS) $(ARGS)
	$(BIN)/python -m study.claims $(TWINS)

soak: setup ## kill runs at random moments, 100 times each way (an hour), and count what was lost
	$(BIN)/python -m tests.faults.soak $(SOAK_ARGS)

gpu: setup ## all that only a GPU can tell, into OUT (an estimated hour on an H200); ARGS=--tiny rehearses it on a CPU
	$(BIN)/python -m benchmarks.gpu $(OUT) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

clean: ## remove what tests and tools leave behind; runs, latents and the environment stay
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
