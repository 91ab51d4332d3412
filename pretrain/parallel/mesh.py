"""Strategy for any combination of parallel dimensions, with a mesh of ranks.

    dense   (pp, dp_replicate, fsdp = dp_shard x cp, tp)   for parameters
    data    (pp, batch = dp_replicate x dp_shard, cp, tp)  for sequences and head exchange
    expert  (pp, dp_replicate, efsdp, ep)                  for experts; efsdp x ep = fsdp x tp

The model is modified in this order: context parallelism (cp) makes attention run on full sequences, pipeline
parallelism (pp) selects this rank's stages, tensor parallelism (tp) splits matrices, and expert parallelism (ep)
distributes the experts. Finally, torch's fully_shard shards experts, layers and the remaining parameters. We apply it
even on a single rank, so that every parameter is a DTensor and all meshes share the same code. Checkpoints contain
unsharded tensors, so a run can resume on a different mesh.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, reduce
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import patch_environment
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedConfig

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError, Problems
from pretrain.mesh_sizes import DIMENSIONS, Sizes, environment_flag, launched_sizes, requested_sizes
from pretrain.model.build import InitialWeights, units_of
from pretrain.model.compile import layers_of
from pretrain.model.fp8 import use_fp8
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.optimizers import OptimizerBuilder, local_tensor, total_norm
from pretrain.parallel.dimension import Dimension
from pretrain.parallel.expert_parallel import dimension_to_shard, expert_modules
from pretrain.parallel.mesh_tiles import divided_axes, place_tiles
from pretrain.parallel.pipeline import STAGE_LAYOUTS, PipelineModel
from pretrain.parallel.pipeline_stages import Stage, stage_parameters
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import LOSS_TERMS, Strategy
from pretrain.parallel.tensor_group import TensorGroup
from pretrain.parallel.tensor_parallel import sum_in_place

if TYPE_CHECKING:
    from pretrain.parallel.fp8_gathers import Fp8Gathers


class Mesh:
    """Three views of the same ranks. Each view includes dimensions of size 1."""

    def __init__(self, sizes: Sizes, device_type: str):
        self.sizes = sizes

        def view(names: list[str]) -> DeviceMesh:
            shape = tuple(getattr(sizes, name) for name in names)
            return init_device_mesh(device_type, shape, mesh_dim_names=tuple(names))

        data = [name for name, row in DIMENSIONS.items() if not row.is_inner]
        dense = ["fsdp" if name == "dp_shard" else name for name in data if name != "cp"]
        expert = [{"fsdp": "efsdp", "tp": "ep"}.get(name, name) for name in dense]
        self.data = view(data)
        self.dense = view(dense)
        self.expert = view(expert) if sizes.ep > 1 else self.dense

    def rank(self, name: str) -> int:
        """Returns this rank's index along a dimension of the data view."""
        return self.data.get_local_rank(name)

    @property
    def data_rank(self) -> int:
        """This rank's index among the ranks that read different sequences."""
        names = [name for name, row in DIMENSIONS.items() if row.reads]
        return reduce(lambda rank, name: rank * getattr(self.sizes, name) + self.rank(name), names, 0)

    def ranks_along(self, *names: str) -> Tensor:
        """Returns the groups of ranks along these dimensions of the dense view, with shape (groups, ranks)."""
        chosen = [self.dense.mesh_dim_names.index(name) for name in names]
        return self.dense.mesh.movedim(chosen, [*range(-len(chosen), 0)]).flatten(-len(chosen)).flatten(0, -2)

    def shards(self, *, experts: bool = False) -> DeviceMesh:
        """Returns the mesh for fully_shard. It is 1-D, or 2-D with replicas (HSDP)."""
        mesh, name = (self.expert, "efsdp") if experts else (self.dense, "fsdp")
        return mesh["dp_replicate", name] if self.sizes.dp_replicate > 1 else mesh[name]

    def replica_group(self) -> dist.ProcessGroup | None:
        """Creates the group of ranks that together hold one replica of this rank's stage (a collective call).

        Returns None if a single mesh dimension already has this group.
        """
        s = self.sizes
        if min(s.fsdp, s.tp) == 1 and min(s.efsdp, s.ep) == 1:
            return None
        return dist.new_subgroups_by_enumeration(self.ranks_along("fsdp", "tp").tolist())[0]


def dimensions_of(sizes: Sizes) -> dict[str, type[Dimension]]:
    """Returns {name: class} for the dimensions larger than 1, innermost first."""
    return {name: resolve_name(DIMENSIONS[name].kind) for name in reversed(sizes.named())}


class MeshStrategy(Strategy):
    """Strategy for any mesh. `Strategy` documents the call order."""

    parameter_form = "sharded"
    precisions = ("fp32", "bf16", "fp8")
    compilations = ("auto", "none", "regional")
    holds_whole_model = False

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        """Returns error messages for the recipe, the mesh sizes and the model."""
        problems = Problems(super().problems(config, name))
        sizes = problems.attempt(launched_sizes)
        # Even if a size is invalid, check the recipe against the requested dimensions.
        asked = {dimension: 2 for dimension in requested_sizes() if dimension != "cp"}
        judged = sizes or Sizes(**asked)
        for kind in dimensions_of(judged).values():
            problems += kind.recipe_problems(config, judged)
        if sizes is None:
            return problems
        with suppress(InputError):  # `derive` reports this error
            model_config = planned_model_config(config)
            of_model = model_problems(model_config, sizes, config.pipeline.schedule)
            if config.optim.name == "adamw_8bit" and not of_model:  # otherwise there are no shards to check
                from pretrain.parallel.block_tiles import blocks_problems

                of_model = blocks_problems(model_config, sizes)
            problems += of_model
        return problems

    def __init__(self, precision: str, config: RunConfig | None = None):
        self.sizes = sizes = launched_sizes()
        super().__init__(precision, config)
        self.mesh = Mesh(sizes, self.device.type)
        self.dimensions = [kind(self, name) for name, kind in dimensions_of(sizes).items()]
        self.pp_group: dist.ProcessGroup = self.mesh.dense.get_group("pp")
        self.fp8_gathers: list[Fp8Gathers] = []
        self.data_rank = self.mesh.data_rank
        self.data_ranks = sizes.batch
        self.sequence_parts = sizes.cp
        self.part = self.mesh.rank("cp")
        self.head_parts = sizes.tp * sizes.cp
        self.head_part = self.mesh.rank("tp") * sizes.cp + self.part
        self.micro_batches_per_call = sizes.pp
        self.stage_owners = [0]
        """Pipeline rank of each stage."""
        if sizes.pp > 1:
            self.stage_owners = STAGE_LAYOUTS[config.pipeline.schedule].owners(sizes.pp)
            self.microbatches = len(self.stage_owners) * config.pipeline.microbatches_per_stage

    def make_accelerator(self) -> Accelerator:
        # Hide the mesh from accelerate, which supports neither pipelines nor expert parallelism. Its context
        # parallelism ignores document boundaries.
        with patch_environment(ACCELERATE_USE_FSDP="false", ACCELERATE_USE_PARALLELISM_CONFIG="false"):
            return super().make_accelerator()

    @property
    def dropout_rank(self) -> int:
        """Seed offset for dropout, shared by pp ranks and by tp ranks, which compute the same hidden states."""
        return self.data_rank * self.sizes.cp + self.part

    @property
    def is_first(self) -> bool:
        """True on exactly one of the ranks that compute the same layers for the same tokens, such as tp ranks."""
        return not any(self.mesh.rank(each.name) for each in self.dimensions if each.repeats_loss)

    @property
    def reports_loss(self) -> bool:
        """True if this rank's metrics count. In a pipeline, only the last stage's metrics count."""
        return self.is_first and self.mesh.rank("pp") == self.stage_owners[-1]

    def running_modules(self) -> list[nn.Module]:
        return list(self.roots.values())

    def sum(self, tensor: Tensor, *, by_layer: bool = False) -> Tensor:
        counts = self.is_first if by_layer else self.reports_loss
        return super().sum(tensor if counts else torch.zeros_like(tensor))

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> nn.Module:
        """Prepares the model as described in `Strategy`.

        Each rank holds at most one unsharded layer at a time, or the parameters outside the layers.
        """
        self.causal_lm = causal_lm = model.causal_lm
        self.loss_terms = model.loss_terms
        self.embeds = model.terms is not None and model.terms.embeds
        if self.precision == "fp8":
            use_fp8(causal_lm, tp=self.sizes.tp)
        named = [*causal_lm.named_parameters(), *self.loss_terms.named_parameters(prefix=LOSS_TERMS)]
        self.places = {name: place for place, (name, _) in enumerate(named)}
        sizes = self.sizes
        for dimension in self.dimensions:
            dimension.before_sharding(model)
        # On one rank, resharding frees nothing, because the gathered weights are the shards. In a pipeline, weights
        # stay gathered so that microbatches don't gather them again. A split backward pass also needs this: torch
        # only computes gradients for a module's current parameters, and silently skips weights that fully_shard has
        # swapped out.
        self.reshards = sizes.fsdp > 1 and sizes.pp == 1 and environment_flag("FSDP_RESHARD_AFTER_FORWARD", "true")
        self.offloads = environment_flag("FSDP_OFFLOAD_PARAMS")
        # In a pipeline, this costs no memory, because the schedule keeps unsharded gradients anyway.
        self.reduces_once = not self.reshards or bool(self.config and self.config.batch.no_sync)
        self.roots = self.stages_of(model, weights.dtype)
        self.shard(list(self.roots.values()), weights)
        self.model = self.called(model)
        optimizer = self.optimizer_of_parameters(build_optimizer)
        place_tiles(optimizer, self.mesh.replica_group)
        self.optimizer = self.accelerator.prepare_optimizer(separate_kinds(optimizer), device_placement=False)
        self.find_copies()
        for dimension in self.dimensions:
            dimension.after_sharding(model, self.model)
        return self.model

    def stages_of(self, model: LanguageModelLoss, weight_dtype: torch.dtype) -> dict[int, nn.Module]:
        """Returns {index: stage} for this rank's stages, on the meta device.

        Without a pipeline, the model is the only stage.
        """
        if self.sizes.pp == 1:
            return {0: model}
        stages = len(self.stage_owners)
        of_terms = sum(parameter.numel() for parameter in self.loss_terms.parameters())
        ranges, self.parameters_of_stages = stage_parameters(self.causal_lm, stages, of_terms)
        mine = [number for number, owner in enumerate(self.stage_owners) if owner == self.mesh.rank("pp")]
        if stages - 1 not in mine:
            self.loss_terms.to("meta")  # like the layers in other stages
        return {number: Stage(model, ranges[number], self.precision, weight_dtype) for number in mine}

    def shard(self, roots: list[nn.Module], weights: InitialWeights) -> None:
        """Initializes the modules in these roots, splits them across tp and ep ranks, and applies fully_shard."""
        causal_lm = self.causal_lm
        inside = MixedPrecisionPolicy()
        if self.precision != "fp32":
            inside = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.offloads else OffloadPolicy()
        apply = partial(fully_shard, offload_policy=offload, mp_policy=inside)
        here = {module for root in roots for module in root.modules()}
        head = causal_lm.get_output_embeddings()
        embedding = causal_lm.get_input_embeddings()
        is_tied = head.weight is embedding.weight
        self.embeds_twice = is_tied or self.embeds
        if is_tied and head in here:
            here.add(embedding)  # a tied head is initialized with the embedding
        layers = layers_of(causal_lm)
        for unit in units_of(causal_lm):
            module = causal_lm.get_submodule(unit)
            if module not in here:
                continue
            weights.fill(causal_lm, unit)
            # The backward pass starts with the last layer, so this layer's weights stay gathered.
            frees = self.reshards and module is not layers[-1]
            for dimension in self.dimensions:
                dimension.divide(unit, module)
            experts = expert_modules(module).values() if self.sizes.ep > 1 else ()
            parts = [(part, self.mesh.shards(experts=True)) for part in experts]
            if module in layers:
                parts.append((module, self.mesh.shards()))
            for part, mesh in parts:
                placement = partial(dimension_to_shard, mesh.shape[-1])
                apply(part, mesh=mesh, reshard_after_forward=frees, shard_placement_fn=placement)
        causal_lm.tie_weights()
        self.copying: nn.Module | None = None
        """Module with the last stage's copy of the embedding, if the first stage is on the same rank."""
        owners = {self.stage_owners[0], self.stage_owners[-1]}
        if self.embeds_twice and len(roots) > 1 and owners == {self.mesh.rank("pp")}:
            # The first and last stages are both on this rank, but fully_shard can assign a parameter to only one of
            # them.
            second = copy.deepcopy(embedding)
            if self.embeds:
                roots[-1].embedding = second
            if is_tied:
                head.weight = second.weight
            self.copying = head if is_tied else second
        # Parameters outside the layers are used last in the forward pass and first in the backward pass, so they stay
        # gathered.
        for root in roots:
            apply(root, mesh=self.mesh.shards(), reshard_after_forward=False)
            root.register_forward_hook(reshard_without_backward)
        # With offload, fully_shard gathers from GPU copies, which lack the fp8 methods.
        if self.precision == "fp8" and self.sizes.fsdp > 1 and not self.offloads:
            from pretrain.parallel.fp8_gathers import Fp8Gathers

            self.fp8_gathers = [Fp8Gathers(root, self.mesh.dense.get_group("fsdp")) for root in roots]
        if is_tied and self.copying is None:
            # fully_shard has replaced the parameter only in the module that is in this rank's stage.
            if head in here and 0 not in self.roots:
                embedding.weight = head.weight
            else:
                head.weight = embedding.weight

    def called(self, model: LanguageModelLoss) -> nn.Module:
        """Returns the module that the training loop calls."""
        called: nn.Module = self.roots[0] if self.sizes.pp == 1 else self.pipeline()
        if self.copying is not None:
            called.register_forward_pre_hook(self.copy_embedding)
        return called

    @torch.no_grad()
    def copy_embedding(self, *_) -> None:
        """Copies the first stage's embedding to the last stage, before each forward call."""
        local_tensor(self.copying.weight).copy_(local_tensor(self.causal_lm.get_input_embeddings().weight))

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        copied = None if self.copying is None else self.copying.weight
        return [pair for pair in super().trained_parameters() if pair[1] is not copied]

    def pipeline(self) -> PipelineModel:
        """Builds the pipeline from this rank's stages."""
        schedule = self.config.pipeline.schedule
        if STAGE_LAYOUTS[schedule].splits_backward and self.config.compile != "none":
            self.ranks.print(
                f"compile: {self.config.compile} has no effect with {schedule}, because a compiled layer cannot "
                "compute input and weight gradients separately"
            )
        # NCCL creates a group's communicator in the group's first operation, which all of its ranks must join. The
        # first sends between stages involve only some of them.
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.pp_group)
        return PipelineModel(
            self.roots,
            self.stage_owners,
            schedule,
            self.microbatches,
            hidden_size=self.causal_lm.config.hidden_size,
            group=self.pp_group,
            device=self.device,
            sequence_parts=self.sizes.cp,
        )

    def find_copies(self) -> None:
        """Counts the replicas of each shard, and creates the group for an embedding shared by two stages."""
        stage_ranks = self.sizes.world // self.sizes.pp
        self.copies_of = {
            parameter: stage_ranks // math.prod(map(parameter.device_mesh.size, divided_axes(parameter)))
            for parameter in self.name_of
        }
        """{parameter: number of ranks in this stage with the same shard}"""
        first, last = self.stage_owners[0], self.stage_owners[-1]
        self.tied_group: dist.ProcessGroup | None = None
        self.tied: nn.Parameter | None = None
        if self.embeds_twice and first != last:
            # Creating a group is a collective call, so every rank creates all groups.
            pairs = self.mesh.ranks_along("pp")[:, [first, last]].tolist()
            group, _ = dist.new_subgroups_by_enumeration(pairs)
            if self.mesh.rank("pp") in (first, last):
                self.tied_group, self.tied = group, self.causal_lm.get_input_embeddings().weight

    def begin_step(self, learning_rate: float, micro_steps: int) -> None:
        super().begin_step(learning_rate, micro_steps)
        for gathers in self.fp8_gathers:
            gathers.is_stale = True
        if self.sizes.pp > 1:  # the pipeline runs the backward pass, so it divides the loss
            self.model.micro_steps = micro_steps

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        if self.sizes.pp > 1:
            self.model.reduces = is_last
        else:
            self.model.set_requires_gradient_sync(is_last or not self.reduces_once)
            self.model.set_requires_all_reduce(is_last)  # the previous call also sets this
            self.model.set_is_last_backward(is_last)
        yield

    def backward(self, loss: Tensor) -> None:
        if self.sizes.pp == 1:  # with a pipeline, the forward call has already computed the gradients
            loss.backward()

    def combine_gradients(self) -> None:
        """Completes the gradients. fully_shard has already averaged them over ranks with different data."""
        if self.copying is not None:
            embedding = self.causal_lm.get_input_embeddings()
            local_tensor(embedding.weight.grad).add_(local_tensor(self.copying.weight.grad))
            self.copying.weight.grad = None
        if (lost := self.without_gradient()) != self.untrained:  # torch would silently skip them
            raise RuntimeError(f"{len(lost)} parameters have no gradient, but had one before: {', '.join(lost[:4])}")
        gradients = {p: local_tensor(p.grad) for p in self.name_of if p.grad is not None}
        for dimension in self.dimensions:
            dimension.combine(gradients)
        if self.tied is not None:
            self.sum_gradients([gradients[self.tied]], self.tied_group)

    def sum_gradients(self, gradients: list[Tensor], group: dist.ProcessGroup) -> None:
        """Sums gradients over a group, in place. Offloaded gradients are summed on the GPU."""
        here = [gradient.to(self.device) for gradient in gradients] if self.offloads else gradients
        sum_in_place(here, group)
        if self.offloads and gradients:
            torch._foreach_copy_(gradients, here)

    def gradient_norm(self) -> Tensor:
        """Returns the gradient norm.

        Each rank divides its squared sums by the number of replicas, so that one all-reduce counts each element once.
        """
        self.combine_gradients()
        by_share: dict[float, list[Tensor]] = {}
        for parameter in self.name_of:
            if parameter.grad is not None:
                by_share.setdefault(self.share_of(parameter), []).append(local_tensor(parameter.grad))
        square = torch.zeros((), device=self.device)
        for share, gradients in by_share.items():
            square += total_norm(gradients).square().to(self.device) * share
        dist.all_reduce(square)
        return square.sqrt()

    def share_of(self, parameter: nn.Parameter) -> float:
        is_copy = parameter is self.tied and self.mesh.rank("pp") == self.stage_owners[-1]
        return 0.0 if is_copy else 1 / self.copies_of[parameter]

    def of_all_stages(self, mine: TensorGroup) -> TensorGroup:
        """Returns the tensors from all stages in model order. mine: the tensors on this rank.

        Fetching a tensor broadcasts it to the whole pipeline.
        """
        if self.sizes.pp == 1:
            return mine
        of_rank: list = [None] * self.sizes.pp
        dist.all_gather_object(of_rank, (mine.shapes, mine.dtypes), group=self.pp_group)
        owners = {name: rank for rank in reversed(range(self.sizes.pp)) for name in of_rank[rank][0]}
        shapes = {name: of_rank[owners[name]][0][name] for name in sorted(owners, key=self.place_of)}
        dtypes = {name: of_rank[owners[name]][1][name] for name in shapes}

        def gather(name: str) -> Tensor:
            if owners[name] == self.mesh.rank("pp"):
                tensor = mine.gather(name).to(self.device).contiguous()
            else:
                tensor = torch.empty(shapes[name], dtype=dtypes[name], device=self.device)
            dist.broadcast(tensor, group=self.pp_group, group_src=owners[name])
            return tensor

        return TensorGroup(shapes, dtypes, gather)

    def place_of(self, name: str) -> tuple[int, str]:
        """Returns a sort key: parameters and their optimizer state in model order, then buffers."""
        parameter = name if name in self.places else name.rpartition(".")[0]
        return self.places.get(parameter, len(self.places)), name

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Loads only the tensors in this rank's stages."""
        mine = set(self.name_of.values())
        super().load(model, {name: optimizer[name] for name in optimizer if name.rpartition(".")[0] in mine})

    def replicas(self) -> list[ReplicaGroup]:
        """Returns the replicated weights: all weights for dp_replicate, unsplit ones for tp, and a tied embedding."""
        parts = {name: local_tensor(parameter.detach()) for parameter, name in self.name_of.items()}
        groups = [group for dimension in self.dimensions for group in dimension.replicas(parts)]
        if self.tied is not None:
            name = self.name_of[self.tied]
            groups.append((self.tied_group, {name: parts[name]}))
        return groups

    def describe(self) -> dict[str, Any]:
        facts = {"mesh": self.sizes.named(), "data_parallel_size": self.data_ranks, "no_sync": self.reduces_once}
        if self.sizes.pp > 1:
            facts |= {
                "schedule": self.config.pipeline.schedule,
                "pipeline_microbatches": self.microbatches,
                "parameters_of_stages": self.parameters_of_stages,
            }
        return super().describe() | facts


def model_problems(model_config: PreTrainedConfig, sizes: Sizes, schedule: str) -> list[str]:
    """Returns an error message for each dimension that can't split this model.

    Raises the same errors as `reference_of`.
    """
    kinds = dimensions_of(sizes).values()
    return [problem for kind in kinds if (problem := kind.model_problem(model_config, sizes, schedule))]


def separate_kinds(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Splits parameter groups by mesh, because fused and foreach kernels accept only one mesh per call."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for group in groups:
        kinds: dict[DeviceMesh | None, list[Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        optimizer.param_groups += [group | {"params": parameters} for parameters in kinds.values()]
    return optimizer


def reshard_without_backward(model: nn.Module, *_) -> None:
    """Frees gathered weights after a forward pass without gradients. Registered as a forward hook.

    Otherwise, they would be stale after the next update or after a swap with the averaged weights.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
