"""A pretrained model's weights, read from its safetensors one tensor at a time, so that no process holds them all."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from pretrain.errors import InputError
from pretrain.model.build import initialize_module, load_pretrained
from pretrain.model.model_config import load_model_config
from pretrain.model.published_names import PublishedNames

TensorPlaces = dict[str, tuple[Path, str]]
"""{name of a tensor, or of each of its pieces as published: (file, name in it)}"""


class PretrainedTensors:
    """The weights of a folder or Hub id, by the names of the model that trains, fp32 whatever they were saved in."""

    def __init__(self, places: dict[str, TensorPlaces], names: PublishedNames | None = None):
        self._places, self._names = places, names

    def read(self, name: str) -> torch.Tensor:
        """A tensor of its own, on the CPU; integers keep their type."""
        tensor = self._found(name)
        # Copied in any case: what safetensors returns is the mapped file.
        return tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)

    def _found(self, name: str) -> torch.Tensor:
        tensors, places = {}, self._places[name]
        for path in {path for path, _ in places.values()}:
            with safe_open(path, framework="pt") as file:
                mine = {piece: name_in_file for piece, (there, name_in_file) in places.items() if there == path}
                tensors |= {piece: file.get_tensor(name_in_file) for piece, name_in_file in mine.items()}
        return tensors[name] if name in tensors else self._names.join(name, tensors.pop)

    def fill(self, causal_lm: PreTrainedModel, unit: str) -> None:
        """Gives the module called `unit` inside `causal_lm`, on the meta device so far, its weights and no others.

        Buffers that are not saved (rotary tables) are computed. A tied parameter is left for `tie_weights`.
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
                    parameter._is_hf_initialized = True  # transformers' initialisers pass over it
                    setattr(module, key, parameter)
        initialize_module(causal_lm, unit, seed=0)
        for module, key, tensor in values:
            # Anew: an initialiser that is not transformers' own may have written into it all the same.
            setattr(module, key, nn.Parameter(tensor, requires_grad=module._parameters[key].requires_grad))
        for name, buffer in root.named_buffers(prefix=unit):
            if name in self._places:
                buffer.copy_(self.read(name))


class TensorsInMemory(PretrainedTensors):
    """Likewise of tensors on the CPU by name; each is let go as it is read, so that no two copies are whole."""

    def _found(self, name: str) -> torch.Tensor:
        return self._places.pop(name)


def open_pretrained(name_or_path: str) -> PretrainedTensors | PreTrainedModel:
    """Where the weights of a folder or a Hub id are; the whole model where its files need more than reading.

    They do where transformers makes one tensor of several kinds of them as it loads (experts, saved one by one, are
    put together here): then every process holds the model until its own part is made. Raises InputError as
    `load_pretrained` does.
    """
    files = {} if name_or_path.endswith(".json") else find_tensors(name_or_path)
    names = PublishedNames.of(load_model_config(name_or_path)) if files else None
    if names is None or (places := places_in_files(files, names)) is None:
        return load_pretrained(name_or_path)
    return PretrainedTensors(places, names)


def find_weights(name_or_path: str) -> None:
    """Raises InputError where a folder on this machine has no weights to start from, or damaged ones."""
    if name_or_path.endswith(".json"):
        raise InputError(
            f"init: pretrained, but model: {name_or_path} is a JSON, which holds no weights; give a model's folder or "
            "Hub id, or train from scratch with init: scratch"
        )
    if Path(name_or_path).is_dir() and not find_tensors(name_or_path):
        raise InputError(f"model: {name_or_path} has no model.safetensors, which init: pretrained starts from")


def find_tensors(name_or_path: str) -> dict[str, Path]:
    """{name in the file: file} of all tensors of a folder or Hub id; {} where it has no safetensors.

    Raises InputError for a file that is damaged.
    """
    missing_is_none = {"_raise_exceptions_for_missing_entries": False}
    try:
        single = cached_file(name_or_path, SAFE_WEIGHTS_NAME, **missing_is_none)
        index = None if single else cached_file(name_or_path, SAFE_WEIGHTS_INDEX_NAME, **missing_is_none)
        if index:
            weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            paths = [Path(cached_file(name_or_path, file)) for file in sorted(set(weight_map.values()))]
        else:
            paths = [Path(single)] if single else []
    except OSError:
        return {}  # load_pretrained says what is wrong
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index}: lists no weights as it should ({type(error).__name__}: {error}); restore the file"
        ) from None
    places = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: is damaged or no safetensors file ({error}); restore or download it") from None
    return places


def places_in_files(files: dict[str, Path], names: PublishedNames) -> dict[str, TensorPlaces] | None:
    """Where the model's tensors are, the base model's prefix added where the files lack it.

    None where a parameter is missing or has another shape.
    """
    meta_model, shapes = names.meta_model, shapes_in_files(files)
    prefix, found = f"{meta_model.base_model_prefix}.", {}
    wanted = dict(meta_model.named_parameters())
    buffers = {name for name, _ in meta_model.named_buffers()} & meta_model.state_dict().keys()
    for name in [*wanted, *buffers]:
        for pieces in ({name: names.shapes[name]}, names.pieces[name]):
            for cut in ("", prefix):
                places = {piece: piece.removeprefix(cut) for piece in pieces}
                if all(shapes.get(place) == pieces[piece] for piece, place in places.items()):
                    found.setdefault(name, {piece: (files[place], place) for piece, place in places.items()})
    return found if wanted.keys() <= found.keys() else None


def shapes_in_files(files: dict[str, Path]) -> dict[str, tuple[int, ...]]:
    """{name: shape}, from the headers."""
    found: dict[str, tuple[int, ...]] = {}
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return found
