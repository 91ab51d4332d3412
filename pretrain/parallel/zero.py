"""ZeRO stages 1, 2 and 3 (Rajbhandari et al., arXiv 1910.02054) with DeepSpeed, with or without offload.

Stage 1 shards the optimizer state and the fp32 master weights across the ranks. Stage 2 also shards the gradients, and
stage 3 the weights. DeepSpeed's settings come from the JSONs in ds_configs/. This module adds the settings that follow
from the recipe, and checks that DeepSpeed uses them.
"""

import fcntl
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.config import RunConfig
from pretrain.deepspeed_build import prepare_extensions_folder
from pretrain.errors import InputError
from pretrain.model.build import InitialWeights, build_meta_model, units_of
from pretrain.model.compile import layers_of
from pretrain.model.fp8 import forward_with_parameters, use_fp8
from pretrain.model.loss import LanguageModelLoss
from pretrain.optim.adafactor import Adafactor
from pretrain.optim.averaging import WeightAverage
from pretrain.optim.matrix_exchange import Holders
from pretrain.optim.muon import MuonWithAdamW
from pretrain.optim.optimizers import OPTIMIZERS, OptimizerBuilder, check_state, load_optimizer_state
from pretrain.parallel.launcher import PRECISIONS, deepspeed_file, processes_launched
from pretrain.parallel.replicas import ReplicaGroup
from pretrain.parallel.strategy import LOSS_TERMS, Strategy, device_type, of_terms, resolve_precision, without_terms
from pretrain.parallel.tensor_group import Shape, TensorGroup, load_parts
from pretrain.parallel.zero_partitions import Masters, full_shape
from pretrain.terminal import is_first_process


class Zero(Strategy):
    """Strategy for ZeRO-1, 2 and 3."""

    parameter_form = "pieces"  # slices of flat tensors that contain many parameters
    precisions = ("fp32", "bf16", "fp8")
    compilations = ("auto", "none", "regional")  # every layer's hooks would break a full graph

    holds_whole_model = False

    @classmethod
    def problems(cls, config: RunConfig, name: str) -> list[str]:
        problems = super().problems(config, name)
        if config.optim.stochastic_rounding:
            problems.append(
                f"optim.stochastic_rounding: not supported with {name}, which keeps weights in fp32; use ddp, "
                "fsdp2 or a mesh"
            )
        from_disk = uses_nvme() or name == "zero3_offload_nvme"
        on_disk = [name for name, spec in OPTIMIZERS.items() if spec.runs_from_disk]
        if from_disk and config.optim.name not in on_disk:
            problems.append(
                f"optim.name: {config.optim.name} does not support optimizer state on disk; "
                f"use accelerate_configs/zero3_offload.yaml, or {' or '.join(on_disk)}"
            )
        if from_disk and config.averaging.kind != "none":
            problems.append(
                f"averaging.kind: {config.averaging.kind} is not supported with weights on disk, because it would "
                "read them every few steps; use accelerate_configs/zero3_offload.yaml, or none"
            )
        offloads = "offload" in name or bool(deepspeed_file().get("zero_optimization", {}).get("offload_optimizer"))
        # If DeepSpeed accumulates gradients without reducing them, it uses the weights' dtype.
        can_choose = not offloads and name in ("zero2", "zero3") and resolve_precision(config.precision) == "fp32"
        if config.batch.no_sync and name != "zero1" and not can_choose:
            problems.append(
                f"batch.no_sync: not supported with {name} except in fp32 without offload, because DeepSpeed would "
                "accumulate in bf16; use zero1, which reduces once and keeps gradients in fp32, fsdp2, or false"
            )
        if config.optim.muon.qk_clip:
            problems.append(
                f"optim.muon.qk_clip: not supported with {name}, which updates weights before they can be "
                "scaled; use ddp, fsdp2 or a mesh, or set qk_clip to null"
            )
        if uses_nvme() and (missing := missing_for_nvme()):
            problems.append(
                f"launcher: offload_optimizer.device: nvme needs {missing}; to offload to CPU memory instead, "
                "use accelerate_configs/zero3_offload.yaml"
            )
        return problems

    def make_accelerator(self) -> Accelerator:
        folder = prepare_extensions_folder()
        if uses_nvme():
            hold_swap_files(Path(deepspeed_file()["zero_optimization"]["offload_optimizer"]["nvme_path"]))
            if not (folder / "async_io" / "async_io.so").exists() and is_first_process():
                text = "compiling DeepSpeed's file I/O operator (takes minutes, but only once per machine) ..."
                print(text, flush=True)
        import deepspeed

        # Prevents DeepSpeed from compiling a shared-memory all-reduce for CPUs, because gloo works as well. The
        # attribute is private, but DeepSpeed has no setting for this.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings(
            "ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning
        )
        self.settings = deepspeed_file() | derived_settings(self.config, self.precision)
        self.stage: int = self.settings["zero_optimization"]["stage"]
        # accelerate rejects a DeepSpeed JSON if this variable is set. deepspeed_problems has already checked its
        # settings.
        os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
        self._unreduced = ExitStack()
        """DeepSpeed's context for accumulating unreduced gradients, for `batch.no_sync`."""
        self._keeps_whole = False
        # Without a backend, each process would train independently on a CPU.
        kwargs_handlers = [InitProcessGroupKwargs(backend="gloo")] if device_type() == "cpu" else []
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=self.settings, zero3_init_flag=False),
            gradient_accumulation_steps=self.settings["gradient_accumulation_steps"],
            mixed_precision=PRECISIONS[self.precision],
            step_scheduler_with_optimizer=False,
            kwargs_handlers=kwargs_handlers,
        )
        # While this is set, transformers would partition every new model and give it different initial weights.
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        if accelerator.deepspeed_plugin is None:
            raise RuntimeError(f"DeepSpeed was requested, but accelerate uses {accelerator.distributed_type}")
        return accelerator

    def prepare(
        self, model: LanguageModelLoss, weights: InitialWeights, build_optimizer: OptimizerBuilder
    ) -> nn.Module:
        """Prepares the model as described in `Strategy`. In stage 3, at most one layer is unsharded at a time."""
        self.causal_lm = causal_lm = model.causal_lm
        if self.precision == "fp8":
            for linear in use_fp8(causal_lm):
                linear.forward = MethodType(forward_with_parameters, linear)
        self.loss_terms = model.loss_terms
        drawn = {name: parameter.detach().clone() for name, parameter in self.loss_terms.named_parameters()}
        self._fill(causal_lm, weights)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer = self.optimizer_of_parameters(build_optimizer)
        self.parameter_of = {name: parameter for parameter, name in self.name_of.items()}
        # Record which parameters get a gradient, because DeepSpeed frees gradients immediately and substitutes zeros
        # for missing ones.
        self.reached: set[Tensor] = set()
        trained = [parameter for parameter in self.name_of if parameter.requires_grad]
        self.notes = [parameter.register_post_accumulate_grad_hook(self.reached.add) for parameter in trained]
        if self.stage == 3 and (head := causal_lm.get_output_embeddings()) is not None:
            import deepspeed

            # The loss uses the head's weight outside of the head's forward pass, so the head's hooks don't gather it.
            deepspeed.zero.register_external_parameter(model, head.weight)
            for parameter in self.loss_terms.parameters():  # loss terms may do the same
                deepspeed.zero.register_external_parameter(model, parameter)
        if self.stage == 3:
            from deepspeed.utils import set_z3_leaf_module

            # A leaf module's weights are gathered together. Hooks on its submodules would break the graph, so
            # torch.compile couldn't compile the layer.
            for layer in layers_of(causal_lm):
                set_z3_leaf_module(layer, True)
        self.model, _ = self.accelerator.prepare(model, optimizer)
        self.optimizer = self.model.optimizer
        self.masters = Masters(self.optimizer, self.stage, self.device)
        holders = Holders(dist.group.WORLD, self.device)
        if isinstance(optimizer, Adafactor):
            optimizer.placed = self.masters.parts(holders)
        elif isinstance(optimizer, MuonWithAdamW):
            optimizer.muon.placed = self.masters.pieces(optimizer.muon.matrices, holders)
        self._check_in_effect()
        if self.precision != "fp32":
            self._undo_rounding(model, buffers, weights, drawn)
        return self.model

    def _fill(self, causal_lm: PreTrainedModel, weights: InitialWeights) -> None:
        """Initializes the model. Stage 3 partitions each unit before it initializes the next one."""
        if self.stage < 3:
            weights.fill(causal_lm, "")
            causal_lm.tie_weights()
            return
        import deepspeed

        def partition(module: nn.Module) -> None:
            if self.precision != "fp32":  # DeepSpeed doesn't cast partitioned parameters
                for parameter in module.parameters():
                    parameter.data = parameter.data.to(torch.bfloat16)
            if not any(parameter.is_meta for parameter in module.parameters()):  # a tied head has no separate weights
                deepspeed.zero.Init(module=module, config_dict_or_path=self.settings)

        for unit in units_of(causal_lm):
            weights.fill(causal_lm, unit)
            partition(causal_lm.get_submodule(unit))
        partition(self.loss_terms)
        causal_lm.tie_weights()

    def _undo_rounding(
        self,
        model: LanguageModelLoss,
        buffers: Mapping[str, Tensor],
        weights: InitialWeights,
        drawn: Mapping[str, Tensor],
    ) -> None:
        """Restores the fp32 values of the master weights and rotary tables, which DeepSpeed has rounded.

        The weights come from a second model, initialized one unit at a time to save memory.
        """
        for name, buffer in buffers.items():
            module, _, key = name.rpartition(".")
            # register_buffer would make the buffers persistent, but checkpoints don't contain them.
            model.get_submodule(module)._buffers[key] = buffer.to(self.device)
        if weights.are_loaded:  # loading writes directly into the masters
            return
        for name, values in drawn.items():
            self.masters.set(self.parameter_of[f"{LOSS_TERMS}.{name}"], None, values.to(self.device))
        twin = build_meta_model(self.causal_lm.config)
        for unit in units_of(twin):
            weights.fill(twin, unit)
            module = twin.get_submodule(unit)
            for name, values in module.named_parameters(prefix=unit):
                if name in self.parameter_of and not values.is_meta:
                    self.masters.set(self.parameter_of[name], None, values.detach().to(self.device))
            module.to("meta")

    def _check_in_effect(self) -> None:
        """Raises RuntimeError if a default in DeepSpeed or accelerate has overridden a derived setting."""
        engine = self.model
        settings = self.settings
        dtype = torch.float32 if self.precision == "fp32" else torch.bfloat16
        in_effect_and_expected = {
            "zero_optimization.stage": (engine.zero_optimization_stage(), self.stage),
            **{
                name: (getattr(engine, name)(), settings[name])
                for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "gradient_clipping")
            },
            "bf16.enabled": (engine.bfloat16_enabled(), self.precision != "fp32"),
            "fp16.enabled": (engine.fp16_enabled(), False),
            "communication_data_type": (engine.communication_data_type, torch.float32),
            "data_types.grad_accum_dtype": (engine.get_data_types()[1], torch.float32),
            "dtypes of the weights": ({getattr(p, "ds_tensor", p).dtype for p in engine.module.parameters()}, {dtype}),
        }
        if wrong := [f"{name} is {a} instead of {b}" for name, (a, b) in in_effect_and_expected.items() if a != b]:
            raise RuntimeError(f"DeepSpeed does not use the recipe's settings: {'; '.join(wrong)}")

    @contextmanager
    def accumulate(self, is_last: bool) -> Iterator[None]:
        self.masters.release()
        if not (is_last or self._keeps_whole) and self.stage > 1 and self.config.batch.no_sync:
            self._unreduced.enter_context(self.model.coalesce_grad_reduction())
            self._keeps_whole = True
        # DeepSpeed expects a fixed number of micro-steps, but a batch ramp changes that number.
        self.model.set_gradient_accumulation_boundary(is_last)
        yield
        if is_last and self._keeps_whole:
            self._unreduced.close()
            self._keeps_whole = False
            self.model.set_gradient_accumulation_boundary(True)  # closing the context restores the old value

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)

    def clip_and_step(self, max_grad_norm: float | None) -> tuple[Tensor, Tensor]:
        """Implements `update`. DeepSpeed clips to its configured norm and skips non-finite gradients."""
        self.model.step()
        grad_norm = torch.as_tensor(self.model.get_global_grad_norm(), dtype=torch.float32, device=self.device)
        return grad_norm, torch.tensor(float(self.optimizer.overflow), device=self.device)

    def without_gradient(self) -> list[str]:
        for note in self.notes:
            note.remove()
        return [name for name, p in self.parameter_of.items() if p.requires_grad and p not in self.reached]

    def model_tensors(self, *, averaged: bool = False) -> TensorGroup:
        gather = self._average if averaged else self.get
        return gathered_group(without_terms(self.shapes()), gather, self.saved_buffers())

    def term_tensors(self, *, averaged: bool = False) -> TensorGroup:
        return gathered_group(of_terms(self.shapes()), self._average if averaged else self.get)

    def optimizer_tensors(self) -> TensorGroup:
        if self.spec.state_is_whole:
            return super().optimizer_tensors()
        return gathered_group(self.state_shapes() if self.optimizer.optimizer.state else {}, self.get)

    def actual_state_shapes(self) -> dict[str, dict[str, Shape]]:
        if self.spec.state_is_whole:
            return super().actual_state_shapes()
        shapes = self.shapes()
        return {name: self.masters.actual_state_shapes(p, shapes[name]) for name, p in self.parameter_of.items()}

    def shapes(self) -> dict[str, Shape]:
        """Returns {name: unsharded shape} for all parameters."""
        return {name: full_shape(parameter) for name, parameter in self.parameter_of.items()}

    def weights(self) -> dict[str, Tensor]:
        """Returns the flat master weight tensors by index."""
        return {str(number): flat for number, flat in enumerate(self.masters.flats)}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        try:
            with super().averaged():
                self._compute_with_masters()
                yield
        finally:
            self._compute_with_masters()

    def _compute_with_masters(self) -> None:
        """Copies the master weights into the forward pass's weights."""
        for name, parameter in self.parameter_of.items():
            self.masters.compute_with(parameter, self.get(name))

    def _average(self, name: str) -> Tensor:
        """Gathers a parameter's average on every rank (a collective call)."""
        return self.masters.gathered(self.parameter_of[name], self._average_part(name))

    def _average_part(self, name: str) -> Tensor:
        """Returns this rank's partition of a parameter's average."""
        place = self.masters.places[self.parameter_of[name]]
        return place.narrow(self.average.means[str(place.group)])

    def load_average(self, average: Mapping[str, Tensor]) -> None:
        self.average = WeightAverage(self.weights())
        for name, parameter in self.parameter_of.items():
            first, end = self.masters.places[parameter].mine
            self._average_part(name).copy_(average[name].flatten()[first:end])

    def load(self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameter_of.items():
            self.masters.set(parameter, None, model[name].to(self.device))
        # ZeRO checkpoints from earlier releases have no buffers.
        load_parts({name: buffer for name, buffer in self.saved_buffers().items() if name in model}, model)
        self.masters.release()
        if not optimizer:
            return
        if self.spec.state_is_whole:
            groups = [{"params": list(self.name_of)}]
            load_optimizer_state(self.inner_optimizer, self.spec, self.name_of, optimizer, groups)
            return
        shapes = self.state_shapes()
        check_state(self.config.optim.name, shapes, optimizer)

        def state_of(parameters: list[Tensor], flat: Tensor) -> dict[str, Tensor]:
            names = [self.name_of[parameter] for parameter in parameters]  # all have the same keys
            return {
                key: torch.zeros_like(flat) if shape else self._scalar_of_all(names, key, optimizer).to(flat.device)
                for key, shape in self.spec.state_shapes(names[0]).items()
            }

        self.masters.create_state(state_of)
        for state, shape in shapes.items():
            if shape:
                name, _, key = state.rpartition(".")
                self.masters.set(self.parameter_of[name], key, optimizer[state])
        self.masters.release()

    def _scalar_of_all(self, names: list[str], key: str, saved: Mapping[str, Tensor]) -> Tensor:
        """Returns the scalar that these parameters of a flat tensor share. Raises InputError if they differ."""
        values = {name: float(saved[f"{name}.{key}"]) for name in names}
        least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        if values[least] != values[most]:
            raise InputError(
                f"optim.name: {self.config.optim.name} saved a different {key} for each parameter ({values[least]:g} "
                f"for {least}, {values[most]:g} for {most}), but ZeRO keeps one for many parameters; resume with ddp, "
                'fsdp2 or a mesh, and remove "pieces" from its `takes`'
            )
        return saved[f"{names[0]}.{key}"].clone()

    def get(self, name: str) -> Tensor:
        """Gathers a master weight or optimizer state ('<parameter>.<state>') on every rank (a collective call)."""
        key = None
        if name not in self.parameter_of:
            name, _, key = name.rpartition(".")
        parameter = self.parameter_of[name]
        if key is not None and self.spec.state_shapes(name)[key] == ():
            return self.masters.scalar(parameter, key)
        return self.masters.gathered(parameter, self.masters.part(parameter, key))

    def replicas(self) -> list[ReplicaGroup]:
        """Returns the forward pass's weights, which stages 1 and 2 replicate. Stage 3 has no replicas."""
        return [(None, dict(self.parameter_of))] if self.stage < 3 and self.ranks.count > 1 else []

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"deepspeed": self.settings}


def derived_settings(config: RunConfig, precision: str) -> dict[str, Any]:
    """Returns the DeepSpeed settings that follow from the recipe and the number of processes.

    gradient_clipping: 0 turns off clipping (DeepSpeed's default is 1). Gradients are accumulated and reduced in fp32.
    """
    batch = config.batch
    sequences_per_micro_step = batch.sequences_per_micro_batch * processes_launched()
    micro_steps = batch.tokens_per_step // (config.data.sequence_length * sequences_per_micro_step)
    return {
        "train_micro_batch_size_per_gpu": batch.sequences_per_micro_batch,
        "gradient_accumulation_steps": max(1, micro_steps),
        "train_batch_size": sequences_per_micro_step * max(1, micro_steps),
        "gradient_clipping": config.optim.max_grad_norm or 0.0,
        "bf16": {"enabled": precision != "fp32"},
        "fp16": {"enabled": False},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        # With offload, DeepSpeed replaces AdamW with its CPU version. Other optimizers run on the CPU unchanged.
        **({} if config.optim.name == "adamw" else {"zero_force_ds_cpu_optimizer": False}),
    }


def uses_nvme() -> bool:
    """Returns True if the DeepSpeed JSON offloads the optimizer state to NVMe."""
    offload = deepspeed_file().get("zero_optimization", {}).get("offload_optimizer") or {}
    return offload.get("device") == "nvme"


@functools.cache
def hold_swap_files(folder: Path) -> int:
    """Locks this rank's swap files in the folder until the process ends. Raises InputError if another run uses them.

    DeepSpeed's files have the same names in every run, so two runs would overwrite each other's weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"rank-{os.environ.get('RANK', '0')}.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(
            f"launcher: another run keeps its optimizer state in {folder}; set nvme_path in the DeepSpeed JSON to "
            "another folder, or wait until that run has finished"
        ) from None
    except OSError:  # a file system without locks
        pass
    return descriptor


def missing_for_nvme() -> str | None:
    """Returns what is missing to build DeepSpeed's asynchronous file I/O operator, or None."""
    prepare_extensions_folder()
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import MissingCUDAException, installed_cuda_version

    if not AsyncIOBuilder().is_compatible():
        return "libaio (apt install libaio-dev, or conda install libaio) and a C++ compiler"
    try:
        if device_type() == "cuda":  # the builder would use CUDA_HOME without checking that it is set
            installed_cuda_version()
    except MissingCUDAException:
        return (
            f"the toolkit for CUDA {torch.version.cuda} (apt install cuda-toolkit, or conda install -c nvidia "
            f"cuda-toolkit), and CUDA_HOME set to the folder that contains bin/nvcc"
        )
    return None


def gathered_group(
    shapes: Mapping[str, Shape],
    gather: Callable[[str], Tensor],
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
) -> TensorGroup:
    """Builds a group from fp32 tensors with these shapes, which `gather` returns flattened, and unsharded buffers."""
    whole = TensorGroup.of(buffers)

    def either(name: str) -> Tensor:
        return whole.gather(name) if name in buffers else gather(name).detach().view(shapes[name])

    return TensorGroup({**shapes, **whole.shapes}, dict.fromkeys(shapes, torch.float32) | whole.dtypes, either)
