"""Converts between stacked experts and published checkpoints, which contain one tensor per expert.

transformers 5 stacks experts on loading (`experts.gate_up_proj`), and `save_pretrained` splits them
(`experts.0.gate_proj.weight`). The Hub, vLLM, llama.cpp and transformers 4 use split experts. We use transformers'
own conversions, but one tensor at a time, so we never need memory for a second copy of the model.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from pretrain.model.build import build_meta_model

Shapes = dict[str, tuple[int, ...]]


class PublishedNames:
    """Tensor names and shapes of an architecture, as written by `save_pretrained`."""

    def __init__(self, config: PreTrainedConfig):
        meta_model = build_meta_model(config)
        tensors = meta_model.state_dict()
        conversions = get_model_conversion_mapping(meta_model, add_legacy=False)
        # `revert_weight_conversion` reads this attribute instead of collecting the conversions for every tensor.
        meta_model._weight_conversions = [each for each in conversions if not isinstance(each, PrefixChange)]
        self.meta_model = meta_model
        self.pieces: dict[str, Shapes] = {name: {name: tuple(tensor.shape)} for name, tensor in tensors.items()}
        """{name in the training model: {published name: shape}}"""
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if not meta_model._weight_conversions:
            return
        try:
            pieces = {name: shapes_of(self._split_all({name: tensor})) for name, tensor in tensors.items()}
            together = shapes_of(self._split_all(tensors))
        except Exception:  # conversions that need several tensors may raise any error
            return
        each = [piece for named in pieces.values() for piece in named.items()]
        if len(each) == len(together) and dict(each) == together:
            self.pieces = pieces

    def _split_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self.meta_model, tensors)

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Splits a training model's tensor into {published name: tensor}. The results may be views."""
        if self.pieces.get(name, {name: None}).keys() == {name}:
            return {name: tensor}
        return self._split_all({name: tensor})

    def join(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Builds a training model's tensor from its published tensors, read with `read(name)`."""
        conversions = self.meta_model._weight_conversions
        converter = None
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        for piece in self.pieces[name]:
            _, pattern = rename_source_key(piece, renamings, converters)
            if pattern is None:
                return read(piece)
            if converter is None:
                converter = copy.deepcopy(next(each for each in converters if pattern in each.source_patterns))
            # add_tensor only collects the tensors. `convert` joins them.
            converter.add_tensor(name, piece, pattern, read(piece))
        return converter.convert(name, model=self.meta_model, config=self.meta_model.config)[name]


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def shapes_in_files(paths: Iterable[Path]) -> Shapes:
    """Reads {name: shape} from the headers of safetensors files."""
    found: Shapes = {}
    for path in dict.fromkeys(paths):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return found


class TensorsOnDisk(Mapping[str, Tensor]):
    """Base class of mappings whose tensors are read on access. `places` has their names as keys."""

    places: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:  # Mapping's default would read the tensor
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class JoinedTensors(TensorsOnDisk):
    """Mapping from the training model's names to saved tensors, which may have published names."""

    def __init__(self, saved: Mapping[str, Tensor], names: PublishedNames):
        self._saved = saved
        self._names = names
        parts = {
            name: pieces
            for name, pieces in names.pieces.items()
            if name not in saved and pieces.keys() <= saved.keys()
        }
        others = {piece for pieces in parts.values() for piece in pieces}
        self.places = dict.fromkeys([*(name for name in saved if name not in others), *parts])

    def __getitem__(self, name: str) -> Tensor:
        return self._saved[name] if name in self._saved else self._names.join(name, self._saved.__getitem__)

    def shapes(self, saved: Shapes) -> Shapes:
        """Returns {name: shape}, given the saved shapes. If a published tensor has the wrong shape, returns it."""
        found = {}
        for name in self:
            pieces = {} if name in saved else self._names.pieces[name]
            wrong = [saved[piece] for piece, shape in pieces.items() if saved[piece] != shape]
            found[name] = saved[name] if name in saved else [*wrong, self._names.shapes[name]][0]
        return found
