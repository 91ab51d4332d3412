"""Exchanges each step's loss, gradient norm and requests between ranks.

Metrics move from the device to the CPU and then between the ranks while later steps run, so no step waits for its own
metrics. All ranks get the same reports at the same step, and make the same decisions without further communication.
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
    """An optimizer step's metrics over all ranks."""

    step: int
    """Steps taken, including this one."""
    loss: float
    """Cross-entropy in nats per token, averaged over all tokens in the step."""
    grad_norm: float
    """Gradient norm of the whole model, before clipping."""
    skipped: bool
    """True if the gradient wasn't finite, so that the weights didn't change."""
    request: Request


@dataclass(frozen=True)
class _Arriving:
    """This rank's numbers, which a GPU may still be transferring."""

    step: int
    figures: torch.Tensor
    """(4,) float32 on the CPU: loss, grad_norm, skipped, and 1 if the loss counts."""
    arrived: torch.cuda.Event | None
    request: int


@dataclass(frozen=True)
class _Sent:
    """All ranks' numbers, which may still be in transfer between ranks."""

    step: int
    answers: list[torch.Tensor]
    """(5,) float64 on the CPU for each rank: its numbers and request."""
    work: dist.Work | None


class Consensus:
    """Exchanges each step's metrics. All methods are collective."""

    def __init__(self, strategy: Strategy):
        self.ranks = strategy.ranks
        self.reports_loss = torch.tensor(float(strategy.reports_loss), device=strategy.device)
        self._arriving: deque[_Arriving] = deque()
        self._sent: deque[_Sent] = deque()

    def exchange(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor, request: Request
    ) -> list[StepReport]:
        """Submits this rank's metrics for `step`, on the device. Returns the reports that have arrived.

        All ranks get the same reports from the same call, because the number of pending reports depends only on the
        device type, not on timing.
        """
        figures = torch.stack([loss.float(), grad_norm.float(), skipped.float(), self.reports_loss])
        arrived = None
        pending = 0
        if figures.is_cuda:
            figures = torch.empty(4, pin_memory=True).copy_(figures, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            pending = 1  # per queue: the device still computes this step, and the network transfers the previous one
        self._arriving.append(_Arriving(step, figures, arrived, request))
        while len(self._arriving) > pending:
            self._send()
        return [self._receive() for _ in range(len(self._sent) - pending)]

    def agree(self, request: Request) -> Request:
        """Immediately returns the most urgent of all ranks' requests. A collective call, between steps."""
        if self.ranks.count == 1:
            return request
        most_urgent = torch.tensor(int(request))
        dist.all_reduce(most_urgent, op=dist.ReduceOp.MAX, group=self.ranks.host_group)
        return Request(int(most_urgent))

    def settle(self) -> list[StepReport]:
        """Waits for pending metrics. Returns the reports up to the last submitted step."""
        while self._arriving:
            self._send()
        return [self._receive() for _ in range(len(self._sent))]

    def _send(self) -> None:
        arriving = self._arriving.popleft()
        if arriving.arrived is not None:
            arriving.arrived.synchronize()
        mine = torch.tensor([*arriving.figures.tolist(), float(arriving.request)], dtype=torch.float64)
        answers = [mine]
        work = None
        if self.ranks.count > 1:
            answers = [torch.empty_like(mine) for _ in range(self.ranks.count)]
            work = dist.all_gather(answers, mine, group=self.ranks.host_group, async_op=True)
        self._sent.append(_Sent(arriving.step, answers, work))

    def _receive(self) -> StepReport:
        sent = self._sent.popleft()
        if sent.work is not None:
            sent.work.wait()
        # Plain Python numbers, because a single torch or numpy call would take longer than all of this.
        losses, norms, skipped, reports_loss, requests = zip(*(a.tolist() for a in sent.answers), strict=True)
        reported = [loss for loss, counts in zip(losses, reports_loss, strict=True) if counts]
        return StepReport(
            step=sent.step,
            loss=sum(reported) / len(reported),
            # With NaN, max() would return the argument that comes first.
            grad_norm=max(norms, key=lambda norm: (math.isnan(norm), norm)),
            skipped=any(skipped),
            request=Request(int(max(requests))),
        )
