"""Loads pretrained weights from safetensors one tensor at a time, so no rank needs memory for the whole model."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from pretrain.errors import InputError, one_line
from pretrain.model.build import clear_padding, initialize_module
from pretrain.model.model_config import load_model_config
from pretrain.model.published_names import PublishedNames, shapes_in_files
from pretrain.model.routers import as_buffers
from pretrain.terminal import is_first_process, say

WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
"""safetensors' names for the dtypes of weights that aren't quantized."""


@dataclass(frozen=True)
class NewTokens:
    """Tokens added to a tokenizer. Each is initialized with the mean of the original tokens for its text."""

    first: int
    """First new ID. Smaller IDs are in the original vocabulary."""
    parts: list[list[int]]
    """Original token IDs for each new token's text."""
    rows: int
    """Number of rows in the extended embedding, including padding."""

    def extend(self, old: torch.Tensor) -> torch.Tensor:
        """Adds rows for the new tokens to an embedding, head or head bias, (tokens, ...).

        Padding rows are initialized with the mean over the original tokens.
        """
        mean = old[: self.first].mean(dim=0)
        extended = torch.cat([old, mean.expand(max(0, self.rows - len(old)), *old.shape[1:])])
        for number, parts in enumerate(self.parts, start=self.first):
            extended[number] = old[parts].mean(dim=0) if parts else mean
        return extended


TensorPlaces = dict[str, tuple[Path, str]]
"""{tensor name or published name: (file, name in the file)}"""


class PretrainedTensors:
    """Weights in a folder or Hub ID, read in fp32 under the training model's names."""

    def __init__(
        self,
        places: dict[str, TensorPlaces],
        names: PublishedNames | None = None,
        new_tokens: NewTokens | None = None,
    ):
        self._places = places
        self._names = names
        self._new_tokens = new_tokens
        self._of_vocabulary = vocabulary_tensors(names.meta_model) if new_tokens else {}

    def read(self, name: str) -> torch.Tensor:
        """Reads a tensor into newly allocated CPU memory. Integer tensors aren't cast to fp32."""
        tensor = self._found(name)
        if name in self._of_vocabulary:
            return self._new_tokens.extend(tensor.to(torch.float32))
        # safetensors returns a view of the memory-mapped file, so we always copy.
        return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)

    def _found(self, name: str) -> torch.Tensor:
        tensors = {}
        places = self._places[name]
        for path in {path for path, _ in places.values()}:
            with safe_open(path, framework="pt") as file:
                mine = {piece: name_in_file for piece, (there, name_in_file) in places.items() if there == path}
                tensors |= {piece: file.get_tensor(name_in_file) for piece, name_in_file in mine.items()}
        return tensors[name] if name in tensors else self._names.join(name, tensors.pop)

    def fill(self, causal_lm: PreTrainedModel, unit: str) -> None:
        """Loads the weights of the module `unit` in `causal_lm`, which is on the meta device.

        Buffers that aren't in the files (rotary tables) are computed. Call `causal_lm.tie_weights()` afterwards.
        """
        root = causal_lm.get_submodule(unit)
        values: list[tuple[nn.Module, str, torch.Tensor]] = []
        for module_name, module in root.named_modules(prefix=unit):
            prefix = f"{module_name}." if module_name else ""
            for key, parameter in list(module.named_parameters(recurse=False)):
                if prefix + key in self._places:
                    tensor = self.read(prefix + key)
                    values.append((module, key, tensor))
                    parameter = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                    parameter._is_hf_initialized = True  # transformers' initializers skip these parameters
                    setattr(module, key, parameter)
        initialize_module(causal_lm, unit, seed=0)  # for buffers that aren't in the files
        for module, key, tensor in values:
            # Custom initializers may ignore _is_hf_initialized and overwrite the values, so we set them again.
            setattr(module, key, nn.Parameter(tensor, requires_grad=module._parameters[key].requires_grad))
        for name, buffer in root.named_buffers(prefix=unit):
            if name in self._places:
                buffer.copy_(self.read(name))


class TensorsInMemory(PretrainedTensors):
    """Weights in a dict of CPU tensors. Reading a tensor removes it from the dict to save memory."""

    def _found(self, name: str) -> torch.Tensor:
        return self._places.pop(name)


class LoadedModel:
    """Weights in a model on the CPU. `fill` shares its tensors with the training model."""

    def __init__(self, model: PreTrainedModel):
        self._model = model

    def fill(self, causal_lm: PreTrainedModel, unit: str) -> None:
        """Gives the parameters and buffers of the module `unit` to the same module in `causal_lm`, except for tied
        parameters.

        The parameters are new objects, because strategies shard or round them, and ZeRO then reads them again.
        """
        tied_names = set(causal_lm.all_tied_weights_keys)
        for module_name, module in causal_lm.get_submodule(unit).named_modules(prefix=unit):
            prefix = f"{module_name}." if module_name else ""
            twin = self._model.get_submodule(module_name)
            for key, parameter in list(twin.named_parameters(recurse=False)):
                if prefix + key not in tied_names:
                    own = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
                    setattr(module, key, own)
            for key, buffer in list(twin.named_buffers(recurse=False)):
                setattr(module, key, buffer)


def vocabulary_tensors(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Returns {name: parameter} for the embedding and the head, which have one row per token."""
    modules = [
        module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None
    ]
    wanted = {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}


def load_pretrained(name_or_path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Loads a pretrained model in fp32 from a folder or the Hub.

    Only supports safetensors, because pickle files can execute code. Raises InputError if the model or some weights
    are missing, or if transformers can't build the model.
    """
    load_model_config(name_or_path, trust_remote_code=trust_remote_code)
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are reported below
            output_loading_info=True,
        )
    except (ImportError, ValueError, SafetensorError, OSError) as error:
        raise InputError(
            f"{name_or_path}: cannot load safetensors weights ({one_line(error)}); use a folder or Hub ID with an "
            "undamaged model.safetensors, of a model that transformers can build here"
        ) from error
    missing = sorted(loading_info["missing_keys"]) + sorted(str(key) for key in loading_info["mismatched_keys"])
    if missing:
        raise InputError(incomplete(name_or_path, missing))
    clear_padding(model)
    as_buffers(model)
    return model


def incomplete(name_or_path: str, missing: list[str]) -> str:
    return (
        f"{name_or_path}: {len(missing)} weights are missing or do not have the shape in config.json, starting "
        f"with {missing[0]}; the checkpoint is incomplete or belongs to a different configuration"
    )


def open_pretrained(name_or_path: str, new_tokens: NewTokens | None = None) -> PretrainedTensors | LoadedModel:
    """Opens the weights in a folder or Hub ID. Raises the same errors as `load_pretrained`.

    If the files need a conversion other than joining experts, each rank loads the whole model, and frees it when its
    shards are built.

    new_tokens: tokens added to the vocabulary.
    """
    if files := find_tensors(name_or_path):
        names = PublishedNames(load_model_config(name_or_path))
        places, ignored = checked_places(name_or_path, files, names)
        if places is not None:
            if ignored and is_first_process():
                say(
                    f"warning: {name_or_path}: {len(ignored)} of its weights are not in the model of its config.json, "
                    f"starting with {ignored[0]}; they are ignored",
                    color="yellow",
                )
            return PretrainedTensors(places, names, new_tokens)
    model = load_pretrained(name_or_path)
    for parameter in vocabulary_tensors(model).values() if new_tokens else ():
        parameter.data = new_tokens.extend(parameter.data)
    return LoadedModel(model)


def find_weights(name_or_path: str) -> None:
    """Raises InputError if the weights in a local folder are missing, damaged, quantized or of another model."""
    if name_or_path.endswith(".json"):
        raise InputError(
            f"init: pretrained, but model: {name_or_path} is a JSON without weights; use a model folder or "
            "Hub ID, or train from scratch with init: scratch"
        )
    if Path(name_or_path).is_dir():
        if (Path(name_or_path) / "adapter_config.json").exists():  # transformers would apply it
            raise InputError(
                f"model: {name_or_path} contains a LoRA adapter, which init: pretrained doesn't apply; merge it with "
                "peft's merge_and_unload, or remove adapter_config.json to train without it"
            )
        if not (files := find_tensors(name_or_path)):
            raise InputError(f"model: {name_or_path} has no model.safetensors, which init: pretrained needs")
        checked_places(name_or_path, files, PublishedNames(load_model_config(name_or_path)))


def checked_places(
    name_or_path: str, files: dict[str, Path], names: PublishedNames
) -> tuple[dict[str, TensorPlaces] | None, list[str]]:
    """Returns (places of the model's tensors, names in the files that aren't in the model).

    The places are None if transformers may be able to convert the tensors. Raises InputError if weights are missing or
    have the wrong shape, or if tied tensors have different values, because transformers wouldn't tie them.
    """
    model = names.meta_model
    for pair in model.all_tied_weights_keys.items():
        if files.keys() >= set(pair):
            one, other = (PretrainedTensors({name: {name: (files[name], name)}}).read(name) for name in pair)
            if not torch.equal(one, other):
                raise InputError(
                    f"model: {name_or_path}: config.json ties {pair[0]} and {pair[1]}, but their values differ; set "
                    "tie_word_embeddings to false in its config.json, or remove one of them from its weights"
                )
    prefix = f"{model.base_model_prefix}."
    known = {*names.shapes, *(piece for pieces in names.pieces.values() for piece in pieces)}
    # Private, but transformers has no other list of tensors that old checkpoints may contain.
    harmless = re.compile("|".join([r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]))
    others = [name for name in files if not {name, prefix + name} & known and not harmless.search(name)]
    places = places_in_files(files, names)
    missing = [name for name, _ in model.named_parameters() if name not in places]
    if not missing:
        return places, others
    # If the embedding is missing, transformers ties it to the head.
    heads = {source: target for target, source in model.all_tied_weights_keys.items()}
    if not others and (lost := [name for name in missing if heads.get(name) not in files]):
        raise InputError(incomplete(name_or_path, lost))
    return None, others


def find_tensors(name_or_path: str) -> dict[str, Path]:
    """Returns {tensor name: file} for a folder or Hub ID, or {} if there are no safetensors.

    Raises InputError if a file is damaged or its weights are quantized.
    """
    # Private, but cached_file has no public option to return None if the file is missing.
    missing_is_none = {"_raise_exceptions_for_missing_entries": False}
    index = None
    try:
        single = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **missing_is_none)
        index = None if single else cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **missing_is_none)
        if index:
            weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = [Path(cached_file(name_or_path, file)) for file in sorted(set(weight_map.values()))]
        else:
            paths = [Path(single)] if single else []
    except OSError as error:
        if index:
            raise InputError(f"{index}: lists a file that is missing ({one_line(error)}); restore it") from None
        return {}  # load_pretrained reports this problem
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index}: not a valid weight index ({type(error).__name__}: {error}); restore the file"
        ) from None
    places = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
                dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: damaged or not a safetensors file ({error}); restore or replace it") from None
        # Without their scales, quantized weights have the right shapes but wrong values.
        for name, dtype in dtypes.items():
            if "weight" in name.rpartition(".")[2] and dtype not in WEIGHT_DTYPES:
                raise InputError(
                    f"{path}: {name} is quantized ({dtype}), but training needs bf16, fp16 or fp32 weights; use the "
                    "unquantized version of this model"
                )
    return places


def places_in_files(files: dict[str, Path], names: PublishedNames) -> dict[str, TensorPlaces]:
    """Finds the model's tensors with the right shape, with or without the base model's prefix in their names."""
    meta_model = names.meta_model
    shapes = shapes_in_files(files.values())
    prefix = f"{meta_model.base_model_prefix}."
    found = {}
    parameters = [name for name, _ in meta_model.named_parameters()]
    buffers = {name for name, _ in meta_model.named_buffers()} & meta_model.state_dict().keys()
    for name in [*parameters, *buffers]:
        for pieces in ({name: names.shapes[name]}, names.pieces[name]):
            for cut in ("", prefix):
                places = {piece: piece.removeprefix(cut) for piece in pieces}
                if all(shapes.get(place) == pieces[piece] for piece, place in places.items()):
                    found.setdefault(name, {piece: (files[place], place) for piece, place in places.items()})
    return found
