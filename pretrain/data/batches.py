"""Computes which tokens each (step, micro-step, rank) reads, so that resuming needs neither saved state nor replay.

Samples are numbered across all ranks. Sample n is a window of sequence_length + 1 tokens from one source and depends
only on (seed, n), so the data order is the same for any number of ranks. Sources are interleaved in a fixed pattern
based on their weights. Each epoch visits every window of a source once, in the order of a keyed permutation.

In a stage with windows `span` times as long as data.sequence_length, each window counts as `span` samples, so the
number of samples per step doesn't change. Such a stage begins at a step boundary. Epochs are counted separately for
each window length.
"""

import bisect
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pretrain.config import Data, Source, WindowSpec
from pretrain.data.sampling import Stream, key_of
from pretrain.data.shards import ShardReader, open_source
from pretrain.errors import InputError, Problems
from pretrain.optim.batch_ramp import BatchRamp
from pretrain.registry import SAMPLERS

if TYPE_CHECKING:
    from pretrain.data.packing import Packing

PATTERN_LENGTH = 10_000
"""Length of the interleaving pattern in windows. Mixture weights are exact to four digits."""

LOCATED_SAMPLES = 256
"""Minimum number of windows to locate per call."""

_Samples = TypeVar("_Samples", int, np.ndarray)

SkippedRange = tuple[int, int]
"""(index of the first sample to skip, number of samples to skip)."""


Drawn = dict[int, np.ndarray]
"""{window length in tokens: (sources,) number of windows drawn from each source}."""


@dataclass(frozen=True)
class SourceRead:
    """A run's progress in one source."""

    shards: str
    """Folder of the prepared source."""
    sha256: str
    """First 16 hex digits of the manifest's hash."""
    number: int
    """Source ID, unique within the run. It determines the order of the source's windows."""
    windows: dict[int, int]
    """{window length in tokens: number of windows drawn}."""


@dataclass(frozen=True)
class DataPosition:
    """A run's position in its data, stored in checkpoints. If the data changes, the run continues from here."""

    step: int
    sample: int
    """Index of the run's next sample."""
    sources: tuple[SourceRead, ...]


@dataclass(frozen=True)
class Segment:
    """Samples drawn with the same pattern: a stage, or the rest of a stage after a source is used up."""

    first_sample: int
    length: int
    """Window length in tokens."""
    span: int
    """Number of samples per window: the window length divided by data.sequence_length."""
    pattern: np.ndarray
    """(PATTERN_LENGTH,) source index of each window. The pattern repeats."""
    counts: np.ndarray
    """(sources,) windows of each source in the pattern."""
    earlier: np.ndarray
    """(PATTERN_LENGTH,) for each window, the number of earlier windows in the pattern from the same source."""
    drawn_before: Drawn
    """Number of windows drawn before this segment."""

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns each sample's source index, and how many windows of this length were drawn from it earlier."""
        rounds, place = np.divmod((samples - self.first_sample) // self.span, len(self.pattern))
        source = self.pattern[place]
        draws = self.drawn_before[self.length][source] + rounds * self.counts[source] + self.earlier[place]
        return source, draws

    def drawn_until(self, sample: int) -> Drawn:
        """Counts the windows drawn before `sample`."""
        rounds, place = divmod(-((self.first_sample - sample) // self.span), len(self.pattern))
        before = self.drawn_before[self.length]
        begun = np.bincount(self.pattern[:place], minlength=len(self.counts))
        return self.drawn_before | {self.length: before + rounds * self.counts + begun}


class Batches:
    """Reads a run's micro-batches.

    Args:
        data: the recipe's data section.
        seed: seed for the data order.
        ramp: number of sequences per step.
        skipped: ranges of samples to skip. They may overlap and be in any order.
        passed: first samples of the stages that have already begun, except the first stage. They stay fixed if the
            run is extended.
        origin: the run's position when it switched to this data; None for its original data. Earlier steps can't be
            read.

    Raises the InputErrors of `open_training`. Also raises InputError if all sources reach their max_epochs before the
    run ends, or if a stage that changes the window length or the RoPE parameters contains no step.
    """

    def __init__(
        self,
        data: Data,
        *,
        seed: int,
        ramp: BatchRamp,
        skipped: Sequence[SkippedRange] = (),
        passed: Sequence[int] = (),
        origin: DataPosition | None = None,
    ):
        self.data = data
        self.origin = origin
        self.window = data.window
        self._sampler = SAMPLERS[data.sampling]
        self.seed = seed
        self.ramp = ramp
        self.skipped = tuple(_merged(skipped))
        self.passed = tuple(passed)
        self.readers = open_training(data)
        # In order of first appearance in the stages.
        self.folders = list(self.readers)
        self._reads = self._continued(origin.sources if origin else ())
        """Progress in each source before this data, with an empty entry for a new source."""
        self._lengths = [window.sequence_length for window in data.windows]
        """Window length of each stage, in tokens."""
        read_at = [length for read in self._reads for length in read.windows]
        self._windows_per_epoch = {
            length: self._whole_windows(length)
            for length in dict.fromkeys([self.window.sequence_length, *self._lengths, *read_at])
        }
        """{window length: (sources,) number of windows per epoch}, including lengths used only earlier in the run."""
        self.stage_starts = self._stage_starts()
        """First sample of each stage."""
        self.first_steps = [self._first_step_from(sample) for sample in self.stage_starts]
        """First step that begins in each stage."""
        self.segments = self._plan()
        self._starts = [segment.first_sample for segment in self.segments]
        self._windows: dict[int, tuple[int, int]] = {}
        """{sample: result of `locate`} for samples that will be read soon."""
        self._is_remote = any(reader.manifest.url is not None for reader in self.readers.values())
        self._expected: dict[tuple[int, int, int], tuple[deque[int], Iterator[int]]] = {}
        """{(rank, ranks, sequences): first samples of the micro-batches being prefetched, and of those after them}."""
        self.manifest = next(iter(self.readers.values())).manifest
        """The first source's manifest. All sources have the same tokenizer."""
        self.dtype = np.result_type(*(reader.manifest.dtype for reader in self.readers.values()))
        self.vocabulary_size = self.manifest.vocabulary_size
        self.end_of_document_id = self.manifest.end_of_document_id
        self._transform = None
        if data.transformations:
            from pretrain.data.transformations import Transformations

            self._transform = Transformations(data, self.manifest, seed)
        self.packings = self._packed() if data.sampling == "best_fit" else {}
        """{(source index, window length): packed windows}; empty for samplers other than best_fit."""

    def _packed(self) -> "dict[tuple[int, int], Packing]":
        from pretrain.data.packing import Packing

        return {
            (number, length): Packing(reader, length, int(windows[number]))
            for length, windows in self._windows_per_epoch.items()
            for number, reader in enumerate(self.readers.values())
        }

    def _whole_windows(self, length: int) -> np.ndarray:
        """Returns (sources,) number of whole windows. Each is at least 1, because a stage may not use the source."""
        window = replace(self.window, sequence_length=length)
        return np.array([max(1, window.count_in(reader.tokens)) for reader in self.readers.values()], np.int64)

    def _continued(self, reads: Sequence[SourceRead]) -> list[SourceRead]:
        """Returns the progress in each source. New sources get unused IDs."""
        left = list(reads)
        free = itertools.count(1 + max((read.number for read in reads), default=-1))
        found = []
        for folder, reader in self.readers.items():
            same = [read for read in left if reader.manifest.sha256.startswith(read.sha256)]
            # Prefer the same folder, because two folders may have the same content. A source may also have moved.
            same.sort(key=lambda read, folder=folder: read.shards != folder)
            if same:
                left.remove(same[0])
                found.append(replace(same[0], shards=folder))
            else:
                found.append(SourceRead(folder, reader.manifest.sha256[:16], next(free), {}))
        return found

    def position(self, step: int) -> DataPosition:
        """Returns the run's position before `step`."""
        sample = self.first_sample(step)
        drawn = self._drawn_before(sample)
        sources = []
        for place, read in enumerate(self._reads):
            windows = {length: int(counts[place]) for length, counts in drawn.items() if counts[place]}
            sources.append(replace(read, windows=windows))
        # Keep unused sources, because the run may use them again.
        numbers = {source.number for source in sources}
        gone = [entry for entry in (self.origin.sources if self.origin else ()) if entry.number not in numbers]
        return DataPosition(step, sample, (*sources, *gone))

    def read(self, step: int, micro_step: int, rank: int, *, ranks: int, sequences: int) -> np.ndarray:
        """Reads a micro-batch's token IDs, (sequences, sequence_length + 1), in the shards' integer type."""
        length = self._lengths[self.stage_at(step)]
        # Counted across all ranks, so that the data order doesn't depend on the number of ranks.
        first = self.ramp.sequences_before(step) + (micro_step * ranks + rank) * sequences * self._span(length)
        if self._is_remote:
            self._expect(first, length, step, micro_step, (rank, ranks, sequences))
        out = np.empty((sequences, length + 1), self.dtype)
        for row, (source, start) in enumerate(self._located(first, sequences)):
            if self.packings:
                self.packings[source, length].read(start // length, out[row])
            else:
                self.readers[self.folders[source]].read(start, out[row])
            if self._transform is not None:
                out[row] = self._transform(out[row], self._unskipped(first + row * self._span(length)))
        # Checked on the CPU, because on a GPU the error would surface far from its cause.
        if out.max() >= self.vocabulary_size:
            self._refuse(first, out)
        return out

    def _expect(self, first: int, length: int, step: int, micro_step: int, who: tuple[int, int, int]) -> None:
        """Starts prefetching windows for `who` (rank, ranks, sequences), from the micro-batch that begins at `first`.

        Assumes that micro-batches are read in training order.
        """
        from pretrain.data.object_store import BLOCK_BYTES, BLOCKS_AHEAD, block_reader

        begun, following = self._expected.get(who, (deque(), iter(())))
        if not begun or begun[0] != first:
            begun, following = self._expected[who] = deque(), self._first_samples(length, step, micro_step, who)
        rows = who[2]
        blocks = rows * (1 + -(-length * self.dtype.itemsize // BLOCK_BYTES))
        ahead = max(1, BLOCKS_AHEAD // (blocks * len(self._expected)))
        block_reader(self.data.cache).keep(2 * (ahead + 1) * blocks * len(self._expected))
        if self.packings:
            pools = len(self.folders) * max(packing.pool_bytes for packing in self.packings.values())
            block_reader(self.data.cache).keep(-(-pools // BLOCK_BYTES))
        while len(begun) <= ahead and (sample := next(following, None)) is not None:
            for source, start in self.locate(sample, rows):
                if self.packings:
                    self.packings[source, length].expect(start // length)
                else:
                    self.readers[self.folders[source]].expect(start, length + 1)
            begun.append(sample)
        begun.popleft()

    def _first_samples(self, length: int, step: int, micro_step: int, who: tuple[int, int, int]) -> Iterator[int]:
        """Yields the first sample of each micro-batch, from this one to the last with this window length."""
        rank, ranks, sequences = who
        samples = sequences * self._span(length)
        while step < self.ramp.total_steps and self._lengths[self.stage_at(step)] == length:
            for number in range(micro_step, self.ramp.sequences_at(step) // (ranks * samples)):
                yield self.ramp.sequences_before(step) + (number * ranks + rank) * samples
            step += 1
            micro_step = 0

    def _refuse(self, first_sample: int, ids: np.ndarray) -> None:
        """Raises InputError with the bad ID and its position."""
        row = int((ids >= self.vocabulary_size).any(axis=1).argmax())
        source, start = self.locate(first_sample, row + 1)[row]
        pieces = self.pieces(source, start, ids.shape[1] - 1)
        places = ", ".join(f"{first:,} to {first + count:,}" for first, count in pieces)
        raise InputError(
            f"{self.folders[source]}: training tokens {places} contain ID {int(ids[row].max()):,}, but the vocabulary "
            f"size is {self.vocabulary_size:,}; the shards are damaged, so restore them or prepare them again"
        )

    def _located(self, first_sample: int, count: int) -> list[tuple[int, int]]:
        """Calls `locate` for many windows at once and caches the results for later steps."""
        span = self.span_at(first_sample)
        samples = range(first_sample, first_sample + count * span, span)
        if not self._windows.keys() >= set(samples):
            ahead = max(count, LOCATED_SAMPLES)
            soon = range(first_sample, first_sample + ahead * span, span)
            self._windows = dict(zip(soon, self.locate(first_sample, ahead), strict=True))
        return [self._windows[sample] for sample in samples]

    def locate(self, first_sample: int, count: int) -> list[tuple[int, int]]:
        """Returns (source index, first token) of `count` consecutive windows, all as long as the first.

        With best-fit packing, `first token` is the window's index times its length. Use `pieces` to resolve it.
        """
        span = self.span_at(first_sample)
        samples = self._unskipped(first_sample + span * np.arange(count, dtype=np.int64))
        source = np.empty(count, np.int64)
        start = np.empty(count, np.int64)
        numbers = np.searchsorted(self._starts, samples, side="right") - 1
        for number in range(numbers[0], numbers[-1] + 1):
            here = numbers == number
            segment = self.segments[number]
            source[here], draw = segment.locate(samples[here])
            start[here] = self._first_tokens(source[here], draw, segment)
        return list(zip(source.tolist(), start.tolist(), strict=True))

    def pieces(self, source: int, start: int, length: int) -> list[tuple[int, int]]:
        """Returns (first token, number of tokens) for each contiguous piece of a located window."""
        if not self.packings:
            return [(start, length + 1)]
        return self.packings[source, length].pieces(start // length)

    def span_at(self, sample: int) -> int:
        """Returns the span of the window at `sample`, in samples."""
        return self.segments[self._segment_of(self._unskipped(sample))].span

    def _span(self, length: int) -> int:
        return length // self.window.sequence_length

    def first_sample(self, step: int) -> int:
        """Returns the index of the first sample of `step`, counting skipped samples."""
        return self._unskipped(self.ramp.sequences_before(step))

    def stage_at(self, step: int) -> int:
        """Returns the index of the stage in which `step` begins."""
        return bisect.bisect_right(self.first_steps, step) - 1

    def epochs_at(self, step: int) -> dict[str, float]:
        """Returns {source folder: epochs completed before `step`}, summed over all window lengths."""
        drawn = self._drawn_before(self.first_sample(step))
        return dict(zip(self.folders, self._epochs(drawn).tolist(), strict=True))

    def _drawn_before(self, sample: int) -> Drawn:
        return self.segments[self._segment_of(sample)].drawn_until(sample)

    def _epochs(self, drawn: Drawn, without: int | None = None) -> np.ndarray:
        """Returns (sources,) epochs, summed over all window lengths except `without`."""
        # Lengths no longer used are summed separately. A different summation order would change the last bit, and
        # therefore logged values and the point at which a source reaches max_epochs.
        current = {self.window.sequence_length, *self._lengths}
        here = np.zeros(len(self.folders))
        elsewhere = np.zeros(len(self.folders))
        for length, windows in drawn.items():
            if length != without:
                total = here if length in current else elsewhere
                total += windows / self._windows_per_epoch[length]
        return here + elsewhere

    def samples_of(self, first_step: int, last_step: int) -> SkippedRange:
        """Returns the samples of steps first_step to last_step (0-based, inclusive) as a range to skip."""
        first = self.first_sample(first_step)
        last = self._unskipped(self.ramp.sequences_before(last_step + 1) - 1)
        return first, last + 1 - first

    def passing(self, stage_starts: Sequence[int], sample: int) -> "Batches":
        """Returns batches for continuing from `sample`. Stages that began earlier keep their first sample."""
        passed = [start for start in stage_starts[1:] if start < sample]
        # If the recipe moves a boundary to before `sample`, the boundary becomes `sample`.
        passed += [sample for start in self.stage_starts[1 + len(passed) :] if start < sample]
        return self.changed(passed=passed)

    def changed(self, **changes: Any) -> "Batches":
        """Returns batches for the same data with some arguments changed, such as the ranges to skip."""
        kept = {name: getattr(self, name) for name in ("seed", "ramp", "skipped", "passed", "origin")}
        return Batches(self.data, **kept | changes)

    def begins_segment(self, step: int) -> bool:
        """Returns True if the mixture changes at or during `step`, because a stage ends or a source is used up."""
        ends = (self._unskipped(self.ramp.sequences_before(number) - 1) for number in (step, step + 1))
        return step > 0 and len(set(map(self._segment_of, ends))) > 1

    def _segment_of(self, sample: int) -> int:
        return bisect.bisect_right(self._starts, sample) - 1

    def _unskipped(self, sample: _Samples) -> _Samples:
        return moved_past(self.skipped, sample)

    def _first_step_from(self, sample: int) -> int:
        """Returns the first step whose samples are all at or after `sample`; total_steps if there is none."""
        return bisect.bisect_left(range(self.ramp.total_steps), sample, key=self.first_sample)

    def _stage_starts(self) -> list[int]:
        starts = [0]
        for number, (stage, following) in enumerate(itertools.pairwise(self.data.mixtures), start=1):
            # Without skipped samples, so that skipping late in a run doesn't move the end of an earlier stage.
            start = round(stage.until * self.ramp.total_sequences)
            if number <= len(self.passed):
                start = self.passed[number - 1]
            # Window length and RoPE parameters can't change within a step.
            if self._lengths[number] != self._lengths[number - 1] or following.rope_parameters:
                step = self._first_step_from(start)
                if step == self.ramp.total_steps:
                    raise InputError(
                        f"data.stages[{number}]: begins after {start:,} of {self.ramp.total_sequences:,} samples, but "
                        f"none of the run's {step:,} steps begins after that; lower stages[{number - 1}].until, or "
                        "raise the budget"
                    )
                start = self.first_sample(step)
            if not (self.passed or self.skipped or starts[-1] < start < self.ramp.total_sequences):
                raise InputError(
                    f"data.stages[{number}]: begins at sample {start:,} of {self.ramp.total_sequences:,}, and the "
                    f"stage before it at {starts[-1]:,}, so one of them has no samples; change "
                    f"stages[{number - 1}].until, or raise the budget"
                )
            starts.append(max(start, starts[-1]))
        return starts

    def _first_tokens(self, source: np.ndarray, draw: np.ndarray, segment: Segment) -> np.ndarray:
        starts = np.empty_like(draw)
        for number in set(source.tolist()):
            here = source == number
            stream = Stream(
                tokens=self.readers[self.folders[number]].tokens,
                length=segment.length,
                windows=int(self._windows_per_epoch[segment.length][number]),
                key=partial(self._key, segment, number),
            )
            found = np.asarray(self._sampler(draw[here], stream))
            most = stream.tokens - stream.length - 1
            fits = found.shape == draw[here].shape and found.dtype.kind in "iu"
            if not fits or found.min() < 0 or found.max() > most:
                raise InputError(
                    f"data.sampling: {self.data.sampling} returned an array of type {found.dtype} and shape "
                    f"{found.shape} for {here.sum():,} windows; it must return one integer per window, from 0 to "
                    f"{most:,} (stream.tokens - stream.length - 1)"
                )
            starts[here] = found
        return starts

    def _key(self, segment: Segment, source: int, purpose: str, *epoch: int) -> int:
        # Never change a key: it determines the data order of every resumed run. Keys for windows of
        # data.sequence_length have no span, for compatibility with runs without stages.
        span = (segment.span,) if segment.span > 1 else ()
        return key_of(self.seed, self._reads[source].number, *epoch, *span, purpose)

    def _plan(self) -> list[Segment]:
        skipped = sum(count for _, count in self.skipped)
        segments: list[Segment] = []
        sample = self.origin.sample if self.origin else 0
        drawn = {
            length: np.array([read.windows.get(length, 0) for read in self._reads], np.int64)
            for length in self._windows_per_epoch
        }
        ends = [*self.stage_starts[1:], self.ramp.total_sequences + skipped]
        for number, (stage, end) in enumerate(zip(self.data.mixtures, ends, strict=True), start=1):
            # A run that ends at the step where its data changes also needs a segment.
            while sample < end or (number == len(ends) and not segments):
                found = self._segment(stage.train, self._lengths[number - 1], sample, drawn)
                if found is None:
                    tokens = self.window.sequence_length
                    caps = ", ".join(f"{source.shards} after {source.max_epochs:g} epochs" for source in stage.train)
                    raise InputError(
                        f"data: the sources are used up ({caps}) after {(sample - skipped) * tokens:,} of "
                        f"{self.ramp.total_sequences * tokens:,} tokens; raise max_epochs, add a source, or lower the "
                        "budget"
                    )
                segment, windows = found
                segments.append(segment)
                sample += min(windows * segment.span, end - sample)
                drawn = segment.drawn_until(sample)
        return segments

    def _segment(self, sources: list[Source], length: int, sample: int, drawn: Drawn) -> tuple[Segment, float] | None:
        """Returns the segment that begins at `sample`, and the number of windows until one of its sources is used up.

        Returns None if all sources are used up.
        """
        weights = np.zeros(len(self.folders))
        left = np.full(len(self.folders), np.inf)
        for source in sources:
            number = self.folders.index(str(source.shards))
            if source.max_epochs is not None:
                epochs = source.max_epochs - self._epochs(drawn, without=length)[number]
                left[number] = np.floor(epochs * self._windows_per_epoch[length][number]) - drawn[length][number]
            weights[number] = source.weight if left[number] > 0 else 0.0
        if not weights.any():
            return None
        pattern = interleave(weights)
        counts = np.bincount(pattern, minlength=len(weights))
        # Not one count per position and source: with 200 sources, each segment would take 16 MB.
        earlier = np.empty_like(pattern)
        earlier[np.argsort(pattern, kind="stable")] = np.concatenate([np.arange(count) for count in counts])
        windows = np.inf
        for number in np.flatnonzero(weights):
            if left[number] < np.inf:
                rounds, rest = divmod(int(left[number]) - 1, int(counts[number]))
                windows = min(windows, rounds * PATTERN_LENGTH + int(np.flatnonzero(pattern == number)[rest]) + 1)
        return Segment(sample, length, self._span(length), pattern, counts, earlier, drawn), windows


def moved_past(ranges: Iterable[SkippedRange], sample: _Samples) -> _Samples:
    """Returns the sample (or array of samples) that a run reads instead of `sample` when it skips these ranges."""
    # Ascending, because each range applies to indices already shifted by earlier ranges.
    for first, count in _merged(ranges):
        sample = sample + count * (sample >= first)
    return sample


def _merged(ranges: Iterable[SkippedRange]) -> list[SkippedRange]:
    """Sorts ranges and merges those that overlap or touch."""
    merged: list[SkippedRange] = []
    for first, count in sorted(ranges):
        if merged and first <= sum(merged[-1]):
            merged[-1] = merged[-1][0], max(sum(merged[-1]), first + count) - merged[-1][0]
        else:
            merged.append((first, count))
    return merged


def interleave(weights: np.ndarray) -> np.ndarray:
    """Returns (PATTERN_LENGTH,) source indices in proportion to the weights, with each source evenly spread."""
    exact = weights / weights.sum() * PATTERN_LENGTH
    counts = np.floor(exact).astype(np.int64)
    # Sources with a tiny weight get at least one window.
    counts[(weights > 0) & (counts == 0)] = 1
    # Stable, so that ties break the same way on every machine.
    remainders = np.argsort(-(exact - counts), kind="stable")
    for index in range(abs(missing := PATTERN_LENGTH - int(counts.sum()))):
        if missing > 0:
            counts[remainders[index % len(remainders)]] += 1
        else:
            counts[np.argmax(counts)] -= 1
    places = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
    numbers = np.repeat(np.arange(len(weights)), counts)
    return numbers[np.lexsort((numbers, places))]


def open_training(data: Data) -> dict[str, ShardReader]:
    """Opens the training split of each of the run's sources.

    Raises InputError listing all sources that are missing, damaged, shorter than one sequence or listed twice, or if
    the sources' tokenizers or end-of-document IDs differ.
    """
    readers: dict[str, ShardReader] = {}
    problems = Problems()
    for stage in data.mixtures:
        counts = Counter(str(source.shards) for source in stage.train)
        problems += [
            f"{folder}: is {count} times in the same mixture; list it once, with the sum of the weights"
            for folder, count in counts.items()
            if count > 1
        ]
    for folder, source in {str(source.shards): source for stage in data.mixtures for source in stage.train}.items():
        reader = problems.attempt(open_source, source, "train", data.cache)
        if reader is None:
            continue
        readers[folder] = reader
        # A source in several stages must be long enough for their longest windows.
        longest = max(
            window.sequence_length
            for stage, window in zip(data.mixtures, data.windows, strict=True)
            if folder in {str(source.shards) for source in stage.train}
        )
        if reader.tokens <= longest:
            where = "data.sequence_length" if longest == data.sequence_length else "its stage's sequence_length"
            problems.append(
                f"{folder}: contains {reader.tokens:,} training tokens, but one sequence needs {longest:,} + 1; "
                f"prepare more text or lower {where}"
            )
    names = {reader.manifest.tokenizer_sha256: folder for folder, reader in readers.items()}
    if len(names) > 1:
        problems.append(
            f"data: the sources were prepared with different tokenizers: {', '.join(names.values())}; "
            "prepare them again with the same tokenizer"
        )
    ends = {reader.manifest.end_of_document_id: folder for folder, reader in readers.items()}
    if len(names) == 1 and len(ends) > 1:
        of_each = ", ".join(f"{folder} with ID {end:,}" for end, folder in ends.items())
        problems.append(
            f"data: the sources end their documents with different tokens: {of_each}; prepare them again with the "
            "same --end_of_document"
        )
    problems.stop_if_any()
    return readers


def windows_of(reader: ShardReader, window: WindowSpec, sequences: int) -> np.ndarray:
    """Returns the first token of each of up to `sequences` windows, spread evenly across the split."""
    windows = window.count_in(reader.tokens)
    count = min(sequences, windows)
    return np.arange(count) * windows // count * window.sequence_length


def expect_windows(reader: ShardReader, starts: np.ndarray, window: WindowSpec) -> None:
    """Starts prefetching windows if they are in an object store."""
    for start in starts.tolist():
        reader.expect(start, window.sequence_length + 1)


def read_windows(reader: ShardReader, starts: np.ndarray, window: WindowSpec, rows: int) -> np.ndarray:
    """Reads the windows' token IDs, (rows, sequence_length + 1). Pads to `rows` rows with the split's first window.

    Padding with zeros could trigger a recompilation, because 0 may be the end-of-document ID. Raises InputError for
    IDs outside the vocabulary, because a GPU would report only a device-side assert.
    """
    ids = np.empty((rows, window.sequence_length + 1), dtype=np.int64)
    expect_windows(reader, starts, window)
    for row in range(rows):
        start = int(starts[row]) if row < len(starts) else 0
        reader.read(start, ids[row])
        if (largest := int(ids[row].max())) >= reader.manifest.vocabulary_size:
            raise InputError(
                f"{reader.manifest.place}: split {reader.split} contains token ID {largest:,} (between tokens "
                f"{start:,} and {start + len(ids[row]):,}), but IDs must be from 0 to "
                f"{reader.manifest.vocabulary_size - 1:,}. The shards are damaged; restore them or prepare them again"
            )
    return ids
