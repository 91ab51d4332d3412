"""The ranks' last steps side by side: what each does, and when it waits for the others."""

from pathlib import Path

from pretrain_tools.profiling.causes import RankSteps
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
from pretrain_tools.runs.plots import COLOURS

COLOUR_OF = {
    WAITING_FOR_DATA: COLOURS[4], FORWARD: COLOURS[5], BACKWARD: COLOURS[0], UPDATE: COLOURS[2],
    BETWEEN_STEPS: "#bbbbbb", IDLE: "black", BLOCKED: COLOURS[1],
}  # fmt: skip
OTHER = COLOURS[3]
"""Work between steps: validation, a save."""
MOST_ROWS = 32


def draw_gantt(ranks: list[RankSteps], title: str, path: Path) -> None:
    """A row per rank; of many those that take longest for themselves and those that take least."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    if len(ranks) > MOST_ROWS:
        ordered = sorted(ranks, key=lambda rank: rank.typical(lambda step: step.own + step.data))
        ranks = sorted([*ordered[: MOST_ROWS // 2], *ordered[-MOST_ROWS // 2 :]], key=lambda rank: rank.rank)
    figure = Figure(figsize=(14, 1.8 + 0.55 * len(ranks)), layout="constrained")
    axis = figure.add_subplot()
    found = dict.fromkeys(name for rank in ranks for *_, name in rank.facts["timeline"])
    names = [name for name in COLOUR_OF if name in found and name not in (IDLE, BLOCKED)]
    names += [name for name in found if name not in (*COLOUR_OF, WHOLE_STEP)]
    names += [name for name in (IDLE, BLOCKED) if name in found]  # on top of the phases
    first = min((start for rank in ranks for start, *_ in rank.facts["timeline"]), default=0.0)
    for row, rank in enumerate(ranks):
        for name in names:
            spans = [(s - first, e - s) for s, e, what in rank.facts["timeline"] if what == name]
            bars = [(1e3 * start, 1e3 * length) for start, length in spans]
            height = 0.3 if name in (BLOCKED, IDLE) else 0.8
            axis.broken_barh(bars, (row - height / 2, height), facecolors=COLOUR_OF.get(name, OTHER), linewidth=0)
        edges = [1e3 * (start - first) for start, _, name in rank.facts["timeline"] if name == WHOLE_STEP]
        axis.vlines(edges, row - 0.46, row + 0.46, color="black", linewidth=1)
    axis.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    axis.invert_yaxis()
    axis.set_xlabel("ms")
    axis.margins(x=0.01)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(title, fontsize=11, loc="left", fontweight="bold")
    handles = [Patch(color=COLOUR_OF.get(name, OTHER), label=name) for name in names]
    figure.legend(handles=handles, loc="outside upper left", ncols=9, frameon=False, fontsize=10)
    unfinished = path.with_name(f".{path.name}.unfinished")
    figure.savefig(unfinished, dpi=110, format="png")
    unfinished.replace(path)
