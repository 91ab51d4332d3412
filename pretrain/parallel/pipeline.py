"""Pipeline parallelism: each rank runs some of the layers, and microbatches pass through the ranks.

The schedules come from torch.distributed.pipelining. One model call runs a complete schedule with all forward and
backward passes, so the training loop doesn't change. See docs/pipelines.md.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.hardware import seed_dropout
from pretrain.mesh_sizes import Sizes
from pretrain.parallel.dimension import Dimension
from pretrain.parallel.pipeline_stages import Stage, cut_problem, layer_problem, split_micro_batch


@dataclass(frozen=True)
class StageLayout:
    """Assignment of stages to ranks in one of torch's schedules."""

    stages_per_rank: int
    is_v: bool = False
    """True if the second half of the stages is assigned in reverse order, so that rank 0 also has the last stage."""
    splits_backward: bool = False
    """True if input and weight gradients are computed separately to fill bubbles (arXiv 2401.10241)."""

    def owners(self, ranks: int) -> list[int]:
        """Returns the pipeline rank of each stage."""
        if self.is_v:
            return [*range(ranks), *reversed(range(ranks))]
        return [stage % ranks for stage in range(ranks * self.stages_per_rank)]


STAGE_LAYOUTS: dict[str, StageLayout] = {
    "GPipe": StageLayout(1),
    "1F1B": StageLayout(1),
    "Interleaved1F1B": StageLayout(2),
    "LoopedBFS": StageLayout(2),
    "InterleavedZeroBubble": StageLayout(2, splits_backward=True),
    "ZBVZeroBubble": StageLayout(2, is_v=True, splits_backward=True),
}


class Pipeline(Dimension):
    """Checks for the pipeline-parallel (pp) dimension. `MeshStrategy` splits the model into stages."""

    @classmethod
    def recipe_problems(cls, config: RunConfig, sizes: Sizes) -> list[str]:
        problems = []
        schedule = config.pipeline.schedule
        splits_backward = STAGE_LAYOUTS[schedule].splits_backward
        if splits_backward and config.activation_checkpointing != "none":
            others = ", ".join(other for other in STAGE_LAYOUTS if not STAGE_LAYOUTS[other].splits_backward)
            problems.append(
                f"activation_checkpointing: {config.activation_checkpointing} is not supported with "
                f"pipeline.schedule {schedule}, which computes input and weight gradients separately; use none, "
                f"or one of these schedules: {others}"
            )
        if config.attention == "flex_attention":
            problems.append("attention: flex_attention is not supported with a pipeline; use auto")
        if config.precision == "fp8" and splits_backward:
            problems.append(
                f"precision: fp8 is not supported with pipeline.schedule {schedule}, because fp8 layers compute "
                "input and weight gradients together, and would compute both twice; use 1F1B or Interleaved1F1B"
            )
        return problems

    @classmethod
    def model_problem(cls, model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> str | None:
        stages = len(STAGE_LAYOUTS[schedule].owners(sizes.pp))
        return cut_problem(model_config) or layer_problem(model_config, stages, sizes.pp, schedule)


class ReducingStage(PipelineStage):
    """A torch pipeline stage that reduces gradients only in a step's last call and can run only forward."""

    reduces = True

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.reduces:
            super().perform_reduce_grad(grad_scale_factor)

    # Without a loss, a schedule skips backward passes. But if a rank has two consecutive stages, as in ZBVZeroBubble,
    # torch 2.13 still passes gradients between them and raises AssertionError.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class PipelineModel(nn.Module):
    """This rank's stages, called like a complete model. All ranks in the pipeline must pass the same batch.

    In training, a call also runs the backward pass for the micro-batch's mean loss / `micro_steps`. Gradients stay
    unsharded and unreduced until a call with `reduces`. A call returns (cross-entropy, cross-entropy), detached, on
    the last stage's rank and zeros on all other ranks.

    Args:
        stages: this rank's stages by index.
        owners: pipeline rank of each stage.
        microbatches: number of pipeline microbatches per micro-batch.
        hidden_size: width of the hidden states sent between stages.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        owners: list[int],
        schedule: str,
        microbatches: int,
        hidden_size: int,
        group: dist.ProcessGroup,
        device: torch.device,
        sequence_parts: int = 1,
    ):
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        self.numbered = stages
        self.owners = owners
        self.schedule_name = schedule
        self.microbatches = microbatches
        self.micro_steps = 1
        """Divisor for the loss."""
        self.reduces = True
        """True if training calls reduce the gradients at the end."""
        self.hidden_size = hidden_size
        self.hidden_dtype = next(iter(stages.values())).dtype
        self.group = group
        self.device = device
        self.rank = dist.get_rank(group)
        self.sequence_parts = sequence_parts
        self.schedules: dict[tuple[int, int, bool], tuple[Any, list[ReducingStage]]] = {}
        """{(B, T, True if it runs backward): (torch's schedule, its stages)}"""

    @property
    def last_stage(self) -> Stage | None:
        """The last stage, or None if it is on another rank."""
        return self.numbered.get(len(self.owners) - 1)

    def forward(self, input_ids_BT: Tensor, targets_BT: Tensor, **attention_arguments) -> tuple[Tensor, Tensor]:
        microbatches = split_micro_batch(
            input_ids_BT, targets_BT, attention_arguments, self.microbatches, self.sequence_parts
        )
        for stage in self.stages:
            stage.begin(microbatches, self.micro_steps)
        # A compiled layer always computes all gradients together, so a split backward pass would compute them twice.
        eager = STAGE_LAYOUTS[self.schedule_name].splits_backward
        with torch.compiler.set_stance("force_eager") if eager else nullcontext():
            if self.training:
                # All ranks in a pipeline have the same seed, but their dropout masks must differ.
                seed_dropout((torch.initial_seed() + self.rank) % 2**63, self.device)
            self.run_schedule(input_ids_BT)
        if self.last_stage is None:
            zero = torch.zeros((), device=self.device)
            return zero, zero
        return self.last_stage.cross_entropy, self.last_stage.cross_entropy

    def compile(self, **options) -> None:
        """Compiles the model code in each stage, but not the schedule."""
        for stage in self.stages:
            stage.base.compile(**options)

    def run_schedule(self, input_ids_BT: Tensor) -> None:
        key = (*input_ids_BT.shape, self.training)
        if self.training:  # evaluation stages have buffers for every microbatch
            self.schedules = {other: built for other, built in self.schedules.items() if other[-1]}
        if key not in self.schedules:
            self.schedules[key] = self.build_schedule(*key)
        inputs = (input_ids_BT,) if 0 in self.numbered else ()
        target = torch.arange(self.microbatches) if self.training and self.last_stage is not None else None
        schedule, stages = self.schedules[key]
        for stage in stages:
            stage.reduces = self.reduces and self.training
        schedule.step(*inputs, target=target, return_outputs=False)

    def build_schedule(self, batch: int, length: int, trains: bool) -> tuple[Any, list[ReducingStage]]:
        """Builds torch's schedule and its stages for this batch shape.

        Without the shape, torch would need a trial run. Without a loss function, the schedule only runs forward.
        """
        rows = batch // self.microbatches
        ids = torch.empty(rows, length, dtype=torch.long, device="meta")
        hidden = torch.empty(
            rows, length, self.hidden_size, dtype=self.hidden_dtype, device="meta", requires_grad=trains
        )
        loss = torch.empty((), device="meta", requires_grad=trains)
        stages = [
            ReducingStage(
                stage,
                number,
                len(self.owners),
                self.device,
                input_args=(ids if stage.is_first else hidden,),
                output_args=(loss if stage.is_last else hidden,),
                group=self.group,
                # If parts of the loss share weights, torch's split backward pass counts some gradients twice.
                dw_builder=None if stage.terms is None else no_second_part,
            )
            for number, stage in self.numbered.items()
        ]
        schedule_class = get_schedule_class(self.schedule_name)
        one = STAGE_LAYOUTS[self.schedule_name].stages_per_rank == 1
        schedule = schedule_class(
            stages[0] if one else stages,
            self.microbatches,
            loss_fn=output_as_loss if trains else None,
            # torch would also scale gradients from earlier micro-steps, so we scale the losses instead.
            scale_grads=False,
        )
        return schedule, stages


def no_second_part() -> Callable[[], None]:
    """Makes torch compute all of a stage's gradients in the first part of a split backward pass."""
    return lambda: None


def output_as_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the output, which is already the loss. torch requires a loss function to run the backward pass."""
    return output
