"""Dispatch of batches from shards that only the first rank can read: it reads for all and sends each its windows."""

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pretrain.config import Data
from pretrain.data.manifest import SPLITS, Manifest, Shard
from pretrain.data.shards import FoundShards, read_manifest, shard_size_problems
from pretrain.errors import InputError

_Result = TypeVar("_Result")

HEADER_BYTES = 16
"""Bytes of the header of each message: the outcome of reading and the batch's number, as int64."""
READ, INPUT_REFUSED, READ_FAILED = range(3)


def describe_shards(data: Data) -> str:
    """Describes, as JSON, what every rank must know about a recipe's shards before it trains."""
    sources = [*(source for stage in data.mixtures for source in stage.train), *(data.validation or ())]
    pairs = dict.fromkeys((str(source.shards), source.tokenizer) for source in sources)
    return json.dumps([(*pair, _found(*pair)) for pair in pairs], default=str)


def _found(folder: str, tokenizer: str | None) -> dict:
    try:
        manifest = read_manifest(folder, tokenizer)
    except InputError as error:
        return {"problems": error.problems}
    # One shard per split with the totals: ranks that read no shards need no more.
    shards = [Shard("", split, *totals, "") for split in SPLITS if (totals := manifest.totals(split))[0]]
    brief = replace(manifest, shards=tuple(shards), source_names=())
    damage = {split: shard_size_problems(manifest, manifest.of_split(split)) for split in SPLITS}
    return {"problems": [], "manifest": asdict(brief), "damage": damage}


def found_shards(description: str) -> dict[tuple[str, str | None], FoundShards]:
    """Parses the JSON of `describe_shards`, for `rely_on_first`."""
    shards = {}
    for folder, tokenizer, found in json.loads(description):
        if fields := found.pop("manifest", None):
            fields["folder"] = Path(folder)
            fields["shards"] = tuple(Shard(**shard) for shard in fields["shards"])
            fields["tokenizer_path"] = fields["tokenizer_path"] and Path(fields["tokenizer_path"])
            found["manifest"] = Manifest(**fields)
        shards[folder, tokenizer] = FoundShards(**found)
    return shards


class Dispatcher:
    """Sender of what the first rank reads. One thread takes part in every exchange, in the order of the calls of
    `take`, which must be the same on all ranks.

    Args:
        data_ranks: the part of a batch that each process takes, by rank.
        rank: this process's rank.
        group: all processes, over the network from CPU memory; it must have no other users.
    """

    def __init__(self, data_ranks: Sequence[int], rank: int, group: dist.ProcessGroup):
        self.data_ranks = data_ranks
        self.rank = rank
        self.group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatch")

    def take(
        self,
        number: int,
        shape: tuple[int, ...],
        dtype: np.dtype | type,
        read: Callable[[int], np.ndarray],
        then: Callable[[np.ndarray], _Result] = lambda ids: ids,
    ) -> Future[_Result]:
        """Returns a future of `then` applied to the token IDs that this rank takes.

        Args:
            number: number of this batch; all ranks must ask for the same one.
            shape, dtype: shape and dtype of the token IDs.
            read: reads the token IDs of a data rank; called only on the first rank, for all ranks.

        An error of `read` is raised on the first rank; the others raise an InputError if it was one, else a
        RuntimeError.
        """
        return self._thread.submit(lambda: then(self._exchange(number, shape, np.dtype(dtype), read)))

    def _exchange(
        self, number: int, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[int], np.ndarray]
    ) -> np.ndarray:
        # The outcome travels with the token IDs: a failed read needs no collective of its own.
        mine = np.zeros(HEADER_BYTES + math.prod(shape) * dtype.itemsize, np.uint8)
        parts = None
        problem = None
        if self.rank == 0:
            try:
                # Ranks that share one model take the same part, which is read once.
                packed = {part: _packed(number, read(part), mine.size) for part in sorted(set(self.data_ranks))}
            except Exception as error:  # sent before it is raised: the other ranks wait in the same collective
                problem = error
                failed = torch.from_numpy(mine.copy())
                failed[:HEADER_BYTES].view(torch.int64)[0] = (
                    INPUT_REFUSED if isinstance(error, InputError) else READ_FAILED
                )
                packed = dict.fromkeys(self.data_ranks, failed)
            parts = [packed[part] for part in self.data_ranks]
        dist.scatter(torch.from_numpy(mine), parts, src=0, group=self.group)
        if problem is not None:
            raise problem
        outcome, found = mine[:HEADER_BYTES].view(np.int64).tolist()
        if outcome != READ:
            error = InputError if outcome == INPUT_REFUSED else RuntimeError
            raise error("the first process, which reads the shards for all, could not: its own message says why")
        if found != number:
            raise RuntimeError(f"the first process has sent ids {found:,} where {number:,} were due")
        return mine[HEADER_BYTES:].view(dtype).reshape(shape)


def _packed(number: int, ids: np.ndarray, size: int) -> torch.Tensor:
    packed = np.empty(size, np.uint8)
    packed[:HEADER_BYTES].view(np.int64)[:] = READ, number
    packed[HEADER_BYTES:] = np.ascontiguousarray(ids).reshape(-1).view(np.uint8)
    return torch.from_numpy(packed)
