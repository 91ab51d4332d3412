"""Folded words, which near duplicates are compared by, and kernels of the search, compiled by numba.

Words are runs of letters and digits without case, accents, ligatures and width, or single characters of scripts
without spaces. This module calls no kernels of others: see `compiled`.
"""

import functools
import unicodedata
from collections.abc import Sequence

import numpy as np
from numba import uint32, uint64, uintp

from pretrain_tools.preparation.cleaning.compiled import compiled

TABLE_CHARACTERS = 0x30000
"""Planes of Unicode that have letters which fold."""
SEPARATOR, NOTHING, HYPHEN, FIRST_LETTER = np.uint32(0), np.uint32(1), np.uint32(2), np.uint32(3)
ALONE, SEVERAL = np.uint32(1 << 31), np.uint32(1 << 30)
"""Flags: the character is a word by itself; it folds to several letters, which the table has at that index."""
APOSTROPHES = "'\u2018\u2019\u02bc\uff07"
HYPHENS = "-\u2010\u2011\ufe63\uff0d"
TATWEEL = "\u0640"
VARIATION_SELECTORS = "".join(map(chr, range(0xFE00, 0xFE10)))
IDEOGRAPHS_BEYOND_TABLE = 0x40000
SCRIPTS_WITHOUT_SPACES = (
    range(0x0E00, 0x0F00),  # Thai, Lao
    range(0x1000, 0x10A0),  # Myanmar
    range(0x1780, 0x1800),  # Khmer
    range(0x2E80, 0xA4D0),  # Chinese, Japanese, Yi
    range(0xF900, 0xFB00),
    range(0xFF66, 0xFFA0),
    range(0x1B000, 0x1B300),
    range(0x20000, TABLE_CHARACTERS),
)
FACTOR, START = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xCBF29CE484222325)
NEW_LINE, RETURN = np.uint8(10), np.uint8(13)


@functools.cache
def word_letters() -> np.ndarray:
    """Returns uint32: the letter of each character, then foldings to several: their number and the letters."""
    characters = list(map(chr, range(TABLE_CHARACTERS)))
    kinds = np.array(list(map(unicodedata.category, characters)))
    is_letter = np.isin(kinds.astype("U1"), ("L", "N", "M"))
    table = np.where(is_letter, np.arange(TABLE_CHARACTERS, dtype=np.uint32), SEPARATOR)
    foldings = []
    # Only what normalization or case can change; the rest is 0.2 s of looking at ideograms.
    folded = [unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", c).casefold()) for c in characters]
    changes = np.fromiter((one != other for one, other in zip(folded, characters, strict=True)), bool)
    for code in np.flatnonzero(is_letter & (changes | (kinds == "Mn") | (kinds == "Me"))).tolist():
        letters = [ord(letter) for letter in folded[code] if _counts(letter)]
        if len(letters) > 1:
            table[code] = TABLE_CHARACTERS + len(foldings) | SEVERAL
            foldings += [len(letters), *letters]
        else:
            table[code] = letters[0] if letters else NOTHING
    for script in SCRIPTS_WITHOUT_SPACES:
        inside = slice(script.start, script.stop)
        table[inside] = np.where(table[inside] > NOTHING, table[inside] | ALONE, table[inside])
    table[kinds == "Cf"] = NOTHING
    table[[ord(character) for character in APOSTROPHES + TATWEEL + VARIATION_SELECTORS]] = NOTHING
    table[list(map(ord, HYPHENS))] = HYPHEN
    return np.concatenate([table, np.array(foldings, np.uint32)])


def _counts(character: str) -> bool:
    """Tells the letters of a decomposed character from accents and vowel points."""
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind == "Mc" or (kind == "Mn" and not unicodedata.combining(character))


def folded_words(texts: Sequence[bytes], least_words: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (words, ends): uint32 hashes of the documents' words, end to end, and where those of each end.

    Apostrophes, soft hyphens and characters without width count as nothing, as do hyphens within words and where they
    divide a word at the end of a line. A document of fewer than `least_words` words is two halves of one hash of all
    of them; one without words, of all its bytes but spaces.
    """
    sizes = np.array([len(text) for text in texts], np.int64)
    content = np.frombuffer(bytearray().join([*texts, bytes(4)]), np.uint8)
    # A word and what divides it from the next have at least two bytes.
    words = np.empty(int(sizes.sum()) // 2 + 2 * len(sizes), np.uint32)
    ends = np.cumsum(sizes)
    taken = _write_documents(content, ends, word_letters(), least_words, words)
    return words[:taken], ends


@compiled
def _write_documents(content, ends, table, least_words, words):
    """Writes the words of all documents, and their ends in place of those of the texts; returns how many there are."""
    start = taken = uintp(0)
    for document in range(len(ends)):
        stop = uintp(ends[document])
        count = _write_words(content, start, stop, table, words[taken:])
        if count < uintp(least_words):
            value = START ^ uint64(count)
            for number in range(count):
                value = _mixed((value ^ words[taken + number]) * FACTOR)
            if count == 0:
                for at in range(start, stop):
                    if content[at] > 32:
                        value = _mixed((value ^ content[at]) * FACTOR)
            words[taken] = uint32(value)
            words[taken + uintp(1)] = uint32(value >> uint64(32))
            count = uintp(2)
        start = stop
        taken = taken + count
        ends[document] = taken
    return taken


@compiled
def _mixed(value):
    value ^= value >> uint64(32)
    value *= FACTOR
    return value ^ value >> uint64(29)


@compiled
def _write_words(content, start, stop, table, words):
    """Writes the words of one document; returns how many there are."""
    # Unsigned indices: numba checks signed ones for being negative.
    at = start
    count = uintp(0)
    value = START
    while at < stop:
        byte = content[at]
        at += uintp(1)
        if byte < 0x80:
            what = table[byte]
        else:
            code = uint32(byte & 0x1F) << uint32(6) | content[at] & uint32(0x3F)
            at += uintp(1)
            if byte >= 0xE0:
                code = (code & uint32(0x3FF)) << uint32(6) | content[at] & uint32(0x3F)
                at += uintp(1)
            if byte >= 0xF0:
                code = (code & uint32(0x7FFF)) << uint32(6) | content[at] & uint32(0x3F)
                at += uintp(1)
            if code < TABLE_CHARACTERS:
                what = table[code]
            else:
                what = ALONE | code if code < IDEOGRAPHS_BEYOND_TABLE else NOTHING
        if FIRST_LETTER <= what < SEVERAL:
            value = (value ^ what) * FACTOR
            continue
        if what == NOTHING:
            continue
        if what == HYPHEN and value != START and at < stop:
            following = content[at]
            if following >= 0x80 or table[following] >= FIRST_LETTER:
                continue
            if following in (NEW_LINE, RETURN):
                while at < stop and content[at] < 0x80 and table[content[at]] == SEPARATOR:
                    at += uintp(1)
                continue
        if what & SEVERAL and not what & ALONE:
            value = _with_several(value, what, table)
            continue
        if value != START:
            words[count] = uint32(_mixed(value) >> uint64(32))
            count += uintp(1)
            value = START
        if what & ALONE:
            of_one = _with_several(START, what, table) if what & SEVERAL else (START ^ (what ^ ALONE)) * FACTOR
            words[count] = uint32(_mixed(of_one) >> uint64(32))
            count += uintp(1)
    if value != START:
        words[count] = uint32(_mixed(value) >> uint64(32))
        count += uintp(1)
    return count


@compiled
def _with_several(value, what, table):
    """Adds to a hash the letters of a folding to several."""
    place = uintp(what & ~(ALONE | SEVERAL))
    for number in range(uintp(1), uintp(table[place]) + uintp(1)):
        value = (value ^ table[place + number]) * FACTOR
    return value


@compiled
def write_smallest(hashes, ends, shingle_words, bits, smallest):
    """Lowers `smallest`, (documents, 2^bits) uint32, to the hashes of each document's shingles.

    A hash's lowest bits are its bin, the others its value. hashes: of shingles, documents end to end.
    """
    mask = uint32((1 << bits) - 1)
    shift = uint32(bits)
    start = np.int64(0)
    for document in range(len(ends)):
        row = smallest[document]
        for place in range(start, ends[document] - shingle_words + 1):
            value = hashes[uintp(place)]
            place_in_row = uintp(value & mask)
            row[place_in_row] = min(row[place_in_row], value >> shift)
        start = ends[document]


@compiled
def unite(parents, pairs):
    """Joins the components of each of the (pairs, 2) uint32 documents; a component's smallest number is its root."""
    for number in range(len(pairs)):
        one = uintp(pairs[number, 0])
        other = uintp(pairs[number, 1])
        while parents[one] != one:
            parents[one] = parents[parents[one]]
            one = uintp(parents[one])
        while parents[other] != other:
            parents[other] = parents[parents[other]]
            other = uintp(parents[other])
        parents[max(one, other)] = min(one, other)
