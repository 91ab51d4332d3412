"""Runs a few real steps of a recipe on this machine.

`python -m pretrain_tools.planning.real_steps RECIPE SECONDS` times them and prints {"tokens_per_second"} as JSON.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError, run_script
from pretrain.hardware import DTYPES
from pretrain.model.attention import choose_attention, model_inputs
from pretrain.model.build import build_meta_model
from pretrain.model.routers import router_losses
from pretrain.parallel.registry import make_strategy
from pretrain.parallel.strategy import Strategy
from pretrain.recipe import read_run_config
from pretrain.training.auto_settings import resolve_auto
from pretrain.training.build import build_training
from pretrain.training.prefetch import ReadAhead
from pretrain.training.run_plan import ModelPlan, RunPlan, derive, plan_model

TOKENS_PER_DOCUMENT = 600
"""Mean length of documents in the random text that replaces missing shards."""
FEWEST_TIMED_STEPS = 3
LEARNING_RATE = 1e-4
FIRST_STEPS = 2
"""Steps that compile, and create the optimizer's state; they are not timed."""


class Steps:
    """A model, its optimizer and its batches under the launched strategy: train.py's steps without the rest.

    Raises InputError as the start of a run does.
    """

    def __init__(self, config: RunConfig, strategy: Strategy):
        self.config = config
        self.strategy = strategy
        self.plan = self._plan()
        self.read_ahead = ReadAhead(strategy)
        built = build_training(config, self.plan, strategy, learning_rate=LEARNING_RATE)
        self.model = built.model
        self.model.train()

    def _plan(self) -> ModelPlan:
        """Plans the run, or without its data the model alone."""
        config = self.config
        strategy = self.strategy
        try:
            return derive(config, strategy.data_ranks * strategy.micro_batches_per_call)
        except InputError:
            model_config = planned_model_config(config.model, config.data)
            choose_attention(
                config.attention,
                device_type=strategy.device.type,
                dtype=DTYPES[strategy.precision],
                window=config.data.window,
            )
            losses_of_routers = router_losses(config.loss, build_meta_model(model_config))
            return plan_model(config, model_config, losses_of_routers)

    def _read(self, step: int, micro_step: int) -> dict[str, Any]:
        """Reads or makes the model's arguments."""
        config = self.config
        if isinstance(self.plan, RunPlan):
            return self.read_ahead.micro_batch(self.plan, step, micro_step % self.plan.micro_steps(step))
        generator = np.random.default_rng((step, micro_step))
        rows = config.batch.sequences_per_micro_batch * self.strategy.micro_batches_per_call
        shape = (rows, config.data.sequence_length + 1)
        # 0 ends a document; no other position may hold it.
        ids = generator.integers(1, self.plan.model_config.vocab_size, shape).astype(np.uint32)
        ids[generator.random(shape) < 1 / TOKENS_PER_DOCUMENT] = 0
        return model_inputs(
            ids,
            config.data.window,
            end_of_document_id=0,
            device=self.strategy.device,
            attention=self.plan.attention,
        )

    def step(self, number: int, micro_steps: int) -> None:
        """Runs one optimizer step to its end on the device."""
        self.strategy.begin_step(LEARNING_RATE, micro_steps)
        for micro_step in range(micro_steps):
            batch = self._read(number, micro_step)
            with self.strategy.accumulate(is_last=micro_step == micro_steps - 1):
                loss, _ = self.model(**batch)
                self.strategy.backward(loss / micro_steps)
            # A reference to the last loss would keep its graph alive during the update, and add to the peak.
            del loss, batch, _
        self.strategy.update(self.config.optim.max_grad_norm)
        if self.strategy.device.type == "cuda":
            torch.cuda.synchronize()


def time_steps(recipe: str, seconds: float) -> None:
    """Runs steps for `seconds`, at least FEWEST_TIMED_STEPS, and prints their speed as a line of JSON."""
    config = resolve_auto(read_run_config(recipe))
    steps = Steps(config, make_strategy(config))
    tokens = config.batch.sequences_per_micro_batch * config.data.sequence_length
    micro_steps = max(1, config.batch.tokens_per_step // tokens)
    for number in range(FIRST_STEPS):
        steps.step(number, micro_steps)
    count = 0
    began = time.perf_counter()
    while count < FEWEST_TIMED_STEPS or time.perf_counter() - began < seconds:
        steps.step(FIRST_STEPS + count, micro_steps)
        count += 1
    rate = count * micro_steps * tokens / (time.perf_counter() - began)
    print(json.dumps({"tokens_per_second": rate}), flush=True)


if __name__ == "__main__":  # started by own_text
    run_script(lambda: time_steps(sys.argv[1], float(sys.argv[2])))
