"""Compiles a model's layers, or sets up activation checkpointing, in place. Parameter names don't change."""

import importlib.util
import math
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from transformers import PreTrainedModel
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from pretrain.config import MemoryBudget, RunConfig


def layers_of(causal_lm: PreTrainedModel) -> list[torch.nn.Module]:
    """Lists the model's blocks in order, based on transformers' list of modules that must not be split."""
    # This private attribute is transformers' only list of block classes. accelerate also uses it.
    names = set(causal_lm._no_split_modules or ())
    # Base classes also count, because FSDP replaces a sharded module's class with a subclass that has a different
    # name.
    return [module for module in causal_lm.modules() if names & {kind.__name__ for kind in type(module).__mro__}]


LAYERS_COMPILED_WHOLE = 4
"""Maximum number of layers for which compiling the whole model takes only a few seconds more
than compiling one layer.
"""


def choose_compile(
    requested: str, causal_lm: PreTrainedModel, *, device_type: str, is_alone: bool, is_plain: bool
) -> str:
    """Returns the mode for `compile_model`, given the recipe's compile setting.

    auto is full for a few layers on a CPU, because calling each compiled layer separately takes 5% of a 1M model's
    step time (docs/measurements_cpu.md).

    Args:
        is_alone: True if a single process trains the model.
        is_plain: True if nothing in the layers is counted or recomputed.
    """
    if requested != "auto":
        return requested
    is_small = len(layers_of(causal_lm)) <= LAYERS_COMPILED_WHOLE
    return "full" if is_alone and is_plain and device_type == "cpu" and is_small else "regional"


def compile_model(
    model: torch.nn.Module, causal_lm: PreTrainedModel, mode: str, lengths: int = 1, memory_budget: float = 1.0
) -> None:
    """Compiles in place. none: nothing. regional: each block, with one shared compilation. full: all of `model`.

    Shapes are static. A batch with a different shape is recompiled instead of running slower dynamic code.

    Args:
        lengths: number of sequence lengths in the run. Each is compiled for training and for validation.
        memory_budget: share of the activations that each compiled graph keeps.
    """
    # This setting is documented, although its module's name is private. Layers are compiled later, in the first step.
    functorch_config.activation_memory_budget = memory_budget
    # With tp, process groups are inputs of the graph, and recent torch versions fail because they can't measure them.
    # They hold no activations.
    if memory_budget < 1.0 and hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
        functorch_config.unsafe_treat_script_objects_as_zero_size = True
    if mode != "none":
        # Beyond torch's limit of eight, layers would silently run uncompiled. Most layers share one compilation,
        # unless a strategy gives each of them its own functions, as tensor parallelism does for experts.
        most = 4 * lengths * (len(layers_of(causal_lm)) if mode == "regional" else 1)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, most)
    if mode != "none" and next(causal_lm.parameters()).device.type == "cpu":
        for module in causal_lm.modules():
            # These two classes use the tanh approximation. The exact GELU doesn't change.
            if isinstance(module, (GELUTanh, NewGELUActivation)):
                module.forward = gelu_by_sigmoid
    if mode == "regional":
        # To overlap DDP's buckets with a layer's backward pass, Dynamo would split the layer after every 25 MB. Layers
        # overlap with each other anyway, and unsplit layers move less memory.
        torch._dynamo.config.optimize_ddp = False
        for layer in layers_of(causal_lm):
            # layer.compile() would trace the hooks of FSDP and DeepSpeed, and break the graph.
            layer.forward = torch.compile(layer.forward, dynamic=False)
    elif mode == "full":
        model.compile(dynamic=False)


def compiler_problems(requested: str, device_type: str) -> list[str]:
    """Lists torch.compile's missing requirements on this machine for the recipe's compile setting, with remedies.

    Without this check, the first compiled step would fail, after the model has been built.
    """
    if requested == "none":
        return []
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    compilers = [os.environ.get("CC"), "gcc", "clang"] if device_type == "cuda" else [cxx]
    needs = []
    if not any(name and shutil.which(name.split()[0]) for name in compilers):
        kind = "C" if device_type == "cuda" else "C++"
        needs.append(f"a {kind} compiler (none of {', '.join(filter(None, compilers))} found)")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        needs.append(f"Python's headers ({header} is missing)")
    install = ["apt install build-essential python3-dev, or conda install gxx python"] if needs else []
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        needs.append("Triton")
        install.append("pip install triton")
    if not needs:
        return []
    return [f"compile: {requested} needs {' and '.join(needs)}: {'; '.join(install)}; or use none, which is slower"]


def gelu_by_sigmoid(x: Tensor) -> Tensor:
    """Computes GELU's tanh form with a sigmoid, because 1 + tanh(y) = 2 sigmoid(2 y).

    Compiled for a CPU, tanh takes three times as long as an exponential (docs/measurements_cpu.md).
    """
    fp32 = x.float()
    return (fp32 * torch.sigmoid(math.sqrt(8.0 / math.pi) * (fp32 + 0.044715 * fp32.pow(3)))).to(x.dtype)


def checkpointing_problems(config: RunConfig, causal_lm: PreTrainedModel) -> list[str]:
    """Lists reasons why this model's activations can't be recomputed as requested."""
    mode = config.activation_checkpointing
    if mode == "none":
        return []
    if isinstance(mode, MemoryBudget):
        problems = []
        if config.compile not in ("auto", "regional"):
            problems.append(
                f"activation_checkpointing: {mode} does not work with compile: {config.compile}, because the compiler "
                "chooses within each layer what to recompute; use compile: auto, or a share of the layers such as 50%"
            )
        if dropouts := dropouts_of(causal_lm):
            problems.append(
                f"activation_checkpointing: {mode} does not work with dropout ({', '.join(dropouts)}): the compiler "
                "would draw other masks when it recomputes; set them to 0, or use a share of the layers such as 50%"
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
    """Lists the dropouts in the model's layers by attribute name, with their probabilities."""
    found = set()
    for module in (module for layer in layers_of(causal_lm) for module in layer.modules()):
        own = {name: value for name, value in vars(module).items() if "drop" in name}
        own |= {"Dropout": module.p} if isinstance(module, torch.nn.Dropout) else {}
        found |= {f"{name}: {value}" for name, value in own.items() if isinstance(value, float) and value > 0}
    return sorted(found)


def checkpoint_activations(causal_lm: PreTrainedModel, mode: str | float | MemoryBudget) -> None:
    """Sets up activation recomputation outside the compiler.

    none: keep all activations. full: keep each block's input and recompute the rest. A share: recompute this share of
    the blocks, rounded up and spread evenly so that it also applies to each pipeline stage. If mode is a memory
    budget, `compile_model` sets it.
    """
    if mode == "none" or isinstance(mode, MemoryBudget):
        return
    causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == "full":
        return
    for index, layer in enumerate(layers_of(causal_lm)):
        layer.gradient_checkpointing = math.ceil((index + 1) * mode) > math.ceil(index * mode)
