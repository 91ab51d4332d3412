"""(step, micro-step, rank) to tokens, by arithmetic alone: resuming needs no state and no replay.

Sample n of a run, counted over all ranks, is a window of sequence_length + 1 tokens of one source. Which one depends
on (seed, n) alone, so the order of the data is the same on any number of ranks. A mixture interleaves its sources by a
fixed pattern of their weights; within a source, each window is visited once per epoch, in the order of a keyed
permutation.
"""

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.config import Data, Source
from pretrain.data.shards import ShardReader, open_shards
from pretrain.errors import InputError, Problems
from pretrain.optim.batch_ramp import BatchRamp

PATTERN_LENGTH = 10_000
"""Samples after which the interleaving of a mixture repeats: weights hold to four digits."""

LOCATED_SAMPLES = 256
"""Samples whose windows are computed at once."""

SkippedRange = tuple[int, int]
"""(first sample, number of samples) that training leaves out, in the run's own count of samples."""


class Permutation:
    """A pseudo-random bijection of range(size) without a table: every position costs the same.

    A Feistel network over the next power of four, walked until it lands inside the range (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). Eight rounds of a murmur-style mix.
    """

    ROUNDS = 8

    def __init__(self, size: int, key: int):
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(key.to_bytes(16, "little"), digest_size=8 * self.ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """positions: int64 array of values in range(size); returns their images, same shape."""
        image = self._encrypt(positions.astype(np.uint64))
        while (outside := image >= self.size).any():
            image[outside] = self._encrypt(image[outside])
        return image.astype(np.int64)

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


def key_of(*parts: object) -> int:
    """A 128-bit key from any printable parts, the same on every machine and version of Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Segment:
    """A stretch of samples drawn by one pattern: a stage, or what is left of it when a source is used up."""

    first_sample: int
    pattern: np.ndarray
    """(PATTERN_LENGTH,) source of each sample, repeating."""
    drawn: np.ndarray
    """(PATTERN_LENGTH + 1, sources) samples of each source before each place in the pattern."""
    drawn_before: np.ndarray
    """(sources,) samples of each source before this segment."""

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source of each sample, and how many samples of that source came before it."""
        rounds, place = np.divmod(samples - self.first_sample, len(self.pattern))
        source = self.pattern[place]
        draws = self.drawn_before[source] + rounds * self.drawn[-1, source] + self.drawn[place, source]
        return source, draws

    def drawn_until(self, sample: int) -> np.ndarray:
        """(sources,) samples of each source before `sample`."""
        rounds, place = divmod(sample - self.first_sample, len(self.pattern))
        return self.drawn_before + rounds * self.drawn[-1] + self.drawn[place]


class Batches:
    """Reads the micro-batches of a run.

    Args:
        data: the recipe's data section.
        seed: of the order of samples.
        ramp: sequences per step over the run.
        skipped: samples that training leaves out, ascending; those after them move up.

    Raises InputError as `open_training` does, and where the max_epochs of all sources are used up before the run ends.
    """

    def __init__(self, data: Data, *, seed: int, ramp: BatchRamp, skipped: Sequence[SkippedRange] = ()):
        self.data = data
        self.window = data.window
        self.random_windows = data.sampling == "random_windows"
        self.seed, self.ramp, self.skipped = seed, ramp, tuple(skipped)
        self.readers = open_training(data)
        self.folders = list(self.readers)
        self._windows_per_epoch = np.array([self.window.count_in(r.tokens) for r in self.readers.values()], np.int64)
        self.segments = self._plan(data)
        self._starts = [segment.first_sample for segment in self.segments]
        self._permutations: dict[tuple[int, int], Permutation] = {}
        self._first_located, self._windows_located = 0, []
        manifests = [reader.manifest for reader in self.readers.values()]
        self.dtype = np.dtype(manifests[0].dtype)
        self.vocabulary_size = manifests[0].vocabulary_size
        self.end_of_document_id = manifests[0].end_of_document_id

    def read(self, step: int, micro_step: int, rank: int, *, ranks: int, sequences: int) -> np.ndarray:
        """Token ids (sequences, sequence_length + 1) of one micro-batch, in the shards' own integer type."""
        first = self.ramp.sequences_before(step) + (micro_step * ranks + rank) * sequences
        out = np.empty((sequences, self.window.sequence_length + 1), self.dtype)
        for row, (source, start) in enumerate(self._located(first, sequences)):
            self.readers[self.folders[source]].read(start, out[row])
        if out.max() >= self.vocabulary_size:
            self._refuse(first, out)
        return out

    def _refuse(self, first_sample: int, ids: np.ndarray) -> None:
        """On a GPU an id beyond the embedding would fail in a device-side assert that names nothing."""
        row = int((ids >= self.vocabulary_size).any(axis=1).argmax())
        source, start = self.locate(first_sample + row, 1)[0]
        raise InputError(
            f"{self.folders[source]}: id {int(ids[row].max()):,} in the training tokens {start:,} to "
            f"{start + ids.shape[1]:,} is outside the vocabulary of {self.vocabulary_size:,}; the shards are damaged: "
            "restore them or prepare them again"
        )

    def _located(self, first_sample: int, count: int) -> list[tuple[int, int]]:
        """As `locate`, for many samples at once: that costs hardly more, and the following ones are needed next."""
        offset = first_sample - self._first_located
        if offset < 0 or offset + count > len(self._windows_located):
            self._first_located, offset = first_sample, 0
            self._windows_located = self.locate(first_sample, max(count, LOCATED_SAMPLES))
        return self._windows_located[offset : offset + count]

    def locate(self, first_sample: int, count: int) -> list[tuple[int, int]]:
        """(source number, first token) of `count` consecutive samples of the run."""
        samples = self._leave_out(np.arange(first_sample, first_sample + count, dtype=np.int64))
        source, draw = np.empty(count, np.int64), np.empty(count, np.int64)
        for number in range(self._segment_of(samples[0]), self._segment_of(samples[-1]) + 1):
            end = self._starts[number + 1] if number + 1 < len(self._starts) else np.iinfo(np.int64).max
            here = (samples >= self._starts[number]) & (samples < end)
            source[here], draw[here] = self.segments[number].locate(samples[here])
        return [(int(s), int(start)) for s, start in zip(source, self._first_tokens(source, draw), strict=True)]

    def epochs_at(self, step: int) -> dict[str, float]:
        """Epochs of each source completed before `step`."""
        (sample,) = self._leave_out(np.array([self.ramp.sequences_before(step)], np.int64)).tolist()
        drawn = self.segments[self._segment_of(sample)].drawn_until(sample)
        return {
            folder: float(n / w) for folder, n, w in zip(self.folders, drawn, self._windows_per_epoch, strict=True)
        }

    def samples_of(self, first_step: int, last_step: int) -> SkippedRange:
        """The samples of steps first_step to last_step (counted from 0), as a range to leave out."""
        first, end = self.ramp.sequences_before(first_step), self.ramp.sequences_before(last_step + 1)
        first, last = self._leave_out(np.array([first, end - 1], np.int64)).tolist()
        return first, last + 1 - first

    def leaving_out(self, ranges: Sequence[SkippedRange]) -> "Batches":
        """The same order of samples without these ranges, which may overlap and come in any order."""
        merged: list[SkippedRange] = []
        for first, count in sorted(ranges):
            if merged and first <= sum(merged[-1]):
                merged[-1] = merged[-1][0], max(sum(merged[-1]), first + count) - merged[-1][0]
            else:
                merged.append((first, count))
        return Batches(self.data, seed=self.seed, ramp=self.ramp, skipped=merged)

    def begins_segment(self, step: int) -> bool:
        """Whether the mixture changes within `step`, or at its beginning: a stage ends or a source is used up."""
        before, after = self.ramp.sequences_before(step), self.ramp.sequences_before(step + 1)
        first, last = self._leave_out(np.array([before - 1, after - 1], np.int64))
        return step > 0 and self._segment_of(first) != self._segment_of(last)

    def _segment_of(self, sample: int) -> int:
        return bisect.bisect_right(self._starts, sample) - 1

    def _leave_out(self, samples: np.ndarray) -> np.ndarray:
        for first, count in self.skipped:
            samples = np.where(samples >= first, samples + count, samples)
        return samples

    def _first_tokens(self, source: np.ndarray, draw: np.ndarray) -> np.ndarray:
        starts, length = np.empty_like(draw), self.window.sequence_length
        epoch, place = np.divmod(draw, self._windows_per_epoch[source])
        for number, turn in {*zip(source.tolist(), epoch.tolist(), strict=True)}:
            here = (source == number) & (epoch == turn)
            if self.random_windows:
                reader = self.readers[self.folders[number]]
                key = np.uint64(key_of(self.seed, number, "random") & (2**64 - 1))
                starts[here] = _mix(_mix(draw[here].astype(np.uint64)) ^ key) % (reader.tokens - length)
            else:
                starts[here] = self._permutation(number, turn)(place[here]) * length
        return starts

    def _permutation(self, source: int, epoch: int) -> Permutation:
        if (source, epoch) not in self._permutations:
            self._permutations = {key: value for key, value in self._permutations.items() if key[1] >= epoch - 1}
            windows, key = int(self._windows_per_epoch[source]), key_of(self.seed, source, epoch, "epoch")
            self._permutations[source, epoch] = Permutation(windows, key)
        return self._permutations[source, epoch]

    def _plan(self, data: Data) -> list[Segment]:
        skipped = sum(count for _, count in self.skipped)
        total = self.ramp.total_sequences + skipped
        segments: list[Segment] = []
        sample, drawn = 0, np.zeros(len(self.folders), np.int64)
        for stage in data.mixtures:
            # Without the skipped samples: skipping late in a run must not move the end of an earlier stage.
            end = total if stage.until in (None, 1.0) else round(stage.until * self.ramp.total_sequences)
            while sample < end:
                segment, length = self._segment(stage.train, sample, drawn)
                if segment is None:
                    raise InputError(self._exhausted(stage.train, sample - skipped, total - skipped))
                segments.append(segment)
                sample += min(length, end - sample)
                drawn = segment.drawn_until(sample)
        return segments

    def _segment(self, sources: list[Source], sample: int, drawn: np.ndarray) -> tuple[Segment | None, int]:
        """The segment that begins at `sample`, and the samples until its first source is used up."""
        weights, left = np.zeros(len(self.folders)), np.full(len(self.folders), np.iinfo(np.int64).max)
        for source in sources:
            number = self.folders.index(str(source.shards))
            if source.max_epochs is not None:
                left[number] = int(source.max_epochs * self._windows_per_epoch[number]) - drawn[number]
            weights[number] = source.weight if left[number] > 0 else 0.0
        if not weights.any():
            return None, 0
        pattern = interleave(weights)
        one_hot = pattern[:, None] == np.arange(len(weights))
        counts = np.vstack([np.zeros(len(weights), np.int64), np.cumsum(one_hot, axis=0)])
        length = np.iinfo(np.int64).max
        for number in np.flatnonzero(weights):
            if left[number] < np.iinfo(np.int64).max:
                rounds, rest = divmod(int(left[number]) - 1, int(counts[-1, number]))
                length = min(length, rounds * PATTERN_LENGTH + int(np.flatnonzero(one_hot[:, number])[rest]) + 1)
        return Segment(sample, pattern, counts, drawn.copy()), length

    def _exhausted(self, sources: list[Source], sample: int, total: int) -> str:
        tokens = self.window.sequence_length
        caps = ", ".join(f"{source.shards} after {source.max_epochs:g} epochs" for source in sources)
        return (
            f"data: the sources are used up ({caps}) at {sample * tokens:,} of {total * tokens:,} tokens; "
            "raise max_epochs, add a source, or lower the budget"
        )


def interleave(weights: np.ndarray) -> np.ndarray:
    """(PATTERN_LENGTH,) source numbers in proportion to the weights, each source spread evenly."""
    exact = weights / weights.sum() * PATTERN_LENGTH
    counts = np.floor(exact).astype(np.int64)
    counts[(weights > 0) & (counts == 0)] = 1
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
    """Opens the training split of every source of the run, once each.

    Raises InputError with every source that is missing, damaged or shorter than one sequence, and for sources of
    different tokenizers.
    """
    readers: dict[str, ShardReader] = {}
    problems = Problems()
    for folder, tokenizer in {str(s.shards): s.tokenizer for stage in data.mixtures for s in stage.train}.items():
        reader = problems.attempt(open_shards, folder, "train", tokenizer)
        if reader is None:
            continue
        readers[folder] = reader
        if not data.window.count_in(reader.tokens):
            problems.append(
                f"{folder}: {reader.tokens:,} training tokens are fewer than one sequence of "
                f"{data.sequence_length:,} + 1; prepare more text or lower data.sequence_length"
            )
    names = {reader.manifest.tokenizer_sha256: folder for folder, reader in readers.items()}
    if len(names) > 1:
        problems.append(
            f"data: the sources were prepared with different tokenizers: {', '.join(names.values())}; "
            "prepare them again with one tokenizer"
        )
    problems.stop_if_any()
    return readers
