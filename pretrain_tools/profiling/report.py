"""Writes a profile's report as text and JSON to RUN/profile/step-X."""

import json
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pretrain.files import write_durably
from pretrain.units import counted, table
from pretrain_tools.profiling.causes import (
    Cause,
    Evidence,
    kernel_shares,
    medians,
    milliseconds,
)

RANKS_SHOWN = 16
WIDTH = 118


def verdict_of(evidence: Evidence, causes: Sequence[Cause]) -> str:
    """Formats the verdict as one sentence."""
    if causes:
        return f"Found: {', '.join(dict.fromkeys(cause.name for cause in causes))}"
    shares = {
        "computing": evidence.median("busy"),
        "waiting for data": evidence.median("data"),
        "communication": evidence.communication,
        "waiting for other ranks": statistics.median(map(evidence.waiting, evidence.ranks)),
        "idle": evidence.median("idle"),
    }
    said = ", ".join(f"{name} {seconds / evidence.seconds:.0%}" for name, seconds in shares.items())
    return f"No problems found. A step takes {milliseconds(evidence.seconds)}: {said}"


def report_text(evidence: Evidence, causes: Sequence[Cause], title: str) -> str:
    """Formats the verdict, causes and tables."""
    parts = [title, verdict_of(evidence, causes)]
    for number, cause in enumerate(causes, start=1):
        said = textwrap.fill(f"{number}. {cause.text}.", WIDTH, subsequent_indent="   ")
        remedy = textwrap.fill(f"-> {cause.remedy}", WIDTH, initial_indent="   ", subsequent_indent="      ")
        parts.append(f"{said}\n{remedy}")
    parts += [ranks_text(evidence), kernels_text(evidence), phases_text(evidence)]
    problems = [problem for rank in evidence.ranks for problem in rank.problems]
    parts += [f"some profiles could not be written: {problem}" for problem in problems[:3]]
    return "\n\n".join(parts)


def ranks_text(evidence: Evidence) -> str:
    """Formats a table of the step times of the RANKS_SHOWN slowest ranks."""
    columns = ("step", "worst", "computing", "data", "communication", "waiting for ranks", "idle", "no core")
    rows = [["ms per step", *columns]]

    slowest = sorted(evidence.ranks, key=lambda rank: rank.typical("unblocked"), reverse=True)[:RANKS_SHOWN]
    for rank in sorted(slowest, key=lambda rank: rank.rank):
        waiting = evidence.waiting(rank)
        seconds = [
            rank.typical("seconds"),
            max(step.seconds for step in rank.steps),
            rank.typical("busy"),
            rank.typical("data"),
            # The rest of the blocked time is communication.
            rank.typical("blocked") - waiting,
            waiting,
            rank.typical("idle"),
            rank.typical("starved"),
        ]
        rows.append([f"rank {rank.rank}", *(f"{1e3 * value:,.1f}" for value in seconds)])
    left_out = len(evidence.ranks) - len(slowest)
    more = f"\n... and {left_out} faster ranks" if left_out else ""
    return table(rows, right=set(range(1, len(rows[0])))) + more


def phases_text(evidence: Evidence) -> str:
    """Formats the time per phase, including waiting."""
    seconds = medians(rank.typical_parts("phases") for rank in evidence.ranks)
    said = ", ".join(f"{name} {milliseconds(value)}" for name, value in seconds.items() if value >= 5e-5)
    return f"time per phase: {said}"


def kernels_text(evidence: Evidence) -> str:
    """Formats a table of kernels by kind."""
    shares = kernel_shares(evidence).items()
    rows = [[kind, f"{1e3 * seconds:,.1f}", f"{share:.0%}"] for kind, (seconds, share) in shares]
    return table([["kernels", "ms per step", "of the step"], *rows], right={1, 2})


def write_profile(folder: Path, run: Path, evidence: Evidence, causes: Sequence[Cause]) -> str:
    """Writes report.txt and report.json. Returns the text. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = [step.step for step in evidence.ranks[0].steps]
    title = (
        f"Profile of {run}: steps {steps[0]:,} to {steps[-1]:,}, {counted(len(evidence.ranks), 'rank')}, "
        f"{counted(evidence.micro_steps, 'micro-step')} each"
    )
    text = report_text(evidence, causes, title)
    write_durably(folder / "report.txt", text + "\n")
    contents = {
        "verdict": verdict_of(evidence, causes),
        "causes": [asdict(cause) for cause in causes],
        "seconds": evidence.seconds,
        "communication": evidence.communication,
        "kernels": {kind: seconds for kind, (seconds, _) in kernel_shares(evidence).items()},
        "ranks": [asdict(rank) for rank in evidence.ranks],
        "text": text,
    }
    write_durably(folder / "report.json", json.dumps(contents))
    return text
