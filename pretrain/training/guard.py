"""Detects non-finite values, loss spikes, divergence, exploding gradients and slowdowns.

Every rank checks the same reports in the same order, so all ranks make the same decisions. Checkpoints contain the
guard's state, so a resumed run detects the same problems as an uninterrupted run.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain import config
from pretrain.training.step_reports import StepReport

MIN_LOSSES_FOR_MEAN = 8
"""Minimum number of losses for computing the mean."""
MIN_LOSSES_FOR_DEVIATION = 64
"""Minimum number of losses for computing the standard deviation."""
FAST = 1 / 16
"""Weight of a new loss in the fast moving average, which covers about 16 steps."""
SLOW = 1 / 256
"""Weight of a new loss in the slow moving average, which covers about 256 steps."""
MOST_HALVINGS = 32
"""How many steps in a row may be skipped in fp16. Each halves the loss scale, from 2^16 down to 2^-16."""
SIGMA_FLOOR = 1.1
"""Minimum threshold for spikes detected by standard deviation, as a multiple of the mean."""


@dataclass(frozen=True)
class Finding:
    """A problem detected in a step."""

    event: str
    """Event name in metrics.jsonl: spike, divergence, explosion or warning."""
    step: int
    message: str
    values: dict[str, float]
    roll_back: tuple[int, int] | None = None
    """First and last bad step, if training should roll back to before the first."""
    stop: bool = False


class StepGuard:
    """Checks each step's report for problems.

    Args:
        settings: the recipe's `guard`.
        state: `state()` from a checkpoint.
        scales_loss: True for fp16, where loss scaling occasionally skips a step.
    """

    def __init__(self, settings: config.Guard, state: Mapping[str, Any] | None = None, *, scales_loss: bool = False):
        state = state or {}
        self.settings = settings
        self.scales_loss = scales_loss
        self._losses: deque[float] = deque(state.get("losses", []), maxlen=settings.loss_window)
        self._fast: float | None = state.get("fast")
        self._slow: float | None = state.get("slow")
        self._bad_steps: list[int] = list(state.get("strikes", []))
        self._diverging: bool = state.get("diverging", False)
        self._overflows: int = state.get("overflows", 0)

    def state(self) -> dict[str, Any]:
        """Returns the state for checkpoints."""
        return {
            "losses": list(self._losses),
            "strikes": list(self._bad_steps),
            "fast": self._fast,
            "slow": self._slow,
            "diverging": self._diverging,
            "overflows": self._overflows,
        }

    def forget(self) -> None:
        """Resets the state when the data changes, because losses before and after aren't comparable."""
        self.__init__(self.settings, scales_loss=self.scales_loss)

    def judge(self, report: StepReport) -> list[Finding]:
        """Returns the problems detected in a step."""
        finite = math.isfinite(report.loss) and math.isfinite(report.grad_norm) and not report.skipped
        findings = self._judge_norm(report) if finite else []
        spike, hard = self._judge_loss(report) if math.isfinite(report.loss) else (None, True)
        if hard or not (finite or self.scales_loss):
            self._bad_steps.append(report.step)
        else:
            self._bad_steps.clear()
        if spike is not None:  # not added to the window, because it would raise the mean
            findings.append(spike)
        elif finite:
            self._losses.append(report.loss)
        if finite:
            findings += self._judge_trend(report)
        self._overflows = 0 if finite else self._overflows + 1
        if self.scales_loss and self._overflows > MOST_HALVINGS:
            self._bad_steps = list(range(report.step - MOST_HALVINGS, report.step + 1))
            findings.append(self._rollback_finding(report))
        elif len(self._bad_steps) >= self.settings.patience:
            findings.append(self._rollback_finding(report))
        return findings

    def _judge_loss(self, report: StepReport) -> tuple[Finding | None, bool]:
        """Returns (spike or None, True if the loss exceeds the rollback threshold)."""
        losses = self._losses
        if len(losses) < MIN_LOSSES_FOR_MEAN:
            return None, False
        mean = statistics.fmean(losses)
        alert = self.settings.spike_warn_factor * mean
        limit = self.settings.spike_factor * mean
        if len(losses) >= MIN_LOSSES_FOR_DEVIATION:
            variance = math.fsum((loss - mean) ** 2 for loss in losses) / (len(losses) - 1)
            sigmas = mean + self.settings.spike_sigma * math.sqrt(variance)
            limit = min(limit, max(sigmas, SIGMA_FLOOR * mean))
        if report.loss <= min(alert, limit):
            return None, False
        values = {"loss": report.loss, "mean": mean, "threshold": min(alert, limit)}
        message = f"loss {report.loss:.4f} after a mean of {mean:.4f} over {len(losses)} steps"
        return Finding("spike", report.step, message, values), report.loss > limit

    def _judge_norm(self, report: StepReport) -> list[Finding]:
        if report.grad_norm <= self.settings.alert_grad_norm:
            return []
        message = f"gradient norm {report.grad_norm:.4g}, above {self.settings.alert_grad_norm:g}"
        return [Finding("explosion", report.step, message, {"grad_norm": report.grad_norm})]

    def _judge_trend(self, report: StepReport) -> list[Finding]:
        """Detects divergence: the fast moving average of the loss exceeds the slow one by the threshold."""
        if self._slow is None:
            self._fast = self._slow = report.loss
        self._fast += FAST * (report.loss - self._fast)
        self._slow += SLOW * (report.loss - self._slow)
        was = self._diverging
        self._diverging = self._fast - self._slow > self.settings.divergence_threshold
        if was or not self._diverging:
            return []
        message = f"the loss averages {self._fast:.4f} over recent steps and {self._slow:.4f} over the long term"
        values = {"fast": self._fast, "slow": self._slow, "threshold": self.settings.divergence_threshold}
        return [Finding("divergence", report.step, message, values, stop=self.settings.on_divergence == "stop")]

    def _rollback_finding(self, report: StepReport) -> Finding:
        first = self._bad_steps[0]
        last = self._bad_steps[-1]
        self._bad_steps.clear()
        self._overflows = 0
        message = f"loss {report.loss:.4f}, gradient norm {report.grad_norm:.4g} in steps {first:,} to {last:,}"
        values = {"loss": report.loss, "grad_norm": report.grad_norm}
        return Finding("warning", report.step, message, values, roll_back=(first, last))


class SpeedGuard:
    """Detects slowdowns relative to the run's median speed."""

    def __init__(self, drop: float):
        self.drop = drop
        self._readings: list[float] = []
        self._slow = False

    def judge(self, tokens_per_second: float) -> str | None:
        """Returns a warning if the speed has just dropped too far below the median, otherwise None."""
        median = statistics.median(self._readings[-1000:]) if len(self._readings) >= MIN_LOSSES_FOR_MEAN else None
        self._readings.append(tokens_per_second)
        was = self._slow
        self._slow = median is not None and tokens_per_second < (1 - self.drop) * median
        if was or not self._slow:
            return None
        return f"{tokens_per_second:,.0f} tokens/s, {1 - tokens_per_second / median:.0%} below this run's median"
