"""The parts of a step by torch.profiler's events: work, waiting, and the kernels by their kind.

On a GPU the device's timeline counts: kernels, collectives that nothing else hid, and the time in which it was idle.
On a CPU the main thread's does: its operators, and collectives that run while it has nothing to do.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MARK = "groundwork: "
STEP = f"{MARK}step "
ALIGNED = f"{MARK}aligned"
"""Marks in a trace that are no phase: a whole step, and a moment that all ranks share."""
WAITING_FOR_DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
BETWEEN_STEPS = "between"
"""The phases of every step, the last one between two micro-steps and two steps; a save and the like have their own."""
BLOCKED = "communication, waiting for ranks"
IDLE = "nothing runs"
WHOLE_STEP = "step"
"""In a timeline, beside the phases."""
LEAST_DRAWN = 0.004
"""Share of a step below which a timeline leaves a wait out."""

OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
POINTWISE = "pointwise and others"
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
"""Kinds of kernels, as a report lists them."""
COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
"""Names that torch gives compiled code, whose own kernels on a CPU it does not name."""
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

    def __init__(self, pairs: Iterable[tuple[int, int]]):
        pairs = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        if len(pairs):
            ends = np.maximum.accumulate(pairs[:, 1])
            first = np.append(True, pairs[1:, 0] > ends[:-1])
            last = np.append(first[1:], True)
            pairs = np.stack([pairs[first, 0], ends[last]], axis=1)
        self.pairs = pairs[pairs[:, 1] > pairs[:, 0]]
        self._sums = np.append(0, np.cumsum(self.pairs[:, 1] - self.pairs[:, 0]))

    def _holds(self, times: np.ndarray) -> np.ndarray:
        begun = np.searchsorted(self.pairs[:, 0], times, "right")
        return begun > np.searchsorted(self.pairs[:, 1], times, "right")

    def __sub__(self, other: "Spans") -> "Spans":
        points = np.unique(np.concatenate([self.pairs.ravel(), other.pairs.ravel()]))
        # Between two neighboring ends of either, both are constant.
        kept = self._holds(points[:-1]) & ~other._holds(points[:-1])
        return Spans(np.stack([points[:-1][kept], points[1:][kept]], axis=1).tolist())

    def __and__(self, other: "Spans") -> "Spans":
        return self - (self - other)

    def _before(self, time: int) -> int:
        number = int(np.searchsorted(self.pairs[:, 0], time, "right"))
        if number == 0:
            return 0
        begin, end = self.pairs[number - 1]
        return int(self._sums[number - 1] + min(time, end) - begin)

    def seconds(self, start: int, end: int) -> float:
        """Adds up what lies between two times."""
        return (self._before(end) - self._before(start)) / 1e9


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
        """The time that this rank took for itself, whoever it waited for."""
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
        name = event.name()
        on_device = event.device_type() != DeviceType.CPU
        is_mark = event.is_user_annotation() and not name.startswith(COMPILED)
        if on_device and is_mark:  # the range again, as the device saw it
            continue
        kind = "kernel" if on_device else "mark" if is_mark else "operator"
        if name.startswith("gloo:"):
            kind = "collective"
        # Operators count from 1 as well: only launches and kernels share a number.
        correlation = event.correlation_id() if on_device or LAUNCH.match(name) else 0
        found.append(TraceEvent(name, event.start_ns(), event.end_ns(), event.start_thread_id(), kind, correlation))
    return found


@functools.cache
def kernel_kind(name: str) -> str:
    """Tells by its name alone what an operator or a kernel computes."""
    return next((kind for kind, pattern in KERNEL_NAMES if pattern.search(name)), POINTWISE)


class WorkSpan(NamedTuple):
    """A stretch of one thread's own work, without what it called."""

    start: int
    end: int
    kind: str


def is_work(name: str) -> bool:
    """Tells whether an operator's own time is work; of autograd's nodes and of collectives' calls it is not."""
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
    pieces = []
    launched = {}
    stack = []

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

    # Of events that begin together the longer one has called the other.
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        close(event.start)
        parent = stack[-1] if stack else None
        inherited = parent.inherited if parent else OPTIMIZER if is_update(event.start) else None
        inherited = inherited or next((kind for kind, pattern in INHERITED if pattern.search(event.name)), None)
        if event.correlation and inherited:
            launched[event.correlation] = inherited
        if parent:
            add_own(parent, event.start)
            # A tensor that is divided over ranks dispatches its operator again, and communicates in between.
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
    steps = [mark for mark in marks if mark.name.startswith(STEP)]
    parts = phases_of(marks, steps)
    updates = spans_of(parts, UPDATE)
    own, launched = walk_threads(events, steps[0].thread, lambda time: updates.seconds(time, time + 1) > 0)
    if on_device:
        work = [WorkSpan(e.start, e.end, kind_of_kernel(e, launched)) for e in events if e.kind == "kernel"]
    else:
        work = [*own, *(WorkSpan(e.start, e.end, COMMUNICATION) for e in events if e.kind == "collective")]
    by_kind = {kind: Spans((w.start, w.end) for w in work if w.kind == kind) for kind in (*KINDS, COMMUNICATION)}
    collectives = by_kind.pop(COMMUNICATION)
    busy = Spans((w.start, w.end) for w in work if w.kind != COMMUNICATION)
    blocked = collectives - busy
    starts = np.sort([w.start for w in work])
    records = []
    for step, of_step in zip(steps, parts, strict=True):
        record = StepRecord(
            int(step.name.removeprefix(STEP)),
            (step.end - step.start) / 1e9,
            busy=busy.seconds(step.start, step.end),
            blocked=blocked.seconds(step.start, step.end),
            kernels={kind: spans.seconds(step.start, step.end) for kind, spans in by_kind.items()},
            launched=int(np.searchsorted(starts, step.end) - np.searchsorted(starts, step.start)) if on_device else 0,
        )
        for part in of_step:
            seconds = (part.end - part.start) / 1e9
            waited = blocked.seconds(part.start, part.end)
            # Times of host and device may overlap by some nanoseconds.
            rest = max(0.0, seconds - waited - busy.seconds(part.start, part.end))
            _add(record.phases, part.name, seconds)
            _add(record.blocked_in, f"{part.micro_step}/{part.name}", waited)
            _add(record.idle_in, part.name, rest)
        record.data = record.idle_in.pop(WAITING_FOR_DATA, 0.0)
        record.idle = max(0.0, record.seconds - record.busy - record.blocked - record.data)
        records.append(record)
    shown = steps[-drawn:] if drawn else []
    within = Spans((step.start, step.end) for step in shown)
    visible = LEAST_DRAWN * 1e9 * sum(record.seconds for record in records) / len(records)
    bars = [(step.start, step.end, WHOLE_STEP) for step in shown]
    bars += [(p.start, p.end, p.name) for of_step in parts[len(parts) - len(shown) :] for p in of_step]
    idle = within - busy - collectives - spans_of(parts, WAITING_FOR_DATA)
    for what, spans in ((IDLE, idle), (BLOCKED, within & blocked)):
        bars += [(begin, end, what) for begin, end in spans.pairs.tolist() if end - begin > visible]
    # Clocks of machines differ: timelines begin at a mark that all ranks set after a barrier.
    aligned = next((mark.start for mark in marks if mark.name == ALIGNED), steps[0].start)
    return records, [[(begin - aligned) / 1e9, (end - aligned) / 1e9, what] for begin, end, what in bars]


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


def spans_of(parts: list[list[PhaseSpan]], name: str) -> Spans:
    """The phases of that name, in all steps."""
    return Spans((part.start, part.end) for of_step in parts for part in of_step if part.name == name)


def kind_of_kernel(event: TraceEvent, launched: Mapping[int, str]) -> str:
    """The kind of a kernel on the device: that of the operators around its launch, but communication by its name."""
    # A product within attention is attention, whatever its kernel is called.
    by_name = kernel_kind(event.name)
    return by_name if by_name == COMMUNICATION else launched.get(event.correlation, by_name)


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
    phases = [mark for mark in marks if mark.name != ALIGNED and not mark.name.startswith(STEP)]
    found = []
    for step in steps:
        micro_step = -1
        of_step = []
        for mark in phases:
            if step.start <= mark.start < step.end:
                name = mark.name.removeprefix(MARK)
                micro_step += name == WAITING_FOR_DATA
                of_step.append(PhaseSpan(name, micro_step, mark.start, min(mark.end, step.end)))
        found.append(of_step)
    return found
