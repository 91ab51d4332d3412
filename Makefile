# Start with `make demo` or `make test`. Both create .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-strategies test-faults test-plans parity bench gpu site lint format clean

# Python versions for which all packages in requirements.txt have wheels.
SUPPORTED = import sys; (3, 11) <= sys.version_info[:2] <= (3, 14) or sys.exit("Groundwork runs on Python 3.11 to 3.14, but \
	%s is %d.%d. Use another one, for example: make PYTHON=python3.12 install" % ((sys.executable,) + tuple(sys.version_info[:2])))

.venv/requirements: requirements.txt
	@test -x $(BIN)/python || { $(PYTHON) -c '$(SUPPORTED)' && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/requirements-dev: requirements-dev.txt .venv/requirements
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

install: .venv/requirements

# The demo trains on the Python standard library's source code, which comes with every Python.
STDLIB = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
DEMO_TEXT = --input '$(STDLIB)/**/*.py' --exclude '*/test/*' '*/tests/*' '*/idle_test/*' '*/site-packages/*' \
	'*/encodings/*' '*/pydoc_data/*'

demo: .venv/requirements
	$(BIN)/python prepare_data.py $(DEMO_TEXT) --train_tokenizer 1024 --output tokenizers/demo
	$(BIN)/python prepare_data.py $(DEMO_TEXT) --tokenizer tokenizers/demo --validation_fraction 0.05 --output data/demo
	$(BIN)/python train.py --config recipes/demo.yaml
	@test -f runs/demo/evaluation.json || $(BIN)/python evaluate.py --model runs/demo/final --data data/demo \
		--output runs/demo/evaluation.json
	$(BIN)/python evaluate.py --model runs/demo/final --prompt '    def read(self' --max_new_tokens 80 --temperature 0.7 --top_k 50
	@echo
	@echo 'The model is in runs/demo/final, a Hugging Face folder that from_pretrained and pipeline can load.'
	@echo 'Try it:               .venv/bin/python evaluate.py --model runs/demo --interactive'
	@echo "Next, your own text:  .venv/bin/python train.py --text mine --minutes 10"
	@echo 'The training loop:    train.py        Logs:  runs/demo/train.log, runs/demo/metrics.jsonl'

# Packages for GPUs. They are installed in a separate folder, because accelerate imports torchao in every process that
# can find it.
.venv/gpu/requirements: requirements-gpu.txt .venv/requirements-dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/gpu -r $< \
		&& touch $@ || echo 'requirements-gpu.txt could not be installed, so fp8 and 8-bit AdamW will not be tested'

# Number of test processes: one more than there are cores, but at most six, to limit memory.
WORKERS = $(shell $(BIN)/python -c 'from pretrain.limits import available_cores; print(min(6, available_cores() + 1))')
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The second command tests fp8 and 8-bit AdamW. It also runs if the first one fails.
test: .venv/requirements-dev .venv/gpu/requirements
	$(BIN)/python -m pytest $(IN_PARALLEL); status=$$?; \
	PYTHONPATH=.venv/gpu $(BIN)/python -m pytest $(IN_PARALLEL) tests/model/test_fp8.py tests/parallel/test_fp8_gathers.py \
		tests/optim/test_optimizers.py tests/parallel/test_adamw_8bit.py tests/planning/test_step_memory.py \
		tests/parallel/test_mesh.py::test_fp8_differs_from_one_process_only_by_rounding -k 'fp8 or 8bit' \
		&& exit $$status

# Trains with every strategy for 50 steps, resumes every strategy's checkpoints with every strategy on one and two
# processes, and kills a run with every strategy. Also compares the memory plans of all strategies with steps on fake
# GPUs, and runs all checks of `make gpu` on the CPU. Takes more than an hour.
test-strategies: .venv/requirements-dev .venv/gpu/requirements
	STRATEGIES=all $(BIN)/python -m pytest tests/parallel/test_strategies.py tests/parallel/test_model_parallel.py tests/parallel/test_mesh.py \
		tests/parallel/test_kill_strategies.py tests/parallel/test_muon_and_adafactor.py tests/parallel/test_nvme.py \
		tests/parallel/test_product_features.py tests/parallel/test_term_strategies.py tests/planning/test_step_memory.py \
		tests/training/test_expert_strategies.py tests/training/test_experts.py tests/model/test_compile.py \
		tests/data/test_dispatch.py tests/scripts/test_gpu_check.py; status=$$?; \
	PYTHONPATH=.venv/gpu STRATEGIES=all $(BIN)/python -m pytest tests/planning/test_step_memory.py -k fp8 && exit $$status

# Injects every fault in docs/faults.md: kills at 200 points during a save, 20 kills with each of six strategies, and
# an hour of simulated spot machines. Then tries 900 mutated recipes, model JSONs and command lines. At the end, prints
# a table of the faults and their outcomes. Takes about 40 minutes.
test-faults: .venv/requirements-dev
	FAULTS=all $(BIN)/python -m pytest tests/faults/test_fault_*.py tests/scripts/test_fuzz.py tests/evaluation/test_lm_harness.py \
		tests/parallel/test_launcher_files.py tests/training/test_resume.py tests/test_deepspeed_build.py \
		tests/preparation/test_prepare.py tests/preparation/documents/test_sources.py tests/scripts/test_prepare_data.py \
		tests/preparation/cleaning/test_near_duplicates.py

# Checks that plan.py still prints the plans in the recipes and in docs/memory.md, including memory.
test-plans: .venv/requirements-dev
	PLANS=all $(BIN)/python -m pytest tests/model/test_gpu_traffic.py
	PLANS=all $(BIN)/python -m pytest tests/scripts/test_recipes.py tests/scripts/test_plan.py

# Checks correctness, then speed, on a GPU with an existing Python: make gpu PYTHON=python. Installs nothing and needs
# no network. Run it again to continue after an interruption. Results and tables are in runs/gpu.
gpu:
	$(PYTHON) bench/gpu_check.py

# Compares Groundwork with a minimal training loop, the Transformers Trainer and a hand-written GPT on this machine.
# Then measures losses and attentions, saving, the guards, data preparation and data loading. Takes about 40 minutes on
# two idle cores.
bench: .venv/requirements
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/backends.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/guards.py
	$(BIN)/python bench/data.py

# Trains a recipe with every strategy: make parity RECIPE=recipes/mine.yaml. Without RECIPE, trains an MoE model and a
# dense one.
RECIPE ?= recipes/moe_5m.yaml
parity: .venv/requirements
	$(BIN)/python runs.py parity --config $(RECIPE) --steps 10
ifeq ($(RECIPE),recipes/moe_5m.yaml)
	$(BIN)/python runs.py parity --config $(RECIPE) --steps 10 --model.config model_configs/llama_demo.json \
		--loss.router_balance 0 --loss.router_z_loss 0 --output runs/parity_dense
endif

# Builds the documentation in site/: the pages, their figures, and the reference generated from the code.
site: .venv/requirements-dev
	$(BIN)/python -m docs.figures
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lint: .venv/requirements-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/requirements-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .pytest_cache .ruff_cache
