"""Base class for all strategies, also used directly for a single process and for DDP.

The strategy is selected with `accelerate launch --config_file accelerate_configs/X.yaml`. `Strategy` builds the
Accelerator, checks that accelerate runs the requested strategy, and defines the methods that the training loop and
checkpoints use. Memory and traffic estimates are in pretrain_tools/planning.

The accelerate configs work with and without GPUs. Without GPUs, processes communicate over gloo.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pretrain.config import RunConfig
from pretrain.errors import InputError
from pretrain.hardware import keep_freed_memory, memory_bytes, missing_bf16, unusable_gpu, use_all_cores
from pretrain.mesh_sizes import environment_flag
from pretrain.model.build import InitialWeights
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.averaging import WeightAverage
from pretrain.optim.optimizers import (
    OPTIMIZERS,
    OptimizerBuilder,
    describe_optimizer,
    load_optimizer_state,
    local_tensor,
    optimizer_state_by_name,
    state_problem,
    total_norm,
)
from pretrain.parallel.launcher import PRECISIONS, launched_strategy
from pretrain.parallel.ranks import Ranks, slow_host_group
from pretrain.parallel.rendezvous import choose_interface, join_nccl, renew_store
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.tensor_group import Shape, TensorGroup, load_parts

if TYPE_CHECKING:
    from pretrain.data.dispatch import Dispatcher

_Value = TypeVar("_Value")

FP16_CAPABILITY = (7, 0)
"""Minimum CUDA compute capability with fp16 tensor cores (V100, T4)."""
LOSS_TERMS = "loss_terms"
"""Name prefix of the loss terms' parameters."""
SCALE_LOSS = ("single", "ddp")
"""Strategies that can train in fp16."""


def device_type() -> str:
    """Returns 'cuda' if a GPU is visible, otherwise 'cpu'. ACCELERATE_USE_CPU forces 'cpu'.

    Raises InputError if there is a GPU that torch can't use.
    """
    if environment_flag("ACCELERATE_USE_CPU"):
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if problem := unusable_gpu():
        raise InputError(problem)
    return "cpu"


def resolve_precision(requested: str) -> str:
    """Resolves auto to bf16 if the device has bf16 matmuls, and otherwise to fp16 or fp32.

    fp16 is used on GPUs with tensor cores (eight times the fp32 speed on V100 and T4), with strategies that scale the
    loss. Raises InputError for unsupported precisions.
    """
    device = device_type()
    if requested == "fp8":
        from pretrain.model.fp8 import fp8_problem

        if problem := fp8_problem(device):
            raise InputError(problem)
    if requested == "fp16" and device == "cpu":
        raise InputError("precision: fp16 needs a GPU; use bf16, fp32, or auto, which chooses a supported one")
    if requested != "auto":
        return requested
    if not missing_bf16(device):
        return "bf16"
    has_fp16 = device == "cuda" and torch.cuda.get_device_capability() >= FP16_CAPABILITY
    return "fp16" if has_fp16 and launched_strategy() in SCALE_LOSS else "fp32"


class Strategy:
    """Base class for all strategies, and the strategy for a single process or data parallelism (DDP).

    The training loop calls `prepare`, and `load` when resuming. In each step, it calls `begin_step`, runs each
    micro-step's forward and backward pass inside `accumulate`, and calls `update`. All methods are collective: every
    rank must call them.
    """

    parameter_form: str = "whole"
    """Format of the parameters passed to the optimizer; see `OptimizerSpec.takes`."""
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    """Supported values of the recipe's precision."""
    compilations: tuple[str, ...] = ("auto", "none", "regional", "full")
    """Supported values of the recipe's compile setting."""
    holds_whole_model = True
    """True if each rank has all fp32 weights on its device."""

    sequence_parts = 1
    """Number of ranks that split each sequence and its targets."""
    part = 0
    """Index of this rank's chunk of each sequence."""
    head_parts = 1
    """Number of ranks that split the attention heads for the same tokens, evenly and in order."""
    head_part = 0
    """Index of this rank's share of the heads."""
    micro_batches_per_call = 1
    """Number of micro-batches per model call."""
    microbatches = 1
    """Number of microbatches per micro-step that run one after another, as in a pipeline."""
    dispatcher: "Dispatcher | None" = None
    """Sends sequences from the first rank to all ranks. None if each rank reads its own."""
    optimizer_built = ""
    """Description of the optimizer, set by `prepare`."""
    average: WeightAverage | None = None
    """Weight average, if enabled in the recipe."""
    untrained: list[str] | None = None
    """Names of this rank's parameters that had no gradient in the first step. None before the first update."""
    first_options: set[tuple[str, str]]
    """`group_options` before the first update. Steps may not change them, because checkpoints don't contain them."""
    before_step: tuple[Callable[[int], None], ...] = ()
    """Functions called before each step's first micro-step, with the number of micro-steps."""
    before_update: tuple[Callable[[], None], ...] = ()
    """Functions called when the gradients are complete but not yet clipped.

    ZeRO doesn't call them, because it doesn't expose these gradients.
    """
    after_update: tuple[Callable[[Tensor], None], ...] = ()
    """Functions called with `skipped` after every update, including skipped ones."""

    def __init__(self, precision: str, config: RunConfig | None = None):
        """Starts communication between the processes. `config` is only needed for training."""
        self.precision = precision
        self.config = config
        self.name = launched_strategy()
        renew_store()
        choose_interface()
        if device_type() == "cuda":
            join_nccl()
        self.accelerator = self.make_accelerator()
        self.device: torch.device = self.accelerator.device
        self.ranks = Ranks.of_launch()
        self.data_rank = self.ranks.rank
        """Index of this rank's share of the batch. Ranks that share a model replica read the same data."""
        self.data_ranks = self.ranks.count
        """Number of shares into which the batch is split."""
        self.loss_terms: nn.Module = nn.ModuleDict()
        """Modules trained by loss terms, set by `prepare`. Checkpoints store them separately from the model."""
        use_all_cores()  # even with a GPU: offloaded AdamW, initialization and export checks run on the CPU
        if self.device.type == "cpu":
            keep_freed_memory(memory_bytes(self.device) // 2)

    def dispatch_batches(self) -> None:
        """Makes the first rank read data for all ranks from now on."""
        from pretrain.data.dispatch import Dispatcher

        if self.ranks.count > 1:
            self.dispatcher = Dispatcher(self.ranks.gather(self.data_rank), self.ranks.rank, slow_host_group())

    def read(self, number: int, read: Callable[[int], np.ndarray]) -> np.ndarray:
        """Returns this rank's token IDs, read by this rank or the first one; see `Dispatcher.take`."""
        if self.dispatcher is None:
            return read(self.data_rank)
        return self.dispatcher.take(number, read).result()

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        """Returns error messages for the recipe settings that this strategy, called `name`, doesn't support."""
        optimizers = [config.optim.name]
        if cls.parameter_form not in OPTIMIZERS[config.optim.name].takes:
            # This imports every optimizer, so we only do it here.
            optimizers = [name for name, spec in OPTIMIZERS.items() if cls.parameter_form in spec.takes]
        given = {
            "optim.name": (config.optim.name, optimizers),
            "precision": (resolve_precision(config.precision), cls.precisions),
            "compile": (config.compile, cls.compilations),
        }
        return [
            f"{path}: {value} is not supported with {name}; use {' or '.join(allowed)}, or a strategy that supports "
            "it, such as ddp"
            for path, (value, allowed) in given.items()
            if value not in allowed
        ]

    def make_accelerator(self) -> Accelerator:
        """Builds the Accelerator. Raises RuntimeError if accelerate silently falls back to a different strategy."""
        return Accelerator(
            cpu=device_type() == "cpu",
            mixed_precision=PRECISIONS[self.precision],
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)],
        )

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> nn.Module:
        """Initializes the model on the device, builds the optimizer, and returns the module to call in training.

        Args:
            model: the model on the meta device.
            weights: the initial weights. Sharded models are filled unit by unit.
            build_optimizer: builds the optimizer from the (name, parameter) pairs that this rank updates.
        """
        if self.precision == "fp8":
            from pretrain.model.fp8 import use_fp8

            use_fp8(model.causal_lm)
        weights.fill(model.causal_lm, "")
        model.causal_lm.tie_weights()
        self.causal_lm = model.causal_lm
        self.loss_terms = model.loss_terms
        optimizer = self.optimizer_of_parameters(build_optimizer)
        with warnings.catch_warnings():  # accelerate still passes broadcast_buffers, which torch has renamed
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if isinstance(self.model, DistributedDataParallel):
            order_buckets(self.model)
        return self.model

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns (name, parameter) for all parameters that this rank updates."""
        named = [*self.causal_lm.named_parameters(), *self.loss_terms.named_parameters(prefix=LOSS_TERMS)]
        return [(name, parameter) for name, parameter in named if not parameter.is_meta]

    def optimizer_of_parameters(self, build_optimizer: OptimizerBuilder) -> torch.optim.Optimizer:
        """Builds the optimizer for this rank's parameters. Sets `name_of` to {parameter: name}."""
        named_parameters = self.trained_parameters()
        self.name_of = {parameter: name for name, parameter in named_parameters}
        self.spec = build_optimizer.spec
        optimizer = build_optimizer(named_parameters)
        if self.spec.shares_work and self.ranks.count > 1:
            from pretrain.optim.matrix_exchange import Holders

            optimizer.muon.copies = Holders(dist.group.WORLD, self.device)
        self.optimizer_built = describe_optimizer(optimizer)
        return optimizer

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        """Wraps a micro-step's forward and backward pass. Gradients are exchanged only in the last micro-step."""
        if is_last:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass. `loss` is already divided by the number of micro-steps."""
        self.accelerator.backward(loss)

    def begin_step(self, learning_rate: float, micro_steps: int) -> None:
        """Prepares a step with `micro_steps` forward and backward passes."""
        self.set_learning_rate(learning_rate)
        for call in self.before_step:
            call(micro_steps)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate before a step's first backward pass.

        It can't be set later, because some strategies update weights inside the last backward pass.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("learning_rate_scale", 1.0)

    def update(self, max_grad_norm: float | None) -> tuple[Tensor, Tensor]:
        """Clips the gradients, updates the weights, and clears the gradients.

        Skips the update if the gradient norm isn't finite. Returns (gradient norm before clipping, 1 if skipped else
        0) as tensors on the device, without waiting for it.
        """
        if self.untrained is None:
            self.untrained = self.without_gradient()
            self.first_options = group_options(self.inner_optimizer)
        grad_norm, skipped = self.clip_and_step(max_grad_norm)
        for call in self.after_update:
            call(skipped)
        return grad_norm, skipped

    def clip_and_step(self, max_grad_norm: float | None) -> tuple[Tensor, Tensor]:
        """Implements `update`, with the same arguments and results."""
        grad_norm = self.gradient_norm()
        for call in self.before_update:
            call()
        skipped = (~torch.isfinite(grad_norm)).float()
        divisor = None  # torch.nn.utils.clip_grad_norm_ would multiply by the inverse
        if max_grad_norm is not None:
            divisor = ((grad_norm + 1e-6) / max_grad_norm).clamp(min=1.0)
        inner = self.inner_optimizer
        scaler = self.accelerator.scaler
        if getattr(inner, "_step_supports_amp_scaling", False):
            # torch's GradScaler sets these attributes for fused kernels, and Muon and Adafactor also use them.
            # The kernels read both values on the device. They divide on the fly, which saves a pass over the
            # gradients, and skip the update if found_inf is 1. For offloaded parameters, torch would copy both values
            # to the CPU without waiting for the copies to finish, so we copy them here.
            device = inner.param_groups[0]["params"][0].device
            inner.grad_scale = divisor if divisor is None else divisor.to(device)
            inner.found_inf = skipped.to(device)
            inner.step()
        else:
            if divisor is not None and (gradients := self.gradients()):
                torch._foreach_div_(gradients, divisor.to(gradients[0].device))
            if not skipped.item():
                inner.step()
        if scaler is not None:  # fp16; scaler.step would wait for the device or not report skipped steps
            scaler.update()
        inner.zero_grad()
        return grad_norm, skipped

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer inside accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def gradient_norm(self) -> Tensor:
        """Returns the norm of the full gradient as a scalar on the device."""
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        return total_norm(self.gradients())

    def without_gradient(self) -> list[str]:
        """Returns the names of trainable parameters that have no gradient."""
        return [name for parameter, name in self.name_of.items() if parameter.requires_grad and parameter.grad is None]

    def gradients(self) -> list[Tensor]:
        """Returns this rank's gradient shards."""
        return [local_tensor(parameter.grad) for parameter in self.name_of if parameter.grad is not None]

    def share_of(self, parameter: nn.Parameter) -> float:
        """Returns this rank's weight in a sum over ranks that must count each element of a parameter once."""
        return 1 / self.ranks.count

    @property
    def dropout_rank(self) -> int:
        """Seed offset for dropout.

        Ranks that compute the same hidden states share one, so that they drop the same elements.
        """
        return self.data_rank

    def running_modules(self) -> list[nn.Module]:
        """Returns this rank's modules that run forward on each microbatch: the model, or pipeline stages."""
        return [self.model]

    def sum(self, tensor: Tensor, *, by_layer: bool = False) -> Tensor:
        """Sums a tensor over the ranks with different data, and returns the sum on all ranks.

        by_layer: each rank passes values for its own layers and zeros for all others.
        """
        return self.accelerator.reduce(tensor, reduction="sum")

    @property
    def reports_loss(self) -> bool:
        """True if this rank's loss counts. Among ranks that share a model replica, only one counts."""
        return True

    def describe(self) -> dict[str, Any]:
        """Describes the strategy in the run's record."""
        return {
            "strategy": self.name,
            "ranks": self.ranks.count,
            "device": self.device.type,
            "precision": self.precision,
            "threads": torch.get_num_threads(),
        }

    def of_all_stages(self, mine: TensorGroup) -> TensorGroup:
        """Returns the tensors from all pipeline stages. mine: the tensors on this rank."""
        return mine

    def model_tensors(self, *, averaged: bool = False) -> TensorGroup:
        """Returns the fp32 parameters and the saved buffers by HF name. Tied parameters are included once.

        averaged: return the average of the parameters.
        """
        weights = self.average.means if averaged else self.weights()
        return self.of_all_stages(TensorGroup.of(without_terms(weights) | self.saved_buffers()))

    def term_tensors(self, *, averaged: bool = False) -> TensorGroup:
        """Returns the loss terms' parameters or their average. The names begin with "loss_terms."."""
        weights = self.average.means if averaged else self.weights()
        return self.of_all_stages(TensorGroup.of(of_terms(weights)))

    def saved_buffers(self) -> dict[str, Tensor]:
        """Returns the persistent buffers, which checkpoints contain."""
        saved = self.causal_lm.state_dict().keys()
        return {
            name: buffer for name, buffer in self.causal_lm.named_buffers() if name in saved and not buffer.is_meta
        }

    def weights(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the fp32 weights, by name."""
        return {name: parameter for parameter, name in self.name_of.items()}

    def update_average(self, share: float) -> None:
        """Moves the average toward the weights by this share of the distance. A share of 1 starts the average."""
        if share == 1.0:
            self.average = WeightAverage(self.weights())
        else:
            self.average.update(self.weights(), share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Uses the averaged weights inside the context, and then restores the original weights bit for bit."""
        self.average.exchange(self.weights())
        try:
            yield
        finally:
            self.average.exchange(self.weights())

    def load_average(self, average: Mapping[str, Tensor]) -> None:
        """Loads unsharded tensors into the average."""
        self.average = WeightAverage(self.weights())
        load_parts(self.average.means, average)

    def optimizer_tensors(self) -> TensorGroup:
        """Returns the optimizer state, with names like '<parameter>.<state>'."""
        tensors = optimizer_state_by_name(self.inner_optimizer, self.name_of)
        return self.of_all_stages(TensorGroup.of(tensors, self.state_shapes()))

    def state_shapes(self) -> dict[str, Shape]:
        """Returns {'<parameter>.<state>': unsharded shape} for the parameters that this rank updates."""
        return {
            f"{name}.{key}": shape
            for name in self.name_of.values()
            for key, shape in self.spec.state_shapes(name).items()
        }

    def state_problem(self) -> str:
        """Returns an error if a checkpoint wouldn't contain this rank's whole optimizer state, otherwise ""."""
        if changed := group_options(self.inner_optimizer) - self.first_options:
            return (
                f"optim.name: {self.config.optim.name}: a step changes {', '.join(sorted(dict(changed)))} in the "
                "parameter groups, which checkpoints don't contain; keep it in the state of each parameter instead"
            )
        found = self.actual_state_shapes().items()
        return next(filter(None, (state_problem(self.config.optim.name, self.spec, *of_one) for of_one in found)), "")

    def actual_state_shapes(self) -> dict[str, dict[str, Shape]]:
        """Returns {parameter: {key: unsharded shape}} for this rank's optimizer state."""
        return {
            self.name_of[parameter]: {
                key: tuple(getattr(value, "shape", ())) for key, value in state.items() if value is not None
            }
            for parameter, state in self.inner_optimizer.state.items()
            if state
        }

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        """Loads unsharded tensors into the model, its loss terms and the optimizer."""
        load_parts(self.weights() | self.saved_buffers(), model)
        load_optimizer_state(self.inner_optimizer, self.spec, self.name_of, optimizer)

    def state(self) -> dict[str, float]:
        """Returns additional state for an exact resume, such as the fp16 loss scale."""
        if self.accelerator.scaler is None:
            return {}
        saved = self.accelerator.scaler.state_dict()
        return {"scale": saved["scale"], "growth_tracker": saved["_growth_tracker"]}

    def load_state(self, state: Mapping[str, float]) -> None:
        if self.accelerator.scaler is not None and state:
            saved = {"scale": state["scale"], "_growth_tracker": state["growth_tracker"]}
            self.accelerator.scaler.load_state_dict(self.accelerator.scaler.state_dict() | saved)

    def replicas(self) -> list[ReplicaGroup]:
        """Returns the weights that must be bitwise equal on several ranks; see `replica_differences`."""
        if self.ranks.count == 1:
            return []
        return [(None, self.weights())]


def group_options(optimizer: torch.optim.Optimizer) -> set[tuple[str, str]]:
    """Returns the name and value of everything in an optimizer's parameter groups except the parameters."""
    return {(key, str(value)) for group in optimizer.param_groups for key, value in group.items() if key != "params"}


def of_terms(by_name: Mapping[str, _Value]) -> dict[str, _Value]:
    """Returns the entries for the loss terms' parameters."""
    return {name: value for name, value in by_name.items() if name.startswith(f"{LOSS_TERMS}.")}


def without_terms(by_name: Mapping[str, _Value]) -> dict[str, _Value]:
    """Returns the entries for everything except the loss terms' parameters."""
    return {name: value for name, value in by_name.items() if not name.startswith(f"{LOSS_TERMS}.")}


def order_buckets(model: DistributedDataParallel) -> None:
    """Makes DDP order its buckets before the first step, with a dummy backward pass.

    DDP normally orders its buckets after the first backward pass, in the order in which gradients arrive. With three
    or more ranks, a gradient's position in its bucket determines the summation order, and therefore the rounding.
    Without this function, the first step after a resume would be rounded differently than in an uninterrupted run.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = torch.zeros((), device=parameters[0].device)
    # The backward pass visits the sum's terms in reverse, so the parameter added last gets its gradient first, like
    # the last layer. Vectors come first because a norm gets its gradient after the matrices in its block, although the
    # model lists it later.
    for parameter in sorted(parameters, key=lambda parameter: parameter.dim() > 1):
        loss = loss + 0 * parameter.sum()
    model.reducer.prepare_for_backward([])
    loss.backward()
    model.zero_grad()
    # torch calls this private method in the first forward pass after a backward pass.
    if not model.reducer._rebuild_buckets():
        raise RuntimeError("DDP did not reorder its buckets, so a resumed run would differ from an uninterrupted one")
