"""Balances the experts of an MoE model over the global batch, with a loss and a bias, and measures their load.

The balancing loss (Fedus et al., arXiv 2101.03961) of a layer with E experts, of which a token uses K, is E x sum over
the experts of f x P, averaged over the layers. f is the number of assignments to the expert per token. P is the
expert's probability. Both are means over tokens. The loss is K if all experts get the same share.

Computed per micro-batch, the loss would force every document to use all experts. Over the global batch, experts may
specialize (Qiu et al., arXiv 2501.11873). But the f of the whole batch is known only after the last micro-step, too
late for the gradients of the first. We therefore use the previous step's f as a constant, just as DeepSeek-V3's bias
follows the previous step. The rest is a mean over tokens, which doesn't depend on the division into micro-batches and
ranks.

The bias (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2) is added to the scores that
select experts. After a step, b <- b + rate x sign(mean load - load), with loads over the whole global batch. The loads
are integers, so the result is bit-identical on all ranks. The bias is a buffer in checkpoints and exports.

A router's loss isn't part of the model's output. It joins the backward pass where the scores leave the router, as in
Megatron-LM's MoEAuxLossAutoScaler, so no tensor has to leave a compiled, sharded or recomputed block. A router
overwrites its record, so recomputation changes nothing.

In a pipeline, each rank records its own stage's routers for every microbatch. After the step, the ranks sum their
counts, so every rank has f and the metrics of all layers.

Shapes: L routers, E experts (maximum over the routers), N tokens in a microbatch, K experts per token.
"""

import functools
import inspect
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.routers import (
    RouterLosses,
    balancing_bias,
    expert_parameters,
    experts_per_token,
    is_known,
    routers_of,
)
from pretrain.parallel.strategy import Strategy

IDLE_STEPS = 100
"""Number of consecutive steps without a token after which an expert counts as dead."""


class WithLoss(torch.autograd.Function):
    """Identity on `scores`. Its backward pass also starts the backward pass of the scalar `loss`, at `scale`."""

    @staticmethod
    def forward(ctx, scores: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return scores.clone()

    @staticmethod
    def backward(ctx, grad_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        # Cloned, because autograd may accumulate into this gradient, and all routers share `scale`.
        return grad_scores, scale.clone(), None


class FollowedRouter(nn.Module):
    """Base class of monitored routers. `Experts` creates the subclass and sets the attributes.

    It is a subclass rather than a hook, because a hook would break a compiled block's graph. Layers differ only in
    tensors, so they share one compilation.
    """

    follow_share_E: Tensor
    """Assignments to each expert per token in the previous step. Their sum is K."""
    follow_scale: Tensor
    """Scalar factor for the gradient of a microbatch's loss."""
    follow_record_3E: Tensor
    """Record of the microbatch in fp32: assignments, mean probabilities, mean logsumexp(logits)^2."""
    follow_balance: float
    follow_z_loss: float
    """Coefficients, divided by the number of routers."""
    follow_logits_at: int
    follow_top_k: int
    follow_score: str

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        # Validation and samples don't count.
        if not (self.training and torch.is_grad_enabled()):
            return output
        outputs = output if isinstance(output, tuple) else (output,)
        logits_NE = outputs[self.follow_logits_at].flatten(0, -2).float()
        experts = logits_NE.shape[-1]
        with torch.no_grad():
            counts_E = count_assignments(chosen_of(outputs, logits_NE, self.follow_top_k), experts)
        probability_E = self.follow_probabilities(logits_NE).mean(0)
        z = logits_NE.logsumexp(-1).square().mean()
        with torch.no_grad():
            # Overwritten instead of accumulated, because activation checkpointing runs this twice.
            self.follow_record_3E.copy_(torch.stack([counts_E, probability_E, z.expand(experts)]))
        if not (self.follow_balance or self.follow_z_loss):
            return output
        balance = experts * (self.follow_share_E * probability_E).sum()
        loss = self.follow_balance * balance + self.follow_z_loss * z
        place = scores_at(outputs, self.follow_logits_at)
        scores = WithLoss.apply(outputs[place], loss, self.follow_scale)
        outputs = (*outputs[:place], scores, *outputs[place + 1 :])
        return outputs if isinstance(output, tuple) else outputs[0]

    def follow_probabilities(self, logits_NE: Tensor) -> Tensor:
        """Returns the probabilities of all experts, with sum 1. Scores without a softmax are divided by their sum."""
        if self.follow_score == "softmax":
            return logits_NE.softmax(-1)
        scores_NE = logits_NE.sigmoid() if self.follow_score == "sigmoid" else self.score_fn(logits_NE)
        return scores_NE / scores_NE.sum(-1, keepdim=True).clamp(min=1e-20)


def chosen_of(outputs: tuple, logits_NE: Tensor, top_k: int) -> Tensor:
    """Returns the chosen experts (N, K): the router's own choice if it returns one, otherwise the top K logits."""
    for output in outputs:
        is_choice = isinstance(output, Tensor) and not output.is_floating_point() and output.dim() > 1
        if is_choice and output.shape[-1] == top_k:
            return output.flatten(0, -2)
    return logits_NE.topk(top_k, dim=-1).indices


def count_assignments(chosen_NK: Tensor, experts: int) -> Tensor:
    """Counts the tokens assigned to each expert, (E,) fp32; exact up to 2^24, in any order of summation."""
    flat = chosen_NK.flatten()
    counts_E = torch.zeros(experts, dtype=torch.float32, device=flat.device)
    return counts_E.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.float32))


def scores_at(outputs: tuple, logits_at: int) -> int:
    """Returns the index of the differentiable output that the block uses: the scores, or the logits."""
    floating = [
        place for place, output in enumerate(outputs) if isinstance(output, Tensor) and output.is_floating_point()
    ]
    return next((place for place in floating if place != logits_at), logits_at)


def score_of(module: nn.Module) -> str:
    """Finds out how a router turns logits into scores, from its code: softmax, sigmoid, or own (its `score_fn`)."""
    if callable(getattr(module, "score_fn", None)):
        return "own"
    return "sigmoid" if "sigmoid" in inspect.unwrap(type(module).forward).__code__.co_names else "softmax"


@functools.cache
def _followed(kind: type) -> type:
    return type(kind.__name__, (FollowedRouter, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class Experts:
    """Monitors an MoE model's routers during training. All methods are collective.

    `attach` registers the methods `begin_step`, `count` and `end_step`.

    A microbatch is the input of a forward pass: a micro-batch, or a pipeline's part of one.

    Args:
        causal_lm: the model, prepared by the strategy and not yet compiled.
        losses: coefficients of the losses. With 0, the routers are still monitored, but their biases don't change.
    """

    def __init__(self, causal_lm: PreTrainedModel, strategy: Strategy, losses: RouterLosses):
        self.strategy = strategy
        self.has_z_loss = losses.z_loss > 0
        self.routers = [router for router in routers_of(causal_lm) if is_known(router, causal_lm.config)]
        self.sizes = [expert_parameters(router)[1] for router in self.routers]
        if not self.routers:
            return
        device = strategy.device
        layers = len(self.routers)
        most = max(self.sizes)
        self._scale = torch.ones((), device=device)
        """Factor for a microbatch's gradients. All routers share it, and it is set before every step."""
        for router, size in zip(self.routers, self.sizes, strict=True):
            module = router.module
            score = score_of(module)  # from its code, before its class changes
            module.__class__ = _followed(type(module))
            module.follow_top_k = experts_per_token(router, causal_lm.config)
            module.follow_share_E = torch.full((size,), module.follow_top_k / size, device=device)
            module.follow_record_3E = torch.zeros(3, size, device=device)
            module.follow_scale = self._scale
            module.follow_balance = losses.balance / layers
            module.follow_z_loss = losses.z_loss / layers
            module.follow_logits_at = router.logits_at
            module.follow_score = score
        self._bias_rate = losses.bias_rate
        biases = {row: balancing_bias(router) for row, router in enumerate(self.routers)} if losses.bias_rate else {}
        self._bias_of = {row: bias for row, bias in biases.items() if not bias.is_meta}
        """{router's number: bias} of this rank's layers."""
        self._top_k_L = torch.tensor([float(router.module.follow_top_k) for router in self.routers], device=device)
        self._size_L = torch.tensor([float(size) for size in self.sizes], device=device)
        self._sums_L3E = torch.zeros(layers, 3, most, device=device)
        """Sums over the step so far, on this rank."""
        self._last_L3E = torch.zeros(layers, 3, most, device=device)
        """Values of the last completed step: assignments summed over all ranks, and means of the rest."""
        self._balance_L = torch.zeros(layers, device=device)
        self._idle_LE = torch.zeros(layers, most, dtype=torch.int32, device=device)
        """Number of consecutive steps, up to the last, in which an expert received no token."""
        self._reported_LE = torch.zeros(layers, most, dtype=torch.bool)
        self._microbatches = strategy.microbatches
        """Microbatches per rank and step."""
        self.load(None)

    def attach(self) -> None:
        """Registers a step's methods with the strategy and with modules' forward hooks."""
        self.strategy.before_step = (self.begin_step,)
        self.strategy.after_update = (self.end_step,)
        for running in self.strategy.running_modules():
            inside = set(running.modules())
            rows = [row for row, router in enumerate(self.routers) if router.module in inside]
            if rows:  # consecutive, as a stage's layers are
                # Outside compiled blocks, to avoid graph breaks, and outside recomputed ones, which run twice.
                count = functools.partial(self._count_in_training, slice(rows[0], rows[-1] + 1))
                running.register_forward_hook(count)

    def _count_in_training(self, rows: slice, model: nn.Module, inputs: tuple, outputs: object) -> None:
        if model.training and torch.is_grad_enabled():
            self.count(rows)

    def begin_step(self, micro_steps: int) -> None:
        """Sets the factor for each microbatch's gradients, before a step's first micro-step."""
        if self.routers:
            self._microbatches = micro_steps * self.strategy.microbatches
            self._scale.fill_(self.strategy.state().get("scale", 1.0) / self._microbatches)

    def count(self, rows: slice = slice(None)) -> None:
        """Adds these routers' records of a forward pass to the step's sums."""
        if self.routers:
            self._sums_L3E[rows] += self._stacked([router.module.follow_record_3E for router in self.routers[rows]])

    def end_step(self, skipped: Tensor | None = None) -> None:
        """Sums over the ranks after the update, in one small asynchronous collective, and updates the biases.

        skipped: scalar on the device; 1 if the update changed nothing. In that case, the biases don't change either.
        """
        if not self.routers:
            return
        # Cloned, because with one rank `sum` returns its argument, which is cleared next.
        self._last_L3E = self.strategy.sum(self._sums_L3E, by_layer=True).clone()
        self._sums_L3E.zero_()
        counts_LE = self._last_L3E[:, 0]
        self._last_L3E[:, 1:] /= self._microbatches * self.strategy.data_ranks * self.strategy.sequence_parts
        self._use(counts_LE)
        self._balance_L = self._size_L * (self._share_LE * self._last_L3E[:, 1]).sum(-1)
        self._idle_LE = torch.where(counts_LE == 0, self._idle_LE + 1, 0)
        if self._bias_of:
            self._move_biases(counts_LE, skipped)

    def _move_biases(self, counts_LE: Tensor, skipped: Tensor | None) -> None:
        # In integers, because rounding must not make an exactly even share uneven.
        counts_LE = counts_LE.long()
        moves_LE = (
            self._bias_rate * (counts_LE.sum(-1, keepdim=True) - counts_LE * self._size_L.long()[:, None]).sign()
        )
        if skipped is not None:
            moves_LE = moves_LE * (1 - skipped)
        moves = [moves_LE[row, : self.sizes[row]] for row in self._bias_of]
        torch._foreach_add_(list(self._bias_of.values()), moves)

    def _largest_biases(self) -> Tensor:
        """Returns every layer's largest absolute bias, (L,), on all ranks."""
        largest_L = torch.zeros_like(self._size_L)
        if self.strategy.data_rank == self.strategy.part == 0:  # other ranks with this layer have the same values
            for row, bias_E in self._bias_of.items():
                largest_L[row] = bias_E.abs().max()
        return self.strategy.sum(largest_L, by_layer=True)

    def _use(self, counts_LE: Tensor) -> None:
        """Uses these assignments as the next step's f."""
        self._share_LE = counts_LE * (self._top_k_L / counts_LE.sum(-1))[:, None]
        shares = [share_E[:size] for share_E, size in zip(self._share_LE, self.sizes, strict=True)]
        torch._foreach_copy_([router.module.follow_share_E for router in self.routers], shares)

    def counts(self) -> list[list[int]] | None:
        """Returns the last step's assignments, by layer and expert, for a checkpoint; None before the first step."""
        if not self.routers or not self._last_L3E[:, 0].any():
            return None
        rows = self._last_L3E[:, 0].tolist()
        return [[int(n) for n in row[:size]] for row, size in zip(rows, self.sizes, strict=True)]

    def load(self, counts: list[list[int]] | None) -> None:
        """Continues after the step with these `counts`. None starts before the first step, with even shares."""
        if not self.routers:
            return
        for tensor in (self._sums_L3E, self._last_L3E, self._idle_LE):
            tensor.zero_()
        if counts is None:
            self._use(self._exists().float())
        else:
            rows = [torch.tensor(row, dtype=torch.float32, device=self.strategy.device) for row in counts]
            self._last_L3E[:, 0] = self._stacked(rows)
            self._use(self._last_L3E[:, 0])

    def _stacked(self, rows: list[Tensor]) -> Tensor:
        """Stacks rows of experts. Pads with zeros for routers with fewer experts."""
        most = self._sums_L3E.shape[-1]
        if any(row.shape[-1] < most for row in rows):
            rows = [nn.functional.pad(row, (0, most - row.shape[-1])) for row in rows]
        return torch.stack(rows)

    def _exists(self) -> Tensor:
        """Returns a mask (L, E) of the experts that exist, because routers may have different numbers of experts."""
        places_E = torch.arange(self._sums_L3E.shape[-1], device=self.strategy.device)
        return places_E < self._size_L[:, None]

    def figures(self) -> dict[str, float]:
        """Returns the last step's metrics over the whole global batch, for the log. Waits for the device.

        Loads are relative to an even share. The entropy of a layer's loads is relative to its maximum, log E.
        """
        if not self.routers:
            return {}
        part_LE = self._share_LE / self._top_k_L[:, None]
        entropy_L = -torch.special.xlogy(part_LE, part_LE).sum(-1) / self._size_L.log().clamp(min=1e-9)
        load_LE = part_LE * self._size_L[:, None]
        figures = {
            "router_balance_loss": self._balance_L.mean(),
            "expert_entropy": entropy_L.mean(),
            "expert_entropy_min": entropy_L.min(),
            "expert_load_max": load_LE.max(),
            "expert_load_min": load_LE.where(self._exists(), math.inf).min(),
        }
        if self.has_z_loss:
            figures["router_z_loss"] = self._last_L3E[:, 2, 0].mean()
        if self._bias_rate:
            figures["router_bias_max"] = self._largest_biases().max()
        return dict(zip(figures, torch.stack(list(figures.values())).tolist(), strict=True))

    def newly_dead(self) -> str | None:
        """Returns a warning, once per case, about experts that got no token for IDLE_STEPS steps; otherwise None."""
        if not self.routers:
            return None
        dead_LE = ((self._idle_LE >= IDLE_STEPS) & self._exists()).cpu()
        new_LE = dead_LE & ~self._reported_LE
        self._reported_LE = dead_LE
        if not new_LE.any():
            return None
        rows = [
            f"{router.name} {int(dead.sum())} of {size} ({_numbers(new.nonzero().flatten().tolist())})"
            for router, size, dead, new in zip(self.routers, self.sizes, dead_LE, new_LE, strict=True)
            if new.any()
        ]
        bias = " or loss.router_bias_rate" if self._bias_rate else ""
        more = f" and in {len(rows) - 4} more layers" if len(rows) > 4 else ""
        return (
            f"{int(dead_LE.sum())} dead experts, which have received no token for {IDLE_STEPS} steps: "
            f"{'; '.join(rows[:4])}{more}; a larger loss.router_balance{bias} keeps experts in use"
        )


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
