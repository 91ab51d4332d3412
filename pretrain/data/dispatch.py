"""Dispatches batches from shards that only the first rank can read. It reads and sends every rank's windows."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from pretrain.config import Data, Shards
from pretrain.data.manifest import SPLITS, Manifest, Shard
from pretrain.data.shards import FoundShards, read_manifest, shard_size_problems
from pretrain.errors import InputError, UnreachableError

_Result = TypeVar("_Result")

NOT_READ = "the first process, which reads the shards for all, failed: see its message"


def describe_shards(data: Data) -> str:
    """Describes a recipe's shards for all ranks, as JSON."""
    pairs = dict.fromkeys((str(source.shards), source.tokenizer) for source in _sources(data))
    return json.dumps([(*pair, _found(*pair)) for pair in pairs], default=str)


def _sources(data: Data) -> list[Shards]:
    return [*(source for stage in data.mixtures for source in stage.train), *(data.validation or ())]


def _found(folder: str, tokenizer: str | None) -> dict:
    try:
        manifest = read_manifest(folder, tokenizer)
    except InputError as error:
        return {"problems": error.problems}
    # Ranks that read no shards only need the totals, as one shard per split.
    shards = [Shard("", split, *totals, "") for split in SPLITS if (totals := manifest.totals(split))[0]]
    brief = replace(manifest, shards=tuple(shards), source_names=())
    damage = {split: shard_size_problems(manifest, manifest.of_split(split)) for split in SPLITS}
    return {"problems": [], "manifest": asdict(brief), "damage": damage}


def rely_on_description(data: Data, description: str) -> None:
    """Adds the result of `describe_shards` to the recipe's sources, so that this rank doesn't open their folders."""
    shards = {}
    for folder, tokenizer, found in json.loads(description):
        if fields := found.pop("manifest", None):
            fields["folder"] = Path(folder)
            fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
            fields["tokenizer_path"] = fields["tokenizer_path"] and Path(fields["tokenizer_path"])
            found["manifest"] = Manifest(**fields)
        shards[folder, tokenizer] = FoundShards(**found)
    for source in _sources(data):
        source._found = shards[str(source.shards), source.tokenizer]


class Dispatcher:
    """Sends the first rank's data to all ranks.

    One thread takes part in every exchange, in the order of the `take` calls, which must be the same on all ranks.

    Args:
        data_ranks: for each rank, the part of the batch that it gets.
        rank: this process's rank.
        group: a group of all processes for tensors in CPU memory, used by nothing else.
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
        """Returns a future of `then` applied to this rank's token IDs.

        If `read` fails, the first rank raises its error. The others raise InputError or UnreachableError if it was one
        of these, otherwise RuntimeError.

        Args:
            number: number of this batch. All ranks must request the same one.
            read: reads the token IDs of a data rank. Called only on the first rank, for all ranks.
        """
        return self._thread.submit(lambda: then(self._exchange(number, read)))

    def _exchange(self, number: int, read: Callable[[int], np.ndarray]) -> np.ndarray:
        sent = None
        problem = None
        if self.rank == 0:
            try:
                # Ranks that share one model get the same part, which is read only once.
                ids = {part: read(part) for part in sorted(set(self.data_ranks))}
                sent = [(number, ids[part]) for part in self.data_ranks]
            except Exception as error:  # sent before it is raised, because the other ranks wait in the same collective
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
