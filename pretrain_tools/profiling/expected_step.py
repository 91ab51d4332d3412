"""Predicts the time of a step and its parts with the formulas of plan.py."""

from dataclasses import dataclass, field

import torch

from pretrain.config import RunConfig
from pretrain.gpus import gpu_called
from pretrain.hardware import cpu_as_gpu
from pretrain.model.build import attention_layers, attention_width, matrix_parameters
from pretrain.parallel.strategy import Strategy
from pretrain.training.run_plan import RunPlan
from pretrain_tools.planning.candidates import work_of_run
from pretrain_tools.planning.layouts import running_layout
from pretrain_tools.planning.memory import PlannedRun
from pretrain_tools.planning.step_time import Hardware, Speed, default_mfu, recomputing
from pretrain_tools.profiling.trace_events import COMMUNICATION


@dataclass(frozen=True)
class ExpectedStep:
    """The predicted step. `seconds` includes exposed communication."""

    seconds: float
    mfu: float
    at_peak: dict[str, float] = field(default_factory=dict)
    """Seconds at the device's peak FLOP/s by kind of kernel, for the kinds whose FLOPs a plan counts."""
    communication: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the step by kind, at the MFU that the plan assumes."""
        kinds = {kind: seconds / self.mfu / self.seconds for kind, seconds in self.at_peak.items()}
        return kinds | {COMMUNICATION: self.communication / self.seconds}


def expected_step(
    config: RunConfig, run: RunPlan, strategy: Strategy, step: int, peak_flops: float | None
) -> ExpectedStep | None:
    """Predicts a step of this run; None for a GPU whose specifications are unknown.

    peak_flops: peak FLOP/s of one process's device.
    """
    stage = run.stage(step)
    ranks = strategy.ranks.count
    if strategy.device.type == "cpu":
        gpu = cpu_as_gpu(ranks, peak_flops)
    else:
        gpu = gpu_called(torch.cuda.get_device_name(strategy.device))
    if gpu is None or not peak_flops:
        return None
    work = work_of_run(config, stage.model_config)
    layout = running_layout(strategy)
    mfu, source = default_mfu(work.active, strategy.device.type)
    hardware = Hardware(gpu, ranks, layout.machines)
    planned = PlannedRun(config, stage.model_config, strategy.precision, strategy.device.type, gpu.memory_bytes)
    time = Speed(mfu, source).step(planned, work, hardware, layout, stage.sequences_per_micro_batch)
    tokens = run.ramp.sequences_at(step) * run.batches.window.sequence_length / ranks
    model = stage.model_config
    head = min(model.vocab_size * model.hidden_size, matrix_parameters(model))
    attention = 12 * attention_layers(model) * attention_width(model) * stage.window.sequence_length
    flops = {
        "matrix products": 6 * (matrix_parameters(model) - head) * recomputing(config),
        "attention": attention * recomputing(config),
        "loss": 6 * head,
    }
    at_peak = {kind: count * tokens / peak_flops for kind, count in flops.items()}
    # In a pipeline's bubble ranks wait for each other, as for data.
    return ExpectedStep(time.seconds, mfu, at_peak, time.exposed + time.waiting)
