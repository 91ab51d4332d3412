"""Draws the figures for the concept pages with the project's own functions: python -m docs.figures.

Boxes have light fills and dark text. Text outside of boxes is gray, so that it is readable on white and dark pages.
tests/test_site.py compares docs/images/ with the output.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pretrain import files
from pretrain.data.batches import interleave
from pretrain.data.sampling import Permutation, key_of
from pretrain.mesh_sizes import DIMENSIONS, Sizes
from pretrain.model.attention import document_layout
from pretrain.optim.batch_ramp import BatchRamp
from pretrain.recipe import read_run_config

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = "#737b87"
INSIDE = "#1f2430"
BLUE, ORANGE, GREEN, VIOLET, RED, GRAY = "#a9c7f5", "#f8cf9b", "#b5dfb6", "#d3bff0", "#f5b5b0", "#d9dde3"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "groundwork", "font.family": "sans-serif", "font.size": 9}


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns a figure and axes in units of 0.01 inches, with the origin at the top left."""
    figure = Figure((width / 100, height / 100))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    return figure, axes


def box(
    axes: Axes, x: float, y: float, width: float, height: float, color: str, text: str = "", size: int = 9
) -> None:
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="none"))
    if text:
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=INSIDE, fontsize=size)


def label(axes: Axes, x: float, y: float, text: str, size: int = 9, **options: str) -> None:
    axes.text(x, y, text, va="center", color=OUTSIDE, fontsize=size, **options)


def arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "->", "color": OUTSIDE, "lw": 1.2})


def step() -> Figure:
    """Draws one step of recipes/demo.yaml on two ranks."""
    config = read_run_config(ROOT / "recipes/demo.yaml", [])
    length = config.data.sequence_length
    rows = config.batch.sequences_per_micro_batch
    ranks = 2
    sequences = config.batch.tokens_per_step // length
    micro_steps = sequences // (rows * ranks)
    if micro_steps == 1:  # halve the micro-batch to show gradient accumulation
        rows //= 2
        micro_steps = 2
    figure, axes = canvas(840, 250)
    label(axes, 20, 20, f"One step of recipes/demo.yaml: {sequences} sequences x {length} tokens = "
          f"{config.batch.tokens_per_step:,} tokens, on {ranks} ranks, {rows} sequences per micro-batch")  # fmt: skip
    for rank in range(ranks):
        y = 55 + 70 * rank
        label(axes, 20, y + 22, f"rank {rank}")
        for micro_step in range(micro_steps):
            x = 75 + 185 * micro_step
            first = (micro_step * ranks + rank) * rows
            box(axes, x, y, 55, 44, GRAY, f"read\n{first} to {first + rows - 1}")
            box(axes, x + 57, y, 60, 44, BLUE, "forward")
            box(axes, x + 119, y, 60, 44, ORANGE, "backward")
        x = 75 + 185 * micro_steps
        box(axes, x + 62, y, 52, 44, VIOLET, "norm,\nclip")
        box(axes, x + 116, y, 68, 44, VIOLET, "optimizer")
        box(axes, x + 186, y, 62, 44, GRAY, "next step")
    box(axes, 75 + 185 * micro_steps, 55, 60, 114, GREEN, "sum of\ngradients")
    label(axes, 75, 190, "gradients accumulate over the micro-steps, then every rank makes the same update")
    label(
        axes, 75, 212, "sequences are numbered across ranks, so a step contains the same ones on any number of ranks"
    )
    label(axes, 75, 234, "ranks exchange the loss and the norm while the next step runs")
    return figure


def batch() -> Figure:
    """Draws how a step's number determines its samples, their sources, and their positions in the sources."""
    weights = np.array([0.7, 0.3])
    windows = (40, 25)
    seed = 42
    ramp = BatchRamp((4, 8), (0, 2), 4)
    pattern = interleave(weights)
    figure, axes = canvas(840, 330)
    label(axes, 20, 18, "step")
    label(axes, 20, 62, "sample")
    label(axes, 20, 104, "source")
    label(axes, 20, 146, "position")
    total = ramp.total_sequences
    width = 690 / total
    drawn = [0, 0]
    chosen: list[list[int]] = [[], []]
    for number in range(ramp.total_steps):
        x = 130 + width * ramp.sequences_before(number)
        color = BLUE if number % 2 == 0 else ORANGE
        box(axes, x, 6, width * ramp.sequences_at(number) - 2, 24, color, f"step {number}")
    for sample in range(total):
        x = 130 + width * sample
        source = int(pattern[sample])
        permutation = Permutation(windows[source], key_of(seed, source, 0, "epoch"))
        place = int(permutation(np.array([drawn[source]], np.int64))[0])
        chosen[source].append(place)
        drawn[source] += 1
        color = GREEN if source == 0 else VIOLET
        box(axes, x, 50, width - 2, 24, GRAY, str(sample))
        box(axes, x, 92, width - 2, 24, color, "AB"[source])
        box(axes, x, 134, width - 2, 24, color, str(place))
    label(axes, 130, 178, f"Batch of 4 sequences, then 8. Weights {weights[0]} and {weights[1]}, seed {seed}.")
    for source, color in ((0, GREEN), (1, VIOLET)):
        y = 208 + 58 * source
        label(axes, 20, y + 11, f"source {'AB'[source]}")
        each = 690 / max(windows)
        for place in range(windows[source]):
            visited = place in chosen[source]
            text = str(chosen[source].index(place)) if visited else ""
            box(axes, 130 + each * place, y, each - 1, 22, color if visited else GRAY, text, size=6)
    label(
        axes,
        130,
        243,
        "the number in a sequence is the number of sequences read before it from the same source",
        size=8,
    )
    label(
        axes,
        130,
        302,
        "gray: read later in the epoch; every sequence is read once before any of them is read again",
        size=8,
    )
    return figure


def packing() -> Figure:
    """Draws two packed sequences of three documents, with their positions and attention masks."""
    end = 0
    documents = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26, 27], [31, 32, 33]]
    letters = "ABC"
    stream = [token for document in documents for token in [*document, end]]
    length = 8
    ids = np.array([stream[first : first + length + 1] for first in (0, length)])
    figure, axes = canvas(840, 430)
    label(axes, 20, 24, "tokens in the shard")
    cell = 40
    colors = {1: BLUE, 2: ORANGE, 3: VIOLET}

    def name(token: int) -> str:
        return "end" if token == end else f"{letters[token // 10 - 1]}{token % 10}"

    def color(token: int) -> str:
        return GRAY if token == end else colors[token // 10]

    for place, token in enumerate(stream):
        box(axes, 130 + cell * place, 10, cell - 2, 28, color(token), name(token))
    layout = document_layout(ids[:, :-1], end)
    positions = layout["position_ids"].numpy()
    starts = layout["cu_seq_lens_q"].numpy()
    for row in range(len(ids)):
        left = 40 + 400 * row
        label(axes, left, 66, f"sequence {row}: {length} inputs, {length} targets")
        label(axes, left - 20, 122, "targets", size=7)
        size = 40
        for place in range(length):
            x = left + 20 + size * place
            box(axes, x, 80, size - 2, 26, color(ids[row, place]), name(ids[row, place]), size=8)
            box(axes, x, 110, size - 2, 26, color(ids[row, place + 1]), name(ids[row, place + 1]), size=8)
            label(axes, x + size / 2 - 1, 148, str(positions[row, place]), ha="center")
        label(axes, left - 20, 148, "pos.", size=7)
        flat = np.arange(length) + row * length
        segment = np.searchsorted(starts, flat, side="right")
        small = 26
        for query in range(length):
            label(axes, left + 76, 176 + small * query + 12, name(ids[row, query]), size=8, ha="right")
            for key in range(length):
                sees = key <= query and segment[key] == segment[query]
                box(axes, left + 84 + small * key, 176 + small * query, small - 2, small - 2,
                    GREEN if sees else GRAY)  # fmt: skip
        label(axes, left + 84, 176 + small * length + 14, "green: the row's token attends to the column's", size=8)
    return figure


@contextlib.contextmanager
def recorded(operations: list[tuple[str, str]], folder: Path) -> Iterator[None]:
    """Records the disk operations of `files.commit` and `files.write_durably`, in order."""
    seal = files.seal
    sync = files.sync_folder
    rename = Path.rename

    def shown(path: Path) -> str:
        return str(path.relative_to(folder)) if path != folder else "checkpoints"

    def sealing(path: Path) -> dict:
        operations.append(("sync, hash", path.name))
        with mock.patch.object(files, "sync_folder", sync):
            return seal(path)

    def syncing(path: Path) -> None:
        operations.append(("sync", shown(path)))
        sync(path)

    def renaming(path: Path, target: Path) -> Path:
        operations.append(("rename", f"{shown(path)} to {Path(target).name}"))
        return rename(path, target)

    with (
        mock.patch.object(files, "seal", sealing),
        mock.patch.object(files, "sync_folder", syncing),
        mock.patch.object(Path, "rename", renaming),
    ):
        yield


def commit_operations() -> list[tuple[str, str]]:
    """Commits a small checkpoint and returns the disk operations, in order."""
    from pretrain.checkpoint.checkpoints import UNFINISHED

    operations: list[tuple[str, str]] = []
    folder = Path(tempfile.mkdtemp())
    unfinished = folder / f"{UNFINISHED}step-00000500"
    unfinished.mkdir()
    for name in ("model.safetensors", "optimizer.safetensors", "config.json", "trainer_state.json"):
        (unfinished / name).write_bytes(b"0")
    with recorded(operations, folder):
        sealed = {name: files.seal(unfinished / name) for name in ("model.safetensors", "optimizer.safetensors")}
        files.commit(unfinished, folder / "step-00000500", sealed)
        files.write_durably(folder / "LATEST", "step-00000500")
    shutil.rmtree(folder)
    return operations


def checkpoint() -> Figure:
    """Draws the disk operations of a save, and the checkpoint to resume from after a crash between any two of them."""
    operations = commit_operations()
    height = 21
    figure, axes = canvas(840, 70 + height * len(operations))
    label(axes, 20, 20, "disk operations of a save, in order")
    label(axes, 560, 20, "after a crash here, the run resumes from")
    place = next(number for number, (verb, what) in enumerate(operations) if verb == "rename" and "saving" in what
                 and what.endswith("step-00000500"))  # fmt: skip
    colors = {"sync, hash": BLUE, "sync": GRAY, "rename": ORANGE}
    for number, (verb, what) in enumerate(operations):
        y = 38 + height * number
        box(axes, 20, y, 82, height - 2, colors[verb], verb, size=8)
        label(axes, 112, y + height / 2, what.replace("step-00000500", "step-500"), size=8)
    middle = 38 + height * (place + 1)
    box(axes, 560, 38, 220, middle - 40, RED, "the previous checkpoint")
    box(axes, 560, middle, 220, height * (len(operations) - place - 1) - 2, GREEN, "this checkpoint")
    label(axes, 20, 52 + height * len(operations), "then old checkpoints are removed, according to keep_last, "
          "keep_best and keep_every")  # fmt: skip
    return figure


def mesh() -> Figure:
    """Draws what each of 16 ranks stores and reads with dp_replicate 2, dp_shard 2, cp 2 and tp 2."""
    sizes = Sizes(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    order = [name for name, row in DIMENSIONS.items() if not row.is_inner]
    shape = [getattr(sizes, name) for name in order]
    reading = [name for name, row in DIMENSIONS.items() if row.reads]
    figure, axes = canvas(840, 420)
    label(
        axes, 20, 18, f"{sizes.world} ranks: " + " x ".join(f"{name} {size}" for name, size in sizes.named().items())
    )
    colors = [BLUE, ORANGE, GREEN, VIOLET]
    for rank in range(sizes.world):
        place = dict(zip(order, np.unravel_index(rank, shape), strict=True))
        batch_number = 0
        for name in reading:
            batch_number = batch_number * getattr(sizes, name) + int(place[name])
        shard = int(place["dp_shard"]) * sizes.cp + int(place["cp"])
        x = 20 + 102 * (rank % 8)
        y = 50 + 165 * (rank // 8)
        box(axes, x, y, 96, 150, GRAY)
        label(axes, x + 48, y + 12, f"rank {rank}", ha="center")
        # The model: columns are slices (tp), rows are shards (dp_shard x cp).
        for row in range(sizes.fsdp):
            for column in range(sizes.tp):
                held = row == shard and column == int(place["tp"])
                box(axes, x + 14 + 34 * column, y + 24 + 17 * row, 33, 16, INSIDE if held else "#f3f4f6")
        for half in range(sizes.cp):
            mine = half == int(place["cp"])
            box(axes, x + 8 + 40 * half, y + 104, 39, 20, colors[batch_number] if mine else "#f3f4f6")
        axes.text(x + 48, y + 137, f"sequences {batch_number}", ha="center", va="center", color=INSIDE, fontsize=8)
    label(axes, 20, 385, "dark: the shard of a layer's matrices that a rank stores; columns are tp slices, rows are "
          "dp_shard x cp shards")  # fmt: skip
    label(axes, 20, 403, "color: the sequences that a rank trains on, and which half of each; each row of ranks is "
          "a replica")  # fmt: skip
    return figure


def survival() -> Figure:
    """Draws the maximum number of steps lost with each failure, with the settings in recipes/llama_125m.yaml."""
    config = read_run_config(ROOT / "recipes/llama_125m.yaml", [])
    every = config.checkpoint.every_steps
    guard = config.guard
    rows = [
        ("SIGTERM, Ctrl-C", 0, "saved at the end of the step"),
        ("non-finite gradient", 1, "this step isn't applied"),
        ("crash, kill, out of memory, hang", every, "back to the newest checkpoint"),
        ("newest checkpoint damaged", 2 * every, "back to the previous checkpoint"),
        (f"loss spike of {guard.patience} steps", guard.rollback_steps + every + guard.patience,
         f"back by at least {guard.rollback_steps} steps, and the data is skipped"),
        ("disk lost, with a mirror", 2 * every, "back to the newest complete copy"),
    ]  # fmt: skip
    figure, axes = canvas(840, 60 + 44 * len(rows))
    label(
        axes,
        20,
        18,
        f"maximum number of steps lost (checkpoint.every_steps {every}, guard.rollback_steps {guard.rollback_steps})",
    )
    scale = 260 / (2 * every)
    for number, (failure, steps, response) in enumerate(rows):
        y = 42 + 44 * number
        label(axes, 20, y + 15, failure)
        color = GREEN if steps <= 1 else ORANGE
        box(axes, 260, y, max(26, steps * scale), 30, color, str(steps))
        label(axes, 270 + max(26, steps * scale), y + 15, response, size=8)
    return figure


FIGURES = {
    "step": step,
    "batch": batch,
    "packing": packing,
    "checkpoint": checkpoint,
    "mesh": mesh,
    "survival": survival,
}


def draw(folder: Path, names: Sequence[str] = tuple(FIGURES)) -> None:
    """Writes figures to a folder. The bytes are always the same."""
    with mpl.rc_context(STYLE):
        for name in names:
            FIGURES[name]().savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs/images")
