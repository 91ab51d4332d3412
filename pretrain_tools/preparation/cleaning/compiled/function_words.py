"""How many function words of each language a sample of a text has, compiled: language.LanguageFilter."""

from collections.abc import Mapping, Sequence

import numpy as np

from pretrain_tools.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    compiled,
    eight_bytes,
    first_bits,
    lowest_bit,
    mask_of,
    mixed,
)

_MOST_BYTES = 8
"""Of a function word: it is compared as one integer."""
_SLOTS = 512
_LOWER = np.uint64(0x2020202020202020)


@compiled
def _slot_of(keys, word):
    """Where a word is in the table, or the empty slot where it would be."""
    slot = mixed(word) >> np.uint64(20) & np.uint64(_SLOTS - 1)
    while keys[slot] and keys[slot] != word:
        slot = (slot + np.uint64(1)) & np.uint64(_SLOTS - 1)
    return slot


def word_table(words: Mapping[str, Sequence[str]]) -> tuple[np.ndarray, np.ndarray]:
    """(keys, which languages have the word) of {language: its function words}, for certain_numbers."""
    keys, has = np.zeros(_SLOTS, np.uint64), np.zeros((_SLOTS, len(words)), np.int64)
    for number, of_language in enumerate(words.values()):
        for word in of_language:
            value = np.uint64(int.from_bytes(word.encode().ljust(_MOST_BYTES, b"\0"), "little"))
            slot = _slot_of(keys, value)
            keys[slot], has[slot, number] = value, 1
    return keys, has


@compiled
def _count(text, start, end, keys, has, seen, stamp, counts):
    """Adds a sample's words by language to counts[0], the different ones to counts[1]; how many words it has."""
    words, is_long = np.int64(0), False
    while start < end:
        spaces = mask_of(text, start, 0, 9, 13) | mask_of(text, start, 0, 32, 32) | ~first_bits(end - start)
        size = lowest_bit(spaces)
        if 0 < size <= _MOST_BYTES and not is_long:
            word = eight_bytes(text, start) & first_bits(8 * size)
            # Lower case of ASCII, as bytes.lower makes it: no other letter becomes one of a function word.
            slot = _slot_of(keys, word | ~word >> np.uint64(2) & _LOWER & first_bits(8 * size))
            for language in range(len(counts[0]) if keys[slot] else 0):
                counts[0, language] += has[slot, language]
                counts[1, language] += has[slot, language] * (seen[slot] != stamp)
            seen[slot] = stamp
        words += size < BLOCK and (size > 0 or is_long)
        is_long = size == BLOCK
        start += size
        if not is_long:
            start += lowest_bit(~spaces >> np.uint64(size))
    return words


@compiled
def _ideograms(text, start, end):
    """How many letters there are of scripts whose words are not, or need not be, divided by spaces."""
    count = np.int64(0)
    for place in range(start, end):
        first = text[place]  # of a character's bytes; 0xE2 begins punctuation and signs
        count += (first == 0xE0) | (first == 0xE1) | (first >= 0xE3) & (first <= 0xED)
    return count


@compiled
def _certain(text, bounds, keys, has, least_words, looks, words, of_place, seen, counts, found):
    stamp = 0
    for document in range(len(bounds)):
        begin, size = bounds[document, 0], bounds[document, 1] - bounds[document, 0]
        found[document] = -1
        places = len(words) if size > looks[0, 0] else 1
        for look in range(len(looks)):
            stamp += 1
            counts[:] = 0
            all_words = np.int64(0)
            each = min(size, np.int64(looks[look, 0])) // places
            for place in range(places):
                start = begin + size * (2 * place + 1) // (2 * places) - each // 2
                for language in range(len(counts[0])):
                    of_place[place, language] = -counts[0, language]
                words[place] = _count(text, start, start + each, keys, has, seen, stamp, counts)
                words[place] += _ideograms(text, start, start + each)
                all_words += words[place]
                for language in range(len(counts[0])):
                    of_place[place, language] += counts[0, language]
            best = counts[0].argmax()
            most, second = counts[0, best], np.int64(0)
            for language in range(len(counts[0])):
                if language != best:
                    second = max(second, counts[0, language])
            agree = np.int64(0)
            for place in range(places):
                agree += 2 * of_place[place, best] >= looks[look, 1] * words[place]
            is_frequent = all_words >= least_words and most >= looks[look, 1] * all_words
            is_frequent = is_frequent and most >= looks[look, 2] * second and 2 * agree > places
            if is_frequent and counts[1, best] >= looks[look, 3]:
                found[document] = best
                break


def certain_numbers(
    text: np.ndarray,
    bounds: np.ndarray,
    table: tuple[np.ndarray, np.ndarray],
    least_words: int,
    looks: Sequence[tuple[int, float, float, int]],
    places: int,
) -> np.ndarray:
    """(documents,) int64: the number of the language whose function words leave no doubt; -1 where there is none.

    text, bounds: as of joined_texts. table: of word_table. least_words: of a sample. looks: language.LOOKS.
    places: of a document, in equal distances, that a sample is of.
    """
    keys, has = table
    found = np.empty(len(bounds), np.int64)
    seen, counts = np.zeros(_SLOTS, np.int64), np.zeros((2, has.shape[1]), np.int64)
    words, of_place = np.zeros(places, np.int64), np.zeros((places, has.shape[1]), np.int64)
    shares = np.array(looks, np.float64)
    _certain(text, bounds, keys, has, least_words, shares, words, of_place, seen, counts, found)
    return found
