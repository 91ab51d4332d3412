"""Shingles, compiled: the least hash of each bin over all of a document, and how many two documents share."""

import numpy as np
from numba import uint32, uintp

from pretrain_tools.preparation.cleaning.compiled.text_blocks import compiled

_PLACES_AT_ONCE = 2048
"""So that their hashes stay in the core's cache."""
_WORD_FACTOR, _SHINGLE_FACTOR = np.uint32(0x85EBCA6B), np.uint32(0x9E3779B1)
_IN_ONE, _IN_OTHER = np.uint8(1), np.uint8(2)
"""Where a shingle has been seen; in both counts as in the other, once it has been counted."""
_FINAL_FACTORS = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


@compiled
def _write_hashes(words, first, count, shingle_words, mixed, hashes):
    """The hashes of `count` shingles from place `first` on, as near_duplicates.shingle_hashes makes them."""
    # Unsigned places and loops without a condition, so that they are the processor's vectors'.
    for place in range(uintp(count + shingle_words - 1)):
        value = uint32(uint32(words[uintp(first) + place]) * _WORD_FACTOR)
        mixed[place] = value ^ value >> uint32(15)
    for place in range(uintp(count)):
        hashes[place] = mixed[place]
    for word in range(uintp(1), uintp(shingle_words)):
        for place in range(uintp(count)):
            hashes[place] = uint32(hashes[place] * _SHINGLE_FACTOR) + mixed[place + word]
    for place in range(uintp(count)):
        value = hashes[place]
        value = uint32((value ^ value >> uint32(16)) * _FINAL_FACTORS[0])
        value = uint32((value ^ value >> uint32(15)) * _FINAL_FACTORS[1])
        hashes[place] = value ^ value >> uint32(16)


@compiled
def write_smallest(words, ends, shingle_words, bits, scratch, smallest):
    """Lowers `smallest`, (documents, 2^bits) uint32, to the hashes of each document's shingles.

    A hash's lowest bits are its bin, the others its value. words: documents end to end.
    scratch: (2, at least 2048 + shingle_words) uint32.
    """
    mask, shift = uint32((1 << bits) - 1), uint32(bits)
    start = np.int64(0)
    for document in range(len(ends)):
        stop = ends[document] - shingle_words + 1
        row = smallest[document]
        while start < stop:
            count = min(_PLACES_AT_ONCE, stop - start)
            _write_hashes(words, start, count, shingle_words, scratch[0], scratch[1])
            for place in range(uintp(count)):
                value = scratch[1, place]
                bin_of = uintp(value & mask)
                row[bin_of] = min(row[bin_of], value >> shift)
            start += count
        start = ends[document]


@compiled
def shared_shingles(one, other, shingle_words, scratch, keys, states):
    """(shingles that both documents have, shingles that either has), each once; neither is shorter than a shingle.

    one, other: uint32 words. scratch: as of write_smallest. keys, states: (power of two, at least twice as
    many as all words,) uint32 and uint8; states are zeros.
    """
    mask, shared, either = uint32(len(keys) - 1), np.int64(0), np.int64(0)
    for is_other in range(2):
        words = other if is_other else one
        start, stop = np.int64(0), np.int64(len(words) - shingle_words + 1)
        while start < stop:
            count = min(_PLACES_AT_ONCE, stop - start)
            _write_hashes(words, start, count, shingle_words, scratch[0], scratch[1])
            for place in range(uintp(count)):
                value = scratch[1, place]
                slot = uintp(value & mask)
                while states[slot] and keys[slot] != value:
                    slot = uintp(uint32(slot + uintp(1)) & mask)
                if not states[slot]:
                    keys[slot], states[slot] = value, _IN_OTHER if is_other else _IN_ONE
                    either += 1
                elif is_other and states[slot] == _IN_ONE:
                    states[slot] = _IN_OTHER
                    shared += 1
            start += count
    return shared, either


def scratch_for(shingle_words: int) -> np.ndarray:
    """The scratch of write_smallest."""
    return np.empty((2, _PLACES_AT_ONCE + shingle_words), np.uint32)


@compiled
def unite(parents, pairs):
    """Joins the components of each of the (pairs, 2) uint32 documents; a component's smallest number is its root."""
    for number in range(len(pairs)):
        one, other = uintp(pairs[number, 0]), uintp(pairs[number, 1])
        while parents[one] != one:
            parents[one] = parents[parents[one]]
            one = uintp(parents[one])
        while parents[other] != other:
            parents[other] = parents[parents[other]]
            other = uintp(parents[other])
        parents[max(one, other)] = min(one, other)
