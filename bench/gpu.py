"""Measures the training speed of Groundwork and baselines on one GPU, for 124M to 7B models. Prints Markdown.

    python bench/gpu.py                                    # all shapes; about half an hour on one H200
    python bench/gpu.py --shapes 124m --attentions auto,flex_attention --losses chunked_compiled,logits --peers ''

train.py runs with every attention and loss implementation. Each program runs alone on the GPU, compiled, in bf16
autocast. MFU is (6 N + 12 L d T) x tokens/s / peak: attention isn't halved for causality, recomputation isn't counted,
and N excludes the embedding lookup. The peak is the data sheet's value for dense bf16 (pretrain/hardware.py). Programs
that fail are listed with the reason.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.contest import Contestant, hold  # noqa: E402
from bench.cpu import PEERS, contestants_of, flops_per_token  # noqa: E402
from bench.shapes import GPU_SHAPES, Shape  # noqa: E402
from pretrain.errors import InputError, did_you_mean, run_script  # noqa: E402

ATTENTIONS = ["auto", "flex_attention", "flash_attention_2", "flash_attention_3"]
LOSSES = ["chunked_compiled", "chunked", "logits"]
SETTINGS = {"7b": ["optim.name=adafactor", "optim.stochastic_rounding=true"]}
"""Settings that shapes need to fit on one GPU. With AdamW's fp32 state, 7B leaves no memory for activations."""
VARIANTS = {
    "deterministic": ["deterministic=true"],
    "fp8": ["precision=fp8"],
    "memory_budget 0.5": ["activation_checkpointing.memory_budget=0.5", "compile=auto"],
}
"""Settings to compare with the defaults, by name. Memory budgets need compiled layers."""
STRATEGIES = ("ddp", "fsdp2", "hsdp")
"""Strategies to measure on several GPUs."""
FEWEST_FOR_ADAMW = 4
"""Minimum number of GPUs on which the shapes in SETTINGS fit with AdamW's state sharded."""
REPORT_EVERY = 10
WARM_UP_REPORTS = 2


@dataclass(frozen=True)
class Row:
    """A table row, without measurements if the program failed."""

    name: str
    documents: str
    attention: str
    loss: str
    tokens_per_second: float | None = None
    peak_memory_bytes: int = 0
    start_seconds: float = 0.0
    problem: str = ""
    gpus: int = 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises InputError for unknown names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    allowed = {"shapes": list(GPU_SHAPES), "attentions": ATTENTIONS, "losses": LOSSES, "peers": list(PEERS)}
    for name, names in allowed.items():
        default = "plain_compiled,bare_compiled,trainer" if name == "peers" else ",".join(names)
        parser.add_argument(f"--{name}", default=default, help=f"comma-separated: {', '.join(names)}")
    parser.add_argument(
        "--reports", type=int, default=3, help=f"number of measured intervals of {REPORT_EVERY} steps each"
    )
    given = parser.parse_args(arguments)
    problems = []
    for name, names in allowed.items():
        chosen = [one for one in getattr(given, name).split(",") if one]
        setattr(given, name, chosen)
        problems += [f"--{name}: {one!r}{did_you_mean(one, names)}" for one in chosen if one not in names]
    if given.reports < 1:
        problems.append(f"--reports: must be at least 1, got {given.reports}")
    if problems:
        raise InputError(*problems)
    return given


def measure(contestant: Contestant, labels: tuple[str, str, str], reports: int) -> Row:
    """Runs a program alone and returns its row."""
    try:
        hold([contestant], ROOT, rounds=1, reports=reports, warm_up=WARM_UP_REPORTS)
    except InputError as error:
        return Row(contestant.name, *labels, problem=error.problems[-1])
    return Row(
        contestant.name,
        *labels,
        statistics.median(contestant.tokens_per_second),
        contestant.peak_memory_bytes,
        contestant.start_seconds,
    )


def measure_own(
    shape: Shape, settings: list[str], labels: tuple[str, str, str], reports: int, report_every: int = REPORT_EVERY
) -> Row:
    """Measures Groundwork with the document mask, attention and loss in `labels`."""
    documents, attention, loss = labels
    name = "groundwork" if documents == "off" else "groundwork_documents"
    chosen = [f"attention={attention}", f"loss.backend={loss}", *settings]
    with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as folder:
        (contestant,) = contestants_of([name], shape, Path(folder), chosen, report_every)
        return measure(contestant, labels, reports)


def measure_variant(
    name: str,
    shape: Shape,
    settings: list[str],
    labels: tuple[str, str, str],
    reports: int,
    report_every: int = REPORT_EVERY,
) -> Row:
    """Measures Groundwork with the settings of a variant from VARIANTS."""
    row = measure_own(shape, [*settings, *VARIANTS[name]], labels, reports, report_every)
    return replace(row, name=f"{row.name}, {name}")


def measure_several(
    strategy: str,
    gpus: int,
    shape: Shape,
    settings: list[str],
    labels: tuple[str, str, str],
    reports: int,
    report_every: int = REPORT_EVERY,
) -> Row:
    """Measures Groundwork's total tokens/s with a strategy on several GPUs, each with the shape's batch size."""
    documents, attention, loss = labels
    name = "groundwork" if documents == "off" else "groundwork_documents"
    chosen = [f"attention={attention}", f"loss.backend={loss}", *settings]
    with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as folder:
        launched = {"strategy": strategy, "processes": gpus}
        (contestant,) = contestants_of([name], shape, Path(folder), chosen, report_every, **launched)
        contestant.name = f"{strategy}, {gpus} GPUs"
        return replace(measure(contestant, labels, reports), gpus=gpus)


def settings_of(name: str, strategy: str = "single", gpus: int = 1) -> list[str]:
    """Returns the settings that a shape needs to fit."""
    shards = strategy != "ddp" and gpus >= FEWEST_FOR_ADAMW
    return [] if shards else SETTINGS.get(name, [])


def measure_peer(name: str, shape: Shape, reports: int, report_every: int = REPORT_EVERY) -> Row:
    """Measures a baseline from PEERS."""
    with tempfile.TemporaryDirectory(prefix="groundwork-bench-") as folder:
        (contestant,) = contestants_of([name], shape, Path(folder), [], report_every)
        return measure(contestant, ("off", "its own", "its own"), reports)


def measure_shape(
    shape: Shape,
    settings: list[str],
    *,
    attentions: list[str],
    losses: list[str],
    peers: list[str],
    reports: int,
    report_every: int = REPORT_EVERY,
) -> list[Row]:
    """Measures Groundwork with each attention and loss, with and without a document mask, then the baselines.

    Prints each result to stderr as soon as it is available.
    """
    crossed = itertools.product(("off", "on"), attentions, losses)
    own = (measure_own(shape, settings, labels, reports, report_every) for labels in crossed)
    rows = []
    for row in itertools.chain(own, (measure_peer(name, shape, reports, report_every) for name in peers)):
        result = row.problem or f"{row.tokens_per_second:,.0f} tokens/s, {row.peak_memory_bytes / 2**30:.1f} GiB"
        labels = f"documents {row.documents}, attention {row.attention}, loss {row.loss}"
        print(f"{row.name}, {labels}: {result}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def table(name: str, shape: Shape, rows: list[Row], peak: float | None) -> list[str]:
    """Formats a Markdown table sorted by speed, followed by the programs that failed, with reasons."""
    flops = flops_per_token(shape)
    lines = [
        f"**{name}**: {shape.in_words()}; {flops / 1e9:.2f} GFLOP per token",
        "",
        "| | document mask | attention | loss | tokens/s | MFU | peak memory | start to first report |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ran = sorted((row for row in rows if row.tokens_per_second), key=lambda row: -row.tokens_per_second)
    for row in ran:
        mfu = f"{flops * row.tokens_per_second / (peak * row.gpus):.1%}" if peak else "peak unknown"
        lines.append(
            f"| {row.name} | {row.documents} | {row.attention} | {row.loss} | {row.tokens_per_second:,.0f} | {mfu} "
            f"| {row.peak_memory_bytes / 2**30:.1f} GiB | {row.start_seconds:.0f} s |"
        )
    failed = [row for row in rows if not row.tokens_per_second]
    lines += [""] if failed else []
    return lines + [
        f"- does not run here: {row.name}, documents {row.documents}, attention {row.attention}, loss {row.loss}: "
        f"{row.problem}"
        for row in failed
    ]


def main() -> int:
    """Prints one table per shape, or a message if there is no GPU."""
    given = parse_arguments()
    import torch

    from pretrain.hardware import peak_flops

    if not torch.cuda.is_available():
        print("bench/gpu.py needs a GPU, but torch finds none here. On a CPU, run python bench/cpu.py")
        return 0
    peak, source = peak_flops(torch.device("cuda"), "bf16")
    print(f"peak: {peak / 1e12:.0f} TFLOP/s, {source}\n" if peak else f"{source}\n")
    for name in given.shapes:
        rows = measure_shape(
            GPU_SHAPES[name],
            SETTINGS.get(name, []),
            attentions=given.attentions,
            losses=given.losses,
            # If Groundwork needs special settings to fit, the baselines' fp32 AdamW doesn't fit either.
            peers=[] if name in SETTINGS else given.peers,
            reports=given.reports,
        )
        print("\n".join(table(name, GPU_SHAPES[name], rows, peak)), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    run_script(main)
