"""From torch.profiler's events to what a step was spent on: work, waiting, and the kernels by their kind.

On a GPU the device's timeline counts: kernels, collectives that nothing else hid, and the time in which it was idle.
On a CPU the main thread's does: its operators, and collectives that run while it has nothing to do.
"""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MARK = "groundwork: "
STEP, ALIGNED = f"{MARK}step ", f"{MARK}aligned"
"""Of the marks in a trace that are no phase: a whole step, and a moment that all ranks share."""
WAITING_FOR_DATA, FORWARD, BACKWARD, UPDATE, BETWEEN_STEPS = "data", "forward", "backward", "update", "between"
"""The phases of every step, the last one between two micro-steps and two steps; a save and the like have their own."""
BLOCKED, IDLE, WHOLE_STEP = "communication, waiting for ranks", "nothing runs", "step"
"""In a timeline, beside the phases."""
LEAST_DRAWN = 0.004
"""Of a step."""

OPTIMIZER, COMMUNICATION, POINTWISE = "optimizer", "communication", "pointwise and others"
INHERITED = (
    ("attention", re.compile(r"attention|flash|fmha|flex_attn", re.IGNORECASE)),
    ("loss", re.compile(r"chunked_loss|softmax_less_target|cross_entropy|nll_loss", re.IGNORECASE)),
)
"""Kinds of operators whose kernels are of the same kind, matrix products too."""
KERNEL_NAMES = (
    (COMMUNICATION, re.compile(r"nccl|rccl|gloo:|c10d", re.IGNORECASE)),
    *INHERITED,
    (
        "matrix products",
        re.compile(
            r"gemm|cutlass|nvjet|xmma|cublas|mkldnn|onednn|scaled_mm|_mm\b|(::|\b)(add|b|badd)?(mm|bmm)_?\b", re.I
        ),
    ),
    ("copies", re.compile(r"memcpy|memset|aten::(copy_|_to_copy|cat|clone|fill_|zero_)", re.IGNORECASE)),
)
KINDS = ("matrix products", "attention", "loss", OPTIMIZER, POINTWISE, "copies")
"""Of kernels, as a report lists them."""
COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
"""What torch calls compiled code, whose own kernels on a CPU it does not name."""
NO_WORK = ("autograd::", "c10d::", "_c10d_functional", "profiler::")
LAUNCH = re.compile(r"^(cuda|cu|hip)[A-Z]")
"""Calls of the device's runtime; operators have numbers of their own, which may be the same."""


class TraceEvent(NamedTuple):
    """One event of a trace; times in ns since the epoch."""

    name: str
    start: int
    end: int
    thread: int = 0
    kind: str = "operator"
    """operator, mark (a range that code has named), collective, or kernel (on the device)."""
    correlation: int = 0
    """The same for a kernel and the call that launched it; 0: none."""


class Spans:
    """Stretches of time in order, none overlapping another: (n, 2) in ns."""

    def __init__(self, pairs: Iterable[tuple[int, int]] | np.ndarray):
        pairs = np.array(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.int64).reshape(-1, 2)
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        if len(pairs):
            ends = np.maximum.accumulate(pairs[:, 1])
            first = np.concatenate([[True], pairs[1:, 0] > ends[:-1]])
            last = np.append(np.flatnonzero(first)[1:], len(pairs)) - 1
            pairs = np.stack([pairs[first, 0], ends[last]], axis=1)
        self.pairs = pairs[pairs[:, 1] > pairs[:, 0]]
        self._sums = np.concatenate([[0], np.cumsum(self.pairs[:, 1] - self.pairs[:, 0])])

    def _combined(self, other: "Spans", keep: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> "Spans":
        points = np.unique(np.concatenate([self.pairs.ravel(), other.pairs.ravel()]))
        kept = keep(self._holds(points[:-1]), other._holds(points[:-1]))
        return Spans(np.stack([points[:-1][kept], points[1:][kept]], axis=1))

    def _holds(self, times: np.ndarray) -> np.ndarray:
        begun = np.searchsorted(self.pairs[:, 0], times, "right")
        return begun > np.searchsorted(self.pairs[:, 1], times, "right")

    def __sub__(self, other: "Spans") -> "Spans":
        return self._combined(other, lambda here, there: here & ~there)

    def __and__(self, other: "Spans") -> "Spans":
        return self._combined(other, lambda here, there: here & there)

    def _before(self, time: int) -> int:
        number = int(np.searchsorted(self.pairs[:, 0], time, "right"))
        if number == 0:
            return 0
        begin, end = self.pairs[number - 1]
        return int(self._sums[number - 1] + min(time, end) - begin)

    def seconds(self, start: int | None = None, end: int | None = None) -> float:
        """Of all of them, or of what lies between two times."""
        return (int(self._sums[-1]) if start is None else self._before(end) - self._before(start)) / 1e9


@dataclass
class StepRecord:
    """A step of one rank, in seconds: `busy`, `blocked`, `data` and `idle` add up to `seconds`."""

    step: int
    seconds: float
    busy: float = 0.0
    """Something was computed: on the device if there is one, else in the main thread's operators."""
    blocked: float = 0.0
    """A collective was under way, and nothing hid it."""
    data: float = 0.0
    """Neither, while the loop waited for a batch."""
    idle: float = 0.0
    """Neither, for any other reason: Python between operators, work between steps."""
    phases: dict[str, float] = field(default_factory=dict)
    """{phase: seconds}, everything included; they add up as well."""
    blocked_in: dict[str, float] = field(default_factory=dict)
    """{'micro-step/phase': `blocked` in it}."""
    idle_in: dict[str, float] = field(default_factory=dict)
    """{phase: `idle` in it}."""
    kernels: dict[str, float] = field(default_factory=dict)
    """{kind: seconds}."""
    launched: int = 0
    """Kernels on the device; 0 without one."""
    cpu: float = 0.0
    """The main thread ran on a core."""
    starved: float = 0.0
    """The main thread could have run, and waited for a core."""
    runnable: int = 0
    """Processes and threads of the whole machine that ran or could have, at the step's end."""

    @property
    def own(self) -> float:
        """What this rank took for itself, whoever it waited for."""
        return self.seconds - self.blocked - self.data


class PhaseSpan(NamedTuple):
    """A phase of a step, as marked."""

    name: str
    micro_step: int
    start: int
    end: int


def read_events(profiler: Any) -> list[TraceEvent]:
    """The events of a torch.profiler.profile that has stopped."""
    from torch.autograd import DeviceType

    found = []
    for event in profiler.profiler.kineto_results.events():
        name, on_device = event.name(), event.device_type() != DeviceType.CPU
        is_mark = event.is_user_annotation() and not name.startswith(COMPILED)
        if on_device and is_mark:  # the range again, as the device saw it
            continue
        kind = "kernel" if on_device else "mark" if is_mark else "operator"
        if name.startswith("gloo:"):
            kind = "collective"
        correlation = event.correlation_id() if on_device or LAUNCH.match(name) else 0
        found.append(TraceEvent(name, event.start_ns(), event.end_ns(), event.start_thread_id(), kind, correlation))
    return found


@functools.cache
def kernel_kind(name: str) -> str:
    """What an operator or a kernel computes, by its name alone."""
    return next((kind for kind, pattern in KERNEL_NAMES if pattern.search(name)), POINTWISE)


class WorkSpan(NamedTuple):
    """What one thread ran without calling anything else."""

    start: int
    end: int
    kind: str


def is_work(name: str) -> bool:
    """Whether an operator's own time is work; of autograd's nodes and of collectives' calls it is not."""
    return name.startswith(COMPILED) or ("::" in name and not name.startswith(NO_WORK))


@dataclass
class _Open:
    """An operator that has begun."""

    event: TraceEvent
    inherited: str | None
    since: int
    """Its own time goes on from here: the end of the last operator that it has called."""
    waits: bool = False
    """It is one of Python's, which dispatches itself again or communicates: what is its own may be waiting."""
    pieces: list[WorkSpan] = field(default_factory=list)


def walk(events: Iterable[TraceEvent], is_update: Callable[[int], bool]) -> tuple[list[WorkSpan], dict[int, str]]:
    """(own work of one thread's operators, {correlation: kind} of what they launched, by the operators around it)."""
    pieces, launched, stack = [], {}, []

    def close(until: float) -> None:
        while stack and stack[-1].event.end <= until:
            done = stack.pop()
            add_own(done, done.event.end)
            if is_work(done.event.name) and not done.waits:
                pieces.extend(done.pieces)
            if stack:
                stack[-1].since = max(stack[-1].since, done.event.end)

    def add_own(of: _Open, until: int) -> None:
        if until > of.since:
            name = of.event.name
            kind = of.inherited or (POINTWISE if name.startswith(COMPILED) else kernel_kind(name))
            of.pieces.append(WorkSpan(of.since, until, kind))

    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        close(event.start)
        parent = stack[-1] if stack else None
        inherited = parent.inherited if parent else OPTIMIZER if is_update(event.start) else None
        inherited = inherited or next((kind for kind, pattern in INHERITED if pattern.search(event.name)), None)
        if event.correlation and inherited:
            launched[event.correlation] = inherited
        if parent:
            add_own(parent, event.start)
            parent.waits |= event.name == parent.event.name or "c10d" in event.name
        stack.append(_Open(event, inherited, event.start))
    close(float("inf"))
    return pieces, launched


def read_steps(
    events: list[TraceEvent], *, on_device: bool, drawn: int = 0
) -> tuple[list[StepRecord], list[list[Any]]]:
    """(the whole steps in a trace, a timeline: [start, end, what] in seconds since the ranks' common moment).

    Args:
        on_device: whether kernels run on a device; else the main thread's operators are the work.
        drawn: number of steps, from the last one back, that the timeline shows.
    """
    marks = sorted((event for event in events if event.name.startswith(MARK)), key=lambda mark: mark.start)
    whole = [mark for mark in marks if mark.name.startswith(STEP)]
    aligned = next((mark.start for mark in marks if mark.name == ALIGNED), whole[0].start)
    parts = phases_of(
        [mark for mark in marks if mark.name not in (ALIGNED,) and not mark.name.startswith(STEP)], whole
    )
    updates = Spans((part.start, part.end) for part in itertools.chain(*parts) if part.name == UPDATE)
    pieces, launched = walk_threads(events, whole[0].thread, lambda time: updates.seconds(time, time + 1) > 0)
    if on_device:
        kernels = [event for event in events if event.kind == "kernel"]
        kinds = [launched.get(e.correlation) or kernel_kind(e.name) for e in kernels]
        kinds = [
            COMMUNICATION if kernel_kind(e.name) == COMMUNICATION else k for e, k in zip(kernels, kinds, strict=True)
        ]
        pieces = [WorkSpan(e.start, e.end, k) for e, k in zip(kernels, kinds, strict=True)]
        collectives = Spans((piece.start, piece.end) for piece in pieces if piece.kind == COMMUNICATION)
    else:
        collectives = Spans((event.start, event.end) for event in events if event.kind == "collective")
    busy = Spans((piece.start, piece.end) for piece in pieces if piece.kind != COMMUNICATION)
    blocked = collectives - busy
    by_kind = {kind: Spans((p.start, p.end) for p in pieces if p.kind == kind) for kind in KINDS}
    starts = np.sort(np.array([piece.start for piece in pieces], dtype=np.int64))
    records, timeline, last = [], [], whole[-drawn:] if drawn else []
    for step, of_step in zip(whole, parts, strict=True):
        number = int(step.name.removeprefix(STEP))
        record = StepRecord(number, (step.end - step.start) / 1e9)
        timeline += [[(step.start - aligned) / 1e9, (step.end - aligned) / 1e9, WHOLE_STEP]] * (step in last)
        record.busy, record.blocked = busy.seconds(step.start, step.end), blocked.seconds(step.start, step.end)
        for part in of_step:
            seconds, waited = (part.end - part.start) / 1e9, blocked.seconds(part.start, part.end)
            rest = max(0.0, seconds - waited - busy.seconds(part.start, part.end))
            _add(record.phases, part.name, seconds)
            _add(record.blocked_in, f"{part.micro_step}/{part.name}", waited)
            _add(record.idle_in, part.name, rest)
            timeline += [[(part.start - aligned) / 1e9, (part.end - aligned) / 1e9, part.name]] * (step in last)
        record.data = record.idle_in.pop(WAITING_FOR_DATA, 0.0)
        record.idle = max(0.0, record.seconds - record.busy - record.blocked - record.data)
        record.kernels = {kind: spans.seconds(step.start, step.end) for kind, spans in by_kind.items()}
        if on_device:
            record.launched = int(np.searchsorted(starts, step.end) - np.searchsorted(starts, step.start))
        records.append(record)
    reads = Spans((part.start, part.end) for part in itertools.chain(*parts) if part.name == WAITING_FOR_DATA)
    shown = Spans((step.start, step.end) for step in last)
    visible = LEAST_DRAWN * 1e9 * sum(record.seconds for record in records) / len(records)
    for what, spans in ((IDLE, shown - busy - collectives - reads), (BLOCKED, shown & blocked)):
        pairs = [(begin, end) for begin, end in spans.pairs.tolist() if end - begin > visible]
        timeline += [[(begin - aligned) / 1e9, (end - aligned) / 1e9, what] for begin, end in pairs]
    return records, timeline


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


def walk_threads(
    events: list[TraceEvent], main: int, is_update: Callable[[int], bool]
) -> tuple[list[WorkSpan], dict[int, str]]:
    """`walk` of every thread: the pieces of the main one, and what all of them launched."""
    by_thread: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.kind == "operator":
            by_thread[event.thread].append(event)
    walked = {thread: walk(of_thread, is_update) for thread, of_thread in by_thread.items()}
    launched = {key: kind for _, found in walked.values() for key, kind in found.items()}
    return walked.get(main, ([], {}))[0], launched


def phases_of(marks: list[TraceEvent], steps: list[TraceEvent]) -> list[list[PhaseSpan]]:
    """The phases of each step, in order. A micro-step begins with its data."""
    found = []
    for step in steps:
        micro_step, of_step = -1, []
        for mark in marks:
            if step.start <= mark.start < step.end:
                name = mark.name.removeprefix(MARK)
                micro_step += name == WAITING_FOR_DATA
                of_step.append(PhaseSpan(name, micro_step, mark.start, min(mark.end, step.end)))
        found.append(of_step)
    return found
