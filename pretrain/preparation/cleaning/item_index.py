"""An index of texts that finds their runs of words in documents, whatever the case, punctuation and spacing.

Texts become letters: lower case, without accents, spaces and punctuation. Seeds of SEED_LETTERS letters are placed in
the indexed texts so that every run of `words` words holds one; a rolling hash looks for seeds at every letter of a
document, and what surrounds a seed is compared letter by letter. So a verdict is exact, not probable.
"""

import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
from numba import uint16, uint32, uint64, uintp

SEED_LETTERS = 16
LEAST_LETTERS = 20
"""A run of fewer letters is no evidence, however many words it has."""
ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))
BITS_PER_SEED = 32


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
    """(65,536,) uint16: what each character of the basic plane counts as; 0: nothing."""
    table = np.zeros(1 << 16, np.uint16)
    for number in range(1 << 16):
        character = chr(number)
        if not character.isalnum():
            continue
        base = [c for c in unicodedata.normalize("NFKD", character) if unicodedata.category(c) != "Mn"]
        folded = base[0] if len(base) == 1 else character  # Hangul and ligatures are several: as they are
        # By way of upper case, so that both of a sigma's small forms are one.
        folded = folded.upper().lower() if len(folded.upper().lower()) == 1 else folded
        table[number] = ord(folded) if ord(folded) < 1 << 16 else number
    return table


@numba.njit(cache=True)
def _decoded(content, at):
    """(character, its bytes) of the UTF-8 at a place; beyond the basic plane (rare scripts, emoji), NUL."""
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


@numba.njit(cache=True)
def _fold(content, start, stop, table, letters):
    """Writes the letters of UTF-8 bytes [start, stop); how many there are."""
    # Unsigned indices: signed ones are checked for being negative, which takes as long as the rest.
    at, end, count = uintp(start), uintp(stop), uintp(0)
    while at < end:
        if content[at] < 0x80:
            letter = table[content[at]]
            at += uintp(1)
        else:
            code, size = _decoded(content, at)
            letter = table[code]
            at += size
        letters[count] = letter
        count += uintp(letter != 0)
    return count


@numba.njit(cache=True)
def _places(content, table, places):
    """Writes the byte where each letter begins; how many letters there are."""
    at, end, count = uintp(0), uintp(len(content)), uintp(0)
    while at < end:
        code, size = _decoded(content, at)
        places[count] = at
        count += uintp(table[code] != 0)
        at += size
    return count


@numba.njit(cache=True)
def _word_starts(content, stop, letters, places, count, starts):
    """Marks the letters that begin a word: after anything but an apostrophe, and every ideogram."""
    for number in range(count):
        starts[number] = number == 0 or 0x2E80 <= letters[number] < 0xAC00
        if number and not starts[number]:
            at = places[number - 1] + 1
            while at < places[number] and (content[at] & 0xC0) == 0x80:  # the rest of the letter before
                at += 1
            while at < places[number]:
                if content[at] == 0x27:
                    at += 1
                elif content[at] == 0xE2 and content[at + 1] == 0x80 and content[at + 2] == 0x99:  # a curly one
                    at += 3
                else:
                    starts[number] = True
                    break


@numba.njit(cache=True)
def _shifted(older, newer, letter):
    """The low bytes of the last 16 letters, as two integers, after one more letter."""
    older = (older << uint64(8)) | (newer >> uint64(56))
    newer = (newer << uint64(8)) | uint64((letter ^ (letter >> uint16(8))) & uint16(255))
    return older, newer


@numba.njit(cache=True)
def _key(older, newer):
    mixed = (older * ODD[0]) ^ (newer * ODD[1])
    return (mixed ^ (mixed >> uint64(32))) * ODD[0]


@numba.njit(cache=True)
def _is_rare(key):
    """One key in eight. Most seeds have such: at the others, only a bitmap is looked at that fits the core's cache."""
    return key & uint64(7) == uint64(0)


@numba.njit(cache=True)
def _place_seeds(letters, word_starts, first_words, first_letters, words, seeds_text, seeds_letter, seeds_key):
    """Seeds (text, letter, key) such that every run of `words` words, or a shorter text as a whole, holds one.

    A rare key where there is one, wherever it begins, else a seed that begins with a word.
    """
    count = 0
    keys = np.empty(len(letters) + 1, np.uint64)  # of one text after another: hardly any of it is touched
    for text in range(len(first_words) - 1):
        begin, end, base = first_words[text], first_words[text + 1], first_letters[text]
        older, newer = uint64(0), uint64(0)
        for number in range(first_letters[text + 1] - base):
            older, newer = _shifted(older, newer, letters[base + number])
            if number >= SEED_LETTERS - 1:
                keys[number + 1 - SEED_LETTERS] = _key(older, newer)
        latest = np.int64(-1)
        for word in range(begin, max(begin + 1, end - words + 1) if end > begin else begin):
            last = min(word + words, end)
            stop = word_starts[last] if last < end else first_letters[text + 1]
            if latest >= word_starts[word]:
                continue  # the latest seed lies within this run, for it ends where an earlier one does or before
            chosen = np.int64(-1)
            for letter in range(stop - SEED_LETTERS, word_starts[word] - 1, -1):
                if _is_rare(keys[letter - base]):
                    chosen = letter
                    break
            for candidate in range(last - 1, word - 1, -1):
                if chosen < 0 and word_starts[candidate] + SEED_LETTERS <= stop:
                    chosen = word_starts[candidate]
            if chosen >= 0:
                latest = chosen
                seeds_text[count], seeds_letter[count], seeds_key[count] = text, chosen, keys[chosen - base]
                count += 1
    return count


@numba.njit(cache=True)
def _insert(seeds_key, rare_bits, other_bits, keys, chain_first, chain_next):
    """Fills the bitmaps and the hash table; seeds of one key are chained."""
    mask = len(keys) - 1
    for seed in range(len(seeds_key) - 1, -1, -1):
        key = seeds_key[seed]
        bits = rare_bits if _is_rare(key) else other_bits
        bit = key >> _shift(bits)
        bits[uintp(bit >> uint64(3))] |= np.uint8(1 << np.int64(bit & uint64(7)))
        slot = _slot(keys, chain_first, key, mask)
        keys[slot] = key
        chain_next[seed] = chain_first[slot]
        chain_first[slot] = seed


@numba.njit(cache=True)
def _slot(keys, chain_first, key, mask):
    """Where a key is in the table, or would be."""
    slot = np.int64((key >> uint64(3)) & uint64(mask))
    while chain_first[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@numba.njit(cache=True)
def _shift(bits):
    """How far to shift a key to the number of its bit: its highest bits count."""
    shift, size = 64, len(bits) * 8
    while size > 1:
        size, shift = size >> 1, shift - 1
    return uint64(shift)


@numba.njit(cache=True)
def _whole_run(starts, text_stop, start, stop, words):
    """The part of letters [start, stop) of a text that is runs of `words` words, or all of a shorter text.

    starts: of the text's words; runs of less than LEAST_LETTERS do not count. Empty where there is none.
    """
    words = min(words, len(starts))
    first, last = stop, stop
    for word in range(np.searchsorted(starts, start), len(starts) - words + 1):
        end = starts[word + words] if word + words < len(starts) else text_stop
        if end > stop:
            break
        if end - starts[word] >= LEAST_LETTERS:
            first, last = min(first, starts[word]), end
    return first, last


@numba.njit(cache=True)
def _find(content, ends, table, texts, hashed, words, found):
    """Writes (document, text, first letter, letter after the last) of each run while there is room; how many."""
    letters, word_starts, first_words, first_letters, seeds_text, seeds_letter, seeds_word = texts
    rare_bits, other_bits, keys, chain_first, chain_next = hashed
    rare_shift, other_shift, mask = _shift(rare_bits), _shift(other_bits), len(keys) - 1
    longest = np.int64(1)
    for document in range(len(ends)):
        longest = max(longest, ends[document] - (ends[document - 1] if document else 0))
    own, count = np.empty(longest + 1, np.uint16), 0
    for document in range(len(ends)):
        size = np.int64(_fold(content, ends[document - 1] if document else 0, ends[document], table, own))
        older, newer = uint64(0), uint64(0)
        for at in range(size):
            older, newer = _shifted(older, newer, own[uintp(at)])
            key = _key(older, newer)
            if _is_rare(key):
                bit = key >> rare_shift
                byte = rare_bits[uintp(bit >> uint64(3))]
            else:
                bit = key >> other_shift
                byte = other_bits[uintp(bit >> uint64(3))]
            if not (byte >> (bit & uint64(7))) & uint64(1) or at < SEED_LETTERS - 1:
                continue
            seed = chain_first[_slot(keys, chain_first, key, mask)]
            while seed >= 0:
                text, word, theirs, ours = (
                    seeds_text[seed],
                    seeds_word[seed],
                    seeds_letter[seed],
                    at + 1 - SEED_LETTERS,
                )
                begin, end = first_words[text], first_words[text + 1]
                # As far as a run that holds this seed can reach, within the text.
                left = word_starts[max(begin, word - words + 1)]
                right = word_starts[word + words] if word + words < end else first_letters[text + 1]
                stop, our_stop = theirs, ours
                while stop < right and our_stop < size and letters[stop] == own[our_stop]:
                    stop, our_stop = stop + 1, our_stop + 1
                while theirs > left and ours > 0 and letters[theirs - 1] == own[ours - 1]:
                    theirs, ours = theirs - 1, ours - 1
                if stop - seeds_letter[seed] >= SEED_LETTERS:
                    first, last = _whole_run(word_starts[begin:end], first_letters[text + 1], theirs, stop, words)
                    if last > first:
                        if count < len(found):
                            found[count, 0], found[count, 1] = document, text
                            found[count, 2], found[count, 3] = ours + first - theirs, ours + last - theirs
                        count += 1
                seed = chain_next[seed]
    return count


@dataclass(frozen=True)
class ItemIndex:
    """Texts to look for in documents. Build it with `build_index`."""

    words: int
    searchable: np.ndarray
    """(texts,) bool: whether a text is long enough to be found."""
    texts: tuple[np.ndarray, ...]
    hashed: tuple[np.ndarray, ...]

    def find(self, documents: Sequence[bytes]) -> list[Run]:
        """Every run, in order, each (document, text, place) once."""
        content = np.frombuffer(b"".join(documents), np.uint8)
        ends = np.cumsum([len(text) for text in documents], dtype=np.int64)
        count, room = 0, 64
        while count == 0 or count > room:
            found = np.empty((max(room, count), 4), np.int64)
            room = len(found)
            count = _find(content, ends, folding_table(), self.texts, self.hashed, self.words, found)
            if not count:
                return []
        rows = np.unique(found[:count], axis=0)
        for document in np.unique(rows[:, 0]).tolist():
            places = np.empty(len(documents[document]) + 1, np.int64)
            size = int(_places(np.frombuffer(documents[document], np.uint8), folding_table(), places))
            places[size] = len(documents[document])
            here = rows[:, 0] == document
            rows[here, 2:] = places[rows[here, 2:]]
        return [Run(*row) for row in rows.tolist()]


def build_index(texts: Sequence[bytes], whole: Sequence[bool], words: int) -> ItemIndex:
    """An index of UTF-8 texts that finds runs of `words` of their words.

    whole: whether a text of fewer words is found, as a whole.
    """
    table = folding_table()
    all_letters, all_starts, first_letters, first_words = [], [], [0], [0]
    for text, is_whole in zip(texts, whole, strict=True):
        content = np.frombuffer(text, np.uint8)
        letters, places = np.empty(len(text) + 1, np.uint16), np.empty(len(text) + 1, np.uint32)
        count = int(_fold(content, 0, len(text), table, letters))
        _places(content, table, places)
        starts = np.zeros(count, bool)
        _word_starts(content, len(text), letters, places, count, starts)
        starts = np.flatnonzero(starts)
        if count < LEAST_LETTERS or (not is_whole and len(starts) < words):
            count, starts = 0, starts[:0]
        all_letters.append(letters[:count])
        all_starts.append(starts + first_letters[-1])
        first_letters.append(first_letters[-1] + count)
        first_words.append(first_words[-1] + len(starts))
    letters = np.concatenate([np.empty(0, np.uint16), *all_letters])
    word_starts = np.concatenate([np.empty(0, np.int64), *all_starts])
    first_words, first_letters = np.array(first_words), np.array(first_letters)
    seeds_text, seeds_letter = np.empty(len(word_starts) + 1, np.int64), np.empty(len(word_starts) + 1, np.int64)
    seeds_key = np.empty(len(word_starts) + 1, np.uint64)
    count = _place_seeds(letters, word_starts, first_words, first_letters, words, seeds_text, seeds_letter, seeds_key)
    seeds_text, seeds_letter, seeds_key = seeds_text[:count].copy(), seeds_letter[:count].copy(), seeds_key[:count]
    seeds_word = np.searchsorted(word_starts, seeds_letter, side="right") - 1
    rare = int(np.count_nonzero(seeds_key & np.uint64(7) == 0))
    rare_bits, other_bits = (
        np.zeros((1 << max(10, int(seeds * BITS_PER_SEED).bit_length())) // 8, np.uint8)
        for seeds in (rare, count - rare)
    )
    keys = np.zeros(1 << max(4, int(2 * count).bit_length()), np.uint64)
    chain_first, chain_next = np.full(len(keys), -1, np.int64), np.empty(count, np.int64)
    _insert(seeds_key, rare_bits, other_bits, keys, chain_first, chain_next)
    return ItemIndex(
        words,
        np.diff(first_words) > 0,
        (letters, word_starts, first_words, first_letters, seeds_text, seeds_letter, seeds_word),
        (rare_bits, other_bits, keys, chain_first, chain_next),
    )
