# Two commands are enough: `make demo` and `make test`. Both build .venv first; nothing else is needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-strategies test-faults test-plans parity bench gpu site lint format clean

# Those that everything in requirements.txt has wheels for.
SUPPORTED = import sys; (3, 11) <= sys.version_info[:2] <= (3, 14) or sys.exit("Groundwork runs on Python 3.11 to 3.14, and \
	%s is %d.%d: name another, such as make PYTHON=python3.12 install" % ((sys.executable,) + tuple(sys.version_info[:2])))

.venv/requirements: requirements.txt
	@test -x $(BIN)/python || { $(PYTHON) -c '$(SUPPORTED)' && $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/requirements-dev: requirements-dev.txt .venv/requirements
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

install: .venv/requirements

# The demo's text: the source of Python's standard library, which every machine with Python has.
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
	@echo 'The model is in runs/demo/final: a Hugging Face folder that from_pretrained and pipeline load.'
	@echo 'Talk to it:           .venv/bin/python evaluate.py --model runs/demo --interactive'
	@echo "Next, your own text:  .venv/bin/python train.py --text mine --minutes 10"
	@echo 'The loop itself:      train.py        The run as it went:  runs/demo/train.log, runs/demo/metrics.jsonl'

# What only GPUs need, beside the environment: accelerate imports torchao in every process that sees it.
.venv/gpu/requirements: requirements-gpu.txt .venv/requirements-dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/gpu -r $< \
		&& touch $@ || echo 'requirements-gpu.txt cannot be installed: fp8 and 8-bit AdamW are not tested'

test: .venv/requirements-dev .venv/gpu/requirements
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
	PYTHONPATH=.venv/gpu $(BIN)/python -m pytest tests/model/test_fp8.py tests/parallel/test_fp8_gathers.py \
		tests/optim/test_optimizers.py tests/parallel/test_adamw_8bit.py -k 'fp8 or 8bit'

# Every strategy for 50 steps, checkpoints from each to each on one process and on two, and a SIGKILL in each: about
# 20 minutes.
test-strategies: .venv/requirements-dev
	STRATEGIES=all $(BIN)/python -m pytest tests/parallel/test_strategies.py tests/parallel/test_model_parallel.py tests/parallel/test_mesh.py \
		tests/parallel/test_kill_strategies.py tests/parallel/test_muon_and_adafactor.py tests/parallel/test_nvme.py \
		tests/parallel/test_product_features.py tests/parallel/test_term_strategies.py tests/planning/test_step_memory.py \
		tests/training/test_expert_strategies.py tests/training/test_experts.py tests/model/test_compile.py tests/model/test_gpu_traffic.py \
		tests/data/test_dispatch.py

# Every fault of docs/faults.md, with a kill at each of 200 points of a save, 20 in each of five strategies and an hour
# of simulated spot machines, then 900 mutated recipes, model JSONs and command lines: about 40 minutes. Ends with a
# table of what was injected and what happened.
test-faults: .venv/requirements-dev
	FAULTS=all $(BIN)/python -m pytest tests/faults/test_fault_*.py tests/scripts/test_fuzz.py tests/evaluation/test_lm_harness.py \
		tests/parallel/test_launcher_files.py tests/training/test_resume.py tests/test_deepspeed_build.py \
		tests/preparation/test_prepare.py tests/preparation/documents/test_sources.py tests/scripts/test_prepare_data.py \
		tests/preparation/cleaning/test_near_duplicates.py

# Every plan in the recipes and in docs/memory.md, memory included: what plan.py prints now.
test-plans: .venv/requirements-dev
	PLANS=all STRATEGIES=all $(BIN)/python -m pytest tests/model/test_gpu_traffic.py
	PLANS=all $(BIN)/python -m pytest tests/scripts/test_recipes.py tests/scripts/test_plan.py

# What a GPU is to prove, correctness and then speed, in the Python that is there: make gpu PYTHON=python. Installs
# nothing and needs no network; interrupted, the same command goes on. Results and tables are in runs/gpu.
gpu:
	$(PYTHON) bench/gpu_check.py

# Groundwork beside a bare loop, the transformers Trainer and a hand-written GPT on this machine; then saving,
# the guards, data preparation and the loader. Some 40 minutes on two cores that do nothing else.
bench: .venv/requirements
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/backends.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/guards.py
	$(BIN)/python bench/data.py

# One recipe under every strategy: make parity RECIPE=recipes/mine.yaml; else a dense model and one with experts.
RECIPE ?= recipes/moe_5m.yaml
parity: .venv/requirements
	$(BIN)/python runs.py parity --config $(RECIPE) --steps 10
ifeq ($(RECIPE),recipes/moe_5m.yaml)
	$(BIN)/python runs.py parity --config $(RECIPE) --steps 10 --model.config model_configs/llama_demo.json --output runs/parity_dense
endif

# The documentation as a site, in site/: the pages, their figures, and the reference made from the code.
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
