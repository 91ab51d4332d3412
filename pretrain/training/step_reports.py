"""Exchanges each step's loss, gradient norm and requests between ranks.

Both the copy to the CPU and the exchange run asynchronously during later steps. All ranks get the same reports at the
same step, so they make the same decisions without further communication.
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
    """Metrics of an optimizer step over all ranks."""

    step: int
    """Step number, from 1."""
    loss: float
    """Mean cross-entropy in nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if the update was skipped because of non-finite gradients."""
    request: Request


class Consensus:
    """Exchanges each step's metrics. All methods are collective."""

    def __init__(self, strategy: Strategy):
        self.ranks = strategy.ranks
        self.reports_loss = torch.tensor(float(strategy.reports_loss), device=strategy.device)
        self._arriving: deque[tuple[int, torch.Tensor, torch.cuda.Event | None, Request]] = deque()
        """(step, figures, arrived, request) while this rank's metrics are being copied to the CPU.

        The figures are (4,) in float32: loss, grad_norm, skipped, and 1 if this rank's loss counts.
        """
        self._sent: deque[tuple[int, list[torch.Tensor], dist.Work | None]] = deque()
        """(step, answers, work) while metrics are being exchanged.

        The answers are one (5,) float64 tensor per rank, on the CPU: the four metrics and the request.
        """

    def exchange(
        self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor, request: Request
    ) -> list[StepReport]:
        """Submits this rank's metrics for `step` and returns the reports that have arrived.

        The number of pending reports depends on the device type and not on timing, so all ranks get the same ones.
        """
        figures = torch.stack([loss.float(), grad_norm.float(), skipped.float(), self.reports_loss])
        arrived = None
        pending = 0
        if figures.is_cuda:
            figures = torch.empty(4, pin_memory=True).copy_(figures, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            pending = 1  # in each queue
        self._arriving.append((step, figures, arrived, request))
        while len(self._arriving) > pending:
            self._send()
        return [self._receive() for _ in range(len(self._sent) - pending)]

    def agree(self, request: Request) -> Request:
        """Returns the most urgent of all ranks' requests, synchronously. A collective call."""
        if self.ranks.count == 1:
            return request
        most_urgent = torch.tensor(int(request))
        dist.all_reduce(most_urgent, op=dist.ReduceOp.MAX, group=self.ranks.host_group)
        return Request(int(most_urgent))

    def settle(self) -> list[StepReport]:
        """Waits for all pending reports and returns them."""
        while self._arriving:
            self._send()
        return [self._receive() for _ in range(len(self._sent))]

    def _send(self) -> None:
        step, figures, arrived, request = self._arriving.popleft()
        if arrived is not None:
            arrived.synchronize()
        mine = torch.tensor([*figures.tolist(), float(request)], dtype=torch.float64)
        answers = [mine]
        work = None
        if self.ranks.count > 1:
            answers = [torch.empty_like(mine) for _ in range(self.ranks.count)]
            work = dist.all_gather(answers, mine, group=self.ranks.host_group, async_op=True)
        self._sent.append((step, answers, work))

    def _receive(self) -> StepReport:
        step, answers, work = self._sent.popleft()
        if work is not None:
            work.wait()
        # Python numbers, because a single torch or numpy call would take longer than all of this.
        losses, norms, skipped, reports_loss, requests = zip(*(a.tolist() for a in answers), strict=True)
        reported = [loss for loss, counts in zip(losses, reports_loss, strict=True) if counts]
        return StepReport(
            step=step,
            loss=sum(reported) / len(reported),
            # Plain max() depends on the order if there is a NaN.
            grad_norm=max(norms, key=lambda norm: (math.isnan(norm), norm)),
            skipped=any(skipped),
            request=Request(int(max(requests))),
        )
