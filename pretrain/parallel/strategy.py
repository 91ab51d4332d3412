"""What the loop trains with and never looks behind: one process or DDP here, the other strategies in subclasses.

`accelerate launch --config_file accelerate_configs/X.yaml` chooses; `Strategy` builds the Accelerator, checks that
what runs is what was asked for, and gives the loop the verbs it needs: prepare, accumulate, backward, update, sum.
It also declares what a plan needs: its layout, memory and traffic.

The same launcher files serve machines with and without GPUs: without one, processes communicate over gloo.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from pretrain.config import RunConfig
from pretrain.data.vocabulary import planned_model_config
from pretrain.errors import InputError
from pretrain.hardware import keep_freed_memory, missing_bf16, unusable_gpu, use_all_cores
from pretrain.memory.parts import FP32, Memory, PlannedRun, Work, at_peak
from pretrain.model.fp8 import fp8_problem, use_fp8
from pretrain.model.initial_weights import InitialWeights
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.averaging import WeightAverage
from pretrain.optim.gradient_norm import total_norm
from pretrain.optim.matrix_exchange import Holders
from pretrain.optim.muon import MuonWithAdamW
from pretrain.optim.optimizers import (
    OPTIMIZERS,
    OptimizerSpec,
    describe_optimizer,
    load_optimizer_state,
    optimizer_state_by_name,
)
from pretrain.parallel.launcher import PRECISIONS, environment_flag, processes_launched
from pretrain.parallel.layout import Layout, StepTraffic
from pretrain.parallel.ranks import Ranks, slow_host_group
from pretrain.parallel.rendezvous import choose_interface, meet_afresh
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.tensor_group import ShardedState, TensorGroup, load_parts

if TYPE_CHECKING:
    from pretrain.data.dispatch import Dispatcher


def device_type() -> str:
    """'cuda' where a GPU is visible, else 'cpu', also on request (accelerate's ACCELERATE_USE_CPU).

    Raises InputError for a GPU that torch cannot use.
    """
    if environment_flag("ACCELERATE_USE_CPU"):
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if problem := unusable_gpu():
        raise InputError(problem)
    return "cpu"


def resolve_precision(requested: str) -> str:
    """auto becomes bf16 where the device multiplies in bf16, else fp32. Raises InputError for what does not run."""
    device = device_type()
    if requested == "fp8" and (problem := fp8_problem(device)):
        raise InputError(problem)
    if requested == "fp16" and device == "cpu":
        raise InputError("precision: fp16 needs a GPU; use bf16, fp32, or auto, which takes what the device has")
    if requested != "auto":
        return requested
    return "fp32" if missing_bf16(device) else "bf16"


OptimizerBuilder = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
"""(name, parameter) pairs to an optimizer for them: see `optimizers.optimizer_builder`."""


class Strategy:
    """The strategy that runs: one process, or data parallel (DDP). The others are subclasses.

    The loop calls, in this order: prepare, load (when it continues a run), then for every step set_learning_rate,
    accumulate with the forward pass and backward in it for every micro-step, update. All ranks call together.
    """

    parameter_form: str = "whole"
    """In which the optimizer is given parameters; see `OptimizerSpec.takes`."""
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    compilations: tuple[str, ...] = ("auto", "none", "regional", "full")
    """What of the recipe's precision and compile runs under this strategy."""
    holds_whole_model = True
    """Whether each process has all fp32 weights on its device."""

    def __init__(self, precision: str, config: RunConfig | None = None):
        """Starts the processes' communication; `config` may be None where nothing is trained."""
        self.precision = precision
        self.config = config
        self.name = self.requested()
        meet_afresh()
        choose_interface()
        self.accelerator = self.make_accelerator()
        self.device: torch.device = self.accelerator.device
        self.ranks = Ranks.of_launch()
        self.data_rank, self.data_ranks = self.ranks.rank, self.ranks.count
        """Which part of the batch this rank reads, of how many. Ranks that share one model's work share a part."""
        self.sequence_parts: int = 1
        """How many ranks share each sequence, and the targets in it."""
        self.part: int = 0
        """Which part of each sequence is here."""
        self.micro_batches_per_call: int = 1
        """How many times batch.sequences_per_micro_batch one call of the model takes."""
        self.dispatcher: Dispatcher | None = None
        """What hands this process its windows; None: it reads them itself."""
        self.optimizer_built = ""
        """A description, once prepared."""
        self.average: WeightAverage | None = None
        """Of the weights, if there is one."""
        use_all_cores()  # beside a GPU too: an offloaded AdamW, initialisation and export checks compute on the host
        if self.device.type == "cpu":
            keep_freed_memory()

    def dispatch_batches(self) -> None:
        """From here on the first process reads for all."""
        from pretrain.data.dispatch import Dispatcher

        if self.ranks.count > 1:
            self.dispatcher = Dispatcher(self.ranks.gather(self.data_rank), self.ranks.rank, slow_host_group())

    def read(
        self, number: int, shape: tuple[int, ...], dtype: np.dtype | type, read: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        """The ids of this process' data rank, by whoever reads them; the arguments are those of `Dispatcher.take`."""
        if self.dispatcher is None:
            return read(self.data_rank)
        return self.dispatcher.take(number, shape, dtype, read).result()

    @classmethod
    def requested(cls) -> str | None:
        """Name of this strategy as the launcher's environment asks for it; None where it does not."""
        return "ddp" if processes_launched() > 1 else "single"

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        """What in the recipe this strategy, called `name`, cannot run."""
        optimizers = [name for name, spec in OPTIMIZERS.items() if cls.parameter_form in spec.takes]
        given = {
            "optim.name": (config.optim.name, optimizers),
            "precision": (resolve_precision(config.precision), cls.precisions),
            "compile": (config.compile, cls.compilations),
        }
        rounding = config.optim.stochastic_rounding and cls.parameter_form != "whole"
        problems = [f"optim.stochastic_rounding: does not run under {name}; it does under single and ddp"]
        return (problems if rounding else []) + [
            f"{path}: {value} does not run under {name}; choose {' or '.join(allowed)}, or a strategy "
            f"that runs it, as ddp does"
            for path, (value, allowed) in given.items()
            if value not in allowed
        ]

    @classmethod
    def layout(cls, name: str, ranks: int, machines: int = 1) -> Layout:
        """How the launcher file of this name, as it is shipped, divides a run."""
        problem = "runs on one GPU" if name == "single" else "needs more than one GPU"
        return Layout(name, ranks, machines, problem=problem if (name == "single") != (ranks == 1) else None)

    @classmethod
    def layouts(cls, name: str, ranks: int, machines: int = 1) -> list[Layout]:
        """Every way in which this file can divide a run by the launcher's options, the fastest first."""
        return [cls.layout(name, ranks, machines)]

    @classmethod
    def launched_layout(cls, name: str) -> Layout:
        """How the processes that were launched divide a run."""
        return cls.layout(name, processes_launched())

    @classmethod
    def micro_batches(cls, layout: Layout) -> int:
        """How many micro-batches all processes take together in a micro-step."""
        return layout.ranks

    @classmethod
    def parts_of_micro_batch(cls, config: RunConfig) -> int:
        """What batch.sequences_per_micro_batch has to be a multiple of."""
        return 1

    @classmethod
    def footprint(cls, run: PlannedRun, layout: Layout, sequences: int) -> Memory:
        """Memory of the process that needs most, with so many sequences per micro-batch."""
        work = run.work(sequences, cls.micro_batches(layout))
        return replicated(work, work.update_bytes("whole", layout.ranks), is_ddp=layout.ranks > 1)

    @classmethod
    def traffic(cls, layout: Layout, step: StepTraffic) -> tuple[float, float]:
        """(seconds in which a GPU sends in a step, part of the computing behind which that can hide).

        Ring collectives: a sum of B bytes over n processes moves 2 B (n - 1) / n, a gather or a scatter half of that.
        """
        # Summed in the last micro-step, during its backward pass.
        return 2 * FP32 * step.sizes.total * layout.ring / step.across, 2 / 3 / step.micro_steps

    @classmethod
    def exchange_seconds(cls, layout: Layout, step: StepTraffic, optimizer: OptimizerSpec) -> float:
        """Of matrices for an update, with nothing to hide behind."""
        sent = optimizer.exchanged_bytes(cls.parameter_form, layout.per_group)
        return sent / (step.inside if layout.groups > 1 else step.across)

    @classmethod
    def idle(cls, config: RunConfig, layout: Layout) -> float:
        """Time in which processes wait for each other's results, relative to the time they compute."""
        return 0.0

    @classmethod
    def reduces_by_choice(cls, name: str, precision: str) -> bool:
        """Whether batch.reduce_once trades memory for communication; elsewhere it is so anyway, or refused."""
        return False

    @classmethod
    def offload_seconds(cls, layout: Layout, parameters: int) -> float:
        """What an update takes longer because it is not on the GPU."""
        return 0.0

    @classmethod
    def largest_footprint(cls, run: PlannedRun, layout: Layout, sequences: int) -> Memory:
        """`footprint` in the stage of the run that needs most. sequences: of a micro-batch at data.sequence_length."""
        stages = [cls.footprint(stage, layout, rows) for stage, rows in run.stages(sequences)]
        return max(stages, key=lambda memory: memory.total)

    def planned_memory(self, config: RunConfig) -> Memory:
        """What a plan says of this recipe as it is launched here."""
        run = PlannedRun(config, planned_model_config(config), self.precision, self.device.type)
        return self.footprint(run, self.running_layout(), config.batch.sequences_per_micro_batch)

    def running_layout(self) -> Layout:
        return self.layout(self.name, self.ranks.count)

    def make_accelerator(self) -> Accelerator:
        """Raises RuntimeError where accelerate, as it does silently, falls back to another strategy."""
        return Accelerator(
            cpu=device_type() == "cpu",
            mixed_precision=PRECISIONS[self.precision],
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)],
        )

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Gives the model its weights, places it and builds the optimizer; returns the model to call from now on.

        Args:
            model: on the meta device; its parameters have no values yet.
            weights: what fills it, unit by unit where the strategy shards.
            build_optimizer: makes the optimizer of the (name, parameter) pairs this process updates.
        """
        if self.precision == "fp8":
            use_fp8(model.causal_lm)
        weights.fill(model.causal_lm, "")
        model.causal_lm.tie_weights()
        self.causal_lm = model.causal_lm
        optimizer = self.optimizer_of_parameters(build_optimizer)
        with warnings.catch_warnings():  # torch renames broadcast_buffers; accelerate passes the old name
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if isinstance(self.model, DistributedDataParallel):
            order_buckets(self.model)
        return self.model

    def optimizer_of_parameters(self, build_optimizer: OptimizerBuilder) -> torch.optim.Optimizer:
        """The optimizer of the parameters that are here, which have their names from now on."""
        named_parameters = [(n, p) for n, p in self.causal_lm.named_parameters() if not p.is_meta]
        self.name_of = {parameter: name for name, parameter in named_parameters}
        optimizer = build_optimizer(named_parameters)
        if isinstance(optimizer, MuonWithAdamW):
            optimizer.muon.copies = self.copies()
        self.optimizer_built = describe_optimizer(optimizer)
        return optimizer

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        """Around the forward and backward of a micro-step; ranks exchange gradients in the last one alone."""
        if is_last:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of `loss` (already divided by the number of micro-steps)."""
        self.accelerator.backward(loss)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Before the first backward of a step: some strategies update inside the last one."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("learning_rate_scale", 1.0)

    def update(self, max_grad_norm: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips, steps and clears the gradients; a step whose gradient norm is not finite changes nothing.

        Returns (gradient norm before clipping, 1 if the step was skipped else 0), both on the device: nothing waits.
        """
        grad_norm = self.gradient_norm()
        skipped = (~torch.isfinite(grad_norm)).float()
        divisor = None  # such that torch.nn.utils.clip_grad_norm_ would multiply by its inverse
        if max_grad_norm is not None:
            divisor = ((grad_norm + 1e-6) / max_grad_norm).clamp(min=1.0)
        inner, scaler = self.inner_optimizer, self.accelerator.scaler
        if getattr(inner, "_step_supports_amp_scaling", False):
            # Fused kernels, Muon and Adafactor read both on the device: they divide as they go, a pass over the
            # gradients less, and leave everything as it is where found_inf is 1. Offloaded parameters are on the host:
            # torch would copy both there without waiting for the copies.
            device = inner.param_groups[0]["params"][0].device
            inner.grad_scale, inner.found_inf = divisor if divisor is None else divisor.to(device), skipped.to(device)
            inner.step()
        else:
            if divisor is not None and (gradients := self.gradients()):
                torch._foreach_div_(gradients, divisor.to(gradients[0].device))
            if not skipped.item():
                inner.step()
        if scaler is not None:  # fp16; scaler.step waits for the device, or says nothing of a skipped step
            scaler.update()
        inner.zero_grad()
        return grad_norm, skipped

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """torch's own, without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def gradient_norm(self) -> torch.Tensor:
        """Norm of the whole model's gradient, a scalar on the device."""
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        return total_norm(self.gradients())

    def gradients(self) -> list[torch.Tensor]:
        """This process's parts of the parameters' gradients."""
        return [parameter.grad for parameter in self.name_of if parameter.grad is not None]

    @property
    def dropout_rank(self) -> int:
        """Ranks of one number drop the same elements: those that compute the same hidden states."""
        return self.data_rank

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that see different data."""
        return self.accelerator.reduce(tensor, reduction="sum")

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts in the mean; ranks that share one model's work have one that reports it."""
        return True

    def describe(self) -> dict[str, Any]:
        """What runs, for the run's record."""
        return {
            "strategy": self.name,
            "ranks": self.ranks.count,
            "device": self.device.type,
            "precision": self.precision,
            "threads": torch.get_num_threads(),
        }

    def model_tensors(self) -> TensorGroup:
        """The parameters by HF name, tied ones once, in fp32."""
        return TensorGroup.of(self.weights() | self.saved_buffers())

    def saved_buffers(self) -> dict[str, torch.Tensor]:
        """What belongs to the model's weights without being trained by gradients."""
        saved = self.causal_lm.state_dict().keys()
        return {
            name: buffer for name, buffer in self.causal_lm.named_buffers() if name in saved and not buffer.is_meta
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """This process's parts of the weights that the optimizer updates, in fp32, by name."""
        return {name: parameter for parameter, name in self.name_of.items()}

    def update_average(self, share: float) -> None:
        """Moves the average by this share of the way to the weights; 1 begins it."""
        if share == 1.0:
            self.average = WeightAverage(self.weights())
        else:
            self.average.update(self.weights(), share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model has the average for weights; after it, to the last bit, those that train."""
        self.average.exchange(self.weights())
        try:
            yield
        finally:
            self.average.exchange(self.weights())

    def average_tensors(self) -> TensorGroup:
        """The average by HF name, in fp32, complete as `model_tensors` are."""
        return TensorGroup.of(self.average.means | self.saved_buffers())

    def load_average(self, average: Mapping[str, torch.Tensor]) -> None:
        """Puts whole tensors by name into the average."""
        self.average = WeightAverage(self.weights())
        load_parts(self.average.means, average)

    def optimizer_tensors(self) -> TensorGroup:
        """The optimizer's state as '<parameter>.<state>'."""
        return TensorGroup.of(optimizer_state_by_name(self.inner_optimizer, self.name_of))

    def load(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        """Puts whole tensors by name into the running model and optimizer."""
        load_parts(self.model_tensors().tensors, model)
        inner = self.inner_optimizer
        state = optimizer if inner.spec.state_is_whole else ShardedState(optimizer, self.name_of)
        load_optimizer_state(inner, self.name_of, state)

    def state(self) -> dict[str, float]:
        """What else an exact continuation needs: the fp16 loss scale."""
        scaler = self.accelerator.scaler
        if scaler is None:
            return {}
        return {"scale": scaler.get_scale(), "growth_tracker": scaler._get_growth_tracker()}

    def load_state(self, state: Mapping[str, float]) -> None:
        if self.accelerator.scaler is not None and state:
            self.accelerator.scaler.load_state_dict(
                {**self.accelerator.scaler.state_dict(), **state, "_growth_tracker": state["growth_tracker"]}
            )

    def copies(self) -> Holders | None:
        """Who else updates the same whole parameters, and can share the work of that."""
        return Holders(dist.group.WORLD, self.device) if self.ranks.count > 1 else None

    def replicas(self) -> list[ReplicaGroup]:
        """Weights of which several ranks hold a copy, equal bit by bit: see `replica_differences`."""
        return [(None, {n: p.detach() for p, n in self.name_of.items()})] if self.ranks.count > 1 else []


def order_buckets(model: DistributedDataParallel) -> None:
    """Lets DDP order its buckets before the first step, by a backward pass that leaves no gradients.

    DDP orders them after its first backward pass, by when gradients arrive. Where a gradient stands in a bucket
    decides in which order three or more processes sum it, and so how it rounds: the first step after a resume would
    round otherwise than the same step of the unbroken run.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = torch.zeros((), device=parameters[0].device)
    # What is added last gets its gradient first, as the last layer does. A norm stands behind its block's matrices in
    # the model, and gets its gradient after them: vectors, small as they are, wait for the last bucket.
    for parameter in sorted(parameters, key=lambda parameter: parameter.dim() > 1):
        loss = loss + 0 * parameter.sum()
    model.reducer.prepare_for_backward([])
    loss.backward()
    model.zero_grad()
    if not model.reducer._rebuild_buckets():
        raise RuntimeError("DDP has not ordered its buckets: a resumed run would not be the unbroken one")


def replicated(work: Work, update_bytes: float, *, is_ddp: bool) -> Memory:
    """Memory where everything is on every process.

    DDP's buckets stay between steps. In the last micro-step gradients are written into them; those of the micro-steps
    before it, which are not summed over the processes, have a place of their own.
    """
    sizes, weight = work.sizes, work.parameter_bytes
    whole = weight * sizes.total
    resident = whole if is_ddp or work.accumulates else 0.0
    buckets = whole if is_ddp and work.accumulates else 0.0
    # A tied head's gradient waits for the embedding's; one of its own is added to the gradients at once.
    act = work.activation_bytes(work.activations, weight, waiting=work.head_gradient if sizes.is_tied else 0.0)
    head = 0.0 if sizes.is_tied else weight * sizes.head
    embedding = weight * sizes.embedding
    moments = {
        "loss": (resident, act["loss"]),
        "backward": (resident or head, act["backward"]),
        "first layer": (resident or whole - embedding - weight * sizes.layer, act["first layer"]),
        "embedding": (resident or whole - embedding, embedding + act["embedding"]),
        "update": (whole, update_bytes),
    }
    return at_peak(moments, whole, work.optimizer_bytes(), buckets)
