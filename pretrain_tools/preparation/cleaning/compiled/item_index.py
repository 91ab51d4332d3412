"""An index of texts that finds their runs of words in documents, whatever the case, punctuation and spacing.

Texts become letters: lower case, without accents, spaces and punctuation. Seeds of SEED_LETTERS letters are placed in
the indexed texts so that every run of `words` words holds one; hashes of as many letters look for seeds at each letter
of a document, and what surrounds a seed is compared letter by letter. So a verdict is exact, not probable.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import uint32, uintp

from pretrain_tools.preparation.cleaning.compiled.kept import cached_njit, kept_array
from pretrain_tools.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    ONE,
    PADDING,
    first_bits,
    joined_texts,
    lowest_bit,
    mask_of,
)

SEED_LETTERS = 16
LEAST_LETTERS = 20
"""A run of fewer letters is no evidence, however many words it has."""
ODD = tuple(map(np.uint32, (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)))
BITS_PER_SEED, FEWEST_BITS = 32, 17
"""Of a bitmap; the exponent of two of as many as the core's cache always holds."""
LETTERS_AT_ONCE = 2048
"""So that their keys stay in the core's cache."""


class Run(NamedTuple):
    """A run of words of an indexed text in a document."""

    document: int
    text: int
    """Number of the indexed text."""
    start: int
    """First byte in the document."""
    stop: int
    """Byte after the last."""


@kept_array
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


@cached_njit
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


@cached_njit
def _fold(content, start, stop, table, letters):
    """Writes the letters of UTF-8 bytes [start, stop); how many there are. Reads PADDING bytes more."""
    # Unsigned indices: signed ones are checked for being negative, which takes as long as the rest.
    at, end, count = uintp(start), uintp(stop), uintp(0)
    while at < end:
        plain = min(end - at, uintp(lowest_bit(mask_of(content, at, 0, 0x80, 0xFF))))
        for place in range(at, at + plain):
            letter = table[content[place]]
            letters[count] = letter
            count += uintp(letter != 0)
        at += plain
        if plain < uintp(BLOCK) and at < end:
            code, size = _decoded(content, at)
            letters[count] = table[code]
            count += uintp(table[code] != 0)
            at += size
    return count


@cached_njit
def _places(content, table, places):
    """Writes the byte where each letter begins; how many letters there are."""
    at, end, count = uintp(0), uintp(len(content)), uintp(0)
    while at < end:
        code, size = _decoded(content, at)
        places[count] = at
        count += uintp(table[code] != 0)
        at += size
    return count


@cached_njit
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


@cached_njit
def _write_keys(letters, start, count, keys):
    """Writes the keys of the `count` runs of SEED_LETTERS letters that begin at `start` and after it.

    By runs of two, four and eight letters, in loops that the processor's vectors take.
    """
    # Unsigned places: the check of signed ones for being negative keeps the loops from being vectors'.
    first, count = uintp(start), uintp(count)
    for place in range(count + uintp(14)):
        keys[place] = uint32(letters[first + place]) * ODD[0] + letters[first + place + uintp(1)]
    for place in range(count + uintp(12)):
        keys[place] = keys[place] * ODD[1] + keys[place + uintp(2)]
    for place in range(count + uintp(8)):
        keys[place] = keys[place] * ODD[2] + keys[place + uintp(4)]
    for place in range(count):
        key = uint32(keys[place] * ODD[3] + keys[place + uintp(8)])
        key = uint32((key ^ key >> uint32(16)) * ODD[1])
        keys[place] = key ^ key >> uint32(15)


@cached_njit
def _is_rare(key):
    """One key in eight. Most seeds have such: at the others, only a bitmap is looked at that fits the core's cache."""
    return key & uint32(7) == uint32(0)


@cached_njit
def _place_seeds(letters, word_starts, first_words, first_letters, words, seeds_text, seeds_letter, seeds_key):
    """Seeds (text, letter, key) such that every run of `words` words, or a shorter text as a whole, holds one.

    A rare key where there is one, wherever it begins, else a seed that begins with a word.
    """
    count = 0
    keys = np.empty(len(letters) + SEED_LETTERS, np.uint32)  # of one text after another: hardly any of it is touched
    for text in range(len(first_words) - 1):
        begin, end, base = first_words[text], first_words[text + 1], first_letters[text]
        runs = first_letters[text + 1] - base - SEED_LETTERS + 1
        if runs > 0:
            _write_keys(letters, base, runs, keys)
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


@cached_njit
def _bit_of(key, rare_shift, other_shift, rare_bits):
    """The number of a key's bit: among the first `rare_bits` for a rare key, else behind them."""
    # Without a branch, which would often be guessed wrong.
    is_other = uint32(not _is_rare(key))
    return uint32((key >> uint32(rare_shift + is_other * (other_shift - rare_shift))) + is_other * rare_bits)


@cached_njit
def _insert(seeds_key, bits, rare_shift, other_shift, rare_bits, keys, chain_first, chain_next):
    """Fills the bitmap and the hash table; seeds of one key are chained."""
    mask = len(keys) - 1
    for seed in range(len(seeds_key) - 1, -1, -1):
        key = seeds_key[seed]
        bit = _bit_of(key, rare_shift, other_shift, rare_bits)
        bits[bit >> uint32(5)] |= uint32(1) << (bit & uint32(31))
        slot = _slot(keys, chain_first, key, mask)
        keys[slot] = key
        chain_next[seed] = chain_first[slot]
        chain_first[slot] = seed


@cached_njit
def _slot(keys, chain_first, key, mask):
    """Where a key is in the table, or would be."""
    slot = np.int64(key >> uint32(3)) & mask
    while chain_first[slot] >= 0 and keys[slot] != key:
        slot = (slot + 1) & mask
    return slot


@cached_njit
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


@cached_njit
def _candidates(keys, tags, count, bits, rare_shift, other_shift, rare_bits, places):
    """Writes the places among `count` keys whose bits are set; how many. tags: scratch of bytes."""
    for place in range(uintp(count)):
        bit = _bit_of(keys[place], rare_shift, other_shift, rare_bits)
        tags[place] = bits[bit >> uint32(5)] >> (bit & uint32(31)) & uint32(1)
    found = np.int64(0)
    for block in range(0, count, BLOCK):
        hits = mask_of(tags, block, 0, 1, 1) & first_bits(count - block)
        while hits:
            places[found] = block + lowest_bit(hits)
            found += 1
            hits &= hits - ONE
    return found


@cached_njit
def _find(content, bounds, table, texts, hashed, words, found):
    """Writes (document, text, first letter, letter after the last) of each run while there is room; how many."""
    keys, chain_first = hashed[4], hashed[5]
    longest = np.int64(1)
    for document in range(len(bounds)):
        longest = max(longest, bounds[document, 1] - bounds[document, 0])
    own, count = np.empty(longest + 1, np.uint16), 0
    own_keys, tags = np.empty(LETTERS_AT_ONCE + SEED_LETTERS, np.uint32), np.empty(LETTERS_AT_ONCE + PADDING, np.uint8)
    places = np.empty(LETTERS_AT_ONCE, np.int64)
    for document in range(len(bounds)):
        size = np.int64(_fold(content, bounds[document, 0], bounds[document, 1], table, own))
        for begin in range(0, size - SEED_LETTERS + 1, LETTERS_AT_ONCE):
            runs = min(LETTERS_AT_ONCE, size - SEED_LETTERS + 1 - begin)
            _write_keys(own, begin, runs, own_keys)
            for candidate in range(_candidates(own_keys, tags, runs, *hashed[:4], places)):
                place = places[candidate]
                seed = chain_first[_slot(keys, chain_first, own_keys[place], len(keys) - 1)]
                if seed >= 0:
                    count = _add_runs(own, size, begin + place, document, seed, texts, hashed[6], words, found, count)
    return count


@cached_njit
def _add_runs(own, size, ours, document, seed, texts, chain_next, words, found, count):
    """Compares the seeds of a chain with what begins at letter `ours` of a document; the number of runs after it."""
    letters, word_starts, first_words, first_letters, seeds_text, seeds_letter, seeds_word = texts
    while seed >= 0:
        text, word, theirs = seeds_text[seed], seeds_word[seed], seeds_letter[seed]
        begin, end = first_words[text], first_words[text + 1]
        # As far as a run that holds this seed can reach, within the text.
        left = word_starts[max(begin, word - words + 1)]
        right = word_starts[word + words] if word + words < end else first_letters[text + 1]
        stop, our_stop, first, our_first = theirs, ours, theirs, ours
        while stop < right and our_stop < size and letters[stop] == own[our_stop]:
            stop, our_stop = stop + 1, our_stop + 1
        while first > left and our_first > 0 and letters[first - 1] == own[our_first - 1]:
            first, our_first = first - 1, our_first - 1
        if stop - theirs >= SEED_LETTERS:
            run, last = _whole_run(word_starts[begin:end], first_letters[text + 1], first, stop, words)
            if last > run:
                if count < len(found):
                    found[count, 0], found[count, 1] = document, text
                    found[count, 2], found[count, 3] = our_first + run - first, our_first + last - first
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
    hashed: tuple[np.ndarray | np.uint32, ...]

    def find(self, documents: Sequence[bytes], joined: tuple[np.ndarray, np.ndarray] | None = None) -> list[Run]:
        """Every run, in order, each (document, text, place) once. joined: the documents as of joined_texts."""
        content, bounds = joined or joined_texts(documents)
        count, room = 0, 64
        while count == 0 or count > room:
            found = np.empty((max(room, count), 4), np.int64)
            room = len(found)
            count = _find(content, bounds, folding_table(), self.texts, self.hashed, self.words, found)
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
        content = np.frombuffer(text + bytes(PADDING), np.uint8)[: len(text)]
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
    seeds_key = np.empty(len(word_starts) + 1, np.uint32)
    count = _place_seeds(letters, word_starts, first_words, first_letters, words, seeds_text, seeds_letter, seeds_key)
    seeds_text, seeds_letter, seeds_key = seeds_text[:count].copy(), seeds_letter[:count].copy(), seeds_key[:count]
    seeds_word = np.searchsorted(word_starts, seeds_letter, side="right") - 1
    rare = int(np.count_nonzero(seeds_key & np.uint32(7) == 0))
    sizes = [max(FEWEST_BITS, int(seeds * BITS_PER_SEED).bit_length()) for seeds in (rare, count - rare)]
    bitmap = (*(np.uint32(32 - size) for size in sizes), np.uint32(1 << sizes[0]))
    bits = np.zeros(sum(1 << size for size in sizes) // 32, np.uint32)
    keys = np.zeros(1 << max(4, int(2 * count).bit_length()), np.uint32)
    chain_first, chain_next = np.full(len(keys), -1, np.int64), np.empty(count, np.int64)
    _insert(seeds_key, bits, *bitmap, keys, chain_first, chain_next)
    return ItemIndex(
        words,
        np.diff(first_words) > 0,
        (letters, word_starts, first_words, first_letters, seeds_text, seeds_letter, seeds_word),
        (bits, *bitmap, keys, chain_first, chain_next),
    )
