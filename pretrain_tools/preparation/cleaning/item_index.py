"""An index of texts that finds their runs of words in documents, whatever the case, punctuation and spacing.

Texts become letters: lower case, without accents, spaces and punctuation. Every run of `words` words holds a seed of
SEED_LETTERS letters, whose hash is looked up at each letter of a document; then the run is compared letter by letter.
So a verdict is exact, not probable.
"""

import functools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import uint32, uintp

from pretrain_tools.preparation.cleaning.compiled import compiled, joined_texts

SEED_LETTERS = 16
LEAST_LETTERS = 20
"""A run of fewer letters is no evidence, however many words it has."""
ODD = tuple(map(np.uint32, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)))
BITS_PER_KEY, FEWEST_BITS = 64, 17
FIRSTS_BITS = 16
LETTER = r"[^\W_\u2e80-\uabff\U00010000-\U0010ffff]"
# Two ideograms, or letters with apostrophes among them: no character that `folding_table` lacks, or letters and words
# would be miscounted. One ideogram alone is too little: 13 of them are fewer than LEAST_LETTERS.
WORD = re.compile(rf"[\u2e80-\uabff]{{1,2}}|{LETTER}+(?:['’]+{LETTER}+)*")


class Run(NamedTuple):
    """A run of words of an indexed text in a document."""

    document: int
    text: int
    """Number of the indexed text."""
    start: int
    """First byte in the document."""
    stop: int
    """Byte after the last."""


@functools.cache
def folding_table() -> np.ndarray:
    """Returns (65,536,) uint16: the letter that each character of the basic plane counts as; 0: none."""
    characters = list(map(chr, range(1 << 16)))
    table = np.zeros(1 << 16, np.uint16)
    for number, character in enumerate(characters):
        if not character.isalnum():
            continue
        base = [c for c in unicodedata.normalize("NFKD", character) if unicodedata.category(c) != "Mn"]
        folded = base[0] if len(base) == 1 else character  # Hangul and ligatures are several: unchanged
        # By way of upper case, so that both small forms of a sigma are one.
        folded = folded.upper().lower() if len(folded.upper().lower()) == 1 else folded
        table[number] = ord(folded) if ord(folded) < 1 << 16 else number
    return table


@compiled
def _decoded(content, at):
    """Decodes (character, its bytes) of the UTF-8 at a place; beyond the basic plane (rare scripts, emoji), NUL."""
    byte = content[at]
    if byte < 0x80:
        return uint32(byte), uintp(1)
    second = uint32(content[at + uintp(1)] & 0x3F)
    if byte < 0xE0:
        return (uint32(byte & 0x1F) << uint32(6)) | second, uintp(2)
    if byte < 0xF0:
        third = uint32(content[at + uintp(2)] & 0x3F)
        return (uint32(byte & 0x0F) << uint32(12)) | (second << uint32(6)) | third, uintp(3)
    return uint32(0), uintp(4)


@compiled
def _fold(content, start, stop, table, letters, places):
    """Writes the letters of UTF-8 bytes [start, stop) and, if there is room, their bytes; returns how many."""
    # Unsigned indices: numba checks signed ones for being negative, which takes as long as the rest.
    at = uintp(start)
    end = uintp(stop)
    count = uintp(0)
    while at < end:
        size = uintp(1)
        letter = table[content[at]]
        if content[at] >= 0x80:
            code, size = _decoded(content, at)
            letter = table[code]
        letters[count] = letter
        if len(places):
            places[count] = at
        count += uintp(letter != 0)
        at += size
    return count


@compiled
def _write_keys(letters, count, keys):
    """Writes the hashes of the runs of SEED_LETTERS letters at the first `count` places.

    By runs of two, four and eight letters, in loops that the compiler vectorizes.
    """
    # Unsigned places: the check of signed ones for being negative keeps the loops from being vectorized.
    count = uintp(count)
    for place in range(count + uintp(14)):
        keys[place] = uint32(letters[place]) * ODD[0] + letters[place + uintp(1)]
    for place in range(count + uintp(12)):
        keys[place] = keys[place] * ODD[1] + keys[place + uintp(2)]
    for place in range(count + uintp(8)):
        keys[place] = keys[place] * ODD[2] + keys[place + uintp(4)]
    for place in range(count):
        key = uint32(keys[place] * ODD[3] + keys[place + uintp(8)])
        key = uint32((key ^ key >> uint32(16)) * ODD[1])
        keys[place] = key ^ key >> uint32(15)


@compiled
def _place_runs(word_starts, first_words, first_letters, words, runs):
    """Writes (text, first letter, letter after the last, seed) of each run of `words` words, or of a shorter text.

    The seed is the letter where a hash is looked for. It begins a word, and as many runs as possible share it.
    """
    count = 0
    for text in range(len(first_words) - 1):
        begin = first_words[text]
        end = first_words[text + 1]
        seed = np.int64(-1)
        for word in range(begin, max(end - words, begin) + 1 if end > begin else begin):
            last = min(word + words, end)
            stop = word_starts[last] if last < end else first_letters[text + 1]
            if stop - word_starts[word] < LEAST_LETTERS:
                continue
            if seed < word_starts[word]:
                candidate = last - 1
                while word_starts[candidate] + SEED_LETTERS > stop:
                    candidate -= 1
                seed = word_starts[candidate]
            runs[count, 0] = text
            runs[count, 1] = word_starts[word]
            runs[count, 2] = stop
            runs[count, 3] = seed
            count += 1
    return count


@compiled
def _look_up(keys, count, bits, shift, places):
    """Writes the places among `count` keys whose bits are set; returns how many."""
    # Apart from what is done with them: the loop over all keys is then twice as fast.
    found = uintp(0)
    for place in range(uintp(count)):
        bit = keys[place] >> shift
        of_keys = bits[bit >> uint32(5)]
        if of_keys >> (bit & uint32(31)) & of_keys >> (keys[place] & uint32(31)) & uint32(1):
            places[found] = place
            found += uintp(1)
    return found


@compiled
def _find(content, bounds, table, letters, runs, first_runs, keys, firsts, bits, shift, found):
    """Writes (document, text, first letter, letter after the last) of each run while there is room; returns how many.

    runs: by the key of the seed. keys: each once, ascending. first_runs: the first run of each key, and the end.
    firsts: the first key that has these highest bits.
    """
    longest = np.int64(0)
    count = 0
    for document in range(len(bounds)):
        longest = max(longest, bounds[document, 1] - bounds[document, 0])
    own = np.empty(longest + 1, np.uint16)
    own_keys = np.empty(longest + 1, np.uint32)
    candidates = np.empty(longest + 1, np.uint32)
    no_places = np.empty(0, np.int64)
    for document in range(len(bounds)):
        size = np.int64(_fold(content, bounds[document, 0], bounds[document, 1], table, own, no_places))
        places = max(0, size - SEED_LETTERS + 1)
        if places:
            _write_keys(own, places, own_keys)
        for place in candidates[: _look_up(own_keys, places, bits, shift, candidates)]:
            key = own_keys[place]
            # Hashes are distributed evenly: the key is one of the next few.
            seed = np.int64(firsts[key >> uint32(32 - FIRSTS_BITS)])
            while seed < len(keys) and keys[seed] < key:
                seed += 1
            if seed == len(keys) or keys[seed] != key:
                continue
            for run in range(first_runs[seed], first_runs[seed + 1]):
                first = runs[run, 1]
                length = runs[run, 2] - first
                ours = np.int64(place) - (runs[run, 3] - first)
                same = 0
                if ours >= 0 and ours + length <= size:
                    while same < length and letters[first + same] == own[ours + same]:
                        same += 1
                if same == length:
                    if count < len(found):
                        found[count, 0] = document
                        found[count, 1] = runs[run, 0]
                        found[count, 2] = ours
                        found[count, 3] = ours + length
                    count += 1
    return count


@dataclass(frozen=True)
class ItemIndex:
    """Texts to look for in documents. Build it with `build_index`."""

    searchable: np.ndarray
    """(texts,) bool: whether a text is long enough to be found."""
    letters: np.ndarray
    runs: np.ndarray
    first_runs: np.ndarray
    keys: np.ndarray
    firsts: np.ndarray
    bits: np.ndarray
    """(2^n / 32,) uint32: two bits of an entry for each key; most letters of documents need no more."""
    shift: np.uint32

    def find(self, documents: Sequence[bytes]) -> list[Run]:
        """Finds every run, in order."""
        content, bounds = joined_texts(documents)
        count = 64
        table = folding_table()
        found = np.empty((0, 4), np.int64)
        while count > len(found):
            found = np.empty((count, 4), np.int64)
            of_index = (self.letters, self.runs, self.first_runs, self.keys, self.firsts, self.bits, self.shift)
            count = _find(content, bounds, table, *of_index, found)
        rows = np.unique(found[:count], axis=0)
        for document in np.unique(rows[:, 0]).tolist():
            start, stop = bounds[document]
            letters = np.empty(stop - start + 1, np.uint16)
            places = np.empty(stop - start + 1, np.int64)
            size = int(_fold(content, start, stop, table, letters, places))
            places[size] = stop
            here = rows[:, 0] == document
            rows[here, 2:] = places[rows[here, 2:]] - start
        return [Run(*row) for row in rows.tolist()]


def build_index(texts: Sequence[bytes], whole: Sequence[bool], words: int) -> ItemIndex:
    """Builds an index of UTF-8 texts that finds runs of `words` of their words.

    whole: whether a text of fewer words is found, as a whole.
    """
    table = folding_table()
    all_letters = [np.empty(0, np.uint16)]
    all_starts = [np.empty(0, np.int64)]
    no_places = np.empty(0, np.int64)
    first_letters = [0]
    first_words = [0]
    for text, is_whole in zip(texts, whole, strict=True):
        letters = np.empty(len(text) + 1, np.uint16)
        count = int(_fold(np.frombuffer(bytearray(text), np.uint8), 0, len(text), table, letters, no_places))
        found = WORD.findall(text.decode())
        starts = np.cumsum([0, *(len(word) - word.count("'") - word.count("’") for word in found)])[:-1]
        if count < LEAST_LETTERS or (not is_whole and len(starts) < words):
            count = 0
            starts = starts[:0]
        all_letters.append(letters[:count])
        all_starts.append(starts + first_letters[-1])
        first_letters.append(first_letters[-1] + count)
        first_words.append(first_words[-1] + len(starts))
    letters = np.concatenate(all_letters)
    word_starts = np.concatenate(all_starts)
    runs = np.empty((len(word_starts), 4), np.int32)
    runs = runs[: _place_runs(word_starts, np.array(first_words), np.array(first_letters), words, runs)]
    all_keys = np.empty(len(letters) + 1, np.uint32)
    if len(letters) >= SEED_LETTERS:
        _write_keys(letters, len(letters) - SEED_LETTERS + 1, all_keys)
    run_keys = all_keys[runs[:, 3]]
    order = np.argsort(run_keys)
    keys, first_runs = np.unique(run_keys[order], return_index=True)
    size = max(FEWEST_BITS, (BITS_PER_KEY * len(keys)).bit_length())
    shift = np.uint32(32 - min(size, 31))
    bits = np.zeros(1 << (27 - int(shift)), np.uint32)
    places = keys >> shift
    for bit in (places, keys):
        np.bitwise_or.at(bits, places >> np.uint32(5), np.uint32(1) << (bit & np.uint32(31)))
    firsts = np.searchsorted(keys, np.arange(1 << FIRSTS_BITS, dtype=np.uint32) << np.uint32(32 - FIRSTS_BITS))
    firsts = firsts.astype(np.int32)
    first_runs = np.append(first_runs, len(order))
    return ItemIndex(np.diff(first_words) > 0, letters, runs[order], first_runs, keys, firsts, bits, shift)
