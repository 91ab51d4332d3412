"""The curves of a run for a page that shows them while they grow: few points, and of those only the new ones sent."""

import math
from pathlib import Path
from typing import Any

from pretrain.runs.history import Event, is_number, repeats_after, scores_of
from pretrain.runs.run_folder import METRICS_FILE
from pretrain_tools.runs.live_log import NO_NEWS, LogFollower
from pretrain_tools.runs.status import facts_text

MOST_LIVE_POINTS = 1200
"""Of the training steps of one run, an even number; more are merged by pairs."""
MOST_HAPPENINGS = 400
POINT = ("step", "tokens", "loss", "low", "high", "grad_norm", "learning_rate", "tokens_per_second", "mfu")
"""What a point is a list of: of the last step in it, means, and of the loss the extremes, of the norm the largest."""
LEAST_OF, LARGEST_OF, LAST_OF = {"low"}, {"high", "grad_norm"}, {"step", "tokens", "learning_rate"}

Point = list[float | None]


class LiveCurves:
    """Steps, measurements and happenings of one run, each a list that grows at its end.

    Whenever anything but that happens, because steps are repeated or points merged, `generation` grows, and a page has
    to forget what it has.
    """

    def __init__(self, run: Path):
        self._log = LogFollower(run / METRICS_FILE)
        self.generation = 0
        self._forget()

    def _forget(self) -> None:
        self.generation += 1
        self.points: list[Point] = []
        self.measured: list[list] = []
        """[name, step, value, standard error]"""
        self.happened: list[list] = []
        """[step, event, text, time]"""
        self._stride, self._in_last = 1, 0
        """Steps logged in each point, and in the last."""

    def refresh(self) -> None:
        """Reads what is new. Raises OSError where the run is gone."""
        events, is_another = self._log.read()
        if is_another:
            self._forget()
        for event in events:
            self._add(event)

    def news(self, generation: int, points: int, measured: int, happened: int) -> dict[str, Any]:
        """What a page lacks that has so many of each of this generation; the last point may have changed since."""
        if generation != self.generation:
            points = measured = happened = 0
        keep = max(0, min(points, len(self.points)) - 1)
        return {
            "generation": self.generation,
            "keep": keep,
            "points": self.points[keep:],
            "measured": self.measured[measured:],
            "happened": self.happened[happened:],
        }

    def _add(self, event: Event) -> None:
        back_to = repeats_after(event)
        if back_to is not None:
            self._go_back(back_to)
        if event["event"] == "train":
            self._add_point(event)
        elif event["event"] == "validation":
            name = f"validation {event.get('source')}"
            self._measure(name, event.get("step"), event.get("loss"), None)
        elif event["event"] == "evaluation":
            for score in scores_of(event):
                self._measure(score.name, score.step, score.value, score.standard_error)
        elif event["event"] not in NO_NEWS:
            time = event.get("time")
            happening = [event.get("step"), event["event"], facts_text(event), time if is_number(time) else None]
            self.happened.append(happening)
            if len(self.happened) > MOST_HAPPENINGS:
                del self.happened[: MOST_HAPPENINGS // 2]
                self.generation += 1

    def _add_point(self, event: Event) -> None:
        values = {name: finite_number(event.get(name)) for name in POINT} | {"step": event.get("step")}
        values["low"] = values["high"] = values["loss"]
        point = [values[name] for name in POINT]
        if point[0] is None:
            return
        if self.points and self._in_last < self._stride:
            self.points[-1] = merged_points(self.points[-1], point, self._in_last)
            self._in_last += 1
            return
        self.points.append(point)
        self._in_last = 1
        if len(self.points) > MOST_LIVE_POINTS:
            self._merge_pairs()

    def _merge_pairs(self) -> None:
        *rest, last = self.points
        self.points = [merged_points(*pair, 1) for pair in zip(rest[::2], rest[1::2], strict=True)] + [last]
        self._stride *= 2
        self.generation += 1

    def _measure(self, name: str, step: Any, value: Any, error: float | None) -> None:
        if not isinstance(step, int) or finite_number(value) is None:
            return
        again = next((row for row in self.measured[-200:] if row[:2] == [name, step]), None)
        if again is not None:
            self.measured.remove(again)
            self.generation += 1
        self.measured.append([name, step, finite_number(value), finite_number(error)])

    def _go_back(self, step: int) -> None:
        points = [point for point in self.points if point[0] <= step]
        measured = [row for row in self.measured if row[1] <= step]
        if (len(points), len(measured)) != (len(self.points), len(self.measured)):
            self.points, self.measured = points, measured
            self._in_last = self._stride
            self.generation += 1


def merged_points(first: Point, second: Point, count: int) -> Point:
    """One point of two, of which the first stands for `count` steps as long as the second."""
    merged = []
    for name, a, b in zip(POINT, first, second, strict=True):
        if a is None or b is None or name in LAST_OF:
            merged.append(a if b is None else b)
        elif name in LEAST_OF | LARGEST_OF:
            merged.append(min(a, b) if name in LEAST_OF else max(a, b))
        else:
            merged.append(float(f"{(count * a + b) / (count + 1):.6g}"))
    return merged


def finite_number(value: Any) -> float | None:
    """The number to six digits; None for what is none, or has no end."""
    if not is_number(value) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.6g}")
