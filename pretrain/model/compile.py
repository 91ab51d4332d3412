"""Compiles a model's layers and enables activation checkpointing, in place and without renaming parameters."""

import functools
import importlib.util
import math
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from pretrain.config import MemoryBudget, RunConfig
from pretrain.hardware import tag_compiled_code
from pretrain.model.bf16_cpu_attention import cxx_compiler


def layers_of(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """Returns the model's transformer blocks in order, according to transformers' `_no_split_modules`."""
    # Private, but the only list of block classes in transformers. accelerate also uses it.
    names = set(causal_lm._no_split_modules or ())
    # We also check base classes, because FSDP replaces a sharded module's class with a subclass.
    return [module for module in causal_lm.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


LAYERS_COMPILED_WHOLE = 4
"""Maximum number of layers in a model that `auto` compiles as a whole.

Compiling this many layers takes only a few seconds longer than compiling one.
"""


def choose_compile(
    requested: str, causal_lm: PreTrainedModel, *, device_type: str, is_alone: bool, is_plain: bool
) -> str:
    """Returns the mode for `compile_model`, given the recipe's compile setting.

    auto means full for models with few layers on a CPU, because calling compiled layers one by one takes 5% of the
    step time of a 1M model (docs/measurements_cpu.md). Otherwise, it means regional.

    Args:
        is_alone: True if a single process trains the model.
        is_plain: True for dense models without activation checkpointing or separate document rows.
    """
    if requested != "auto":
        return requested
    is_small = len(layers_of(causal_lm)) <= LAYERS_COMPILED_WHOLE
    return "full" if is_alone and is_plain and device_type == "cpu" and is_small else "regional"


def compile_model(
    model: nn.Module, causal_lm: PreTrainedModel, mode: str, lengths: int = 1, memory_budget: float = 1.0
) -> None:
    """Compiles the model in place. Shapes are static, so a batch with a new shape causes a recompilation.

    Args:
        mode: none, regional (each block, with one shared compilation) or full (all of `model`).
        lengths: number of different sequence lengths in the run.
        memory_budget: share of the activations that each compiled graph saves.
    """
    tag_compiled_code()
    # torch documents this setting, although its module is private.
    functorch_config.activation_memory_budget = memory_budget
    # With tp, process groups are graph inputs, and recent torch versions fail to compute their size.
    if memory_budget < 1.0 and hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
        functorch_config.unsafe_treat_script_objects_as_zero_size = True
    if mode == "none":
        return
    # Beyond torch's limits of 8 recompilations per module and 256 in total, layers would silently run uncompiled.
    # Layers usually share one compilation, but not if each has its own functions, as the experts do with tensor
    # parallelism.
    most = 4 * lengths * (len(layers_of(causal_lm)) if mode == "regional" else 1)
    for limit in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(torch._dynamo.config, limit, max(getattr(torch._dynamo.config, limit), most))
    device_type = next(causal_lm.parameters()).device.type
    if device_type == "cuda":
        # With torch's limit of 4, Inductor writes nanochat's rotated queries and keys to memory before their norms.
        torch._inductor.config.realize_reads_threshold = 5
    if device_type == "cpu":
        for module in causal_lm.modules():
            # These two classes use the tanh approximation.
            if isinstance(module, (GELUTanh, NewGELUActivation)):
                module.forward = gelu_by_sigmoid
    if mode == "regional":
        # Dynamo would split layers at DDP's 25 MB buckets to overlap communication with computation. But communication
        # already overlaps with other layers, and unsplit layers cause less memory traffic.
        torch._dynamo.config.optimize_ddp = False
        for layer in layers_of(causal_lm):
            compile_layer(layer)
    else:
        model.compile(dynamic=False)


def compile_layer(layer: nn.Module, **settings: Any) -> None:
    """Compiles a layer in place, without its hooks. settings: arguments of torch.compile."""
    # layer.compile() would trace FSDP's and DeepSpeed's hooks, which causes graph breaks.
    layer.forward = torch.compile(layer.forward, dynamic=False, **settings)
    if getattr(layer, "gradient_checkpointing", False) and any(map(runs_uncompiled, layer.modules())):
        # Dynamo can't split a checkpointed function, so it would leave the whole layer uncompiled.
        layer.gradient_checkpointing = False
        layer.forward = functools.partial(recompute, layer, layer.forward)


def runs_uncompiled(module: nn.Module) -> bool:
    """Returns True if the module's forward pass is excluded with torch.compiler.disable."""
    return getattr(module.forward, "_torchdynamo_disable", False)  # torch has no public function for this


def recompute(layer: nn.Module, forward: Callable, *args, **kwargs) -> Any:
    """Calls `forward`, and again in the backward pass if the layer is in training mode."""
    return checkpoint(forward, *args, use_reentrant=False, **kwargs) if layer.training else forward(*args, **kwargs)


def compiler_problems(requested: str, device_type: str) -> list[str]:
    """Returns error messages if this machine doesn't have everything that torch.compile needs."""
    if requested == "none":
        return []
    cxx = cxx_compiler()
    compilers = [os.environ.get("CC"), "gcc", "clang"] if device_type == "cuda" else [cxx]
    needs = []
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        kind = "C" if device_type == "cuda" else "C++"
        needs.append(f"a {kind} compiler ({', '.join(filter(None, compilers))} not found)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        needs.append(f"Python's headers ({header} is missing)")
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        needs.append("Triton")
    if not needs:
        return []
    return [
        f"compile: {requested} needs {' and '.join(needs)}; install the missing software (apt install build-essential "
        "python3-dev, or conda install gxx python; pip install triton), or use none, which is slower"
    ]


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """Computes GELU's tanh approximation with a sigmoid, because 1 + tanh(y) = 2 sigmoid(2 y).

    In compiled CPU code, tanh takes three times as long as an exponential (docs/measurements_cpu.md).
    """
    fp32 = x.float()
    return (fp32 * torch.sigmoid(math.sqrt(8.0 / math.pi) * (fp32 + 0.044715 * fp32.pow(3)))).to(x.dtype)


def checkpointing_problems(config: RunConfig, causal_lm: PreTrainedModel) -> list[str]:
    """Returns error messages if this model doesn't support the requested activation checkpointing."""
    mode = config.activation_checkpointing
    if mode == "none":
        return []
    if isinstance(mode, MemoryBudget):
        problems = []
        if config.compile not in ("auto", "regional"):
            problems.append(
                f"activation_checkpointing: {mode} does not work with compile: {config.compile}, because the compiler "
                "chooses what to recompute in each layer; use compile: auto, or a share of the layers such as 50%"
            )
        if dropouts := dropouts_of(causal_lm):
            problems.append(
                f"activation_checkpointing: {mode} does not work with dropout ({', '.join(dropouts)}): the compiler "
                "would use different masks in the recomputation; set dropout to 0, or use a share of the layers such "
                "as 50%"
            )
        return problems
    model_type = causal_lm.config.model_type
    if not causal_lm.supports_gradient_checkpointing:
        return [f"activation_checkpointing: {mode} does not work with {model_type} in transformers; use none"]
    if mode == "full" or all(isinstance(layer, GradientCheckpointingLayer) for layer in layers_of(causal_lm)):
        return []
    return [
        f"activation_checkpointing: {mode} does not work with {model_type}, which can only recompute all layers or "
        "none; use full or none"
    ]


def dropouts_of(causal_lm: PreTrainedModel) -> list[str]:
    """Returns 'name: probability' for each nonzero dropout in the model's layers."""
    found = set()
    for module in (module for layer in layers_of(causal_lm) for module in layer.modules()):
        own = {name: value for name, value in vars(module).items() if "drop" in name}
        own |= {"Dropout": module.p} if isinstance(module, torch.nn.Dropout) else {}
        found |= {f"{name}: {value}" for name, value in own.items() if isinstance(value, float) and value > 0}
    return sorted(found)


def checkpoint_activations(causal_lm: PreTrainedModel, mode: str | float | MemoryBudget, **settings: Any) -> None:
    """Enables activation checkpointing.

    Args:
        mode: none, full (every block), or the share of blocks to checkpoint, rounded up. These blocks are evenly
            spaced, so the share also applies to each pipeline stage. `compile_model` sets memory budgets instead.
        settings: arguments of torch.utils.checkpoint.checkpoint.
    """
    if mode == "none" or isinstance(mode, MemoryBudget):
        return
    causal_lm.gradient_checkpointing_enable({"use_reentrant": False, **settings})
    if mode == "full":
        return
    for index, layer in enumerate(layers_of(causal_lm)):
        layer.gradient_checkpointing = is_recomputed(index, mode)


def is_recomputed(layer: int, share: float) -> bool:
    """Returns True if activation checkpointing with this share of the layers recomputes a layer."""
    return math.ceil((layer + 1) * share) > math.ceil(layer * share)
