"""Reports a profile as text, JSON and a Gantt chart of the ranks, in RUN/profile/step-X."""

import json
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.files import write_durably
from pretrain.runs.run_folder import PROFILE_REPORT
from pretrain.units import bytes_text, counted, table
from pretrain_tools.profiling.causes import (
    Cause,
    Evidence,
    RankSteps,
    kernel_shares,
    lines_per_step,
    milliseconds,
)
from pretrain_tools.profiling.trace_events import (
    BACKWARD,
    BETWEEN_STEPS,
    BLOCKED,
    FORWARD,
    IDLE,
    UPDATE,
    WAITING_FOR_DATA,
    WHOLE_STEP,
)
from pretrain_tools.runs.plots import COLORS, save_figure

RANKS_SHOWN = 16
LINES_SHOWN = 5
WIDTH = 118
COLOR_OF = {
    WAITING_FOR_DATA: COLORS[4], FORWARD: COLORS[5], BACKWARD: COLORS[0], UPDATE: COLORS[2],
    BETWEEN_STEPS: "#bbbbbb", IDLE: "black", BLOCKED: COLORS[1],
}  # fmt: skip
OTHER = COLORS[3]
"""Color of tasks between steps, such as validation or a save."""
MOST_ROWS = 32
"""Maximum number of ranks in the chart."""


def verdict_of(evidence: Evidence, causes: Sequence[Cause]) -> str:
    """Formats the verdict in one sentence."""
    if causes:
        return f"Found: {', '.join(dict.fromkeys(cause.name for cause in causes))}"
    shares = {
        "computing": statistics.median(evidence.each(lambda step: step.busy)),
        "waiting for data": statistics.median(evidence.each(lambda step: step.data)),
        "communication": evidence.communication,
        "waiting for other ranks": statistics.median(map(evidence.waiting, evidence.ranks)),
        "neither": statistics.median(evidence.each(lambda step: step.idle)),
    }
    said = ", ".join(f"{name} {seconds / evidence.seconds:.0%}" for name, seconds in shares.items())
    return f"Nothing is wrong: of a step of {milliseconds(evidence.seconds)} {said}"


def report_text(evidence: Evidence, causes: Sequence[Cause], title: str) -> str:
    """Formats the verdict, its causes, and the tables behind them."""
    parts = [title, verdict_of(evidence, causes)]
    for number, cause in enumerate(causes, start=1):
        said = textwrap.fill(f"{number}. {cause.text}.", WIDTH, subsequent_indent="   ")
        remedy = textwrap.fill(f"-> {cause.remedy}", WIDTH, initial_indent="   ", subsequent_indent="      ")
        parts.append(f"{said}\n{remedy}")
    parts += [ranks_text(evidence), kernels_text(evidence), phases_text(evidence)]
    parts += [*filter(None, [lines_text(evidence)]), memory_text(evidence)]
    problems = [problem for rank in evidence.ranks for problem in rank.facts["problems"]]
    parts += [f"could not be written: {problem}" for problem in problems[:3]]
    return "\n\n".join(parts)


def slowest_first(ranks: Sequence[RankSteps]) -> list[RankSteps]:
    """Sorts ranks by their own time, including waiting for data, the slowest first."""
    return sorted(ranks, key=lambda rank: -rank.typical(lambda step: step.own + step.data))


def ranks_text(evidence: Evidence) -> str:
    """Formats a table of how each rank spends a step; of many ranks only the slowest RANKS_SHOWN."""
    columns = {
        "step": lambda rank: rank.typical(lambda step: step.seconds),
        "worst": lambda rank: max(step.seconds for step in rank.steps),
        "computing": lambda rank: rank.typical(lambda step: step.busy),
        "data": lambda rank: rank.typical(lambda step: step.data),
        # Blocked time beyond waiting for slower ranks is the transfer itself.
        "communication": lambda rank: rank.typical(lambda step: step.blocked) - evidence.waiting(rank),
        "waiting for ranks": evidence.waiting,
        "idle": lambda rank: rank.typical(lambda step: step.idle),
        "no core": lambda rank: rank.typical(lambda step: step.starved),
    }
    shown = sorted(slowest_first(evidence.ranks)[:RANKS_SHOWN], key=lambda rank: rank.rank)
    rows = [["ms per step", *columns]]
    rows += [[f"rank {rank.rank}", *(f"{1e3 * of(rank):,.1f}" for of in columns.values())] for rank in shown]
    left_out = len(evidence.ranks) - len(shown)
    more = f"\n... and {left_out} that take less" if left_out else ""
    return table(rows, right=set(range(1, len(rows[0])))) + more


def phases_text(evidence: Evidence) -> str:
    """Formats the time of each phase of the loop, including waiting."""
    sums = [rank.typical_parts("phases") for rank in evidence.ranks]
    names = dict.fromkeys(name for of_rank in sums for name in of_rank)
    seconds = {name: statistics.median(of_rank.get(name, 0.0) for of_rank in sums) for name in names}
    said = ", ".join(f"{name} {milliseconds(value)}" for name, value in seconds.items() if value >= 5e-5)
    return f"in the loop: {said}"


def kernels_text(evidence: Evidence) -> str:
    """Formats a table of kernels by kind, with what plan.py expects."""
    expected = evidence.expected
    shares, peaks = (expected.shares, expected.at_peak) if expected else ({}, {})
    rows = [["kernels", "ms per step", "of the step", "plan.py expects", "ms at the peak"]]
    for kind, (seconds, share) in kernel_shares(evidence).items():
        planned = f"{shares[kind]:.0%}" if kind in shares else "-"
        peak = f"{1e3 * peaks[kind]:,.1f}" if kind in peaks else "-"
        rows.append([kind, f"{1e3 * seconds:,.1f}", f"{share:.0%}", planned, peak])
    text = table(rows, right={1, 2, 3, 4})
    if expected:
        text += (
            f"\nplan.py expects {milliseconds(expected.seconds)} per step, at an MFU of {expected.mfu:.0%}; profiled "
            "steps are a little longer than others"
        )
    return text


def lines_text(evidence: Evidence) -> str:
    """Formats the lines that wait for the device, including harmless ones; '' if there are none."""
    lines = [
        f"  {place}  {call} in {phase}, {count:.3g} per step"
        for (place, call, phase), count in list(lines_per_step(evidence).items())[:LINES_SHOWN]
    ]
    return "\n".join(["lines that read a tensor's value:", *lines]) if lines else ""


def memory_text(evidence: Evidence) -> str:
    """Formats the memory of the rank that uses most."""
    most = max(
        evidence.ranks, key=lambda r: r.facts["memory"].get("reserved_peak", r.facts["memory"]["resident_peak"])
    )
    memory = most.facts["memory"]
    if "total" in memory:
        return (
            f"memory of rank {most.rank}: tensors {bytes_text(memory['allocated_peak'])} at the peak, torch holds "
            f"{bytes_text(memory['reserved_peak'])} of {bytes_text(memory['total'])}"
        )
    return f"memory of rank {most.rank}: {bytes_text(memory['resident_peak'])} resident at the peak"


def write_profile(
    folder: Path, run: Path, evidence: Evidence, causes: Sequence[Cause], *, request_id: str | None
) -> str:
    """Writes report.txt, gantt.png and report.json, and returns the text.

    report.json comes last, because `wait_for_profile` takes it as the sign that the profile is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    steps = [step.step for step in evidence.ranks[0].steps]
    title = (
        f"Profile of {run}: steps {steps[0]:,} to {steps[-1]:,}, {counted(len(evidence.ranks), 'rank')}, "
        f"{counted(evidence.micro_steps, 'micro-step')} each"
    )
    text = report_text(evidence, causes, title)
    write_durably(folder / "report.txt", text + "\n")
    draw_gantt(evidence.ranks, f"{title}; the last ones", folder / "gantt.png")
    contents = {
        "request": request_id,
        "verdict": verdict_of(evidence, causes),
        "causes": [asdict(cause) for cause in causes],
        "seconds": evidence.seconds,
        "communication": evidence.communication,
        "expected": asdict(evidence.expected) if evidence.expected else None,
        "kernels": {kind: seconds for kind, (seconds, _) in kernel_shares(evidence).items()},
        "ranks": [rank.facts for rank in evidence.ranks],
        "text": text,
    }
    write_json(folder, contents)
    return text


def write_json(folder: Path, contents: dict[str, Any]) -> None:
    """Writes report.json. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / PROFILE_REPORT, json.dumps(contents))


def draw_gantt(ranks: list[RankSteps], title: str, path: Path) -> None:
    """Draws a Gantt chart of the ranks' last steps: their phases, idle time and waiting.

    If there are more than MOST_ROWS ranks, shows the slowest and the fastest.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if len(ranks) > MOST_ROWS:
        ordered = slowest_first(ranks)
        ranks = sorted([*ordered[: MOST_ROWS // 2], *ordered[-MOST_ROWS // 2 :]], key=lambda rank: rank.rank)
    figure = Figure(figsize=(14, 1.8 + 0.55 * len(ranks)), layout="constrained")
    axis = figure.add_subplot()
    spans = [span for rank in ranks for span in rank.facts["timeline"]]
    found = dict.fromkeys(name for *_, name in spans if name != WHOLE_STEP)
    # Waiting happens within phases, so it is drawn as thin bars on top of them.
    on_top = (IDLE, BLOCKED)
    phases = [name for name in COLOR_OF if name in found and name not in on_top]
    names = [*phases, *(name for name in found if name not in COLOR_OF), *(name for name in on_top if name in found)]
    first = min((start for start, *_ in spans), default=0.0)
    for row, rank in enumerate(ranks):
        for name in names:
            bars = [(1e3 * (s - first), 1e3 * (e - s)) for s, e, what in rank.facts["timeline"] if what == name]
            height = 0.3 if name in on_top else 0.8
            color = COLOR_OF.get(name, OTHER)
            axis.broken_barh(bars, (row - height / 2, height), facecolors=color, linewidth=0)
        edges = [1e3 * (start - first) for start, _, name in rank.facts["timeline"] if name == WHOLE_STEP]
        axis.vlines(edges, row - 0.46, row + 0.46, color="black", linewidth=1)
    axis.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.margins(x=0.01)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
    handles = [Patch(color=COLOR_OF.get(name, OTHER), label=name) for name in names]
    figure.legend(handles=handles, loc="outside upper left", ncols=9, frameon=False, fontsize=10)
    save_figure(figure, path)
