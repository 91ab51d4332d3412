"""Balances the load of MoE experts over the global batch, with an auxiliary loss and a bias.

The balancing loss (Fedus et al., arXiv 2101.03961) is E * sum(f * P) over a layer's E experts, averaged over the
layers. For each expert, f is the fraction of tokens routed to it and P its mean routing probability. With K experts
per token and an even load, the loss is K.

Computed per micro-batch, the loss would push every document to use all experts. Computed over the global batch, it
lets experts specialize (Qiu et al., arXiv 2501.11873). Because f of the global batch is known only after the last
micro-step, we use f of the previous step, as a constant.

The bias (Wang et al., arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2) is added to the scores that
select experts. After each step, b <- b + rate * sign(mean load - load), with loads over the global batch. Loads are
integers, so the bias is bit-identical on all ranks. Checkpoints and exports contain it as a buffer.

As in Megatron-LM's MoEAuxLossAutoScaler, the loss enters the backward pass at the router's scores, so no tensor has to
leave a compiled, sharded or recomputed block.

In a pipeline, each rank records its own stage's routers. The counts are summed over ranks after each step.

Shapes: L routers, E experts (maximum over the routers), N tokens in a microbatch, K experts per token.
"""

import functools
import inspect
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.routers import (
    Router,
    RouterLosses,
    balancing_bias,
    expert_parameters,
    experts_per_token,
    is_known,
    routers_of,
)
from pretrain.parallel.strategy import Strategy

IDLE_STEPS = 100
"""An expert counts as dead after this many consecutive steps without a token."""


class WithLoss(torch.autograd.Function):
    """Returns `scores` unchanged. Its backward pass also backpropagates the scalar `loss`, with gradient `scale`."""

    @staticmethod
    def forward(ctx, scores: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return scores.clone()

    @staticmethod
    def backward(ctx, grad_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        # Cloned, because autograd may accumulate in place and all routers share `scale`.
        return grad_scores, scale.clone(), None


class FollowedRouter(nn.Module):
    """Mixin for routers that records their load and adds the auxiliary losses. `Experts` sets the attributes.

    A forward hook would cause a graph break in compiled blocks.
    """

    follow_share_E: Tensor
    """Fraction of tokens routed to each expert in the previous step. Sums to K."""
    follow_scale: Tensor
    """Scalar factor for a microbatch's gradients."""
    follow_record_3E: Tensor
    """Statistics of the last microbatch, in fp32: assignments, mean probabilities, and mean logsumexp(logits)^2."""
    follow_balance: float
    follow_z_loss: float
    """Loss coefficients divided by the number of routers."""
    follow_logits_at: int
    follow_top_k: int
    follow_score: str

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        # Validation and sampling don't count.
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
        """Returns each token's expert probabilities. Scores other than softmax are normalized to sum to 1."""
        if self.follow_score == "softmax":
            return logits_NE.softmax(-1)
        scores_NE = logits_NE.sigmoid() if self.follow_score == "sigmoid" else self.score_fn(logits_NE)
        return scores_NE / scores_NE.sum(-1, keepdim=True).clamp(min=1e-20)


def chosen_of(outputs: tuple, logits_NE: Tensor, top_k: int) -> Tensor:
    """Returns the selected experts (N, K): those that the router returns, or else the top K logits."""
    for output in outputs:
        is_choice = isinstance(output, Tensor) and not output.is_floating_point() and output.dim() > 1
        if is_choice and output.shape[-1] == top_k:
            return output.flatten(0, -2)
    return logits_NE.topk(top_k, dim=-1).indices


def count_assignments(chosen_NK: Tensor, experts: int) -> Tensor:
    """Counts tokens per expert, (E,) in fp32, which is exact up to 2^24."""
    flat = chosen_NK.flatten()
    counts_E = torch.zeros(experts, dtype=torch.float32, device=flat.device)
    return counts_E.scatter_add(0, flat, torch.ones_like(flat, dtype=torch.float32))


def scores_at(outputs: tuple, logits_at: int) -> int:
    """Returns the index of the scores in the router's outputs, or of the logits if there are no scores."""
    floating = [
        place for place, output in enumerate(outputs) if isinstance(output, Tensor) and output.is_floating_point()
    ]
    return next((place for place in floating if place != logits_at), logits_at)


def score_of(module: nn.Module) -> str:
    """Infers a router's score function from its code: softmax, sigmoid, or own (its `score_fn`)."""
    if callable(getattr(module, "score_fn", None)):
        return "own"
    return "sigmoid" if "sigmoid" in inspect.unwrap(type(module).forward).__code__.co_names else "softmax"


@functools.cache
def _followed(kind: type) -> type:
    return type(kind.__name__, (FollowedRouter, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def followed_routers(causal_lm: PreTrainedModel) -> list[Router]:
    """Returns the model's routers whose load can be recorded."""
    return [router for router in routers_of(causal_lm) if is_known(router, causal_lm.config)]


class Experts:
    """Balances and monitors the experts of an MoE model during training. All methods are collective.

    A microbatch is the input to one forward pass: a micro-batch, or a pipeline microbatch.

    Args:
        causal_lm: the model, after `Strategy.prepare` and before compilation. It has `followed_routers`.
        losses: loss coefficients and bias rate. If they are 0, the load is still recorded.
    """

    def __init__(self, causal_lm: PreTrainedModel, strategy: Strategy, losses: RouterLosses):
        self.strategy = strategy
        self.has_z_loss = losses.z_loss > 0
        self.routers = followed_routers(causal_lm)
        self.sizes = [expert_parameters(router)[1] for router in self.routers]
        device = strategy.device
        layers = len(self.routers)
        most = max(self.sizes)
        self._scale = torch.ones((), device=device)
        """Factor for a microbatch's gradients, shared by all routers."""
        for router, size in zip(self.routers, self.sizes, strict=True):
            module = router.module
            score = score_of(module)  # must run before __class__ is replaced
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
        """{router index: bias} for layers on this rank."""
        self._top_k_L = torch.tensor([float(router.module.follow_top_k) for router in self.routers], device=device)
        self._size_L = torch.tensor([float(size) for size in self.sizes], device=device)
        self._sums_L3E = torch.zeros(layers, 3, most, device=device)
        """Sums over the current step on this rank."""
        self._last_L3E = torch.zeros(layers, 3, most, device=device)
        """Values from the last step over all ranks: summed assignments, and means of the other records."""
        self._idle_LE = torch.zeros(layers, most, dtype=torch.int32, device=device)
        """Number of steps since each expert last received a token."""
        self._reported_LE = torch.zeros(layers, most, dtype=torch.bool)
        self._microbatches = strategy.microbatches
        """Number of microbatches per rank and step."""
        self.load(None)

    def attach(self) -> None:
        """Registers the step callbacks with the strategy, and forward hooks that call `count`."""
        self.strategy.before_step = (self.begin_step,)
        self.strategy.after_update = (self.end_step,)
        for running in self.strategy.running_modules():
            inside = set(running.modules())
            rows = [row for row, router in enumerate(self.routers) if router.module in inside]
            if rows:  # consecutive, because a pipeline stage has consecutive layers
                # Outside compiled blocks, the hook doesn't break the graph. Recomputed blocks would run it twice.
                count = functools.partial(self._count_in_training, slice(rows[0], rows[-1] + 1))
                running.register_forward_hook(count)

    def _count_in_training(self, rows: slice, model: nn.Module, inputs: tuple, outputs: object) -> None:
        if model.training and torch.is_grad_enabled():
            self.count(rows)

    def begin_step(self, micro_steps: int) -> None:
        """Sets the gradient scale for the step's microbatches."""
        self._microbatches = micro_steps * self.strategy.microbatches
        self._scale.fill_(self.strategy.state().get("scale", 1.0) / self._microbatches)

    def count(self, rows: slice = slice(None)) -> None:
        """Adds these routers' records from the last forward pass to the step's sums."""
        self._sums_L3E[rows] += self._stacked([router.module.follow_record_3E for router in self.routers[rows]])

    def end_step(self, skipped: Tensor | None = None) -> None:
        """Reduces the records over all ranks and updates the biases. Call it after the optimizer update.

        skipped: scalar on the device; 1 if the update was skipped, in which case the biases don't change.
        """
        # Cloned, because with one rank `sum` returns its argument.
        self._last_L3E = self.strategy.sum(self._sums_L3E, by_layer=True).clone()
        self._sums_L3E.zero_()
        counts_LE = self._last_L3E[:, 0]
        self._last_L3E[:, 1:] /= self._microbatches * self.strategy.data_ranks * self.strategy.sequence_parts
        self._use(counts_LE)
        self._idle_LE = torch.where(counts_LE == 0, self._idle_LE + 1, 0)
        if self._bias_of:
            self._move_biases(counts_LE, skipped)

    def _move_biases(self, counts_LE: Tensor, skipped: Tensor | None) -> None:
        # Integers, so that an exactly even load has sign 0.
        counts_LE = counts_LE.long()
        moves_LE = (
            self._bias_rate * (counts_LE.sum(-1, keepdim=True) - counts_LE * self._size_L.long()[:, None]).sign()
        )
        if skipped is not None:
            moves_LE = moves_LE * (1 - skipped)
        moves = [moves_LE[row, : self.sizes[row]] for row in self._bias_of]
        torch._foreach_add_(list(self._bias_of.values()), moves)

    def _largest_biases(self) -> Tensor:
        """Returns the largest absolute bias per layer, (L,), on all ranks."""
        largest_L = torch.zeros_like(self._size_L)
        if self.strategy.data_rank == self.strategy.part == 0:  # other ranks have the same values
            for row, bias_E in self._bias_of.items():
                largest_L[row] = bias_E.abs().max()
        return self.strategy.sum(largest_L, by_layer=True)

    def _use(self, counts_LE: Tensor) -> None:
        """Sets f for the next step."""
        self._share_LE = counts_LE * (self._top_k_L / counts_LE.sum(-1))[:, None]
        shares = [share_E[:size] for share_E, size in zip(self._share_LE, self.sizes, strict=True)]
        torch._foreach_copy_([router.module.follow_share_E for router in self.routers], shares)

    def counts(self) -> list[list[int]] | None:
        """Returns the last step's assignments per layer and expert, for checkpoints; None before the first step."""
        if not self._last_L3E[:, 0].any():
            return None
        rows = self._last_L3E[:, 0].tolist()
        return [[int(n) for n in row[:size]] for row, size in zip(rows, self.sizes, strict=True)]

    def load(self, counts: list[list[int]] | None) -> None:
        """Restores `counts` from a checkpoint. None resets to an even load."""
        for tensor in (self._sums_L3E, self._last_L3E, self._idle_LE):
            tensor.zero_()
        if counts is None:
            self._use(self._exists().float())
        else:
            rows = [torch.tensor(row, dtype=torch.float32, device=self.strategy.device) for row in counts]
            self._last_L3E[:, 0] = self._stacked(rows)
            self._use(self._last_L3E[:, 0])

    def _stacked(self, rows: list[Tensor]) -> Tensor:
        """Stacks rows, padded with zeros for routers with fewer experts."""
        most = self._sums_L3E.shape[-1]
        if any(row.shape[-1] < most for row in rows):
            rows = [nn.functional.pad(row, (0, most - row.shape[-1])) for row in rows]
        return torch.stack(rows)

    def _exists(self) -> Tensor:
        """Returns a mask (L, E) of existing experts, because routers may differ in their number of experts."""
        places_E = torch.arange(self._sums_L3E.shape[-1], device=self.strategy.device)
        return places_E < self._size_L[:, None]

    def figures(self) -> dict[str, float]:
        """Returns the last step's metrics over the global batch. Waits for the device.

        A load of 1 means perfectly balanced. Entropies are normalized by log E.
        """
        part_LE = self._share_LE / self._top_k_L[:, None]
        entropy_L = -torch.special.xlogy(part_LE, part_LE).sum(-1) / self._size_L.log().clamp(min=1e-9)
        load_LE = part_LE * self._size_L[:, None]
        balance_L = self._size_L * (self._share_LE * self._last_L3E[:, 1]).sum(-1)
        figures = {
            "router_balance_loss": balance_L.mean(),
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
        """Returns a warning about experts that have become dead since the last call, or None."""
        dead_LE = ((self._idle_LE >= IDLE_STEPS) & self._exists()).cpu()
        new_LE = dead_LE & ~self._reported_LE
        self._reported_LE = dead_LE
        if not new_LE.any():
            return None
        names = [router.name for router, new in zip(self.routers, new_LE, strict=True) if new.any()]
        bias = " or loss.router_bias_rate" if self._bias_rate else ""
        return (
            f"{int(dead_LE.sum())} experts are dead (no tokens for {IDLE_STEPS} steps), new ones in "
            f"{', '.join(names)}; increase loss.router_balance{bias} to keep experts in use"
        )
