"""Converts between a model's stacked experts and published tensor names with one tensor per expert.

transformers 5 stacks experts when it loads them (`experts.gate_up_proj`), and `save_pretrained` splits them
(`experts.0.gate_proj.weight`). The Hub, vLLM, llama.cpp and transformers 4 use split experts. Both directions use
transformers' own conversions one tensor at a time, so there is never a second copy of a model.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
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
    """Names and shapes of an architecture's tensors, as written by `save_pretrained`."""

    def __init__(self, meta_model: PreTrainedModel):
        tensors = meta_model.state_dict()
        conversions = get_model_conversion_mapping(meta_model, add_legacy=False)
        # Cached on the model, because `revert_weight_conversion` would otherwise collect them again for each tensor.
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
        except Exception:  # if a conversion needs several tensors, it may fail in any way on one
            return
        each = [piece for named in pieces.values() for piece in named.items()]
        if len(each) == len(together) and dict(each) == together:
            self.pieces = pieces

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Self:
        return cls(build_meta_model(config))

    def _split_all(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self.meta_model, tensors)

    def split(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Returns {published name: tensor} for a training model's tensor. Some tensors are views of it."""
        if self.pieces.get(name, {name: None}).keys() == {name}:
            return {name: tensor}
        return self._split_all({name: tensor})

    def join(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Builds a training model's tensor from the tensors that `read` returns for its published names."""
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
            # add_tensor only collects pieces. `convert` joins them when all are present.
            converter.add_tensor(name, piece, pattern, read(piece))
        return converter.convert(name, model=self.meta_model, config=self.meta_model.config)[name]


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def shapes_in_files(paths: Iterable[Path]) -> Shapes:
    """Reads {name: shape} for the tensors in safetensors files from the file headers."""
    found: Shapes = {}
    for path in dict.fromkeys(paths):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return found


class JoinedTensors(Mapping[str, Tensor]):
    """Saved tensors under the training model's names, even if they were saved under published names."""

    def __init__(self, saved: Mapping[str, Tensor], names: PublishedNames):
        self._saved = saved
        self._names = names
        parts = {
            name: pieces
            for name, pieces in names.pieces.items()
            if name not in saved and pieces.keys() <= saved.keys()
        }
        others = {piece for pieces in parts.values() for piece in pieces}
        self._keys = dict.fromkeys([*(name for name in saved if name not in others), *parts])

    def __getitem__(self, name: str) -> Tensor:
        return self._saved[name] if name in self._saved else self._names.join(name, self._saved.__getitem__)

    def shapes(self, saved: Shapes) -> Shapes:
        """Returns {name: shape} for tensors saved with these shapes. If pieces don't fit, returns the wrong shape."""
        found = {}
        for name in self:
            pieces = {} if name in saved else self._names.pieces[name]
            wrong = [saved[piece] for piece, shape in pieces.items() if saved[piece] != shape]
            found[name] = saved[name] if name in saved else [*wrong, self._names.shapes[name]][0]
        return found

    def __contains__(self, name: object) -> bool:  # Mapping's own method would read the tensor
        return name in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
