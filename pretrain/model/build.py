"""Builds models from configurations, counts parameters and FLOPs, and initializes weights.

Initial weights depend only on (configuration, seed). Every module has its own seed, so any part of a model can be
initialized separately, and the weights are the same with every strategy (see `initialize_module`).
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.dynamic_module_utils import custom_object_save

from pretrain.errors import InputError, one_line
from pretrain.model.attention import autocast_dtype, classes_in_rows, head_widths, implementation_of
from pretrain.model.compile import layers_of
from pretrain.model.model_config import described, padded_vocabulary
from pretrain.model.routers import as_buffers, inactive_parameters

_Value = TypeVar("_Value")

FORMULA = "6N + 12 x layers x heads x head width x sequence length"
"""Formula for the FLOPs per token. `layers` is the number of attention layers."""
NO_SUCH_ATTENTION = "the architecture does not support this attention implementation"


INITIALIZERS = (
    nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_,
    Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_,
)  # fmt: skip
"""Functions that write initial values to their first argument."""


class _WithoutInitialValues(TorchFunctionMode):
    """Skips writing initial values to meta tensors, which would take half of the time to build a meta model."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in INITIALIZERS:
            written = args[0] if args else kwargs["tensor"]
            if written.is_meta:
                return written
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_meta_device() -> Iterator[None]:
    """Creates tensors on the meta device, without computing initial values."""
    with torch.device("meta"), _WithoutInitialValues():
        yield


def build_meta_model(config: PreTrainedConfig, *, attention: str | None = None) -> PreTrainedModel:
    """Builds the model in fp32 on the meta device, with tied parameters.

    Clears every embedding's padding_idx, because packed data has no padding. Otherwise, torch.nn.Embedding would set
    the padding row to zero and never train it, even if the padding ID is also the end-of-document ID. Raises
    InputError if the model or the machine doesn't support the attention implementation.

    attention: defaults to `library_attention`.
    """
    if attention is None:
        attention = library_attention(config)
    given = {"attn_implementation": implementation_of(attention), "dtype": torch.float32}
    try:
        with on_meta_device():
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **given)
    except Exception as error:  # a model's own code may raise any error for unexpected values
        raise InputError(_building_problem(config, attention, error)) from error
    clear_padding(model)
    as_buffers(model)
    _embed_in_bf16(model)
    _count_positions_in_the_window(model, attention)
    _use_rows(model, attention)
    return model


def library_attention(config: PreTrainedConfig) -> str:
    """Returns sdpa if the architecture supports it, and otherwise eager."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # transformers has no public flag for this.
    return "sdpa" if getattr(model_class, "_supports_sdpa", False) else "eager"


def use_attention(model: PreTrainedModel, attention: str) -> None:
    """Changes a model's attention implementation to one of `attention.candidates_of`."""
    model.set_attn_implementation(implementation_of(attention))
    _count_positions_in_the_window(model, attention)
    _use_rows(model, attention)


def _use_rows(model: PreTrainedModel, attention: str) -> None:
    if classes := classes_in_rows(attention):
        from pretrain.model.document_rows import keep_documents_apart

        keep_documents_apart(model, classes)


@dataclass(frozen=True)
class KeyedConfig:
    """A hashable configuration, for caches. Configurations are equal if their contents are equal."""

    key: str
    config: PreTrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "KeyedConfig":
        return cls(json.dumps(config.to_dict(), sort_keys=True, default=str), config)


def once_per_config(function: Callable[[PreTrainedConfig], _Value]) -> Callable[[PreTrainedConfig], _Value]:
    """Caches a function's results by the configuration's content, for up to 64 configurations."""
    cached = functools.lru_cache(maxsize=64)(lambda keyed: function(keyed.config))

    @functools.wraps(function)
    def of_config(config: PreTrainedConfig) -> _Value:
        return cached(KeyedConfig.of(config))

    return of_config


def shared_meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns `build_meta_model(config)` from a cache, for callers that only read it.

    Building a model with many layers takes seconds.
    """
    return _shared_meta_model(KeyedConfig.of(config))


@functools.lru_cache(maxsize=2)
def _shared_meta_model(keyed: KeyedConfig) -> PreTrainedModel:
    return build_meta_model(keyed.config)


@dataclass(frozen=True)
class _Counts:
    """Parameter counts: total, used in matmuls, and inactive."""

    all: int
    in_matmuls: int
    inactive: int


@once_per_config
def _counts(config: PreTrainedConfig) -> _Counts:
    model = shared_meta_model(config)
    head_weight = getattr(model.get_output_embeddings(), "weight", None)
    looked_up = sum(e.weight.numel() for e in _embeddings(model) if e.weight is not head_weight)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return _Counts(parameters, parameters - looked_up, inactive_parameters(model))


def count_parameters(config: PreTrainedConfig) -> int:
    """Counts the parameters. Tied parameters count once."""
    return _counts(config).all


def active_parameters(config: PreTrainedConfig) -> int:
    """Counts the active parameters, without the experts that a token isn't routed to."""
    counts = _counts(config)
    return counts.all - counts.inactive


def matrix_parameters(config: PreTrainedConfig) -> int:
    """Counts the active parameters used in matmuls, N in the 6N FLOPs per token (PaLM, arXiv 2204.02311, appendix B).

    Token and position embeddings are lookups, so they don't count, unless they're tied to the head.
    """
    counts = _counts(config)
    return counts.in_matmuls - counts.inactive


def flops_per_token(config: PreTrainedConfig, sequence_length: int) -> float:
    """Computes the FLOPs per token of a forward and backward pass (PaLM, arXiv 2204.02311, appendix B).

    Uses FORMULA with N = `matrix_parameters`. If keys and values have different widths, as in multi-head latent
    attention, the head width is their mean. In hybrid models, only matmuls count in the other mixers.
    """
    attention = 12 * attention_layers(config) * attention_width(config) * sequence_length
    return 6 * matrix_parameters(config) + attention


WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}
"""transformers' layer types without attention."""


def attention_layers(config: PreTrainedConfig) -> int:
    """Counts the attention layers."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return sum(kind not in WITHOUT_ATTENTION for kind in kinds)


def attention_width(config: PreTrainedConfig) -> float:
    """Returns query heads x head width, or 0 without attention.

    It may differ from the hidden size, as in Qwen3.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0.0 if heads is None else config.hidden_size
    widths = head_widths(config)
    return config.hidden_size if widths is None else heads * sum(widths) / 2


def embedding_parameter_names(model: nn.Module) -> set[str]:
    """Returns the names of all parameters in nn.Embedding modules, including the names of tied heads.

    Also works for meta and sharded models.
    """
    owned = {id(embedding.weight) for embedding in _embeddings(model)}
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in owned}


def transposed_names(model: nn.Module) -> set[str]:
    """Returns the names of weights stored as (inputs, outputs), such as GPT-2's."""
    from transformers.pytorch_utils import Conv1D

    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}


def build_model(config: PreTrainedConfig, *, seed: int, attention: str | None = None) -> PreTrainedModel:
    """Builds a model on the CPU, with fp32 weights that depend only on (config, seed).

    Doesn't use or change the global random state. Raises the same errors as `build_meta_model`.
    """
    model = build_meta_model(config, attention=attention)
    names = {name for name, _ in model.named_parameters()}
    initialize_module(model, "", seed=seed)
    model.tie_weights()
    # initialize_module replaces a module's parameters, so only modules and the class's tied weights stay shared.
    if untied := [name for name, _ in model.named_parameters() if name not in names]:
        raise InputError(
            f"model: {config.model_type} shares parameters between modules in a way that Groundwork can't keep: "
            f"{', '.join(untied)}; share the whole module, or tie the head with tie_word_embeddings: true"
        )
    return model


def copy_model(model: PreTrainedModel, *, attention: str, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Builds a model on the CPU with the weights of `model`, in evaluation mode. Raises the same errors as
    `build_meta_model`.

    config: defaults to the configuration of `model`.
    """
    copied = build_meta_model(config or model.config, attention=attention)
    initialize_module(copied, "", seed=0, is_loaded=True)
    copied.tie_weights()
    copied.load_state_dict(model.state_dict())
    return copied.eval()


def initialize_module(model: PreTrainedModel, name: str, *, seed: int, is_loaded: bool = False) -> None:
    """Initializes the weights of the module `name` in `model` ("" for the whole model).

    Meta tensors are created on the CPU, because random numbers depend on the device. Existing tensors are written in
    place. Modules are initialized by the model's own `_init_weights`, children first, each with a seed that depends on
    the module's name. A decoder layer, the embedding, the final norm or the head therefore gets the same weights
    whether it's initialized separately or with the whole model. Don't initialize a module separately if its parent's
    `_init_weights` also writes to it, as GPT-2's does for c_proj. Call `model.tie_weights()` afterwards.

    Raises InputError if the architecture doesn't initialize a parameter or buffer.

    is_loaded: True if parameters will be loaded later. Only buffers are then initialized, and parameters stay NaN.
    """
    tied_names = set(model.all_tied_weights_keys)
    root = model.get_submodule(name)
    # Reversed pre-order, so that parents can overwrite their children's weights (GPT-2's scaled c_proj).
    modules = list(reversed(list(root.named_modules(prefix=name))))
    random_state = torch.get_rng_state()
    try:
        with torch.no_grad(), init.guard_torch_init_functions():
            for module_name, module in modules:
                _materialize(module, module_name, tied_names)
                if is_loaded and next(module.buffers(), None) is None:
                    continue  # an initializer that reads the weights may not accept NaN
                if is_loaded and not module._buffers:  # otherwise, buffers would get different random numbers
                    for parameter in module.parameters(recurse=False):
                        parameter._is_hf_initialized = True  # private, as in `_run_initializer`
                torch.default_generator.manual_seed(module_seed(seed, module_name))
                _run_initializer(_initializing_model(model, module_name), module, module_name, tied_names)
    finally:
        torch.set_rng_state(random_state)
    _refuse_missing_values(type(model).__name__, modules, has_parameters=not is_loaded)


class SavedWeights(Protocol):
    """Pretrained weights; see model/pretrained.py."""

    def fill(self, causal_lm: PreTrainedModel, unit: str) -> None:
        """Loads the weights of the module `unit` to the CPU."""


@dataclass(frozen=True)
class InitialWeights:
    """A run's initial weights, filled in unit by unit, so the whole model doesn't have to fit in memory."""

    seed: int
    pretrained: SavedWeights | None = None
    """Weights to load, or None for random weights."""
    dtype: torch.dtype = torch.float32
    """Dtype of the parameters. Buffers aren't converted, because rotary tables must not be rounded."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """{parameter name: factor} for random weights; see `width_roles`."""
    are_loaded: bool = False
    """True if a checkpoint will be loaded next. Leaving parameters NaN takes a third of the time."""

    def fill(self, causal_lm: PreTrainedModel, unit: str) -> None:
        """Fills in CPU weights for the module `unit` in `causal_lm`, which is on the meta device.

        `unit` is one of `units_of(causal_lm)`, in any order, or "" for the whole model. Call `causal_lm.tie_weights()`
        after the last unit.
        """
        if self.pretrained is not None:
            self.pretrained.fill(causal_lm, unit)
        else:
            initialize_module(causal_lm, unit, seed=self.seed, is_loaded=self.are_loaded)
        for name, parameter in causal_lm.get_submodule(unit).named_parameters(prefix=unit):
            if self.pretrained is None and name in self.scales:
                parameter.data *= self.scales[name]
            parameter.data = parameter.data.to(self.dtype)


def units_of(causal_lm: PreTrainedModel) -> list[str]:
    """Returns the names of modules that can be built separately: layers, then modules that don't contain layers.

    Together, they make up the whole model. Raises InputError if a parent of the layers has its own parameters or
    buffers.
    """
    layers = set(layers_of(causal_lm))
    layer_names = [name for name, module in causal_lm.named_modules() if module in layers]
    ancestors = {""} | {name[:end] for name in layer_names for end, character in enumerate(name) if character == "."}
    others = []
    for name in sorted(ancestors, key=len):
        container = causal_lm.get_submodule(name)
        own = [*container.named_parameters(recurse=False), *container.named_buffers(recurse=False)]
        if own:
            raise InputError(
                f"model: {type(causal_lm).__name__} has {own[0][0]} outside its layers{name and f', in {name}'}, so "
                "strategies that build models layer by layer do not support it; use ddp"
            )
        # Parents of layers can't be built separately, but their other children can.
        paths = [f"{name}.{child}" if name else child for child, _ in container.named_children()]
        others += [path for path in paths if path not in ancestors and path not in layer_names]
    return [*layer_names, *others]


def set_end_of_document(config: PreTrainedConfig, end_of_document_id: int) -> None:
    """Sets a base model's bos and eos IDs to the data's end-of-document ID, as in GPT-2.

    The padding ID is set to None, because a padding token would never be trained (see `build_meta_model`). For batched
    generation, `save_model_metadata` sets a padding ID in generation_config.json.
    """
    config.bos_token_id = config.eos_token_id = end_of_document_id
    config.pad_token_id = None


def check_vocabulary(config: PreTrainedConfig, vocabulary_size: int, *, has_weights: bool = False) -> list[str]:
    """Checks whether the model's vocabulary includes all IDs below vocabulary_size. Returns error messages.

    has_weights: True for a pretrained model.
    """
    if vocabulary_size <= config.vocab_size:
        return []
    what = f"the data's tokenizer has {vocabulary_size:,} IDs, but the model's vocab_size is {config.vocab_size:,}"
    auto = f"use --model.vocab_size auto, which sets it to {padded_vocabulary(vocabulary_size):,}"
    if has_weights:
        return [
            f"{what}; prepare the data with the model's own tokenizer, or, if the data's tokenizer extends it, {auto}"
        ]
    return [f"{what}; {auto}, or prepare the data with a tokenizer that has fewer IDs"]


def shape_changes(config: PreTrainedConfig, changed: PreTrainedConfig) -> str | None:
    """Describes how two models' weight shapes differ, or returns None if they are the same."""
    ours, theirs = (
        {name: tuple(parameter.shape) for name, parameter in build_meta_model(of).named_parameters()}
        for of in (config, changed)
    )
    different = [name for name in (ours | theirs) if ours.get(name) != theirs.get(name)]
    if not different:
        return None
    first = different[0]
    return (
        f"{len(different)} tensors differ, starting with {first}: {ours.get(first, 'none')}, "
        f"{theirs.get(first, 'none')}"
    )


def save_model_metadata(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Writes config.json, generation_config.json and the model's custom code to a folder.

    A local architecture's file is copied next to config.json, which refers to it in auto_map. The default padding ID
    for generation is the end-of-document ID.
    """
    config = copy.deepcopy(model.config)
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Configurations don't save the class name themselves, but AutoModel and vLLM need it.
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the model whose config the run started from; our weights aren't quantized
    config.output_attentions = False  # with our attention, transformers can't save True
    if type(model)._auto_class is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    # Only classes with GenerationMixin have a generation_config.
    generation = copy.deepcopy(getattr(model, "generation_config", None)) or GenerationConfig()
    generation.bos_token_id = config.bos_token_id
    generation.eos_token_id = config.eos_token_id
    if generation.pad_token_id is None and isinstance(config.eos_token_id, int):
        generation.pad_token_id = config.eos_token_id
    generation.save_pretrained(folder)


def clear_padding(model: nn.Module) -> None:
    """Makes every embedding row trainable; see `build_meta_model`."""
    for embedding in _embeddings(model):
        embedding.padding_idx = None


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _embed_in_bf16(model: PreTrainedModel) -> None:
    """Makes embeddings return bf16 under bf16 autocast, so that the residual stream is bf16.

    Autocast itself leaves lookups in fp32, which causes more memory traffic. fp16 isn't used, because it overflows
    above 65,504.
    """
    for embedding in _embeddings(model):
        embedding.register_forward_hook(_in_bf16_of_autocast)


def _in_bf16_of_autocast(module: nn.Module, args: tuple, looked_up: Tensor) -> Tensor:
    return looked_up.to(torch.bfloat16) if autocast_dtype(looked_up) == torch.bfloat16 else looked_up


def _count_positions_in_the_window(model: PreTrainedModel, attention: str) -> None:
    """Makes BLOOM's ALiBi ignore the document mask, which it would otherwise interpret as a padding mask.

    The biases are linear in the key position and softmax ignores constant offsets, so all documents can share them.
    """
    if "+mask" not in attention or not hasattr(model.base_model, "build_alibi_tensor"):
        return
    build = type(model.base_model).build_alibi_tensor

    def without_padding(mask: torch.Tensor, *arguments, **keywords) -> torch.Tensor:
        return build(model.base_model, mask.new_ones((mask.shape[0], mask.shape[-1])), *arguments, **keywords)

    model.base_model.build_alibi_tensor = without_padding


def _building_problem(config: PreTrainedConfig, attention: str, error: Exception) -> str:
    in_its_table = isinstance(error, KeyError) and error.args == (
        implementation_of(attention),
    )  # some architectures look up their attention class in a dict
    if in_its_table or "does not support an attention implementation" in str(error):
        return NO_SUCH_ATTENTION
    if isinstance(error, ImportError | ValueError):
        return f"attention {attention} cannot be used with this model here: {one_line(error)}"
    return (
        f"model: {type(config).__name__} cannot be built with these values ({described(error)}); compare them with "
        "a working model of the same type"
    )


def module_seed(seed: int, module_name: str) -> int:
    """Returns a 63-bit seed for one module, hashed because adjacent seeds may produce correlated random numbers."""
    digest = hashlib.sha256(f"{seed}:{module_name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _initializing_model(model: PreTrainedModel, module_name: str) -> PreTrainedModel:
    """Returns the innermost PreTrainedModel that contains the module. Its `_init_weights` initializes the module."""
    innermost = current = model
    for part in module_name.split(".") if module_name else ():
        current = getattr(current, part)
        if isinstance(current, PreTrainedModel):
            innermost = current
    return innermost


def _materialize(module: nn.Module, module_name: str, tied_names: set[str]) -> None:
    """Replaces a module's meta tensors with NaN on the CPU, to detect missing initial values later."""
    prefix = f"{module_name}." if module_name else ""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.is_meta and prefix + name not in tied_names:
            values = torch.full_like(parameter, float("nan"), device="cpu")
            setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            fill = float("nan") if buffer.is_floating_point() else 0
            setattr(module, name, torch.full_like(buffer, fill, device="cpu"))


def _run_initializer(
    initializing_model: PreTrainedModel, module: nn.Module, module_name: str, tied_names: set[str]
) -> None:
    """Runs `_init_weights` on one module, except for tied parameters, which another module initializes."""
    prefix = f"{module_name}." if module_name else ""
    own = module.named_parameters(recurse=False)
    tied = [parameter for name, parameter in own if prefix + name in tied_names]
    for parameter in tied:
        parameter._is_hf_initialized = True  # private, but transformers has no other way to skip a parameter
    initializing_model._init_weights(module)
    for parameter in tied:
        del parameter._is_hf_initialized


def _refuse_missing_values(model_class: str, modules: list[tuple[str, nn.Module]], *, has_parameters: bool) -> None:
    forgotten = [
        f"{module_name}.{name}"
        for module_name, module in modules
        for name, tensor in (
            *(module.named_parameters(recurse=False) if has_parameters else ()),
            *module.named_buffers(recurse=False),
        )
        if tensor.is_floating_point() and not tensor.is_meta and torch.isnan(tensor.sum())
    ]
    if forgotten:
        raise InputError(
            f"{model_class} does not initialize {', '.join(sorted(forgotten))}; initialize them in its _init_weights"
        )
