"""A small copy of a model as a reference: the library's own eager forward, which everything else is compared with.

Shapes: B windows, T positions, V vocabulary.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from pretrain.errors import InputError
from pretrain.model.build import build_model
from pretrain.model.small_copy import WINDOWS, in_a_line, small_copies

DOCUMENT_LENGTHS = ((9, 1, 14), (16, 8))
"""Documents of each of two windows."""
SHORT_DOCUMENT_LENGTHS = ((3, 1, 4), (5, 3))
"""The same for models with fewer positions than the above have tokens."""
END_OF_DOCUMENT = 1
TOLERANCE = 5e-4
"""Largest difference, relative to the largest logit, that rounding in fp32 explains; leaks are far larger."""
VISIBLE = 100 * TOLERANCE
"""What an earlier token must change, relative to the largest logit, for the copy to tell anything about leaks."""
WEIGHT_FACTORS = (3.0, 10.0, 30.0)
"""Initial weights hardly let one token see another: they are multiplied by the first of these under which it does."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations as small as those of a small copy only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class KeyedConfig:
    """A configuration that caches compare by its content."""

    key: str
    config: PreTrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "KeyedConfig":
        return cls(json.dumps(config.to_dict(), sort_keys=True, default=str), config)


def projects_hidden_states(config: PreTrainedConfig) -> bool:
    """Whether the logits are head(last hidden state) and nothing else: no scale, no cap, no second head.

    Found by running a small copy, once per configuration and process. Raises InputError as `reference_of` does.
    """
    return _projects_hidden_states(KeyedConfig.of(config))


@functools.lru_cache(maxsize=64)
@one_thread()
def _projects_hidden_states(keyed: KeyedConfig) -> bool:
    return is_projection(reference_of(keyed))


@functools.lru_cache(maxsize=4)
@one_thread()
def reference_of(keyed: KeyedConfig) -> PreTrainedModel:
    """The small copy with the library's eager forward, and weights under which tokens see each other.

    Raises InputError for an architecture that does not run on token ids alone, or has weights without initial values.
    """
    failures: list[str] = []
    for small in small_copies(keyed.config, failures):
        try:
            model = build_model(small, seed=0, attention="eager").eval()
            _make_context_visible(model)
        except InputError:
            raise
        except Exception as error:  # whatever the library's own forward raises
            failures.append(in_a_line(error))
            continue
        return model
    raise InputError(_unbuildable(keyed.config, failures))


def _unbuildable(config: PreTrainedConfig, failures: Sequence[str]) -> str:
    reason = failures[-1] if failures else "the library cannot build it from this configuration"
    return (
        f"model: {config.model_type} does not run on token ids alone ({reason}); complete its configuration, or take "
        "another architecture (docs/models.md lists what works)"
    )


def _make_context_visible(model: PreTrainedModel) -> None:
    """Multiplies the matrices such that the first token of a document changes what the model says of later ones."""
    matrices = [p for name, p in model.named_parameters() if p.dim() >= 2 and "A_log" not in name]
    window = ReferenceWindow.of(model.config)
    first = window.documents[0][1]
    ids_BT = window.ids_BT[:1, first]
    changed_BT = window.with_other_tokens(slice(first.start, first.start + 1))[:1, first]
    now, best = 1.0, (0.0, 1.0)
    for factor in WEIGHT_FACTORS:
        _multiply(matrices, factor / now)
        now = factor
        logits = logits_of(model, ids_BT)
        change = relative_difference(logits_of(model, changed_BT)[:, 1:], logits[:, 1:])
        best = max(best, (change, factor)) if logits.isfinite().all() else best
        if best[0] > VISIBLE:
            break
    _multiply(matrices, best[1] / now)
    if best[0] < VISIBLE / 10:
        windows = [f"{name} {value}" for name in WINDOWS if (value := getattr(model.config, name, None)) is not None]
        raise RuntimeError(f"its tokens do not see each other{' with ' * bool(windows)}{' and '.join(windows)}")


def _multiply(matrices: Sequence[Tensor], factor: float) -> None:
    with torch.no_grad():
        for matrix in matrices:
            matrix.mul_(factor)


@dataclass(frozen=True)
class ReferenceWindow:
    """Two windows of several documents each, always the same; each opens with END_OF_DOCUMENT, as in training."""

    ids_BT: Tensor
    """(2, T + 1), the last column for targets alone."""
    documents: list[tuple[int, slice]]
    """(window, positions) of each document."""
    vocabulary_size: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "ReferenceWindow":
        """For a model with this configuration: in its vocabulary, within its positions."""
        lengths = DOCUMENT_LENGTHS
        if (getattr(config, "max_position_embeddings", None) or sum(lengths[0])) < sum(lengths[0]):
            lengths = SHORT_DOCUMENT_LENGTHS
        generator = torch.Generator().manual_seed(0)
        shape = (len(lengths), sum(lengths[0]) + 1)
        ids_BT = torch.randint(END_OF_DOCUMENT + 1, config.vocab_size, shape, generator=generator)
        documents = []
        for row, row_lengths in enumerate(lengths):
            for length, end in zip(row_lengths, np.cumsum(row_lengths).tolist(), strict=True):
                documents.append((row, slice(end - length, end)))
                ids_BT[row, end - length] = END_OF_DOCUMENT
        return cls(ids_BT, documents, config.vocab_size)

    @property
    def inputs_BT(self) -> Tensor:
        return self.ids_BT[:, :-1]

    def with_other_tokens(self, positions: slice) -> Tensor:
        """ids_BT with other ids at these positions, none of them END_OF_DOCUMENT."""
        changed_BT = self.ids_BT.clone()
        ordinary = END_OF_DOCUMENT + 1
        choices = self.vocabulary_size - ordinary
        changed_BT[:, positions] = (changed_BT[:, positions] - ordinary + choices // 2) % choices + ordinary
        return changed_BT


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids_BT: Tensor, **arguments) -> Tensor:
    """(B, T, V) in fp32 on the CPU, wherever and however the model computes."""
    return model(input_ids=ids_BT.to(model.device), use_cache=False, **arguments).logits.float().cpu()


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest number wanted; infinite where something is not finite."""
    difference = ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-9)).item()
    return difference if difference == difference else float("inf")


def is_projection(model: PreTrainedModel) -> bool:
    """Whether the model's logits are those of its output head on its base model's last hidden states."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    ids_BT = ReferenceWindow.of(model.config).inputs_BT
    try:
        with torch.no_grad():
            hidden_BTD = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
            logits_BTV = F.linear(hidden_BTD, head.weight, head.bias)
    except Exception:  # a base model of another form: its own forward computes the logits
        return False
    wanted_BTV = logits_of(model, ids_BT)
    return logits_BTV.shape == wanted_BTV.shape and relative_difference(logits_BTV, wanted_BTV) <= TOLERANCE / 10
