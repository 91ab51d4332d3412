"""Separates documents in state-space models, linear attention, short convolutions and other causal mixers.

These mixers start each row with a zero state. We therefore move each document to a separate row, padded at the end,
run the mixer, and move the outputs back. This works with any kernel. Documents whose lengths differ by less than a
factor of two share a call. The remaining documents share one call if they need little padding.

Shapes: B windows, T positions, N = B x T tokens, R rows in a call, L row length, C cells (R x L summed over all
calls).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.compile import layers_of

LITTLE = 1 / 16
"""Maximum padding, as a share of all tokens, that costs less than another mixer call."""
MAX_CELLS_PER_TOKEN = 2 + LITTLE
"""Maximum number of cells per token, including padding."""
OF_SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments for packed documents, not needed for rows with a single document."""


@dataclass(frozen=True)
class DocumentRows:
    """Mapping between a micro-batch's tokens and rows with one document each."""

    shapes: tuple[tuple[int, int], ...]
    """(rows, length) for each mixer call."""
    tokens: Tensor
    """Token index (C,) for each cell, int64. Padding repeats the document's last token."""
    cells: Tensor
    """Cell index (N,) for each token, int64."""
    shape: tuple[int, int]
    """The micro-batch's shape (B, T)."""

    @classmethod
    def of(cls, cu_seq_lens: Tensor, shape: tuple[int, int], device: torch.device | str = "cpu") -> "DocumentRows":
        """Assigns documents to rows, sorted by length.

        Args:
            cu_seq_lens: cumulative lengths from `attention.document_layout`, on the CPU.
            device: device for the indices.
        """
        bounds = np.unique(cu_seq_lens.numpy())
        lengths = np.diff(bounds)
        order = np.argsort(-lengths, kind="stable")
        starts = bounds[:-1][order].astype(np.int64)
        lengths = lengths[order]
        shapes = []
        tokens = []
        cells = np.empty(shape[0] * shape[1], dtype=np.int64)
        little = LITTLE * len(cells)
        first = 0
        used = 0
        while first < len(lengths):
            length = int(lengths[first])
            last = len(lengths)
            if (length - lengths[first:]).sum() > little:
                last = int(np.searchsorted(-lengths, -(length // 2), side="left"))
            own_lengths = lengths[first:last, None]
            positions = np.arange(length)
            tokens_RL = starts[first:last, None] + np.minimum(positions, own_lengths - 1)
            is_real_RL = positions < own_lengths
            cells[tokens_RL[is_real_RL]] = used + np.flatnonzero(is_real_RL)
            shapes.append(tokens_RL.shape)
            tokens.append(tokens_RL.ravel())
            used += tokens_RL.size
            first = last
        indices = [torch.from_numpy(array) for array in (np.concatenate(tokens), cells)]
        if torch.device(device).type == "cuda":
            indices = [index.pin_memory() for index in indices]
        return cls(tuple(shapes), *(index.to(device, non_blocking=True) for index in indices), shape)

    def calls(self, arguments: Any) -> Iterator[Any]:
        """Yields each call's arguments, with tensors (B, T, ...) or (1, T, ...) gathered into (R, L, ...)."""
        first = 0
        for rows, length in self.shapes:
            index = self.tokens[first : first + rows * length]
            yield self._gathered(arguments, index, (rows, length))
            first += rows * length

    def _gathered(self, value: Any, index: Tensor, shape: tuple[int, int]) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._gathered(one, index, shape) for one in value)
        if isinstance(value, dict):
            return {name: self._gathered(one, index, shape) for name, one in value.items()}
        with_tokens = (self.shape, (1, self.shape[1]))
        if not isinstance(value, Tensor) or tuple(value.shape[:2]) not in with_tokens:
            return value
        value = value.expand(self.shape[0], *value.shape[1:])
        return value.flatten(0, 1).index_select(0, index).unflatten(0, shape)

    def together(self, outputs: list[Any]) -> Any:
        """Combines the outputs (R, L, ...) of all calls into (B, T, ...), and replaces states with None."""
        if isinstance(outputs[0], tuple | list):
            return type(outputs[0])(self.together(list(parts)) for parts in zip(*outputs, strict=True))
        if not all(
            isinstance(output, Tensor) and tuple(output.shape[:2]) == shape
            for output, shape in zip(outputs, self.shapes, strict=True)
        ):
            return None
        cells = torch.cat([output.flatten(0, 1) for output in outputs])
        return cells.index_select(0, self.cells).unflatten(0, self.shape)


class Current:
    """Rows of the current micro-batch, shared by all mixers in a model."""

    given: DocumentRows | None = None
    rows: DocumentRows | None = None


def keep_documents_apart(model: PreTrainedModel, classes: Iterable[str]) -> None:
    """Makes mixers of these classes process each document separately if the model receives `document_rows`.

    The model and its base model then accept this argument, a `DocumentRows`. Layers that are recomputed in the
    backward pass use the rows of the last forward pass, so only one micro-batch may be in flight.
    """
    classes = set(classes)
    mixers = [child for layer in layers_of(model) for child in layer.children() if type(child).__name__ in classes]
    _replace_forwards(model, mixers, in_rows)


def _replace_forwards(model: PreTrainedModel, modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Current:
    current = Current()
    # A copy of the model would share closures with the original, so we use methods and attributes.
    for module in modules:
        module.current_documents = current
        module.forward = MethodType(forward, module)
    for module, hook in ((model, _pass_on), (model.base_model, _take)):
        module.current_documents = current
        module.register_forward_pre_hook(hook, with_kwargs=True)
    return current


def _pass_on(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    model.current_documents.given = kwargs.pop("document_rows", None)
    return args, kwargs


def _take(base_model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    current = base_model.current_documents
    current.rows = kwargs.pop("document_rows", None) or current.given
    current.given = None
    return args, kwargs


@torch.compiler.disable  # shapes change in every batch
def in_rows(mixer: nn.Module, *args, **kwargs) -> Any:
    """Runs the mixer's forward pass on each document separately."""
    forward = type(mixer).forward
    rows = mixer.current_documents.rows
    if rows is None:
        return forward(mixer, *args, **kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name not in OF_SEGMENTS}
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = None  # the mask is for windows, not for rows
    if not any(_has_tokens(value, rows) for value in (*args, *kwargs.values())):
        raise ValueError(f"{type(mixer).__name__} needs hidden states of shape {rows.shape}, as in document_rows")
    return rows.together([forward(mixer, *a, **k) for a, k in rows.calls((args, kwargs))])


LEAK = 1e-4
"""Minimum relative change in a module's outputs that counts as a leak from another document."""


def leaking_classes(model: PreTrainedModel, ids_BT: Tensor, first: int, arguments: dict[str, Any]) -> set[str]:
    """Returns the class names of the layers' direct children that mix documents despite `arguments`.

    Each child is called twice, with different first documents. If it leaks, the forward pass continues with separate
    documents to test later children. This changes the model permanently.

    Args:
        first: length of the first document in tokens.
        arguments: the model's arguments for `ids_BT`, with `document_rows`.
    """
    found: set[str] = set()

    def watch(module: nn.Module, *args, **kwargs) -> Any:
        try:
            output = type(module).forward(module, *args, **kwargs)
            leaks = _leaks(module, output, first, args, kwargs)
        except Exception:  # some libraries reject packed documents
            leaks = True
        if not leaks:
            return output
        output = in_rows(module, *args, **kwargs)
        found.add(type(module).__name__)
        return output

    _replace_forwards(model, [child for layer in layers_of(model) for child in layer.children()], watch)
    with torch.no_grad():
        model(input_ids=ids_BT, use_cache=False, **arguments)
    return found


def _leaks(module: nn.Module, output: Any, first: int, args: tuple, kwargs: dict[str, Any]) -> bool:
    rows = module.current_documents.rows
    output = output[0] if isinstance(output, tuple) else output
    hidden = next((x for x in (*args, *kwargs.values()) if _has_tokens(x, rows)), None)
    if hidden is None or not _has_tokens(output, rows):
        return False
    changed = hidden.clone()
    noise = torch.randn(changed[0, :first].shape, generator=torch.Generator().manual_seed(0))
    changed[0, :first] += noise.to(changed) * hidden.std()
    args = tuple(changed if x is hidden else x for x in args)
    kwargs = {name: changed if x is hidden else x for name, x in kwargs.items()}
    other = type(module).forward(module, *args, **kwargs)
    other = other[0] if isinstance(other, tuple) else other
    later = (output - other).flatten(0, 1)[first:].abs().max()
    return bool(later > LEAK * output.abs().max())


def _has_tokens(value: Any, rows: DocumentRows) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape[:2]) == rows.shape
