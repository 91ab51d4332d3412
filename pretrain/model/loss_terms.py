"""Terms that a recipe adds to the loss, each a class of an extension; see docs/own_ideas.md.

Shapes: B sequences, T positions, D hidden width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig

from pretrain.config import Loss, Section
from pretrain.errors import InputError
from pretrain.mesh_sizes import environment_flag, launched_sizes
from pretrain.model.build import module_seed
from pretrain.model.small_copy import logit_cap
from pretrain.registry import LOSS_TERMS


class TermOptions(Section):
    """Base of a term's `Options`."""

    coefficient: float = 1.0
    """Factor of the term in the loss."""


@dataclass(frozen=True)
class Seen:
    """A micro-batch as a term sees it."""

    input_ids_BT: Tensor
    targets_BT: Tensor
    hidden_BTD: Tensor
    """Last hidden states, from which the head makes the logits."""
    documents_BT: Tensor
    """Number of each token's document within its sequence, from 0; all 0 without document_mask."""
    step: int
    """Number of the step, from 0."""
    head: nn.Module
    """Output head: its weight is (V, D)."""
    embedding: nn.Module
    """Embedding of the token IDs."""
    attention: Mapping[str, Any]
    """Arguments of the model beside its input: with them another model of transformers sees the same documents."""
    cap: float | None = None
    """Cap of the model's logits, cap x tanh(logits / cap); None without one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns (..., V) logits of hidden states (..., D). Pass a few rows at a time: all of them may not fit."""
        logits = F.linear(hidden, self.head.weight, getattr(self.head, "bias", None))
        return logits if self.cap is None else self.cap * (logits.float() / self.cap).tanh()


class LossTerm(ABC):
    """Term of the loss: a sum over tokens.

    Register a subclass in `registry.LOSS_TERMS`. Its nested class `Options` declares what a recipe may set. What it
    trains itself is in `module`; it has no other state.
    """

    Options: type[TermOptions] = TermOptions
    by_token = False
    """True if each token's part needs nothing of other tokens: then the term also runs under cp, where a rank has only
    a part of each sequence."""

    def __init__(self, options: TermOptions, model_config: PreTrainedConfig):
        self.options = options
        self.model_config = model_config
        self.trained: nn.Module | None = None
        """What `module` has built."""

    def module(self) -> nn.Module | None:
        """Builds, on the CPU in fp32, what this term trains; random numbers come from the run's seed.

        Each of its parameters must have a gradient in every step.
        """
        return None

    @classmethod
    def has_parameters(cls) -> bool:
        """Tells if terms of this class train something of their own."""
        return cls.module is not LossTerm.module

    @abstractmethod
    def __call__(self, seen: Seen) -> Tensor:
        """Returns the term of each token (B, T), or their sum. It is divided by all tokens of the step."""


class LossTerms:
    """Terms of a run, and their means since they were last logged."""

    def __init__(self, settings: Loss, model_config: PreTrainedConfig, *, seed: int, dtype: torch.dtype):
        self.terms: dict[str, LossTerm] = {}
        self.trained = nn.ModuleDict()
        """{name of a term: what it trains}, its parameters in `dtype`."""
        for name, given in settings.terms.items():
            made = LOSS_TERMS[name]
            term = made(made.Options.model_validate(given or {}), model_config)
            self.terms[name] = term
            if made.has_parameters():
                with torch.random.fork_rng(devices=[]):
                    # One seed per term: what it draws must not depend on which other terms there are.
                    torch.default_generator.manual_seed(module_seed(seed, f"loss_terms.{name}"))
                    term.trained = self.trained[name] = term.module()
                for parameter in term.trained.parameters():  # buffers keep theirs: rotary tables must not be rounded
                    parameter.data = parameter.data.to(dtype)
                if lost := set(term.trained.state_dict()) - {key for key, _ in term.trained.named_parameters()}:
                    raise InputError(
                        f"loss.terms.{name}: {min(lost)} of its module would not be in checkpoints, which have its "
                        "parameters alone, each once: make it a buffer with persistent=False"
                    )
        self.cap = logit_cap(model_config)
        self.step = 0
        self._sums: Tensor | None = None

    def add(
        self,
        input_ids_BT: Tensor,
        targets_BT: Tensor,
        hidden_BTD: Tensor,
        causal_lm: nn.Module,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        """Returns the sum of all terms x their coefficients, per token."""
        positions_BT = arguments.get("position_ids")
        documents_BT = torch.zeros_like(targets_BT)
        if positions_BT is not None:
            documents_BT = ((positions_BT == 0).cumsum(dim=1) - 1).clamp(min=0).expand_as(targets_BT)
        head = causal_lm.get_output_embeddings()
        embedding = causal_lm.get_input_embeddings()
        seen = Seen(
            input_ids_BT, targets_BT, hidden_BTD, documents_BT, self.step, head, embedding, arguments, self.cap
        )
        # Every micro-batch of a step has as many tokens, so that the means of all of them are the mean of the step.
        means = [term(seen).float().sum() / targets_BT.numel() for term in self.terms.values()]
        known = torch.stack([*(mean.detach() for mean in means), torch.ones_like(means[0].detach())]).double()
        self._sums = known if self._sums is None else self._sums + known
        return sum(term.options.coefficient * mean for term, mean in zip(self.terms.values(), means, strict=True))

    def figures(self, strategy: Any) -> dict[str, float]:
        """Returns {'loss_NAME': mean over all ranks since the last call}, before coefficients. A collective call."""
        if self._sums is None:
            return {}
        *sums, count = strategy.sum(self._sums.float()).tolist()
        self._sums = None
        return {f"loss_{name}": value / count for name, value in zip(self.terms, sums, strict=True)}


def term_problems(settings: Loss, compile_mode: str, *, scales_width: bool = False) -> list[str]:
    """Lists why the terms do not run under the launched strategy, or with these settings.

    scales_width: optim.parametrization gives each of the model's parameters its learning rate.
    """
    if not settings.terms:
        return []
    sizes = launched_sizes()
    problems = [
        f"loss.terms: do not run with {name}, where no rank has all that a term needs; use ddp, fsdp2 or ZeRO"
        for name, size in (("tp", sizes.tp), ("pp", sizes.pp))
        if size > 1
    ]
    needy = [name for name in settings.terms if not LOSS_TERMS[name].by_token]
    if sizes.cp > 1 and needy:
        problems.append(
            f"loss.terms: {', '.join(needy)}: not under cp, where a rank has a part of each sequence, unless the "
            "class says by_token = True; use fsdp2"
        )
    if not set(sizes.named()) <= {"dp_replicate", "dp_shard"} or environment_flag("ACCELERATE_USE_DEEPSPEED"):
        problems += [
            f"loss.terms: {name} has trained parameters, which run under ddp, fsdp2 and hsdp alone; use one of them"
            for name in settings.terms
            if LOSS_TERMS[name].has_parameters()
        ]
    if compile_mode == "full":
        problems.append("loss.terms: run outside compiled code; take compile: regional, or auto")
    if scales_width and (trained := [name for name in settings.terms if LOSS_TERMS[name].has_parameters()]):
        problems.append(
            f"loss.terms: {trained[0]} has trained parameters, and optim.parametrization knows no learning rate for "
            "them; take parametrization: standard"
        )
    return problems
