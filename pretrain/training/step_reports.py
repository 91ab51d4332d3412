"""Exchanges what every rank knows about a step: its loss over all data, its gradient norm, and any rank's requests.

Metrics travel from the device to the CPU, and then between the ranks, while later steps run, so no step waits for its
own. All ranks get the same reports at the same step, and so reach the same decisions without further communication.
"""

import math
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pretrain.checkpoint.run_state import Request
from pretrain.parallel.strategy import Strategy


@dataclass(frozen=True)
class StepReport:
    """An optimizer step as all ranks know it."""

    step: int
    """Steps taken, including this one."""
    loss: float
    """Cross-entropy per token, mean over all tokens of the step, in nats."""
    grad_norm: float
    """Gradient norm of the whole model, before clipping."""
    skipped: bool
    """True if the gradient was not finite, and the weights did not change."""
    request: Request


@dataclass
class _Pending:
    step: int
    figures: torch.Tensor
    """Loss, grad_norm, skipped, whether the loss counts: (4,) float32 on the CPU, perhaps in transfer from a GPU."""
    arrived: torch.cuda.Event | None
    request: int
    answers: list[torch.Tensor] | None = None
    work: dist.Work | None = None


class Consensus:
    """Exchange of each step's metrics. All methods are collective."""

    def __init__(self, strategy: Strategy):
        self.ranks = strategy.ranks
        self.reports_loss = torch.tensor(float(strategy.reports_loss), device=strategy.device)
        self._pending: deque[_Pending] = deque()

    def exchange(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor, request: Request
    ) -> list[StepReport]:
        """Submits this rank's metrics of `step`, on the device; returns the reports that have arrived.

        All ranks get the same reports from the same call: how many are pending depends on the device type, not on
        time.
        """
        figures = torch.stack([loss.float(), grad_norm.float(), skipped.float(), self.reports_loss])
        arrived = None
        if figures.is_cuda:
            figures = torch.empty(4, pin_memory=True).copy_(figures, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        pending = _Pending(step, figures, arrived, request)
        self._pending.append(pending)
        # On a CPU these metrics are ready; on a GPU the previous step's are, while the device computes this one.
        ready = pending if arrived is None else self._pending[-2] if len(self._pending) > 1 else None
        if ready is not None:
            self._send(ready)
        return [self._receive() for _ in range(len(self._pending) - (1 if arrived is None else 2))]

    def agree(self, request: Request) -> Request:
        """Returns the most urgent of all ranks' requests, immediately. A collective call, between steps."""
        if self.ranks.count == 1:
            return request
        most_urgent = torch.tensor(int(request))
        dist.all_reduce(most_urgent, op=dist.ReduceOp.MAX, group=self.ranks.host_group)
        return Request(int(most_urgent))

    def settle(self) -> list[StepReport]:
        """Waits for pending metrics; returns the reports up to the last submitted step."""
        for pending in self._pending:
            self._send(pending)
        return [self._receive() for _ in range(len(self._pending))]

    def _send(self, pending: _Pending) -> None:
        if pending.answers is not None:
            return
        if pending.arrived is not None:
            pending.arrived.synchronize()
        mine = torch.tensor([*pending.figures.tolist(), float(pending.request)], dtype=torch.float64)
        pending.answers = [mine]
        if self.ranks.count > 1:
            pending.answers = [torch.empty_like(mine) for _ in range(self.ranks.count)]
            pending.work = dist.all_gather(pending.answers, mine, group=self.ranks.host_group, async_op=True)

    def _receive(self) -> StepReport:
        pending = self._pending.popleft()
        if pending.work is not None:
            pending.work.wait()
        # Plain Python numbers: for so few, a single torch or numpy call takes longer than all of this.
        losses, norms, skipped, reports_loss, requests = zip(*(a.tolist() for a in pending.answers), strict=True)
        reported = [loss for loss, counts in zip(losses, reports_loss, strict=True) if counts]
        return StepReport(
            step=pending.step,
            loss=sum(reported) / len(reported),
            grad_norm=max(norms, key=lambda norm: (math.isnan(norm), norm)),
            skipped=any(skipped),
            request=Request(int(max(requests))),
        )
