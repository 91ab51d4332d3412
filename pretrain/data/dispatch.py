"""Dispatches batches if only the first rank can read the shards: it reads and sends all ranks' windows."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch.distributed as dist
from pydantic import TypeAdapter

from pretrain.config import Data, Shards
from pretrain.data.manifest import SPLITS, Shard
from pretrain.data.shards import FoundShards, read_manifest, shard_size_problems
from pretrain.errors import InputError, UnreachableError

_Result = TypeVar("_Result")

DESCRIPTION = TypeAdapter(list[tuple[str, str | None, FoundShards]])
"""(folder, tokenizer, what the first rank found there) for each source."""

NOT_READ = "the first process, which reads the shards for all processes, failed; see its error message"


def describe_shards(data: Data) -> str:
    """Describes a recipe's shards as JSON, for the other ranks."""
    pairs = dict.fromkeys((str(source.shards), source.tokenizer) for source in _sources(data))
    found = [(*pair, _found(*pair)) for pair in pairs]
    return DESCRIPTION.dump_json(found).decode()


def _sources(data: Data) -> list[Shards]:
    return [*(source for stage in data.mixtures for source in stage.train), *(data.validation or ())]


def _found(folder: str, tokenizer: str | None) -> FoundShards:
    try:
        manifest = read_manifest(folder, tokenizer)
    except InputError as error:
        return FoundShards(error.problems)
    # The other ranks need only the totals, passed as one shard per split.
    shards = [Shard("", split, *totals, "") for split in SPLITS if (totals := manifest.totals(split))[0]]
    brief = replace(manifest, folder=Path(folder), shards=tuple(shards), source_names=())
    damage = {split: shard_size_problems(manifest, manifest.of_split(split)) for split in SPLITS}
    return FoundShards([], brief, damage)


def rely_on_description(data: Data, description: str) -> None:
    """Stores the result of `describe_shards` in the recipe's sources, so that this rank doesn't open their folders."""
    entries = DESCRIPTION.validate_json(description)
    shards = {(folder, tokenizer): found for folder, tokenizer, found in entries}
    for source in _sources(data):
        source._found = shards[str(source.shards), source.tokenizer]


class Dispatcher:
    """Scatters data read by the first rank to all ranks.

    A background thread runs the collectives in the order of the `take` calls, so all ranks must make the same calls.

    Args:
        data_ranks: the data rank of each rank. Ranks with the same data rank get the same data.
        rank: this process's rank.
        group: process group of all ranks for CPU tensors, reserved for this class.
    """

    def __init__(self, data_ranks: Sequence[int], rank: int, group: dist.ProcessGroup):
        self.data_ranks = data_ranks
        self.rank = rank
        self.group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatch")

    def take(
        self,
        number: int,
        read: Callable[[int], np.ndarray],
        then: Callable[[np.ndarray], _Result] = lambda ids: ids,
    ) -> Future[_Result]:
        """Returns a future for the result of calling `then` with this rank's token IDs.

        If `read` fails, the first rank raises its error, and the others raise InputError, UnreachableError or
        RuntimeError.

        Args:
            number: batch number. All ranks must request the same batch.
            read: reads the token IDs for a data rank. Called only on the first rank.
        """
        return self._thread.submit(lambda: then(self._exchange(number, read)))

    def _exchange(self, number: int, read: Callable[[int], np.ndarray]) -> np.ndarray:
        sent = None
        problem = None
        if self.rank == 0:
            try:
                # Each data rank's data is read only once.
                ids = {part: read(part) for part in sorted(set(self.data_ranks))}
                sent = [(number, ids[part]) for part in self.data_ranks]
            except Exception as error:  # sent first, because the other ranks are waiting in the collective
                problem = error
                told = RuntimeError(NOT_READ)
                if isinstance(error, InputError):
                    told = InputError(NOT_READ)
                elif isinstance(error, UnreachableError):
                    told = UnreachableError(5, NOT_READ, "data.dispatch_batches")
                sent = [(number, told)] * len(self.data_ranks)
        received = [None]
        dist.scatter_object_list(received, sent, src=0, group=self.group)
        found, ids = received[0]
        if problem is not None or isinstance(ids, Exception):
            raise problem or ids
        if found != number:
            raise RuntimeError(f"the first process sent batch {found:,} instead of batch {number:,}")
        return ids
