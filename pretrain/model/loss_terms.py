"""Additional loss terms, defined by classes in extensions; see docs/own_loss.md.

Shapes: B sequences, T positions, D hidden width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pretrain.config import Loss, Section
from pretrain.errors import InputError
from pretrain.mesh_sizes import launched_sizes
from pretrain.model.build import module_seed
from pretrain.model.small_copy import logit_cap
from pretrain.registry import LOSS_TERMS


class TermOptions(Section):
    """Base class for a term's `Options`."""

    coefficient: float = 1.0
    """Weight of the term in the loss."""


@dataclass(frozen=True)
class Seen:
    """A micro-batch as seen by a loss term."""

    input_ids_BT: Tensor
    targets_BT: Tensor
    hidden_BTD: Tensor
    """Last hidden states, the input to the head."""
    documents_BT: Tensor
    """Index of each token's document in its sequence, starting at 0. Always 0 without document_mask."""
    step: int
    """Step number, starting at 0."""
    head: "nn.Module | Shared"
    """Output head, with a weight of shape (V, D)."""
    given_embedding: "nn.Module | Shared | None"
    """The token embedding, or None if the term sets embeds = False."""
    attention: Mapping[str, Any]
    """The model's other arguments. Pass them to another transformers model to use the same document mask there."""
    cap: float | None = None
    """Soft cap c if the model computes c x tanh(logits / c), or None."""
    sequences: "Sequences" = field(default_factory=lambda: Sequences())
    """Conversion between this rank's tokens and full sequences."""

    @property
    def embedding(self) -> "nn.Module | Shared":
        """Token embedding, available to terms with `embeds = True`."""
        if self.given_embedding is None:
            raise InputError("loss.terms: to use seen.embedding, add embeds = True to the term's class")
        return self.given_embedding

    def whole(self, values_BT: Tensor) -> Tensor:
        """Converts values (B, T, ...) of this rank's tokens to values of full sequences."""
        return self.sequences.whole(values_BT)

    def own(self, values_BT: Tensor) -> Tensor:
        """Converts values of full sequences to values of this rank's tokens."""
        return self.sequences.own(values_BT)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits (..., V) for hidden states (..., D).

        Pass only a few rows at a time, because the logits need a lot of memory.
        """
        logits = F.linear(hidden, self.head.weight, getattr(self.head, "bias", None))
        return logits if self.cap is None else self.cap * (logits.float() / self.cap).tanh()


class Sequences:
    """Each rank has full sequences. cp uses a different class."""

    def whole(self, values_BT: Tensor) -> Tensor:
        return values_BT

    def own(self, values_BT: Tensor) -> Tensor:
        return values_BT


class Shared:
    """The model's head or embedding, for terms that several ranks compute for the same tokens.

    Divides parameter gradients by the number of these ranks, because the gradients are later summed over the ranks.
    """

    def __init__(self, module: nn.Module, ranks: int):
        self.module = module
        self.ranks = ranks

    def __call__(self, *args) -> Tensor:
        shares = {name: self.share(parameter) for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, shares, args)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return self.share(value) if isinstance(value, nn.Parameter) else value

    def share(self, parameter: Tensor) -> Tensor:
        parameter = parameter.view_as(parameter)
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / self.ranks)
        return parameter


class LossTerm(ABC):
    """Base class for loss terms, which are sums over tokens.

    Register subclasses in `registry.LOSS_TERMS`, and declare their settings in a nested class `Options`. All
    parameters must be in `module`, and there must be no other state.
    """

    Options: type[TermOptions] = TermOptions
    by_token = False
    """True if a token's value depends on other tokens only through `seen.whole` and the model's attention.

    This is required for cp, which splits each sequence across ranks.
    """
    embeds = False
    """True if the term uses `seen.embedding`. The last pipeline stage then also has the embedding."""

    def __init__(self, options: TermOptions, model_config: PreTrainedConfig):
        self.options = options
        self.model_config = model_config
        self.trained: nn.Module | None = None
        """Result of `module`."""

    def module(self) -> nn.Module | None:
        """Builds the term's trainable module on the CPU in fp32. torch is already seeded.

        Every parameter must receive a gradient in every step.
        """
        return None

    @classmethod
    def has_parameters(cls) -> bool:
        """Returns True if this class has trainable parameters."""
        return cls.module is not LossTerm.module

    @abstractmethod
    def __call__(self, seen: Seen) -> Tensor:
        """Returns one value per token, (B, T), or their sum.

        The result is later divided by the number of tokens in the step.
        """


class LossTerms:
    """A run's loss terms, and their means since they were last logged."""

    def __init__(self, settings: Loss, model_config: PreTrainedConfig, *, seed: int, dtype: torch.dtype):
        self.terms: dict[str, LossTerm] = {}
        self.trained = nn.ModuleDict()
        """{term name: trainable module}, with parameters in `dtype`."""
        for name, given in settings.terms.items():
            made = LOSS_TERMS[name]
            term = made(made.Options.model_validate(given or {}), model_config)
            self.terms[name] = term
            if made.has_parameters():
                with torch.random.fork_rng(devices=[]):
                    # Each term has its own seed, so its weights don't depend on other terms.
                    torch.default_generator.manual_seed(module_seed(seed, f"loss_terms.{name}"))
                    term.trained = term.module()
                if not isinstance(term.trained, nn.Module):
                    kind = type(term.trained).__name__
                    raise InputError(f"loss.terms.{name}: module must return a torch.nn.Module, got {kind}")
                self.trained[name] = term.trained
                for parameter in term.trained.parameters():  # but not buffers, such as rotary tables
                    parameter.data = parameter.data.to(dtype)
                if lost := set(term.trained.state_dict()) - {key for key, _ in term.trained.named_parameters()}:
                    raise InputError(
                        f"loss.terms.{name}: checkpoints would not contain {min(lost)}, because they only store the "
                        "module's parameters, and each of them only once; make it a buffer with persistent=False"
                    )
        self.embeds = any(term.embeds for term in self.terms.values())
        self.cap = logit_cap(model_config)
        self.step = 0
        self.sequences = Sequences()
        self.ranks = 1
        """Number of ranks that compute the terms for the same tokens and sum their head gradients."""
        self._sums: Tensor | None = None

    def add(
        self,
        input_ids_BT: Tensor,
        targets_BT: Tensor,
        hidden_BTD: Tensor,
        head: nn.Module,
        embedding: nn.Module | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Returns the weighted sum of all terms, averaged over this rank's tokens."""
        is_tied = embedding is not None and embedding.weight is head.weight
        shown = [Shared(each, self.ranks) if self.ranks > 1 else each for each in (head, embedding)]
        if not (self.embeds and is_tied):  # an untied embedding's gradient is already complete on every rank
            shown[1] = embedding if self.embeds else None
        documents_BT = self.documents(arguments.get("position_ids"), targets_BT)
        seen = Seen(
            input_ids_BT, targets_BT, hidden_BTD, documents_BT, self.step, *shown, arguments, self.cap, self.sequences
        )
        # Micro-batches have the same number of tokens, so the mean of their means is the step's mean.
        means = [
            _checked_value(name, term, seen).float().sum() / targets_BT.numel() for name, term in self.terms.items()
        ]
        known = torch.stack([*(mean.detach() for mean in means), torch.ones_like(means[0].detach())]).double()
        self._sums = known if self._sums is None else self._sums + known
        return sum(term.options.coefficient * mean for term, mean in zip(self.terms.values(), means, strict=True))

    def documents(self, positions_BT: Tensor | None, like_BT: Tensor) -> Tensor:
        """Returns each token's document index within its full sequence."""
        if positions_BT is None:
            return torch.zeros_like(like_BT)
        starts_BT = self.sequences.whole((positions_BT == 0).long())
        return self.sequences.own((starts_BT.cumsum(dim=1) - 1).clamp(min=0)).expand_as(like_BT)

    def figures(self, strategy: Any) -> dict[str, float]:
        """Returns {'loss_NAME': mean over all ranks since the last call}, unweighted. All ranks must call it."""
        known = torch.zeros(len(self.terms) + 1, device=strategy.device) if self._sums is None else self._sums.float()
        *sums, count = strategy.sum(known).tolist()
        self._sums = None
        return {f"loss_{name}": value / count for name, value in zip(self.terms, sums, strict=True) if count}


def _checked_value(name: str, term: LossTerm, seen: Seen) -> Tensor:
    """Computes a term. Raises InputError unless it's a scalar tensor or has one value per token, with a gradient."""
    value = term(seen)
    if isinstance(value, Tensor) and (value.shape == seen.targets_BT.shape or value.numel() == 1):
        # A micro-batch without matching tokens may have a constant 0.
        if term.options.coefficient and not value.requires_grad and value.any():
            raise InputError(
                f"loss.terms.{name}: the result has no gradient, so it doesn't affect training; compute it without "
                "detach() and no_grad(), or set coefficient: 0 to only log it"
            )
        return value
    kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise InputError(
        f"loss.terms.{name}: must return a tensor of shape {tuple(seen.targets_BT.shape)} with one value per token, "
        f"or a scalar tensor with their sum, got {kind}"
    )


def term_problems(settings: Loss, compile_mode: str, *, scales_width: bool = False) -> list[str]:
    """Returns error messages if the loss terms don't work with the launched strategy or these settings.

    scales_width: True if optim.parametrization sets separate learning rates for each parameter.
    """
    if not settings.terms:
        return []
    problems = []
    needy = [name for name in settings.terms if not LOSS_TERMS[name].by_token]
    if launched_sizes().cp > 1 and needy:
        problems.append(
            f"loss.terms: {', '.join(needy)}: cp, which splits each sequence across ranks, requires by_token = True "
            "in a term's class; use fsdp2 for other terms"
        )
    if compile_mode == "full":
        problems.append("loss.terms: not supported with compile: full; use regional or auto")
    if scales_width and (trained := [name for name in settings.terms if LOSS_TERMS[name].has_parameters()]):
        problems.append(
            f"loss.terms: {trained[0]} has trainable parameters, for which optim.parametrization defines no learning "
            "rate; use parametrization: standard"
        )
    return problems
