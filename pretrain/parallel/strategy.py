"""The only module that knows which strategy runs.

`accelerate launch --config_file accelerate_configs/X.yaml` chooses it; `Strategy` builds the Accelerator, checks that
what runs is what was asked for, and gives the loop the verbs it needs: prepare, accumulate, backward, update, sum.
The same files serve machines with and without GPUs: without one, processes talk over gloo.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from pretrain.config import RunConfig
from pretrain.errors import InputError
from pretrain.hardware import keep_freed_memory, missing_bf16, unusable_gpu, use_all_cores
from pretrain.model.fp8 import fp8_problem, use_fp8
from pretrain.model.initial_weights import InitialWeights
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.gradient_norm import total_norm
from pretrain.optim.optimizers import OPTIMIZERS, describe_optimizer, load_optimizer_state, optimizer_state_by_name
from pretrain.parallel.launcher import PRECISIONS, launcher_problems, requested_strategy
from pretrain.parallel.ranks import Ranks
from pretrain.parallel.rendezvous import choose_interface, meet_afresh
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.tensor_group import TensorGroup


def device_type() -> str:
    """'cuda' where a GPU is visible, else 'cpu'. Raises InputError for a GPU that torch cannot use."""
    if torch.cuda.is_available():
        return "cuda"
    if problem := unusable_gpu():
        raise InputError(problem)
    return "cpu"


def resolve_precision(requested: str) -> str:
    """auto becomes bf16 where the device multiplies in bf16, else fp32. Raises InputError for what does not run."""
    if requested == "fp8" and (problem := fp8_problem()):
        raise InputError(problem)
    if requested == "fp16" and device_type() == "cpu":
        raise InputError("precision: fp16 needs a GPU; use bf16, fp32, or auto, which takes what the device has")
    if requested != "auto":
        return requested
    return "fp32" if missing_bf16(device_type()) else "bf16"


OptimizerBuilder = Callable[[list[tuple[str, torch.nn.Parameter]]], torch.optim.Optimizer]
"""(name, parameter) pairs to an optimizer for them: see `optimizers.optimizer_builder`."""

STRATEGIES = {
    "single": "pretrain.parallel.strategy.Strategy",
    "ddp": "pretrain.parallel.strategy.Strategy",
    "fsdp2": "pretrain.parallel.fully_sharded.FullySharded",
    "hsdp": "pretrain.parallel.fully_sharded.FullySharded",
    "zero1": "pretrain.parallel.zero.Zero",
    "zero2": "pretrain.parallel.zero.Zero",
    "zero3": "pretrain.parallel.zero.Zero",
    "pp": "pretrain.parallel.pipeline.PipelineParallel",
    "tp": "pretrain.parallel.tensor_parallel.TensorParallel",
}
"""Class of each strategy, imported when it is asked for."""


def make_strategy(config: RunConfig) -> "Strategy":
    """The strategy that the launcher asks for, ready to prepare a model. Raises InputError as `strategy_class`."""
    return strategy_class(config)(resolve_precision(config.precision), config)


def strategy_class(config: RunConfig) -> type["Strategy"]:
    """The class of the strategy that the launcher asks for.

    Raises InputError with everything in the launcher's settings that contradicts the recipe or cannot run.
    """
    name = requested_strategy()
    problems = launcher_problems(config, resolve_precision(config.precision))
    if name not in STRATEGIES:
        if not problems:
            problems.append(
                f"launcher: {name} is not among the strategies that run: {', '.join(STRATEGIES)}; take a file of "
                "accelerate_configs, or set fsdp_version: 2 in your own"
            )
        raise InputError(*problems)
    module, _, class_name = STRATEGIES[name].rpartition(".")
    found: type[Strategy] = getattr(importlib.import_module(module), class_name)
    problems += found.problems(config)
    if problems:
        raise InputError(*problems)
    return found


class Strategy:
    """The strategy that runs: one process, or data parallel (DDP). The others are subclasses.

    The loop calls, in this order: prepare, load (when it continues a run), then for every step set_learning_rate,
    accumulate with the forward pass and backward in it for every micro-step, update. All ranks call together.
    """

    parameter_form: str = "whole"
    """In which the optimizer is given parameters; see `OptimizerSpec.takes`."""
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    compilations: tuple[str, ...] = ("none", "regional", "full")
    """What of the recipe's precision and compile runs under this strategy."""

    def __init__(self, precision: str, config: RunConfig | None = None):
        """Starts the processes' communication; `config` may be None where nothing is trained."""
        self.precision = precision
        self.config = config
        self.name = requested_strategy()
        if config is None and self.name not in ("single", "ddp"):
            raise InputError(
                f"launcher: {self.name} is for training; use accelerate_configs/single.yaml or ddp.yaml here: a "
                "checkpoint of any strategy can be read under them"
            )
        meet_afresh()
        choose_interface()
        self.accelerator = self.make_accelerator()
        self.device: torch.device = self.accelerator.device
        self.check_started()
        self.ranks = Ranks.of_launch()
        self.data_rank, self.data_ranks = self.ranks.rank, self.ranks.count
        """Which part of the batch this rank reads, of how many. Ranks that share one model's work share a part."""
        self.micro_batches_per_call: int = 1
        """How many times batch.sequences_per_micro_batch one call of the model takes."""
        self.optimizer_built = ""
        """What was built, in words, once prepared."""
        if self.device.type == "cpu":
            use_all_cores()
            keep_freed_memory()

    @classmethod
    def problems(cls, config: RunConfig) -> list[str]:
        """What in the recipe this strategy cannot run."""
        optimizers = [name for name, spec in OPTIMIZERS.items() if cls.parameter_form in spec.takes]
        given = {
            "optim.name": (config.optim.name, optimizers),
            "precision": (resolve_precision(config.precision), cls.precisions),
            "compile": (config.compile, cls.compilations),
        }
        return [
            f"{path}: {value} does not run under {requested_strategy()}; choose {' or '.join(allowed)}, or a strategy "
            f"that runs it, as ddp does"
            for path, (value, allowed) in given.items()
            if value not in allowed
        ]

    def make_accelerator(self) -> Accelerator:
        return Accelerator(
            cpu=device_type() == "cpu",
            mixed_precision=PRECISIONS[self.precision],
            step_scheduler_with_optimizer=False,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)],
        )

    def check_started(self) -> None:
        """Accelerate silently falls back to another strategy: refuse that."""

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
        named_parameters = list(model.causal_lm.named_parameters())
        optimizer = build_optimizer(named_parameters)
        self.optimizer_built = describe_optimizer(optimizer)
        self.name_of = {parameter: name for name, parameter in named_parameters}
        with warnings.catch_warnings():  # torch renames broadcast_buffers; accelerate passes the old name
            warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
            self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        return self.model

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
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        if self.accelerator.scaler is None and inner.defaults.get("fused"):
            # The fused kernels read both on the device: they divide as they go, a pass over the gradients less, and
            # leave everything as it is where found_inf is 1.
            inner.grad_scale, inner.found_inf = divisor, skipped
            self.optimizer.step()
        else:
            if divisor is not None and (gradients := self.gradients()):
                torch._foreach_div_(gradients, divisor.to(gradients[0].device))
            if self.accelerator.scaler is not None:  # fp16: the scaler skips, and lowers its scale
                self.optimizer.step()
                skipped = torch.tensor(float(self.optimizer.step_was_skipped), device=self.device)
            elif not skipped.item():
                self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm, skipped

    def gradient_norm(self) -> torch.Tensor:
        """Norm of the whole model's gradient, a scalar on the device."""
        if self.accelerator.scaler is not None:
            self.accelerator.unscale_gradients()
        return total_norm(self.gradients())

    def gradients(self) -> list[torch.Tensor]:
        """This process's parts of the parameters' gradients."""
        return [parameter.grad for parameter in self.causal_lm.parameters() if parameter.grad is not None]

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
        saved = self.causal_lm.state_dict().keys()
        buffers = {name: buffer for name, buffer in self.causal_lm.named_buffers() if name in saved}
        return TensorGroup.of({name: parameter for parameter, name in self.name_of.items()} | buffers)

    def optimizer_tensors(self) -> TensorGroup:
        """The optimizer's state as '<parameter>.<state>'."""
        return TensorGroup.of(optimizer_state_by_name(self.optimizer.optimizer, self.name_of))

    def load(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        """Puts whole tensors by name into the running model and optimizer."""
        with torch.no_grad():
            for name, tensor in self.model_tensors().tensors.items():
                tensor.copy_(model[name])
        load_optimizer_state(self.optimizer.optimizer, self.name_of, optimizer)

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

    def replicas(self) -> list[ReplicaGroup]:
        """Weights of which several ranks hold a copy, equal bit by bit: see `replicas.differences`."""
        return [(None, {n: p.detach() for p, n in self.name_of.items()})] if self.ranks.count > 1 else []
