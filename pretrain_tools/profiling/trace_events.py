"""Breaks down steps into work, waiting time and kernel types, using torch.profiler's events.

On a GPU, work is the time in kernels. On a CPU, it is the time in the main thread's operators. Collectives are only
counted while nothing else runs.
"""

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

MARK = "groundwork: "
STEP = f"{MARK}step "
"""Prefix of the marker for an entire step."""
WAITING_FOR_DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
BETWEEN_STEPS = "between"
"""Phase between micro-steps or steps."""

OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
POINTWISE = "pointwise and others"
INHERITED = (
    ("attention", re.compile(r"attention|flash|fmha|flex_attn", re.IGNORECASE)),
    ("loss", re.compile(r"chunked_loss|softmax_less_target|cross_entropy|nll_loss", re.IGNORECASE)),
)
"""Operators that determine the type of all their kernels, including matmuls."""
KERNEL_NAMES = (
    (COMMUNICATION, re.compile(r"nccl|rccl|gloo:|c10d", re.IGNORECASE)),
    *INHERITED,
    (
        "matmuls",
        re.compile(
            r"gemm|cutlass|nvjet|xmma|cublas|mkldnn|onednn|scaled_mm|_mm\b|(::|\b)(add|b|badd)?(mm|bmm)_?\b", re.I
        ),
    ),
    ("copies", re.compile(r"memcpy|memset|aten::(copy_|_to_copy|cat|clone|fill_|zero_)", re.IGNORECASE)),
)
KINDS = ("matmuls", "attention", "loss", OPTIMIZER, POINTWISE, "copies")
"""Kernel types, in report order."""
COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
"""Prefixes of torch's names for compiled code. Generated CPU kernels have no separate events."""
NO_WORK = ("autograd::", "c10d::", "_c10d_functional", "profiler::")
LAUNCH = re.compile(r"^(cuda|cu|hip)[A-Z]")
"""Names of runtime calls. Only these share correlation IDs with kernels."""


Work = dict[str, list[tuple[int, int]]]
"""{kind: time spans in nanoseconds, possibly overlapping}"""


class TraceEvent(NamedTuple):
    """A trace event, with times in nanoseconds since 1970."""

    name: str
    start: int
    end: int
    thread: int = 0
    kind: str = "operator"
    """'operator', 'mark' (a record_function range), 'collective' or 'kernel' (on the device)."""
    correlation: int = 0
    """ID shared by a kernel and the call that launched it, or 0."""


class Spans:
    """Sorted time spans in nanoseconds, shape (n, 2). Overlapping spans are merged."""

    def __init__(self, pairs: Iterable[tuple[int, int]]):
        pairs = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        if len(pairs):
            ends = np.maximum.accumulate(pairs[:, 1])
            first = np.append(True, pairs[1:, 0] > ends[:-1])
            last = np.append(first[1:], True)
            pairs = np.stack([pairs[first, 0], ends[last]], axis=1)
        self.pairs = pairs[pairs[:, 1] > pairs[:, 0]]

    def seconds(self, start: int, end: int) -> float:
        """Returns the total length of the spans between two times, in seconds."""
        return float(np.diff(np.clip(self.pairs, start, end)).sum()) / 1e9


@dataclass
class StepRecord:
    """Breakdown of one rank's step in seconds. `busy`, `blocked`, `data` and `idle` add up to `seconds`."""

    step: int
    seconds: float
    busy: float = 0.0
    """Time spent computing on the device or, on a CPU, in the main thread's operators."""
    blocked: float = 0.0
    """Time spent in exposed collectives."""
    data: float = 0.0
    """Time spent waiting for a batch, without computing or communication."""
    idle: float = 0.0
    """Remaining time: Python between operators, or tasks between steps."""
    phases: dict[str, float] = field(default_factory=dict)
    """Time per phase, which also adds up to `seconds`."""
    blocked_in: dict[str, float] = field(default_factory=dict)
    """`blocked` per phase."""
    idle_in: dict[str, float] = field(default_factory=dict)
    """`idle` per phase."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Kernel time per kind."""
    launched: int = 0
    """Number of kernels launched on the device; 0 on a CPU."""
    starved: float = 0.0
    """Time the main thread was runnable but waiting for a core."""
    runnable: int = 0
    """Number of runnable processes and threads on the machine at the end of the step."""

    @property
    def unblocked(self) -> float:
        """Step time, excluding the wait for other ranks."""
        return self.seconds - self.blocked

    @property
    def own(self) -> float:
        """Step time, excluding the wait for other ranks or data."""
        return self.unblocked - self.data

    @property
    def own_with_core(self) -> float:
        """`own` minus the time spent waiting for a core."""
        return max(0.0, self.own - self.starved)

    @property
    def idle_in_passes(self) -> float:
        """Idle time in forward, backward and update, minus the time spent waiting for a core."""
        return sum(self.idle_in.get(phase, 0.0) for phase in (FORWARD, BACKWARD, UPDATE)) - self.starved

    @property
    def idle_between(self) -> float:
        """Idle time after the update: logging, trackers, synchronization between ranks."""
        return self.idle_in.get(BETWEEN_STEPS, 0.0)


def read_events(profiler: Any) -> list[TraceEvent]:
    """Reads the events of a stopped torch.profiler.profile."""
    from torch.autograd import DeviceType

    found = []
    # Use the raw events, because profiler.events() is slow: it builds a tree of Python objects.
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        on_device = event.device_type() != DeviceType.CPU
        is_mark = event.is_user_annotation() and not name.startswith(COMPILED)
        if on_device and is_mark:  # a copy of the range on the device's timeline
            continue
        kind = "kernel" if on_device else "mark" if is_mark else "operator"
        if name.startswith("gloo:"):
            kind = "collective"
        # Ignore operators' correlation IDs. They also start at 1, but don't refer to kernels.
        correlation = event.correlation_id() if on_device or LAUNCH.match(name) else 0
        found.append(TraceEvent(name, event.start_ns(), event.end_ns(), event.start_thread_id(), kind, correlation))
    return found


@functools.cache
def kernel_kind(name: str) -> str:
    """Classifies an operator or kernel by its name."""
    return next((kind for kind, pattern in KERNEL_NAMES if pattern.search(name)), POINTWISE)


def is_work(name: str) -> bool:
    """Returns True if an operator's own time counts as work. Autograd nodes and collectives don't."""
    return name.startswith(COMPILED) or ("::" in name and not name.startswith(NO_WORK))


@dataclass
class _Open:
    """An operator that hasn't ended."""

    event: TraceEvent
    inherited: str | None
    since: int
    """End of the last operator that it called, or its own start."""
    waits: bool = False
    """True if its own time may be waiting time, because it is a DTensor operator that redispatches or communicates."""
    pieces: list[tuple[str, tuple[int, int]]] = field(default_factory=list)
    """(kind, (start, end)) of the time spent in the operator itself, not in operators that it calls."""


def walk(events: Iterable[TraceEvent], is_update: Callable[[int], bool], launched: dict[int, str]) -> Work:
    """Returns the work of one thread's operators, without double counting nested ones.

    launched: is filled with {correlation ID: kind that the kernel inherits}.
    """
    work: Work = defaultdict(list)
    stack: list[_Open] = []

    def close(until: float) -> None:
        while stack and stack[-1].event.end <= until:
            done = stack.pop()
            add_own(done, done.event.end)
            if is_work(done.event.name) and not done.waits:
                for kind, span in done.pieces:
                    work[kind].append(span)
            if stack:
                stack[-1].since = max(stack[-1].since, done.event.end)

    def add_own(of: _Open, until: int) -> None:
        if until > of.since:
            name = of.event.name
            kind = of.inherited or (POINTWISE if name.startswith(COMPILED) else kernel_kind(name))
            of.pieces.append((kind, (of.since, until)))

    # If two events start at the same time, the longer one is the caller.
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        close(event.start)
        parent = stack[-1] if stack else None
        inherited = parent.inherited if parent else OPTIMIZER if is_update(event.start) else None
        inherited = inherited or next((kind for kind, pattern in INHERITED if pattern.search(event.name)), None)
        if event.correlation and inherited:
            launched[event.correlation] = inherited
        if parent:
            add_own(parent, event.start)
            # A DTensor communicates and then dispatches the same operator again on its local shard.
            parent.waits |= event.name == parent.event.name or "c10d" in event.name
        stack.append(_Open(event, inherited, event.start))
    close(float("inf"))
    return work


def read_steps(events: list[TraceEvent], *, on_device: bool) -> list[StepRecord]:
    """Returns the steps in a trace.

    on_device: True if kernels run on a GPU. Otherwise, the main thread's operators count as work.
    """
    marks = sorted((event for event in events if event.name.startswith(MARK)), key=lambda mark: mark.start)
    steps = [mark for mark in marks if mark.name.startswith(STEP)]
    phases = [mark for mark in marks if mark not in steps]
    updates = Spans((mark.start, mark.end) for mark in phases if mark.name == MARK + UPDATE)
    by_thread: dict[int, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.kind == "operator":
            by_thread[event.thread].append(event)
    launched: dict[int, str] = {}
    own = {
        thread: walk(of_thread, lambda time: updates.seconds(time, time + 1) > 0, launched)
        for thread, of_thread in by_thread.items()
    }
    work: Work = defaultdict(list)
    if not on_device:
        work |= own.get(steps[0].thread, {})
    for event in events:
        if on_device and event.kind == "kernel":
            work[kind_of_kernel(event, launched)].append((event.start, event.end))
        elif not on_device and event.kind == "collective":
            work[COMMUNICATION].append((event.start, event.end))
    by_kind = {kind: Spans(work[kind]) for kind in KINDS}
    busy = Spans(itertools.chain.from_iterable(work[kind] for kind in KINDS))
    # Exposed communication is the union of communication and computation, minus computation.
    either = Spans(itertools.chain.from_iterable(work.values()))
    starts = np.array([start for spans in work.values() for start, _ in spans])
    records = []
    for step in steps:
        within = step.start, step.end
        record = StepRecord(
            int(step.name.removeprefix(STEP)),
            (step.end - step.start) / 1e9,
            busy=busy.seconds(*within),
            blocked=either.seconds(*within) - busy.seconds(*within),
            kernels={kind: spans.seconds(*within) for kind, spans in by_kind.items()},
            launched=int(((starts >= step.start) & (starts < step.end)).sum()) if on_device else 0,
        )
        for mark in phases:
            if not step.start <= mark.start < step.end:
                continue
            name = mark.name.removeprefix(MARK)
            within = mark.start, min(mark.end, step.end)
            seconds = (within[1] - within[0]) / 1e9
            worked = either.seconds(*within)
            _add(record.phases, name, seconds)
            _add(record.blocked_in, name, worked - busy.seconds(*within))
            # Clamp, because CPU and device times may overlap by a few nanoseconds.
            _add(record.idle_in, name, max(0.0, seconds - worked))
        record.data = record.idle_in.pop(WAITING_FOR_DATA, 0.0)
        record.idle = max(0.0, record.seconds - record.busy - record.blocked - record.data)
        records.append(record)
    return records


def _add(sums: dict[str, float], name: str, seconds: float) -> None:
    sums[name] = sums.get(name, 0.0) + seconds


def kind_of_kernel(event: TraceEvent, launched: Mapping[int, str]) -> str:
    """Returns the kind of a kernel. A matmul launched by attention counts as attention."""
    by_name = kernel_kind(event.name)
    return by_name if by_name == COMMUNICATION else launched.get(event.correlation, by_name)
