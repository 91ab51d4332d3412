"""Measures the validation loss on all ranks, always on the same windows."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.config import Data, WindowSpec
from pretrain.data.batches import expect_windows, read_windows, windows_of
from pretrain.data.shards import ShardReader, manifest_of, open_source
from pretrain.errors import Problems
from pretrain.model.attention import model_inputs
from pretrain.model.loss import recording_losses
from pretrain.parallel.strategy import Strategy

SHORTEST_RANGE = 128
"""Size of the first position range. Later ranges start at 1, 2, 4, ... times this position."""


def open_validation(data: Data) -> dict[str, ShardReader]:
    """Opens the validation sources as {source name: reader}. Raises InputError with all problems."""
    if data.validation is not None:
        wanted = [(source, source.split) for source in data.validation]
    else:
        sources = {source.shards: source for stage in data.mixtures for source in stage.train}
        wanted = [
            (source, "validation")
            for source in sources.values()
            if data.window.count_in(manifest_of(source).totals("validation")[0]) > 0
        ]
    readers = {}
    problems = Problems()
    trained_on = manifest_of(data.mixtures[0].train[0])
    for source, split in wanted:
        folder = source.shards
        reader = problems.attempt(open_source, source, split, data.cache)
        if reader is None:
            continue
        if not data.window.count_in(reader.tokens):
            problems.append(
                f"data.validation: {folder} contains {reader.tokens:,} {split} tokens, but one sequence needs "
                f"{data.sequence_length:,} + 1; prepare it with a larger --validation_fraction or use shorter "
                "sequences"
            )
        if reader.manifest.tokenizer_sha256 != trained_on.tokenizer_sha256:
            problems.append(
                f"data.validation: {folder} was prepared with a different tokenizer "
                f"({reader.manifest.tokenizer_name}) than the training data ({trained_on.tokenizer_name}); prepare it "
                "again with the same tokenizer"
            )
        readers[source_name(folder, readers)] = reader
    problems.stop_if_any()
    return readers


def source_name(folder: Path | str, taken: dict) -> str:
    """Returns the folder name, the full path or URL if the name is taken, or a numbered one if both are."""
    names = Path(folder).name, str(folder), f"{folder} ({len(taken) + 1})"
    return next(name for name in names if name not in taken)


@torch.no_grad()
def measure(
    model: torch.nn.Module,
    readers: dict[str, ShardReader],
    strategy: Strategy,
    *,
    window: WindowSpec,
    sequences: int,
    sequences_per_micro_batch: int,
    attention: str,
    after_batch: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Returns {source: {loss, perplexity, bits_per_byte, tokens, ...}}. The loss is in nats per token.

    bits_per_byte = loss / ln 2 * tokens / UTF-8 bytes, with the token and byte counts of the whole split.
    loss_by_position and tokens_by_position are {"0-127": ..., "128-255": ...}. Positions are counted from the start of
    the document, or of the window without document_mask.

    Args:
        after_batch: called on all ranks after each batch. May raise an exception to interrupt.
    """
    model.eval()
    results = {}
    ranges = position_ranges(window.sequence_length)
    rows = sequences_per_micro_batch
    try:
        for name, reader in readers.items():
            starts = windows_of(reader, window, sequences)
            total = torch.zeros(2 + 2 * len(ranges), dtype=torch.float64)
            for first in range(0, len(starts), rows * strategy.data_ranks):
                # Includes the next batch, to prefetch it from an object store.
                parts = [starts[first + rank * rows :][:rows] for rank in range(2 * strategy.data_ranks)]
                mine = parts[strategy.data_rank]

                def read(data_rank: int, reader: ShardReader = reader, parts: list = parts) -> np.ndarray:
                    ids = read_windows(reader, parts[data_rank], window, rows)
                    expect_windows(reader, parts[strategy.data_ranks + data_rank], window)
                    return ids

                ids = strategy.read(first, read)
                batch = model_inputs(
                    ids,
                    window,
                    end_of_document_id=reader.manifest.end_of_document_id,
                    device=strategy.device,
                    attention=attention,
                    rows=len(mine),
                )
                with recording_losses(model) as losses:
                    _, cross_entropy = model(**batch)
                tokens = len(mine) * window.sequence_length // strategy.sequence_parts
                # Sums, because the number of windows differs between ranks and in the last batch.
                total[:2] += torch.tensor([cross_entropy.item() * tokens, tokens], dtype=torch.float64)
                if losses:
                    positions = positions_of(batch, strategy)[:tokens]
                    total[2:] += sums_by_range(torch.cat(losses)[:tokens], positions, ranges)
                after_batch()
            loss_sum, tokens, *by_range = strategy.sum(total.to(strategy.device)).tolist()
            results[name] = summary(loss_sum / tokens, int(tokens), reader) | by_position(ranges, by_range)
    finally:
        model.train()
    return results


def position_ranges(length: int) -> list[range]:
    """Returns the position ranges 0-127, 128-255, 256-511, ... up to `length`."""
    starts = [0]
    while (following := max(SHORTEST_RANGE, 2 * starts[-1])) < length:
        starts.append(following)
    return [range(start, end) for start, end in itertools.pairwise([*starts, length])]


def positions_of(batch: dict[str, Any], strategy: Strategy) -> np.ndarray:
    """Returns the positions (N,) of this rank's tokens in their documents, or in the window without document_mask."""
    positions_BT = batch.get("position_ids")
    if positions_BT is None:
        positions_BT = torch.arange(batch["input_ids_BT"].shape[1]).expand(batch["input_ids_BT"].shape)
    return positions_BT.chunk(strategy.sequence_parts, dim=1)[strategy.part].flatten().cpu().numpy()


def sums_by_range(losses_N: Tensor, positions_N: np.ndarray, ranges: list[range]) -> Tensor:
    """Returns (2 R,) in fp64 on the CPU: the loss sum per range, then the number of tokens per range."""
    losses = losses_N.cpu().double().numpy()
    place = np.searchsorted([r.start for r in ranges], positions_N, side="right") - 1
    sums = [np.bincount(place, weights, minlength=len(ranges)) for weights in (losses, None)]
    return torch.from_numpy(np.concatenate(sums).astype(np.float64))


def by_position(ranges: list[range], sums: list[float]) -> dict[str, dict[str, float]]:
    """Converts the sums from `sums_by_range` to mean losses and token counts. Omits ranges without tokens."""
    names = [f"{r.start}-{r.stop - 1}" for r in ranges]
    found = [(n, s, t) for n, s, t in zip(names, sums, sums[len(ranges) :], strict=False) if t]
    return {
        "loss_by_position": {name: loss / tokens for name, loss, tokens in found},
        "tokens_by_position": {name: int(tokens) for name, _, tokens in found},
    }


def perplexity_of(loss: float) -> float:
    """Returns exp(loss), limited to exp(700) to avoid overflow."""
    return math.exp(min(loss, 700))


def summary(loss: float, tokens: int, reader: ShardReader) -> dict[str, float]:
    """Returns a source's metrics. loss: mean in nats per token."""
    split_tokens, _, split_bytes = reader.manifest.totals(reader.split)
    return {
        "loss": loss,
        "perplexity": perplexity_of(loss),
        "bits_per_byte": loss / math.log(2) * split_tokens / split_bytes,
        "tokens": tokens,
    }
