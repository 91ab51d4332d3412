"""Optimizer interface, AdamW, parameter groups, optimizer state in checkpoints, and the gradient norm."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pretrain.config import Optim
from pretrain.errors import InputError
from pretrain.model.build import embedding_parameter_names, transposed_names
from pretrain.model.routers import expert_matrices, expert_parameters, routers_of
from pretrain.optim.scaling_laws import MIN_BATCH_FACTOR, scaling_law_learning_rate
from pretrain.registry import OPTIMIZERS

if TYPE_CHECKING:
    from pretrain.model.width_roles import WidthRole

NamedParameters = list[tuple[str, torch.nn.Parameter]]
MAX_SERIAL_SUM = 2**16
"""Maximum number of squares to sum sequentially in fp32 on a CPU.

The error is 2e-7 for this many squares, and 1e-5 for a million.
"""


HEADS = ("lm_head.", "embed_out.", "output.")
"""Prefixes of output heads in models whose `get_output_embeddings` doesn't return them."""


@dataclass(frozen=True)
class ModelShapes:
    """Unsharded shapes and types of a model's parameters, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    embeddings: frozenset[str]
    heads: frozenset[str] = frozenset()
    """Names of the output head's parameters."""
    transposed: frozenset[str] = frozenset()
    """Names of weights with the shape (inputs, outputs), as in GPT-2."""
    experts: frozenset[str] = frozenset()
    """Names of the routed experts' parameters."""
    roles: "Mapping[str, WidthRole]" = field(default_factory=dict)
    """muP roles, which determine each parameter's learning rate. Empty without muP."""
    width_ratio: float = 1.0
    """Model width divided by `optim.mup_base_width`."""
    group_rates: Mapping[str, float] = field(default_factory=dict)
    """{group: learning rate relative to the run's}, from `optim.group_learning_rates`."""
    stacks: Mapping[str, tuple[int | None, bool]] = field(default_factory=dict)
    """Expert matrices, as returned by `routers.expert_matrices`."""

    @classmethod
    def of(
        cls,
        causal_lm: PreTrainedModel,
        settings: Optim | None = None,
        learning_rate: float | None = None,
        loss_terms: nn.Module | None = None,
    ) -> "ModelShapes":
        """Reads the shapes from an unsharded model, which may be on the meta device.

        Raises InputError if muP doesn't support the model.

        Args:
            learning_rate: the run's peak learning rate. If None, `optim.group_learning_rates` is ignored.
            loss_terms: modules trained by the loss terms, as in `LossTerms.trained`.
        """
        whole = nn.Module()
        whole.causal_lm = causal_lm
        whole.loss_terms = loss_terms or nn.ModuleDict()

        def named(name: str) -> str:
            return name.removeprefix("causal_lm.")

        shapes = {named(name): tuple(parameter.shape) for name, parameter in whole.named_parameters()}
        experts = [
            f"{router.name.rpartition('.')[0]}.{name}"
            for router in routers_of(whole)
            for name in expert_parameters(router)[0]
        ]
        of_head = set((causal_lm.get_output_embeddings() or nn.Module()).parameters())
        heads = [name for name, p in whole.named_parameters() if p in of_head or named(name).startswith(HEADS)]
        names = embedding_parameter_names(whole), heads, transposed_names(whole), experts
        stacks = {named(name): kind for name, kind in expert_matrices(whole).items()}
        known = cls(shapes, *(frozenset(map(named, found)) for found in names), stacks=stacks)
        if settings is not None and learning_rate is not None:
            rates = {group: rate / learning_rate for group, rate in settings.group_learning_rates.items()}
            known = replace(known, group_rates=rates)
        if settings is None or settings.parametrization == "standard":
            return known
        from pretrain.model.width_roles import hidden_width, width_roles

        ratio = hidden_width(causal_lm.config) / settings.mup_base_width
        return replace(known, roles=width_roles(causal_lm.config), width_ratio=ratio)

    def rate_scale(self, name: str, *, orthogonalized: bool = False) -> float:
        """Returns a parameter's muP learning-rate factor."""
        role = self.roles.get(name)
        return 1.0 if role is None else role.rate_scale(self.width_ratio, orthogonalized=orthogonalized)

    def group_of(self, name: str) -> str:
        """Returns a parameter's group in `optim.group_learning_rates`."""
        if name in self.embeddings:
            return "embedding"
        if name in self.heads:
            return "head"
        return "matrices" if self.is_hidden_matrix(name) else "scalars"

    def decays(self, name: str) -> bool:
        """Returns True if weight decay applies to a parameter. Embeddings, norms and biases aren't decayed."""
        is_vectors = name.endswith(("_bias", "A_log"))  # stacked expert biases, and Mamba's decay rates
        return len(self.shapes[name]) >= 2 and name not in self.embeddings and not is_vectors

    def is_hidden_matrix(self, name: str) -> bool:
        """Returns True if a parameter is a hidden matrix, or a stack of them (experts)."""
        is_matrix = len(self.shapes[name]) == 2 or name in self.stacks
        return self.decays(name) and is_matrix and name not in self.heads


@dataclass(frozen=True)
class OptimizerSpec(ABC):
    """Base class for optimizers: creates the optimizer and describes its state and capabilities.

    Subclasses are registered in `registry.OPTIMIZERS`. Their `Options` class defines the allowed `optim.options`.
    """

    model: ModelShapes

    takes = ("whole",)
    """Supported values of a strategy's `parameter_form`.

    whole: unsharded tensors (single, ddp). sharded: DTensors. pieces: slices of flat tensors that contain many
    parameters (ZeRO).
    """
    state_is_whole = False
    """True if the state is replicated on every rank instead of sharded."""
    pads_state = False
    """True if sharded state may have more elements than in `state_shapes`."""
    shares_work = False
    """True if ranks with parameter replicas share the work of an update (`Muon.copies`)."""
    runs_from_disk = False
    """True if the optimizer supports DeepSpeed's NVMe offload."""
    relative_learning_rate = 1.0
    """Usual peak learning rate relative to AdamW's."""
    min_batch_factor = MIN_BATCH_FACTOR
    """Lower limit for the batch-size factor in `scaling_law_learning_rate`."""
    updates_in_bf16 = False
    """True if updates are computed in bf16 on devices with bf16 matmuls, even with `precision: fp32`."""
    clips_heads = False
    """True if the optimizer supports `optim.muon.qk_clip`."""

    Options = None
    """Subclass of config.Section for `optim.options`. None if there are no options."""

    def options(self, settings: Optim) -> Any:
        """Returns the validated `optim.options`."""
        return self.Options.model_validate(settings.options)

    @classmethod
    def auto_learning_rate(cls, parameters: float, tokens_per_step: float) -> float:
        """Returns the peak learning rate for `learning_rate: auto`."""
        return scaling_law_learning_rate(parameters, tokens_per_step, cls.relative_learning_rate, cls.min_batch_factor)

    def problems(self, settings: Optim, device_type: str) -> list[str]:
        """Lists reasons why the optimizer doesn't support this model, these settings or this device."""
        return []

    @abstractmethod
    def make(
        self, parameters: NamedParameters, settings: Optim, learning_rate: float, seed: int, device_type: str
    ) -> torch.optim.Optimizer:
        """Creates the optimizer, usually with parameter groups from `groups`."""

    @abstractmethod
    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Returns {key: unsharded shape} for a parameter's state. Scalars have the shape ()."""

    def placed(self, key: str, value: torch.Tensor, parameter: torch.Tensor, group: dict) -> torch.Tensor | int:
        """Moves saved state to the parameter's device. `step` stays on the CPU unless the optimizer is fused."""
        if key == "step" and not group.get("fused"):
            return value.clone()
        return value.to(parameter.device, copy=True)

    def groups(self, parameters: NamedParameters, weight_decay: float) -> list[dict]:
        """Creates parameter groups, one for each combination of weight decay and learning rate."""
        decayed = [(name, parameter) for name, parameter in parameters if self.model.decays(name)]
        others = [(name, parameter) for name, parameter in parameters if not self.model.decays(name)]
        return self.groups_by_rate(decayed, weight_decay) + self.groups_by_rate(others, 0.0)

    def groups_by_rate(
        self, parameters: NamedParameters, weight_decay: float, *, orthogonalized: bool = False
    ) -> list[dict]:
        """Creates one parameter group per learning-rate scale.

        Each step decays a weight by learning rate x weight decay. The weight decay is divided by the muP scale, so
        that muP doesn't change the decay per step. `optim.group_learning_rates` does change it.
        """
        groups: dict[tuple[float, float], dict] = {}
        for name, parameter in parameters:
            by_width = self.model.rate_scale(name, orthogonalized=orthogonalized)
            scale = by_width * self.model.group_rates.get(self.model.group_of(name), 1.0)
            own = {"params": [], "weight_decay": weight_decay / by_width}
            groups.setdefault((by_width, scale), own | ({"learning_rate_scale": scale} if scale != 1 else {}))
            groups[by_width, scale]["params"].append(parameter)
        return list(groups.values())


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), with torch's fused kernel on CPU and CUDA."""

    takes = ("whole", "sharded", "pieces")
    runs_from_disk = True

    def make(self, parameters, settings, learning_rate, seed, device_type) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self.groups(parameters, settings.weight_decay),
            lr=learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=device_type in ("cpu", "cuda"),
        )

    def state_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        shape = self.model.shapes[name]
        return {"step": (), "exp_avg": shape, "exp_avg_sq": shape}


@dataclass(frozen=True)
class OptimizerBuilder:
    """Creates the recipe's optimizer for (name, parameter) pairs."""

    spec: OptimizerSpec
    settings: Optim
    learning_rate: float
    seed: int
    device_type: str

    def __call__(self, parameters: NamedParameters) -> torch.optim.Optimizer:
        name = f"optim.name: {self.settings.name}"
        made = self.spec.make(parameters, self.settings, self.learning_rate, self.seed, self.device_type)
        if not isinstance(made, torch.optim.Optimizer):
            raise InputError(f"{name}: make must return a torch.optim.Optimizer, got {type(made).__name__}")
        if hasattr(made, "eval"):
            raise InputError(
                f"{name}: {type(made).__name__} has eval(), but optimizers with separate weights for evaluation are "
                "not supported; use averaging"
            )
        held = {parameter for group in made.param_groups for parameter in group["params"]}
        if left := [own for own, parameter in parameters if parameter.requires_grad and parameter not in held]:
            raise InputError(
                f"{name}: make left out {len(left)} of {len(parameters)} parameters ({', '.join(left[:4])}), which "
                "would not be trained; add them to the optimizer, for example with self.groups"
            )
        return made


def optimizer_builder(
    settings: Optim,
    causal_lm: torch.nn.Module,
    learning_rate: float,
    *,
    seed: int,
    device_type: str,
    loss_terms: nn.Module | None = None,
) -> OptimizerBuilder:
    """Returns a builder for the recipe's optimizer. Raises InputError if `OptimizerSpec.problems` finds any.

    Args:
        causal_lm: the unsharded model, which may be on the meta device.
        loss_terms: modules trained by the loss terms. Their parameter names start with "loss_terms.".
    """
    spec = OPTIMIZERS[settings.name](ModelShapes.of(causal_lm, settings, learning_rate, loss_terms))
    if problems := spec.problems(settings, device_type):
        raise InputError(*problems)
    return OptimizerBuilder(spec, settings, learning_rate, seed, device_type)


def optimizer_problems(settings: Optim, causal_lm: PreTrainedModel, device_type: str) -> list[str]:
    """Lists reasons why the recipe's optimizer doesn't support this model or this device.

    causal_lm: the unsharded model, which may be on the meta device.
    """
    try:
        shapes = ModelShapes.of(causal_lm, settings)
    except InputError as error:
        return error.problems
    spec = OPTIMIZERS[settings.name](shapes)
    problems = spec.problems(settings, device_type)
    if settings.muon.qk_clip and not spec.clips_heads:
        problems.append(
            f"optim.muon.qk_clip: requires optim.name: muon, got {settings.name}; use muon, or set qk_clip to null"
        )
    groups = set(map(shapes.group_of, shapes.shapes))
    problems += [
        f"optim.group_learning_rates.{group}: this model has no parameters in this group; omit it (a tied head is in "
        f"embedding); available: {', '.join(sorted(groups))}"
        for group in settings.group_learning_rates
        if group not in groups
    ]
    return problems


def parameter_dtype(settings: Optim) -> torch.dtype:
    """Returns the dtype of the trained parameters: bf16 with stochastic rounding, otherwise fp32."""
    return torch.bfloat16 if settings.stochastic_rounding else torch.float32


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Describes an optimizer, for example 'AdamW (fused), weight decay on 5,933,000 of 5,934,300 parameters'."""
    inner = getattr(optimizer, "optimizer", optimizer)
    decayed = others = 0
    for group in inner.param_groups:
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in group["params"])  # parameters are empty in ZeRO-3
        if group["weight_decay"]:
            decayed += elements
        else:
            others += elements
    fused = " (fused)" if any(group.get("fused") for group in inner.param_groups) else ""
    return f"{type(inner).__name__}{fused}, weight decay on {decayed:,} of {decayed + others:,} parameters"


def optimizer_state_by_name(
    optimizer: torch.optim.Optimizer, name_of: Mapping[torch.Tensor, str]
) -> dict[str, torch.Tensor]:
    """Returns {'<parameter>.<key>': tensor} for the whole optimizer state. Numbers become 0-dim tensors."""
    return {
        f"{name_of[parameter]}.{key}": value if torch.is_tensor(value) else torch.tensor(value)
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None
    }


def state_problem(optimizer_name: str, spec: OptimizerSpec, name: str, found: Mapping[str, tuple[int, ...]]) -> str:
    """Returns the error if a parameter's state doesn't match `OptimizerSpec.state_shapes`, otherwise "".

    A checkpoint of this state couldn't be loaded.

    found: {key: unsharded shape}; empty before the first update.
    """
    declared = spec.state_shapes(name)
    if not found or declared == found or (spec.pads_state and declared.keys() == found.keys()):
        return ""
    return (
        f"optim.name: {optimizer_name}: state_shapes({name!r}) returns {declared}, but after the first step, the "
        f"parameter's state is {dict(found)}; return these keys and shapes"
    )


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    spec: OptimizerSpec,
    name_of: Mapping[torch.Tensor, str],
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping] | None = None,
) -> None:
    """Loads saved state into an optimizer that hasn't taken a step.

    Does nothing if `tensors` is empty, as in a checkpoint saved before the first update. Raises InputError if state is
    missing, unexpected or has the wrong shape.

    groups: parameter groups to use instead of the optimizer's own.
    """
    if not tensors:
        return
    shapes = {}
    places = {}
    for group in optimizer.param_groups if groups is None else groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                for key, shape in spec.state_shapes(name_of[parameter]).items():
                    name = f"{name_of[parameter]}.{key}"
                    shapes[name] = shape
                    places[name] = (parameter, group, key)
    # Otherwise, a parameter without saved state would silently start from zero.
    check_state(type(optimizer).__name__, shapes, tensors)
    for name, (parameter, group, key) in places.items():
        value = tensors[name] if spec.state_is_whole else divided_like(parameter, tensors[name])
        optimizer.state[parameter][key] = spec.placed(key, value, parameter, group)


def check_state(
    optimizer_name: str, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Raises InputError if any state is missing, unexpected or has the wrong shape."""
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    reshaped = [n for n in wanted.keys() & tensors.keys() if tuple(tensors[n].shape) != wanted[n]]
    found = {"missing": missing, "unexpected": unexpected, "with the wrong shape": sorted(reshaped)}
    problems = [f"{len(names)} {kind} ({', '.join(names[:4])})" for kind, names in found.items() if names]
    if problems:
        raise InputError(
            f"the saved optimizer state doesn't match {optimizer_name} on this model: {'; '.join(problems)}; "
            "resume with the same optimizer and model"
        )


def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the L2 norm of all gradients as an fp32 scalar (a DTensor if the gradients are DTensors)."""
    # On a CPU, the squares of a large tensor are summed sequentially, with an error of 1e-3 for 25 million elements.
    # Reducing rows first avoids this. For bf16 gradients, a norm computed in bf16 would have an error of 1%.
    parts = [
        torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)
        if gradient.device.type == "cpu" and gradient.dim() > 1 and gradient.numel() > MAX_SERIAL_SUM
        else gradient
        for gradient in gradients
    ]
    if not parts:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard as a plain tensor with the same storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def divided_like(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Shards `whole` like the parameter. Returns it unchanged if the parameter isn't sharded or the shapes differ."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    from pretrain.optim.tiles import local_part

    part = local_part(whole, parameter).to(parameter.to_local().device)
    return sharded_like(parameter, part, tuple(whole.shape))


def sharded_like(parameter: torch.Tensor, local: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Wraps this rank's shard in a DTensor with the parameter's placements, if the parameter is a DTensor.

    shape: unsharded shape.
    """
    if not isinstance(parameter, DTensor):
        return local
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
