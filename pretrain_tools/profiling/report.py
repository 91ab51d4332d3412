"""The verdict of a profile in words and figures, and its files in RUN/profile/step-X."""

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
from pretrain_tools.profiling.causes import Cause, Evidence, RankSteps, kernel_shares, milliseconds

RANKS_SHOWN, LINES_SHOWN, WIDTH = 16, 5, 118


def verdict_of(evidence: Evidence, causes: Sequence[Cause]) -> str:
    """The first sentence."""
    if causes:
        return f"Found: {', '.join(dict.fromkeys(cause.name for cause in causes))}"
    waiting = statistics.median(map(evidence.waiting, evidence.ranks))
    shares = {
        "computing": statistics.median(evidence.each(lambda step: step.busy)),
        "waiting for data": statistics.median(evidence.each(lambda step: step.data)),
        "communication": evidence.communication,
        "waiting for other ranks": waiting,
        "neither": statistics.median(evidence.each(lambda step: step.idle)),
    }
    said = ", ".join(f"{name} {seconds / evidence.seconds:.0%}" for name, seconds in shares.items())
    return f"Nothing is wrong: of a step of {milliseconds(evidence.seconds)} {said}"


def report_text(evidence: Evidence, causes: Sequence[Cause], title: str) -> str:
    """The verdict, its causes, and the figures they rest on."""
    parts = [title, verdict_of(evidence, causes)]
    for number, cause in enumerate(causes, start=1):
        said = textwrap.fill(f"{number}. {cause.text}.", WIDTH, subsequent_indent="   ")
        parts.append(
            said + "\n" + textwrap.fill(f"-> {cause.remedy}", WIDTH, initial_indent="   ", subsequent_indent="      ")
        )
    parts += [ranks_text(evidence), kernels_text(evidence)]
    parts += [text for text in (phases_text(evidence), lines_text(evidence), memory_text(evidence)) if text]
    problems = [problem for rank in evidence.ranks for problem in rank.facts["problems"]]
    parts += [f"could not be written: {problem}" for problem in problems[:3]]
    return "\n\n".join(parts)


def ranks_shown(evidence: Evidence) -> list[RankSteps]:
    """Of many ranks those that take longest for themselves, in their order."""
    slowest = sorted(evidence.ranks, key=lambda rank: -rank.typical(lambda step: step.own + step.data))[:RANKS_SHOWN]
    return sorted(slowest, key=lambda rank: rank.rank)


def ranks_text(evidence: Evidence) -> str:
    """Where each rank's steps go."""
    header = [
        "ms per step",
        "step",
        "worst",
        "computing",
        "data",
        "communication",
        "waiting for ranks",
        "idle",
        "no core",
    ]
    rows = [header]
    for rank in ranks_shown(evidence):
        waiting = evidence.waiting(rank)
        seconds = [
            rank.typical(lambda step: step.seconds),
            max(step.seconds for step in rank.steps),
            rank.typical(lambda step: step.busy),
            rank.typical(lambda step: step.data),
            rank.typical(lambda step: step.blocked) - waiting,
            waiting,
            rank.typical(lambda step: step.idle),
            rank.typical(lambda step: step.starved),
        ]
        rows.append([f"rank {rank.rank}", *(f"{1e3 * value:,.1f}" for value in seconds)])
    left_out = len(evidence.ranks) - len(rows) + 1
    return table(rows, right=set(range(1, len(header)))) + (f"\n... and {left_out} that take less" if left_out else "")


def phases_text(evidence: Evidence) -> str:
    """The parts of the loop, whatever happens in them."""
    sums = [rank.typical_sum("phases") for rank in evidence.ranks]
    names = dict.fromkeys(name for of_rank in sums for name in of_rank)
    seconds = {name: statistics.median(of_rank.get(name, 0.0) for of_rank in sums) for name in names}
    said = ", ".join(f"{name} {milliseconds(value)}" for name, value in seconds.items() if value >= 5e-5)
    return f"in the loop: {said}"


def kernels_text(evidence: Evidence) -> str:
    """Kernels by kind, beside what a plan expects of them."""
    expected, shares = evidence.expected, kernel_shares(evidence)
    rows = [["kernels", "ms per step", "of the step", "plan.py expects", "ms at the peak"]]
    for kind, (seconds, share) in shares.items():
        planned = expected.shares.get(kind) if expected else None
        peak = expected.at_peak.get(kind) if expected else None
        rows.append([kind, f"{1e3 * seconds:,.1f}", f"{share:.0%}"])
        rows[-1] += ["-" if planned is None else f"{planned:.0%}", "-" if peak is None else f"{1e3 * peak:,.1f}"]
    text = table(rows, right={1, 2, 3, 4})
    if expected:
        text += (
            f"\nplan.py expects {milliseconds(expected.seconds)} per step, at an MFU of {expected.mfu:.0%}; profiled "
            "steps are a little longer than others"
        )
    return text


def lines_text(evidence: Evidence) -> str:
    """All lines that wait for the device, those that are no cause too."""
    rows = [(rank, line) for rank in evidence.ranks for line in rank.facts["sync_lines"]]
    seen: dict[str, float] = {}
    for rank, line in rows:
        text = f"{line['place']}  {line['call']} in {line['phase']}"
        seen[text] = max(seen.get(text, 0.0), line["count"] / len(rank.steps))
    most = sorted(seen.items(), key=lambda pair: -pair[1])[:LINES_SHOWN]
    return (
        "\n".join(["lines that read a tensor's value:", *(f"  {text}, {n:.3g} per step" for text, n in most)])
        if most
        else ""
    )


def memory_text(evidence: Evidence) -> str:
    """Of the rank that needs most."""
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


def profile_title(run: Path, evidence: Evidence) -> str:
    steps = [step.step for step in evidence.ranks[0].steps]
    return (
        f"Profile of {run}: steps {steps[0]:,} to {steps[-1]:,}, {counted(len(evidence.ranks), 'rank')}, "
        f"{counted(evidence.micro_steps, 'micro-step')} each"
    )


def write_profile(
    folder: Path, run: Path, evidence: Evidence, causes: Sequence[Cause], *, request_id: str | None
) -> str:
    """report.txt, gantt.png and report.json, for which others may wait, in this order; returns the text."""
    from pretrain_tools.profiling.gantt import draw_gantt

    folder.mkdir(parents=True, exist_ok=True)
    title = profile_title(run, evidence)
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
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / PROFILE_REPORT, json.dumps(contents))
