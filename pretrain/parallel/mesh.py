"""Any product of parallel dimensions: one mesh of ranks, and one strategy for every product.

    dense   (pp, dp_replicate, fsdp = dp_shard x cp, tp)   parameters
    data    (pp, batch = dp_replicate x dp_shard, cp, tp)  which rank reads what, and exchanges heads with which
    expert  (pp, dp_replicate, efsdp, ep)                  experts; efsdp x ep = fsdp x tp

The dimensions are applied to a model in this order: attention over whole sequences (cp), pipeline stages (pp), slices
of matrices (tp), experts on their ranks (ep), and then torch's fully_shard of experts, layers and the rest. It is
always applied, even over a single rank: so every parameter is a DTensor, and one code serves every product.
Checkpoints hold whole tensors, so a run can resume under any other product.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.mesh_sizes import Sizes, environment_flag, launched_sizes, requested_sizes
from pretrain.model.build import InitialWeights, units_of
from pretrain.model.compile import layers_of
from pretrain.model.fp8 import use_fp8
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.optimizers import OptimizerBuilder, total_norm
from pretrain.parallel import context_parallel, expert_parallel, tensor_parallel
from pretrain.parallel.context_parallel import exchange_heads, part_of_batch
from pretrain.parallel.expert_parallel import divide_experts, expert_modules
from pretrain.parallel.mesh_tiles import place_tiles
from pretrain.parallel.pipeline import STAGE_LAYOUTS, PipelineModel, StagedTensors
from pretrain.parallel.pipeline_stages import Stage, cut_problem, layer_problem, stage_parameters
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import Strategy
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.parallel.tensor_parallel import (
    SUMMED,
    share_head,
    split_unit,
    style_of,
    sum_in_place,
    tensor_plan_of,
)

if TYPE_CHECKING:
    from pretrain.parallel.fp8_gathers import Fp8Gathers


class Mesh:
    """Three views of the same ranks, each with all of its dimensions, also those of size 1."""

    def __init__(self, sizes: Sizes, device_type: str):
        s = sizes
        make = partial(init_device_mesh, device_type)
        dense = (s.pp, s.dp_replicate, s.fsdp, s.tp)
        self.sizes = sizes
        self.dense = make(dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
        self.data = make((s.pp, s.batch, s.cp, s.tp), mesh_dim_names=("pp", "batch", "cp", "tp"))
        self.expert = self.dense
        if s.ep > 1:
            expert = (s.pp, s.dp_replicate, s.efsdp, s.ep)
            self.expert = make(expert, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))

    def rank(self, name: str) -> int:
        """Returns this rank's place along a dimension of the view of data."""
        return self.data.get_local_rank(name)

    def shards(self, *, experts: bool = False) -> DeviceMesh:
        """Returns the mesh for fully_shard: of one dimension, or of two if there are replicas."""
        mesh = self.expert if experts else self.dense
        name = mesh.mesh_dim_names[2]
        return mesh["dp_replicate", name] if self.sizes.dp_replicate > 1 else mesh[name]

    def replica_group(self) -> dist.ProcessGroup | None:
        """Returns the group of this rank's stage and replica, fsdp x tp or efsdp x ep; a collective call.

        None if it is that of one dimension.
        """
        s = self.sizes
        if min(s.fsdp, s.tp) == 1 and min(s.efsdp, s.ep) == 1:
            return None
        return dist.new_subgroups_by_enumeration(self.dense.mesh.view(-1, s.fsdp * s.tp).tolist())[0]


class MeshStrategy(Strategy):
    """Strategy for any product of dimensions. See `Strategy` for the order of calls."""

    parameter_form = "sharded"
    precisions = ("fp32", "bf16", "fp8")
    why_not = MappingProxyType(
        {
            "fp16": "weights would be gathered in it, and the head's gradient, a sum over tokens, can exceed 65,504, "
            "its largest number",
            "adamw_8bit": "each of its scales is of 256 neighboring elements, and parts do not end where they do",
        }
    )
    compilations = ("auto", "none", "regional")
    holds_whole_model = False

    @classmethod
    def parts_of_micro_batch(cls, config: RunConfig) -> int:
        if "pp" not in requested_sizes():
            return 1
        return STAGE_LAYOUTS[config.pipeline.schedule].stages_per_rank * config.pipeline.microbatch_scale

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        """Lists problems as in the base class, then those of the sizes alone, of the recipe, and of the model."""
        problems = super().problems(config, name)
        try:
            sizes = launched_sizes()
        except InputError as error:
            # Whatever the size will be, the dimension is asked for.
            asked = Sizes(**{dimension: 2 for dimension in requested_sizes() if dimension != "cp"})
            return problems + error.problems + recipe_problems(config, asked)
        problems += recipe_problems(config, sizes)
        try:
            model_config = planned_model_config(config.model, config.data)
            return problems + model_problems(model_config, sizes, config.pipeline.schedule)
        except InputError:
            return problems  # `derive` reports this problem of the model

    def __init__(self, precision: str, config: RunConfig | None = None):
        self.sizes = sizes = launched_sizes()
        super().__init__(precision, config)
        self.mesh = Mesh(sizes, self.device.type)
        self.tp_group: dist.ProcessGroup = self.mesh.dense.get_group("tp")
        self.pp_group: dist.ProcessGroup = self.mesh.dense.get_group("pp")
        self.fp8_gathers: list[Fp8Gathers] = []
        self.data_rank = self.mesh.rank("batch")
        self.data_ranks = sizes.batch
        self.sequence_parts = sizes.cp
        self.part = self.mesh.rank("cp")
        self.micro_batches_per_call = sizes.pp
        self.stage_owners = [0]
        """Place within the pipeline of the rank that has each stage."""
        if sizes.pp > 1:
            self.stage_owners = STAGE_LAYOUTS[config.pipeline.schedule].owners(sizes.pp)
            self.microbatches = len(self.stage_owners) * config.pipeline.microbatch_scale

    def make_accelerator(self) -> Accelerator:
        # accelerate must see plain processes: it knows neither pipelines nor experts, and its context parallelism
        # would drop the boundaries of documents.
        with patch_environment(ACCELERATE_USE_FSDP="false", ACCELERATE_USE_PARALLELISM_CONFIG="false"):
            return super().make_accelerator()

    @property
    def dropout_rank(self) -> int:
        """Ranks of tp and of a pipeline compute the same hidden states; those of a sequence have other positions."""
        return self.data_rank * self.sizes.cp + self.part

    @property
    def reports_loss(self) -> bool:
        """True on ranks whose metrics count, so that no token counts twice: of tp the first, of pp the last stage."""
        return self.mesh.rank("tp") == 0 and self.mesh.rank("pp") == self.stage_owners[-1]

    def running_modules(self) -> list[nn.Module]:
        return list(self.roots.values())

    def sum(self, tensor: Tensor, *, by_layer: bool = False) -> Tensor:
        counts = self.mesh.rank("tp") == 0 if by_layer else self.reports_loss
        return super().sum(tensor if counts else torch.zeros_like(tensor))

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Prepares as in `Strategy`. No rank ever holds more than one whole layer, or than all that is in no layer."""
        self.causal_lm = causal_lm = model.causal_lm
        if self.precision == "fp8":
            use_fp8(causal_lm)
        self.places = {name: place for place, (name, _) in enumerate(causal_lm.named_parameters())}
        sizes = self.sizes
        if sizes.cp > 1:
            exchange_heads(causal_lm, sizes.cp, self.mesh.data.get_group("cp").group_name)
        if sizes.tp > 1 and model.from_hidden_states:
            share_head(model, self.tp_group)
        # With one rank there is nothing to free: the gathered weights are the shards. A pipeline's schedule keeps them
        # from the first backward pass to the last; freed after every forward pass, they would be gathered for each
        # microbatch again. A split backward pass also needs them: torch computes gradients only for parameters that
        # the modules hold when it runs, and silently skips weights that fully_shard has swapped out.
        self.reshards = (
            sizes.fsdp > 1 and sizes.pp == 1 and os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true") == "true"
        )
        self.offloads = environment_flag("FSDP_OFFLOAD_PARAMS")
        # In a pipeline it costs no memory: a schedule holds gradients whole from its first backward pass on.
        self.reduces_once = not self.reshards or bool(self.config and self.config.batch.reduce_once)
        self.roots = self.stages_of(model)
        self.shard(list(self.roots.values()), weights)
        self.model = self.called(model)
        optimizer = self.optimizer_of_parameters(build_optimizer)
        place_tiles(optimizer, self.mesh.replica_group)
        self.optimizer = self.accelerator.prepare_optimizer(separate_kinds(optimizer), device_placement=False)
        self.find_shared_parameters(model)
        return self.model

    def stages_of(self, model: LanguageModelLoss) -> dict[int, nn.Module]:
        """Returns this rank's stages by number, on the meta device; without a pipeline, the whole model."""
        if self.sizes.pp == 1:
            return {0: model}
        ranges, self.parameters_of_stages = stage_parameters(self.causal_lm, len(self.stage_owners))
        mine = [number for number, owner in enumerate(self.stage_owners) if owner == self.mesh.rank("pp")]
        return {number: Stage(model, ranges[number], self.precision) for number in mine}

    def shard(self, roots: list[nn.Module], weights: InitialWeights) -> None:
        """Gives the modules inside these roots their weights, divides them over tp and ep, and shards them."""
        causal_lm = self.causal_lm
        inside = MixedPrecisionPolicy()
        if self.precision != "fp32":
            inside = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.offloads else OffloadPolicy()
        apply = partial(fully_shard, offload_policy=offload)
        here = {module for root in roots for module in root.modules()}
        head = causal_lm.get_output_embeddings()
        embedding = causal_lm.get_input_embeddings()
        is_tied = head.weight is embedding.weight
        if is_tied and head in here:
            here.add(embedding)  # a tied head gets its values from the embedding
        layers = set(layers_of(causal_lm))
        plan = tensor_plan_of(causal_lm.config)
        for unit in units_of(causal_lm):
            module = causal_lm.get_submodule(unit)
            if module not in here:
                continue
            weights.fill(causal_lm, unit)
            experts = expert_modules(module) if self.sizes.ep > 1 else {}
            for part in experts.values():
                divide_experts(part.to(self.device), self.mesh.expert["ep"], self.mesh.dense["tp"])
            if self.sizes.tp > 1:
                split_unit(
                    causal_lm,
                    unit,
                    plan,
                    self.mesh.dense["tp"],
                    self.device,
                    splits_experts=self.sizes.ep == 1,
                )
            for part in experts.values():
                apply(part, mesh=self.mesh.shards(experts=True), reshard_after_forward=self.reshards, mp_policy=inside)
            if module in layers:
                apply(module, mesh=self.mesh.shards(), reshard_after_forward=self.reshards, mp_policy=inside)
        causal_lm.tie_weights()
        self.copies_head = False
        if is_tied and len(roots) > 1 and self.stage_owners[0] == self.stage_owners[-1] == self.mesh.rank("pp"):
            # The first and the last stage are both here, and fully_shard gives a parameter to one of them alone.
            self.copies_head = True
            head.weight = nn.Parameter(embedding.weight.detach().clone())
        # Parameters outside of the layers are used last in forward and first in backward, so they stay gathered.
        outside = replace(inside, output_dtype=torch.float32)
        for root in roots:
            apply(root, mesh=self.mesh.shards(), reshard_after_forward=False, mp_policy=outside)
            root.register_forward_hook(reshard_without_backward)
        # What is in host memory is copied to the GPU before, which loses what tells fully_shard to gather in fp8.
        if self.precision == "fp8" and self.sizes.fsdp > 1 and not self.offloads:
            from pretrain.parallel.fp8_gathers import Fp8Gathers

            self.fp8_gathers = [Fp8Gathers(root, self.mesh.dense.get_group("fsdp")) for root in roots]
        if is_tied and not self.copies_head:
            # fully_shard has replaced the parameter in the stage alone, and the other module is in no stage here.
            if head in here and 0 not in self.roots:
                embedding.weight = head.weight
            else:
                head.weight = embedding.weight

    def called(self, model: LanguageModelLoss) -> nn.Module:
        """Returns the module that the loop calls."""
        called: nn.Module = self.roots[0] if self.sizes.pp == 1 else self.pipeline()
        if self.copies_head:
            called.register_forward_pre_hook(self.copy_tied_head)
        if self.sizes.cp > 1:
            cut = partial(part_of_batch, self.part, self.sizes.cp)
            called.register_forward_pre_hook(cut, with_kwargs=True)
        return called

    @torch.no_grad()
    def copy_tied_head(self, *_) -> None:
        """Gives, before each call of the model, the last stage's copy of a tied matrix the values of the first's."""
        head, embedding = self.causal_lm.get_output_embeddings(), self.causal_lm.get_input_embeddings()
        local(head.weight).copy_(local(embedding.weight))

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        copied = self.causal_lm.get_output_embeddings().weight if self.copies_head else None
        return [pair for pair in super().trained_parameters() if pair[1] is not copied]

    def pipeline(self) -> PipelineModel:
        """Returns the pipeline of this rank's stages."""
        schedule = self.config.pipeline.schedule
        if STAGE_LAYOUTS[schedule].splits_backward and self.config.compile != "none":
            self.ranks.print(
                f"compile: {self.config.compile} has no effect with {schedule}: a compiled layer cannot compute the "
                "gradients of its inputs and of its weights apart"
            )
        # NCCL creates a communicator in its first operation, of which all ranks of the group have to be part; the
        # first sends between stages are not.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.pp_group)
        return PipelineModel(
            self.roots,
            self.stage_owners,
            self.config.pipeline.schedule,
            self.microbatches,
            hidden_size=self.causal_lm.config.hidden_size,
            group=self.pp_group,
            device=self.device,
            sequence_parts=self.sizes.cp,
        )

    def find_shared_parameters(self, model: LanguageModelLoss) -> None:
        """Finds the parameters whose gradients have to be summed over tp, or over the first and the last stage."""
        plan = tensor_plan_of(self.causal_lm.config)
        prefix = f"{self.causal_lm.base_model_prefix}."
        head = self.causal_lm.get_output_embeddings()
        self.shares = {
            parameter
            for parameter, name in self.name_of.items()
            if style_of(name.removeprefix(prefix).rpartition(".")[0], plan) == SUMMED
        }
        """Parameters whole on every rank of tp, of whose gradient each rank has its own share."""
        if self.sizes.tp > 1 and model.from_hidden_states:
            # The gradient of a copied head is added to the embedding's, of which each rank has its share too.
            sharing = self.causal_lm.get_input_embeddings() if self.copies_head else head
            self.shares.update(parameter for parameter in sharing.parameters() if parameter in self.name_of)
        self.whole_over_tp = [parameter for parameter in self.name_of if not is_split(parameter)]
        """Parameters that all ranks of a tp group have whole, or the same shard of."""
        stage_ranks = self.sizes.world // self.sizes.pp
        self.copies_of = {parameter: stage_ranks // pieces(parameter) for parameter in self.name_of}
        """Number of the stage's ranks that have the same part of a parameter."""
        first, last = self.stage_owners[0], self.stage_owners[-1]
        self.tied_group: dist.ProcessGroup | None = None
        self.tied: nn.Parameter | None = None
        if head.weight is self.causal_lm.get_input_embeddings().weight and first != last:
            # Creating a group is collective: every rank has to take part for every group.
            pairs = self.mesh.dense.mesh[[first, last]].flatten(1).T.tolist()
            group, _ = dist.new_subgroups_by_enumeration(pairs)
            if self.mesh.rank("pp") in (first, last):
                self.tied_group, self.tied = group, head.weight

    def begin_step(self, learning_rate: float, micro_steps: int) -> None:
        super().begin_step(learning_rate, micro_steps)
        for gathers in self.fp8_gathers:
            gathers.is_stale = True
        if self.sizes.pp > 1:  # its call computes the gradients, of a loss that the loop cannot divide
            self.model.micro_steps = micro_steps

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        if self.sizes.pp > 1:
            self.model.reduces = is_last
        else:
            self.model.set_requires_gradient_sync(is_last or not self.reduces_once)
            self.model.set_requires_all_reduce(is_last)  # between replicas; the line before sets it too
            self.model.set_is_last_backward(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        if self.sizes.pp == 1:  # a pipeline's call has computed the gradients
            loss.backward()

    def combine_gradients(self) -> None:
        """Completes the gradients, of which fully_shard has done the mean over the ranks that read different data."""
        if self.copies_head:
            head, embedding = self.causal_lm.get_output_embeddings(), self.causal_lm.get_input_embeddings()
            local(embedding.weight.grad).add_(local(head.weight.grad))
            head.weight.grad = None
        gradients = {p: local(p.grad) for p in self.name_of if p.grad is not None}
        if lost := [name for p, name in self.name_of.items() if p.requires_grad and p not in gradients]:
            raise RuntimeError(f"{len(lost)} parameters have no gradient, the first is {lost[0]}")
        if self.sizes.tp > 1:
            whole = {parameter: gradients[parameter] for parameter in self.whole_over_tp if parameter in gradients}
            self.sum_gradients(list(whole.values()), self.tp_group)
            # Others should be equal already, but GPU kernels may sum in any order: replicas must not drift apart.
            others = [grad for parameter, grad in whole.items() if parameter not in self.shares]
            if others:
                torch._foreach_div_(others, self.sizes.tp)
        if self.sizes.ep > 1:
            # fully_shard has divided by the ranks that have the same experts. Rows of other ranks' tokens have arrived
            # as well, so the sum is to be divided by all ranks whose tokens differ. set_gradient_divide_factor would
            # do that, but torch 2.13 divides twice where only one rank has the experts.
            experts = [grad for parameter, grad in gradients.items() if "ep" in parameter.device_mesh.mesh_dim_names]
            torch._foreach_mul_(experts, self.sizes.tp / self.sizes.ep)
        if self.tied is not None:
            self.sum_gradients([gradients[self.tied]], self.tied_group)

    def sum_gradients(self, gradients: list[Tensor], group: dist.ProcessGroup) -> None:
        """Sums gradients over the ranks of a group, in place; offloaded ones by the GPU."""
        here = [gradient.to(self.device) for gradient in gradients] if self.offloads else gradients
        sum_in_place(here, group)
        if self.offloads and gradients:
            torch._foreach_copy_(gradients, here)

    def gradient_norm(self) -> Tensor:
        """Returns the norm by one sum over all ranks: a local square counts 1 / (ranks of the stage that have it)."""
        self.combine_gradients()
        by_copies: dict[int, list[Tensor]] = {}
        for parameter, copies in self.copies_of.items():
            is_copy = parameter is self.tied and self.mesh.rank("pp") == self.stage_owners[-1]
            if parameter.grad is not None and not is_copy:
                by_copies.setdefault(copies, []).append(local(parameter.grad))
        square = torch.zeros((), device=self.device)
        for copies, gradients in by_copies.items():
            square += total_norm(gradients).square().to(self.device) / copies
        dist.all_reduce(square)
        return square.sqrt()

    def gradients(self) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.name_of if parameter.grad is not None]

    def model_tensors(self) -> TensorGroup:
        return self.staged(super().model_tensors())

    def optimizer_tensors(self) -> TensorGroup:
        return self.staged(super().optimizer_tensors())

    def average_tensors(self) -> TensorGroup:
        return self.staged(super().average_tensors())

    def staged(self, mine: TensorGroup) -> TensorGroup:
        """Returns the tensors of all stages, of which this rank has `mine`, in the whole model's order."""
        if self.sizes.pp == 1:
            return mine
        facts = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in mine.tensors.items()}
        facts_of_rank: list[dict] = [{} for _ in range(self.sizes.pp)]
        dist.all_gather_object(facts_of_rank, facts, group=self.pp_group)
        owners = {name: rank for rank in reversed(range(self.sizes.pp)) for name in facts_of_rank[rank]}
        names = sorted(owners, key=self.place_of)
        shapes = {name: facts_of_rank[owners[name]][name][0] for name in names}
        dtypes = {name: facts_of_rank[owners[name]][name][1] for name in names}
        return StagedTensors(shapes, dtypes, mine.tensors, owners, self.pp_group, self.device)

    def place_of(self, name: str) -> tuple[int, str]:
        """Returns a tensor's sort key: parameters and their optimizer state in the model's order, then buffers."""
        parameter = name if name in self.places else name.rpartition(".")[0]
        return self.places.get(parameter, len(self.places)), name

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Loads only the tensors of this rank's stages."""
        mine = set(self.name_of.values())
        super().load(model, {name: optimizer[name] for name in optimizer if name.rpartition(".")[0] in mine})

    def replicas(self) -> list[ReplicaGroup]:
        """Lists what several ranks hold: all of it over dp_replicate, what tp does not split, a tied embedding."""
        parts = {name: local(parameter.detach()) for parameter, name in self.name_of.items()}
        groups: list[ReplicaGroup] = []
        if self.sizes.dp_replicate > 1:
            groups.append((self.mesh.dense.get_group("dp_replicate"), parts))
        if self.sizes.tp > 1:
            whole = {self.name_of[parameter]: parts[self.name_of[parameter]] for parameter in self.whole_over_tp}
            groups.append((self.tp_group, whole))
        if self.tied is not None:
            name = self.name_of[self.tied]
            groups.append((self.tied_group, {name: parts[name]}))
        return groups

    def describe(self) -> dict[str, Any]:
        facts = {"mesh": self.sizes.named(), "data_parallel_size": self.data_ranks, "reduce_once": self.reduces_once}
        if self.sizes.pp > 1:
            facts |= {
                "schedule": self.config.pipeline.schedule,
                "pipeline_microbatches": self.microbatches,
                "parameters_of_stages": self.parameters_of_stages,
            }
        return {**super().describe(), **facts}


def recipe_problems(config: RunConfig, sizes: Sizes) -> list[str]:
    """Lists the recipe's and the launcher's settings that do not run with these sizes."""
    problems = []
    length = config.data.sequence_length
    if length % sizes.cp:
        below = length // sizes.cp * sizes.cp
        problems.append(
            f"data.sequence_length: {length:,} cannot be cut into {sizes.cp} equal parts; "
            f"nearest: {f'{below:,} or ' if below else ''}{below + sizes.cp:,}"
        )
    schedule = STAGE_LAYOUTS[config.pipeline.schedule]
    if sizes.pp > 1 and schedule.splits_backward and config.activation_checkpointing != "none":
        others = ", ".join(other for other in STAGE_LAYOUTS if not STAGE_LAYOUTS[other].splits_backward)
        problems.append(
            f"activation_checkpointing: {config.activation_checkpointing} does not run with pipeline.schedule "
            f"{config.pipeline.schedule}, which computes the gradients of inputs and of weights apart; use none, "
            f"or one of {others}"
        )
    if sizes.pp > 1 and config.attention == "flex_attention":
        problems.append("attention: flex_attention does not run under a pipeline; use auto")
    if config.precision == "fp8" and sizes.tp > 1:
        problems.append(
            "precision: fp8 does not run with tp, where every slice of a matrix would have its own scale; use bf16, "
            "or fp8 with dp_shard, dp_replicate, cp, pp or ep"
        )
    if config.precision == "fp8" and sizes.pp > 1 and schedule.splits_backward:
        problems.append(
            f"precision: fp8 does not run with pipeline.schedule {config.pipeline.schedule}: it computes the "
            "gradients of inputs and of weights together, so twice each; use 1F1B or Interleaved1F1B"
        )
    return problems


def model_problems(model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> list[str]:
    """Lists why this model cannot be divided in these sizes, with what works. Raises InputError as `reference_of`."""
    problems: list[str | None] = []
    if sizes.tp > 1:
        problems.append(tensor_parallel.model_problem(model_config, sizes.tp, splits_experts=sizes.ep == 1))
    if sizes.cp > 1:
        problems.append(context_parallel.model_problem(model_config, sizes.cp, sizes.tp))
    if sizes.ep > 1:
        problems.append(expert_parallel.model_problem(model_config, sizes.ep))
    if sizes.pp > 1:
        stages = len(STAGE_LAYOUTS[schedule].owners(sizes.pp))
        problems.append(cut_problem(model_config) or layer_problem(model_config, stages, sizes.pp, schedule))
    return [problem for problem in problems if problem]


def separate_kinds(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Splits each group by the mesh of its parameters: fused and foreach kernels accept only one in a call."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for group in groups:
        kinds: dict[DeviceMesh | None, list[Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        optimizer.param_groups += [{**group, "params": parameters} for parameters in kinds.values()]
    return optimizer


def reshard_without_backward(model: nn.Module, *_) -> None:
    """Frees, as a forward hook, gathered weights that were kept for a backward pass if none follows.

    They would be out of date after the next update, or after an exchange with the average of the weights.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_split(tensor: Tensor) -> bool:
    """Tells if the ranks of a tp group have different parts of a tensor: by tp, or by ep."""
    if not isinstance(tensor, DTensor):
        return False
    placements = dict(zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True))
    # Not is_shard(), which is False for rows of two matrices in one, and for what is divided twice.
    return any(not placements[name].is_replicate() for name in ("tp", "ep") if name in placements)


def pieces(tensor: Tensor) -> int:
    """Returns the number of different parts into which a tensor is divided."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    # Not is_shard(), which is False for a shard of a dimension that tp or ep has divided already.
    divided = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return math.prod(mesh.size(dim) for dim in divided)
