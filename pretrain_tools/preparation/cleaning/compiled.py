"""Numba kernels for cleaning: splitting documents into words and lines, and finding repeated n-grams.

Kernels that call each other must be in the same module, because numba's cache doesn't detect changes in other modules.
"""

import functools
import sys
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

compiled = functools.partial(numba.njit, cache=True, nogil=True, error_model="numpy")
"""Decorator for kernels, whose machine code is cached on disk."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
START = np.uint64(0xCBF29CE484222325)
ONE = np.uint64(1)
SPACE, LINE_END, ALPHABETIC, LOWER, DIGIT, VISIBLE, SENTENCE_END, CLOSING = (1 << bit for bit in range(8))
"""Character classes. LINE_END matches str.splitlines. VISIBLE characters are neither spaces nor punctuation. CLOSING
characters are quotes and brackets that may follow the end of a sentence."""
SENTENCE_ENDS = ".!?…。．！？｡؟۔।॥։።၊။។៕᠃᠉‼‽⁇⁈⁉"
LINE_ENDS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
FIRST_WIDE = 0x3000
"""Punctuation at or above this code point ends a sentence even without a following space."""
LINE = np.dtype(
    [
        (name, "<i4")
        for name in (
            "document", "block", "start", "stop", "characters", "words", "sentences", "longest_word",
            "first_kind", "first_code", "last_kind", "last_code", "numbers", "gaps",
        )
    ] + [("digest", "<u8")]
)  # fmt: skip
"""A nonblank line. block: index of its block of consecutive nonblank lines. start, stop: byte offsets in the
concatenated documents, without surrounding spaces. digest: hash of its words. gaps: number of runs of two or more
spaces. numbers: number of words that contain digits. first_kind, last_kind: character classes, ignoring CLOSING
characters at the end."""
PADDING = 16
"""Number of padding bytes after the concatenated documents. Kernels may read beyond the end."""
GRAM_RULES = ("top_2_gram", "top_3_gram", "top_4_gram", *(f"duplicate_{n}_gram" for n in range(5, 11)))


@functools.cache
def character_classes() -> np.ndarray:
    """Returns (0x110000,) uint16, the character classes of all code points."""
    classes = np.full(sys.maxunicode + 1, VISIBLE, np.uint16)
    # There are no letters, spaces or punctuation above this range.
    for code in range(0x32000):
        character = chr(code)
        category = unicodedata.category(character)
        is_space = character.isspace()
        classes[code] = (
            SPACE * is_space
            | ALPHABETIC * character.isalpha()
            | LOWER * character.islower()
            | VISIBLE * (not is_space and category[0] != "P")
            | CLOSING * (category in ("Pe", "Pf", "Pi"))
        )
    flags = {SENTENCE_ENDS: SENTENCE_END, LINE_ENDS: LINE_END, "\"'`*_": CLOSING, "0123456789": DIGIT}
    for characters, flag in flags.items():
        classes[list(map(ord, characters))] |= flag
    return classes


@compiled
def code_at(text, position):
    """Decodes a UTF-8 character. Returns (code point, number of bytes)."""
    first = np.int64(text[position])
    if first < 0x80:
        return first, 1
    second = np.int64(text[position + 1]) & 0x3F
    if first < 0xE0:
        return (first & 0x1F) << 6 | second, 2
    third = np.int64(text[position + 2]) & 0x3F
    if first < 0xF0:
        return (first & 0x0F) << 12 | second << 6 | third, 3
    return (first & 0x07) << 18 | second << 12 | third << 6 | np.int64(text[position + 3]) & 0x3F, 4


@compiled
def mixed(value):
    """Mixes the bits of a hash, so that its low bits depend on all bits."""
    value ^= value >> np.uint64(32)
    value *= FACTOR
    return value ^ value >> np.uint64(29)


@compiled
def _divide(text, bounds, classes, lengths, hashes, word_bounds, totals, lines):
    """Fills the arrays of DividedTexts. Returns (number of words, number of lines). `lines` must be all zeros."""
    word = count = block = np.int64(0)
    for document in range(len(bounds)):
        word_bounds[document, 0] = word
        position = bounds[document, 0]
        end = bounds[document, 1]
        block += 1
        while position < end:
            line = lines[count]
            first_word = word
            spaces = np.int64(0)
            is_ended = False
            size = np.int64(1)
            last_kind = last_code = np.int64(0)
            digest = START
            while position < end:
                code, size = code_at(text, position)
                kind = np.int64(classes[code])
                if kind & SPACE:
                    if kind & LINE_END and not (code == 13 and position + 1 < end and text[position + 1] == 10):
                        break
                    spaces += 1
                    position += size
                    continue
                if word == first_word:
                    line.start = position
                    line.first_kind = kind
                    line.first_code = code
                else:
                    line.gaps += spaces > 1
                    line.sentences += is_ended
                    line.characters += spaces
                length = np.int64(0)
                kinds = np.int64(0)
                value = START
                while True:
                    if not kind & CLOSING:
                        if last_kind & SENTENCE_END and last_code >= FIRST_WIDE and length > 0:
                            line.sentences += 1
                        last_kind = kind
                        last_code = code
                    length = length + 1
                    kinds = kinds | kind
                    value = (value ^ np.uint64(code)) * FACTOR
                    position += size
                    if position >= end:
                        break
                    code, size = code_at(text, position)
                    kind = np.int64(classes[code])
                    if kind & SPACE:
                        break
                value = mixed(value)
                hashes[word] = value
                lengths[word] = length
                digest = (digest ^ value) * FACTOR
                word += 1
                spaces = np.int64(0)
                is_ended = last_kind & SENTENCE_END != 0
                line.stop = position
                line.characters += length
                line.longest_word = max(line.longest_word, length)
                line.numbers += kinds & DIGIT != 0
                if kinds & VISIBLE:
                    totals[document, 0] += 1
                    totals[document, 1] += length
                    totals[document, 2] += kinds & ALPHABETIC != 0
            if word == first_word:
                block += 1
            else:
                line.document = document
                line.block = block
                line.words = word - first_word
                line.digest = mixed(digest)
                line.last_kind = last_kind
                line.last_code = last_code
                line.sentences += 1
                count += 1
            position += size
        word_bounds[document, 1] = word
    return word, count


class DividedTexts(NamedTuple):
    """Concatenated documents, split into words and lines."""

    text: np.ndarray
    """(bytes,) uint8"""
    lengths: np.ndarray
    """(words,) int32, length in characters."""
    hashes: np.ndarray
    """(words,) uint64"""
    word_bounds: np.ndarray
    """(documents, 2) int64: indices of each document's first word and of the word after its last."""
    totals: np.ndarray
    """(documents, 3) int64: number of words that aren't only punctuation, number of characters in them, and number of
    words that contain a letter."""
    lines: np.ndarray
    """(lines,) LINE, without blank lines."""


def divided_texts(texts: Sequence[bytes]) -> DividedTexts:
    """Splits UTF-8 documents into words and lines. They must be smaller than 2 GiB in total."""
    sizes = np.array([len(text) for text in texts], np.int64)
    ends = np.cumsum(sizes)
    bounds = np.stack([ends - sizes, ends], axis=1)
    # Use a writable array, as everywhere else, so that numba compiles only one version.
    text = np.frombuffer(bytearray().join([*texts, bytes(PADDING)]), np.uint8)
    most_words = len(text) // 2 + len(bounds)
    # This is an upper bound. The last byte of multibyte line ends is 0x85, 0xA8 or 0xA9.
    most_lines = np.count_nonzero((text - np.uint8(10) < 21) | (text == 0x85) | (text & 0xFE == 0xA8))
    lengths = np.empty(most_words, np.int32)
    hashes = np.empty(most_words, np.uint64)
    word_bounds = np.zeros_like(bounds)
    totals = np.zeros((len(bounds), 3), np.int64)
    lines = np.zeros(most_lines + len(bounds) + 1, LINE)
    words, count = _divide(text, bounds, character_classes(), lengths, hashes, word_bounds, totals, lines)
    return DividedTexts(text, lengths[:words], hashes[:words], word_bounds, totals, lines[:count])


@compiled
def _find(keys, stamps, stamp, value):
    """Looks up a value in a hash table. Returns (slot, found). Entries with a different stamp are empty."""
    mask = np.uint64(len(keys) - 1)
    slot = value & mask
    while stamps[slot] == stamp:
        if keys[slot] == value:
            return slot, True
        slot = (slot + ONE) & mask
    return slot, False


@compiled
def _gram(hashes, start, n):
    value = np.uint64(0)
    for index in range(np.uintp(start), np.uintp(start + n)):
        value = value * FACTOR + hashes[index]
    return mixed(value)


@compiled
def _top_gram(lengths, hashes, start, end, n, table, stamp):
    """Returns the length in characters of the most frequent n-gram, times its count. In a tie, the first one wins."""
    keys, stamps, counts = table
    best = np.int64(0)
    for position in range(start, end - n + 1):
        value = _gram(hashes, position, n)
        slot, seen = _find(keys, stamps, stamp, value)
        if not seen:
            keys[slot] = value
            stamps[slot] = stamp
            counts[slot] = 0
        counts[slot] += 1
        best = max(best, counts[slot])
    for position in range(start, end - n + 1):
        slot, _ = _find(keys, stamps, stamp, _gram(hashes, position, n))
        if counts[slot] == best:
            return (lengths[position : position + n].sum() + n - 1) * best
    return np.int64(0)


@compiled
def _duplicate_characters(lengths, hashes, start, end, n, table, stamp):
    """Counts the characters in repeated, non-overlapping n-grams."""
    keys = table[0]
    stamps = table[1]
    position = start
    characters = np.int64(0)
    while position < end - n + 1:
        value = _gram(hashes, position, n)
        slot, seen = _find(keys, stamps, stamp, value)
        if seen:
            characters += lengths[position : position + n].sum()
            position += n
        else:
            keys[slot] = value
            stamps[slot] = stamp
            position += 1
    return characters


@compiled
def repetitions(lengths, hashes, word_bounds, characters, limits, skipped, broken, values):
    """Finds the first of GRAM_RULES that each document violates.

    Args:
        characters: (documents,) total number of characters.
        limits: (9,) maximum share of `characters` for each rule; inf turns a rule off.
        skipped: (documents,) bool, documents to skip.
        broken: (documents,) output, index of the violated rule. Not written for documents without a violation.
        values: (documents,) output, the share that exceeds the limit.
    """
    size = 64
    while size < 2 * (word_bounds[:, 1] - word_bounds[:, 0]).max():
        size *= 2
    stamps = np.zeros(size, np.int64)
    table = np.empty(size, np.uint64), stamps, np.empty(size, np.int64)
    stamp = 0
    for document in range(len(word_bounds)):
        if skipped[document] or not characters[document]:
            continue
        total = characters[document]
        start = word_bounds[document, 0]
        end = word_bounds[document, 1]
        for rule in range(len(limits)):
            n = rule + 2
            stamp += 1
            if n < 5:
                repeated = _top_gram(lengths, hashes, start, end, n, table, stamp)
            else:
                repeated = _duplicate_characters(lengths, hashes, start, end, n, table, stamp)
            if repeated / total > limits[rule]:
                broken[document] = rule
                values[document] = repeated / total
                break
