"""The words of documents as near duplicates compare them: folded, hashed, without what is between them."""

import unicodedata
from collections.abc import Sequence

import numpy as np
from numba import uint32, uint64, uintp

from pretrain_tools.preparation.cleaning.compiled.kept import kept_array
from pretrain_tools.preparation.cleaning.compiled.text_blocks import compiled

TABLE_CHARACTERS = 0x30000
"""The planes of Unicode that have letters which fold."""
SEPARATOR, NOTHING, HYPHEN, FIRST_LETTER = np.uint32(0), np.uint32(1), np.uint32(2), np.uint32(3)
ALONE, SEVERAL = np.uint32(1 << 31), np.uint32(1 << 30)
"""Flags: the character is a word of its own; it folds to several, which the table has at that index."""
APOSTROPHES, HYPHENS, TATWEEL = "'\u2018\u2019\u02bc\uff07", "-\u2010\u2011\ufe63\uff0d", "\u0640"
VARIATION_SELECTORS = range(0xFE00, 0xFE10)
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
_FACTOR, _START = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xCBF29CE484222325)
_NEW_LINE, _RETURN = np.uint8(10), np.uint8(13)
_PADDING = bytes(4)


@kept_array
def word_letters() -> np.ndarray:
    """uint32: what each character counts as, then the foldings to several letters: their number and the letters."""
    table, foldings = np.zeros(TABLE_CHARACTERS, np.uint32), []
    for code in range(TABLE_CHARACTERS):
        character = chr(code)
        kind = unicodedata.category(character)
        if character in HYPHENS:
            table[code] = HYPHEN
        elif kind == "Cf" or character in APOSTROPHES or character == TATWEEL or code in VARIATION_SELECTORS:
            table[code] = NOTHING
        elif kind[0] in "LNM":
            decomposed = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
            letters = [ord(letter) for letter in decomposed if _counts(letter)]
            alone = ALONE if any(code in script for script in SCRIPTS_WITHOUT_SPACES) else 0
            if not letters:
                table[code] = NOTHING
            elif len(letters) == 1:
                table[code] = letters[0] | alone
            else:
                table[code] = TABLE_CHARACTERS + len(foldings) | SEVERAL | alone
                foldings += [len(letters), *letters]
    return np.concatenate([table, np.array(foldings, np.uint32)])


def _counts(character: str) -> bool:
    """Whether a character of a decomposed letter counts: accents and vowel points don't."""
    kind = unicodedata.category(character)
    return kind[0] in "LN" or kind == "Mc" or (kind == "Mn" and not unicodedata.combining(character))


def folded_words(texts: Sequence[bytes], least_words: int) -> tuple[np.ndarray, np.ndarray]:
    """(words, ends): uint32 hashes of the documents' words, end to end, and where those of each end.

    Letters are folded: case, accents, ligatures, width. Words are runs of letters and digits, or single characters of
    scripts without spaces. Apostrophes, soft hyphens and characters without width count as nothing, as do hyphens
    within words and where they divide a word at the end of a line. A document of fewer than `least_words` words is
    two halves of one hash of all of them; one without words, of all its bytes but spaces.
    """
    sizes = np.array([len(text) for text in texts], np.int64)
    content = np.frombuffer(b"".join([*texts, _PADDING]), np.uint8)
    # A word and what divides it from the next have two bytes at least.
    words = np.empty(int(sizes.sum()) // 2 + 2 * len(sizes), np.uint32)
    ends = np.cumsum(sizes)
    taken = _write_documents(content, ends, word_letters(), least_words, words)
    return words[:taken], ends


@compiled
def _write_documents(content, ends, table, least_words, words):
    """Writes the words of all documents, and where they end in place of where the texts do; how many there are."""
    start = taken = uintp(0)
    for document in range(len(ends)):
        stop = uintp(ends[document])
        count = _write_words(content, start, stop, table, words[taken:])
        if count < uintp(least_words):
            value = _START ^ uint64(count)
            for number in range(count):
                value = _mixed((value ^ words[taken + number]) * _FACTOR)
            if count == 0:
                for at in range(start, stop):
                    if content[at] > 32:
                        value = _mixed((value ^ content[at]) * _FACTOR)
            words[taken], words[taken + uintp(1)] = uint32(value), uint32(value >> uint64(32))
            count = uintp(2)
        start, taken = stop, taken + count
        ends[document] = taken
    return taken


@compiled
def _mixed(value):
    value ^= value >> uint64(32)
    value *= _FACTOR
    return value ^ value >> uint64(29)


@compiled
def _write_words(content, start, stop, table, words):
    """Writes the words of one document; how many there are."""
    # Unsigned indices: signed ones are checked for being negative.
    at, count, value = start, uintp(0), _START
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
            value = (value ^ what) * _FACTOR
            continue
        if what == NOTHING:
            continue
        if what == HYPHEN and value != _START and at < stop:
            following = content[at]
            if following >= 0x80 or table[following] >= FIRST_LETTER:
                continue
            if following in (_NEW_LINE, _RETURN):
                while at < stop and content[at] < 0x80 and table[content[at]] == SEPARATOR:
                    at += uintp(1)
                continue
        if what & SEVERAL and not what & ALONE:
            value = _with_several(value, what, table)
            continue
        if value != _START:
            words[count] = uint32(_mixed(value) >> uint64(32))
            count += uintp(1)
            value = _START
        if what & ALONE:
            of_one = _with_several(_START, what, table) if what & SEVERAL else (_START ^ (what ^ ALONE)) * _FACTOR
            words[count] = uint32(_mixed(of_one) >> uint64(32))
            count += uintp(1)
    if value != _START:
        words[count] = uint32(_mixed(value) >> uint64(32))
        count += uintp(1)
    return count


@compiled
def _with_several(value, what, table):
    """The hash so far with the letters of a folding to several."""
    place = uintp(what & ~(ALONE | SEVERAL))
    for number in range(uintp(1), uintp(table[place]) + uintp(1)):
        value = (value ^ table[place + number]) * _FACTOR
    return value
