"""ZeRO stages 1, 2 and 3 (Rajbhandari et al., arXiv 1910.02054), with or without offload, with DeepSpeed.

Stage 1 shards the optimizer's state and the fp32 master weights over the ranks, stage 2 the gradients too, stage 3
the weights as well. The file in ds_configs/ sets the details; what follows from the recipe is written into DeepSpeed's
configuration here and compared with what DeepSpeed then uses.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from transformers import PreTrainedModel

from pretrain.config import RunConfig
from pretrain.deepspeed_build import prepare_extensions_folder
from pretrain.errors import InputError
from pretrain.model.build import InitialWeights, build_meta_model, units_of
from pretrain.model.compile import layers_of
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.adafactor import Adafactor
from pretrain.optim.averaging import WeightAverage
from pretrain.optim.matrix_exchange import Holders
from pretrain.optim.muon import MuonWithAdamW
from pretrain.optim.optimizers import OPTIMIZERS, OptimizerBuilder, load_optimizer_state
from pretrain.parallel.launcher import PRECISIONS, deepspeed_file, processes_launched
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import Strategy, device_type, resolve_precision
from pretrain.parallel.tensor_group import TensorGroup, load_parts
from pretrain.parallel.zero_partitions import Partitions, fragment_places, placed_parts, placed_pieces


class Zero(Strategy):
    """ZeRO-1, 2 and 3."""

    parameter_form = "pieces"  # flat tensors of many parameters
    precisions = ("fp32", "bf16")
    compilations = ("auto", "none", "regional")  # compiled whole, the graph would break at every layer's hooks

    holds_whole_model = False

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        problems = super().problems(config, name)
        from_disk = uses_nvme() or name == "zero3_offload_nvme"
        on_disk = [name for name, spec in OPTIMIZERS.items() if spec.runs_from_disk]
        if from_disk and config.optim.name not in on_disk:
            problems.append(
                f"optim.name: {config.optim.name} does not run with its state on a disk; "
                f"use accelerate_configs/zero3_offload.yaml, or {' or '.join(on_disk)}"
            )
        if from_disk and config.averaging.kind != "none":
            problems.append(
                f"averaging.kind: {config.averaging.kind} does not run with weights on a disk, which it would read "
                "every few steps; use accelerate_configs/zero3_offload.yaml, or none"
            )
        offloads = "offload" in name or bool(deepspeed_file().get("zero_optimization", {}).get("offload_optimizer"))
        # DeepSpeed accumulates gradients that it does not reduce in the dtype of the weights.
        can_choose = not offloads and name in ("zero2", "zero3") and resolve_precision(config.precision) == "fp32"
        if config.batch.reduce_once and name != "zero1" and not can_choose:
            reason = "with offload" if offloads else "but in fp32: DeepSpeed would add gradients up in bf16"
            other = "zero1, which reduces once and keeps gradients in fp32" if name == "zero2" else "fsdp2"
            problems.append(f"batch.reduce_once: does not run under {name} {reason}; use {other}, or false")
        if config.optim.muon.qk_clip:
            problems.append(
                f"optim.muon.qk_clip: does not run under {name}, whose update is over before weights can be scaled; "
                "use ddp, fsdp2 or a mesh, or null"
            )
        if uses_nvme() and (missing := missing_for_nvme()):
            problems.append(
                f"launcher: offload_optimizer.device: nvme needs {missing}; accelerate_configs/zero3_offload.yaml "
                "uses host memory and does not"
            )
        return problems

    def make_accelerator(self) -> Accelerator:
        folder = prepare_extensions_folder()
        if uses_nvme() and not (folder / "async_io" / "async_io.so").exists() and os.environ.get("RANK", "0") == "0":
            print("compiling DeepSpeed's file I/O operator, once per machine; this takes minutes ...", flush=True)
        import deepspeed

        # DeepSpeed would compile an operator for all-reduces within one CPU at the first start; gloo works as well.
        # Private, but DeepSpeed has no setting for it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings(
            "ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning
        )
        self.settings = {**deepspeed_file(), **derived_settings(self.config, self.precision)}
        self.stage: int = self.settings["zero_optimization"]["stage"]
        self._unreduced = ExitStack()
        """DeepSpeed's context that keeps gradients whole and does not reduce them: `batch.reduce_once`."""
        self._keeps_whole = False
        kwargs_handlers = []
        if device_type() == "cpu":  # without a backend every process would run alone
            kwargs_handlers.append(InitProcessGroupKwargs(backend="gloo"))
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=self.settings, zero3_init_flag=False),
            gradient_accumulation_steps=self.settings["gradient_accumulation_steps"],
            mixed_precision=PRECISIONS[self.precision],
            step_scheduler_with_optimizer=False,
            kwargs_handlers=kwargs_handlers,
        )
        # Otherwise transformers would partition every model built from here on, with different initial weights.
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        if accelerator.deepspeed_plugin is None:
            raise RuntimeError(f"DeepSpeed was asked for, but accelerate runs {accelerator.distributed_type}")
        return accelerator

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> torch.nn.Module:
        """Prepares as in `Strategy`. In stage 3 no rank ever holds more of the whole model than one layer."""
        self.causal_lm = causal_lm = model.causal_lm
        self._fill(causal_lm, weights)
        buffers = {name: buffer.clone() for name, buffer in causal_lm.named_buffers()}
        optimizer = self.optimizer_of_parameters(build_optimizer)
        self.parameter_of = {name: parameter for parameter, name in self.name_of.items()}
        if self.stage == 3 and (head := causal_lm.get_output_embeddings()) is not None:
            import deepspeed

            # The loss uses the head's weight outside of the head's own forward, whose hooks would gather it.
            deepspeed.zero.register_external_parameter(model, head.weight)
        if self.stage == 3:
            from deepspeed.utils import set_z3_leaf_module

            # Gather each layer's weights together. Hooks on its individual modules would break a compiled layer's
            # graph at every one of them, until nothing is compiled.
            for layer in layers_of(causal_lm):
                set_z3_leaf_module(layer, True)
        self.model, _ = self.accelerator.prepare(model, optimizer)
        self.optimizer = self.model.optimizer
        self.partitions = Partitions(self.optimizer) if self.stage == 3 else None
        if isinstance(optimizer, MuonWithAdamW | Adafactor):
            places = self.partitions.places() if self.stage == 3 else fragment_places(self._groups_and_masters())
            holders = Holders(dist.group.WORLD, self.device)
            if isinstance(optimizer, Adafactor):
                optimizer.placed = placed_parts(places, holders)
            else:
                optimizer.muon.placed = placed_pieces(places, optimizer.muon.matrices, holders)
        self._check_in_effect()
        if self.precision != "fp32":
            self._undo_rounding(buffers, weights)
        return self.model

    def _fill(self, causal_lm: PreTrainedModel, weights: InitialWeights) -> None:
        """Gives the model its weights; in stage 3 each unit is partitioned before the next one is created."""
        if self.stage < 3:
            weights.fill(causal_lm, "")
            causal_lm.tie_weights()
            return
        import deepspeed

        for unit in units_of(causal_lm):
            weights.fill(causal_lm, unit)
            module = causal_lm.get_submodule(unit)
            if self.precision != "fp32":  # DeepSpeed casts whole models, but not partitioned parameters
                for parameter in module.parameters():
                    parameter.data = parameter.data.to(torch.bfloat16)
            if not any(parameter.is_meta for parameter in module.parameters()):  # a tied head has no own weights
                deepspeed.zero.Init(module=module, config_dict_or_path=self.settings)
        causal_lm.tie_weights()

    def _undo_rounding(self, buffers: Mapping[str, torch.Tensor], weights: InitialWeights) -> None:
        """Restores the original fp32 master weights and rotary tables, which DeepSpeed has rounded.

        A second model on the meta device is filled unit by unit, so that only one unit is whole at a time.
        """
        for name, buffer in buffers.items():
            module, _, key = name.rpartition(".")
            # Assigned directly: register_buffer would make buffers persistent that no checkpoint contains.
            self.causal_lm.get_submodule(module)._buffers[key] = buffer.to(self.device)
        twin = build_meta_model(self.causal_lm.config)
        for unit in units_of(twin):
            weights.fill(twin, unit)
            module = twin.get_submodule(unit)
            for name, values in module.named_parameters(prefix=unit):
                if name in self.parameter_of and not values.is_meta:
                    self._set(name, None, values.detach())
            module.to("meta")

    def _check_in_effect(self) -> None:
        """Raises RuntimeError unless DeepSpeed uses the derived settings: it and accelerate have defaults."""
        engine = self.model
        settings = self.settings
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        in_effect_and_expected = {
            "zero_optimization.stage": (engine.zero_optimization_stage(), self.stage),
            **{
                name: (getattr(engine, name)(), settings[name])
                for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
            },
            "bf16.enabled": (engine.bfloat16_enabled(), self.precision == "bf16"),
            "fp16.enabled": (engine.fp16_enabled(), False),
            "communication_data_type": (engine.communication_data_type, torch.float32),
            "data_types.grad_accum_dtype": (engine.get_data_types()[1], torch.float32),
            "dtypes of the weights": ({getattr(p, "ds_tensor", p).dtype for p in engine.module.parameters()}, {dtype}),
        }
        if wrong := [f"{name} is {a} instead of {b}" for name, (a, b) in in_effect_and_expected.items() if a != b]:
            raise RuntimeError(f"DeepSpeed does not run with the recipe's settings: {'; '.join(wrong)}")

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        self._release()
        if not (is_last or self._keeps_whole) and self.stage > 1 and self.config.batch.reduce_once:
            self._unreduced.enter_context(self.model.coalesce_grad_reduction())
            self._keeps_whole = True
        # Set explicitly: the batch ramp changes the number of micro-steps, but DeepSpeed's counter is fixed.
        self.model.set_gradient_accumulation_boundary(is_last)
        yield
        if is_last and self._keeps_whole:
            self._unreduced.close()
            self._keeps_whole = False
            self.model.set_gradient_accumulation_boundary(True)  # closing the context restores the old value

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def clip_and_step(self, max_grad_norm: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Steps as in `Strategy`; DeepSpeed clips at its configured norm, and skips non-finite gradients."""
        self.model.step()
        grad_norm = torch.as_tensor(self.model.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        return grad_norm, torch.tensor(float(self.optimizer.overflow), device=self.device)

    def model_tensors(self) -> TensorGroup:
        shapes = {name: full_shape(parameter) for name, parameter in self.parameter_of.items()}
        whole = TensorGroup.of(self.saved_buffers())
        dtypes = dict.fromkeys(shapes, torch.float32) | whole.dtypes
        return GatheredGroup(shapes | whole.shapes, dtypes, whole.tensors, self.get)

    def optimizer_tensors(self) -> TensorGroup:
        if self.spec.state_is_whole:
            return super().optimizer_tensors()
        shapes: dict[str, tuple[int, ...]] = {}
        if self.optimizer.optimizer.state:
            self._link_state()
            for name in self.parameter_of:
                shapes |= {f"{name}.{key}": shape for key, shape in self.spec.state_shapes(name).items()}
        return GatheredGroup(shapes, dict.fromkeys(shapes, torch.float32), {}, self.get)

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the flat master weights, by their index."""
        return {str(number): flat for number, flat in enumerate(flat_masters(self.optimizer))}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        try:
            with super().averaged():
                self._compute_with_masters()
                yield
        finally:
            self._compute_with_masters()

    def _compute_with_masters(self) -> None:
        """Copies the changed master weights into the weights that compute."""
        for name, parameter in self.parameter_of.items():
            if self.partitions is not None:
                self.partitions.set(parameter, None, self.get(name))
            else:
                parameter.data.copy_(self.get(name))

    def average_tensors(self) -> TensorGroup:
        return replace(self.model_tensors(), get=self._average)

    def _average(self, name: str) -> torch.Tensor:
        """Returns a weight's average, whole on every rank; a collective call."""
        part, first, end = self._average_part(name)
        whole = torch.zeros(math.prod(full_shape(self.parameter_of[name])), device=self.device)
        whole[first:end] = part
        dist.all_reduce(whole)
        return whole

    def _average_part(self, name: str) -> tuple[torch.Tensor, int, int]:
        """Returns this rank's part of a weight's average, and its first and end element in the whole."""
        flat, offset, first, end = self._places[name]
        return self.average.means[flat].narrow(0, offset, end - first), first, end

    @cached_property
    def _places(self) -> dict[str, tuple[str, int, int, int]]:
        """{parameter: (its flat master, offset of this rank's part in it, the part's first and end element)}"""
        places = self.partitions.places() if self.stage == 3 else fragment_places(self._groups_and_masters())
        number_of = {flat: number for number, flat in self.weights().items()}
        rank = dist.get_rank()
        return {self.name_of[p]: (number_of[flat], offset, *ranges[rank]) for p, flat, offset, ranges in places}

    def load_average(self, average: Mapping[str, torch.Tensor]) -> None:
        self.average = WeightAverage(self.weights())
        for name in self.parameter_of:
            part, first, end = self._average_part(name)
            part.copy_(average[name].flatten()[first:end])

    def load(self, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        for name in self.parameter_of:
            self._set(name, None, model[name])
        # Checkpoints saved under ZeRO by earlier releases have no buffers.
        load_parts({name: buffer for name, buffer in self.saved_buffers().items() if name in model}, model)
        self._release()
        if not optimizer:
            return
        if self.spec.state_is_whole:
            groups = [{"params": list(self.name_of)}]
            load_optimizer_state(self.inner_optimizer, self.spec, self.name_of, optimizer, groups)
            return
        kept = {name: self.spec.state_shapes(name) for name in self.parameter_of}
        missing = [f"{name}.{key}" for name, keys in kept.items() for key in keys if f"{name}.{key}" not in optimizer]
        if missing:
            raise InputError(
                f"the checkpoint has no {self.config.optim.name} state {', '.join(missing[:4])} ({len(missing)} in "
                "all); resume with the optimizer that saved it"
            )
        self._create_state(next(optimizer[f"{name}.step"] for name, keys in kept.items() if "step" in keys))
        for name, keys in kept.items():
            for key in keys.keys() - {"step"}:
                self._set(name, key, optimizer[f"{name}.{key}"])
        self._release()

    def _release(self) -> None:
        if self.partitions is not None:
            self.partitions.release()

    def _create_state(self, step: torch.Tensor) -> None:
        """Creates zero moments as after `step` steps; optimizers themselves create them only in their first step."""

        def state_of(parameter: torch.Tensor, flat: torch.Tensor) -> dict[str, torch.Tensor]:
            keys = self.spec.state_shapes(self.name_of[parameter])  # the same for all parameters of a group
            return {key: step.clone().to(flat.device) if key == "step" else torch.zeros_like(flat) for key in keys}

        if self.partitions is not None:
            self.partitions.create_state(state_of)
            return
        for parameters, flat in self._groups_and_masters():
            self.optimizer.optimizer.state[flat] = state_of(parameters[0], flat)
        self._link_state()

    def _groups_and_masters(self) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
        """Returns, in stages 1 and 2, each group's parameters and this rank's part of their flat fp32 masters."""
        groups = getattr(self.optimizer, "bit16_groups", None) or self.optimizer.bf16_groups
        return list(zip(groups, flat_masters(self.optimizer), strict=True))

    def _link_state(self) -> None:
        """Tells each parameter, in stages 1 and 2, where its moments are.

        DeepSpeed does so only once, after the first group's first step, when the other groups have no moments yet. Its
        private mapping is the only place that its public functions for a parameter's state read.
        """
        if self.stage < 3:
            for parameters, flat in self._groups_and_masters():
                for parameter in parameters:
                    if parameter._hp_mapping is not None:
                        parameter._hp_mapping.set_optim_state_fragment(flat, self.optimizer.optimizer.state[flat])

    def _set(self, name: str, key: str | None, whole: torch.Tensor) -> None:
        """Copies a whole fp32 tensor into this rank's part of a master weight (key None) or of a moment."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self.parameter_of[name]
        whole = whole.to(self.device)
        if self.partitions is not None:
            self.partitions.set(parameter, key, whole)
        elif key is None:
            safe_set_full_fp32_param(parameter, whole)
            parameter.data.copy_(whole)  # setting only the masters would leave the computing weights stale
        else:
            safe_set_full_optimizer_state(parameter, whole, key)

    def get(self, name: str) -> torch.Tensor:
        """Returns a master weight, or '<parameter>.<state>', whole on every rank; a collective call."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = name
        key = None
        if name not in self.parameter_of:
            parameter, _, key = name.rpartition(".")
        if key == "step":
            return next(state["step"] for state in self.optimizer.optimizer.state.values() if "step" in state)
        if self.partitions is not None:
            return self.partitions.get(self.parameter_of[parameter], key, self.device)
        if key is None:
            return safe_get_full_fp32_param(self.parameter_of[name])
        return safe_get_full_optimizer_state(self.parameter_of[parameter], key)

    def replicas(self) -> list[ReplicaGroup]:
        """Lists, in stages 1 and 2, the weights that compute, gathered after every update. Stage 3 has no replicas."""
        return [(None, dict(self.parameter_of))] if self.stage < 3 and self.ranks.count > 1 else []

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "deepspeed": self.settings}


def derived_settings(config: RunConfig, precision: str) -> dict[str, Any]:
    """Derives the part of DeepSpeed's configuration that follows from the recipe and the number of processes.

    gradient_clipping 0 means off; DeepSpeed's default is 1. Gradients are accumulated and reduced in fp32.
    """
    batch = config.batch
    sequences_per_micro_step = batch.sequences_per_micro_batch * processes_launched()
    micro_steps = batch.tokens_per_step // (config.data.sequence_length * sequences_per_micro_step)
    return {
        "train_micro_batch_size_per_gpu": batch.sequences_per_micro_batch,
        "gradient_accumulation_steps": max(1, micro_steps),
        "train_batch_size": sequences_per_micro_step * max(1, micro_steps),
        "gradient_clipping": config.optim.max_grad_norm or 0.0,
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": False},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        # With offload, AdamW is replaced by DeepSpeed's CPU version; other optimizers run on the CPU unchanged.
        **({} if config.optim.name == "adamw" else {"zero_force_ds_cpu_optimizer": False}),
    }


def uses_nvme() -> bool:
    """Tells if the launcher's DeepSpeed JSON puts the optimizer's state on disk."""
    offload = deepspeed_file().get("zero_optimization", {}).get("offload_optimizer") or {}
    return offload.get("device") == "nvme"


def missing_for_nvme() -> str | None:
    """Returns what is missing to build DeepSpeed's asynchronous file operator; None if nothing is."""
    prepare_extensions_folder()
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version

    if not AsyncIOBuilder().is_compatible():
        return "libaio (apt install libaio-dev, or conda install libaio) and a C++ compiler"
    try:
        if device_type() == "cuda":  # the builder joins paths to CUDA_HOME without checking that it is set
            installed_cuda_version()
    except MissingCUDAException:
        return (
            f"the CUDA toolkit (apt install cuda-toolkit, or conda install -c nvidia cuda-toolkit), for torch's CUDA "
            f"{torch.version.cuda}, and CUDA_HOME set to its folder, which has bin/nvcc"
        )
    return None


@dataclass(frozen=True)
class GatheredGroup(TensorGroup):
    """Tensors that DeepSpeed shards over all ranks; `tensors` are those that every rank has whole."""

    get: Callable[[str], torch.Tensor]
    """Gathers one tensor by name; a collective call."""

    def whole(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        if name in self.tensors:
            return super().whole(name, wanted)
        whole = self.get(name)
        return whole.detach().view(self.shapes[name]) if wanted else None

    def fetch(self, name: str, wanted: bool = True) -> torch.Tensor | None:
        whole = self.whole(name, wanted)
        return whole.to("cpu", copy=True) if wanted else None


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns a parameter's whole shape; under stage 3 the parameter itself is empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def flat_masters(optimizer: Any) -> list[torch.Tensor]:
    """Returns the flat fp32 tensors that a DeepSpeed optimizer updates, for each of its three classes."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return getattr(optimizer, name)
    raise RuntimeError(f"{type(optimizer).__name__} is not a ZeRO optimizer of the DeepSpeed versions known here")
