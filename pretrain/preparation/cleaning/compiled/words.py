"""Texts to words, compiled: the division into English words that the published filters count by.

Most of a text is words of letters with a sign behind them, which are divided here; other chunks by module chunks.
"""

from typing import NamedTuple

import numpy as np

from pretrain.preparation.cleaning.compiled.chunks import (
    divide_chunks,
    special_slot,
    special_slot_of_hash,
    word_tables,
)
from pretrain.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    ONE,
    compiled,
    first_bits,
    hash_of,
    inlined,
    letters_at,
    lowest_bit,
    spaces_at,
)
from pretrain.preparation.cleaning.compiled.word_rules import SUFFIX


@inlined
def _is_divided_off(text, sign, classes):
    """Whether a sign behind a word of ASCII letters, at the end of a chunk, is a word of its own."""
    mark = text[sign]
    return (mark == 46 and text[sign - 1] >= 97) or (mark != 46 and mark < 0x80 and classes[mark] & SUFFIX != 0)


@inlined
def _is_in(byte, first, second, third, fourth, fifth, sixth):
    return byte in (first, second) or byte in (third, fourth) or byte in (fifth, sixth)


@inlined
def _curled(text, position):
    """The last byte of a quote or dash of three bytes, E2 80 and that, which begins at a position; 0 - none."""
    return text[position + 2] if text[position] == 0xE2 and text[position + 1] == 0x80 else np.uint8(0)


@inlined
def _add_word(text, start, end, characters, words, hashes, count):
    """Writes a word unless it is empty; the number of words after it."""
    words[count, 0], words[count, 1], words[count, 2] = start, end, characters
    hashes[count] = hash_of(text, start, end)
    return count + (end > start)


@inlined
def _ends_special(text, start, first, second, third, stop, tables):
    """Whether what begins at a position and ends at one of four is a special word."""
    return (
        special_slot(text, start, stop, tables) >= 0
        or (third < stop and special_slot(text, start, third, tables) >= 0)
        or (second < third and special_slot(text, start, second, tables) >= 0)
        or (first < second and special_slot(text, start, first, tables) >= 0)
    )


@inlined
def _within_signs(text, begin, stop, tables):
    """(start, end, closing) of the word in a chunk; from end to closing, and from there to stop, is a sign or nothing.

    A negative start: other rules are needed.
    """
    start, end = begin, stop
    if _is_in(text[begin], 34, 39, 40, 91, 95, 96):
        start += 1
    elif _curled(text, begin) == 0x9C or _curled(text, begin) == 0x98:
        start += 3
    last = text[end - 1]
    if (end - 3 > start and _curled(text, end - 3) == 0x9D) or _curled(text, end - 3) == 0x99:
        end -= 3
        last = np.uint8(39)
    elif end - 1 > start and last < 0x80 and tables.classes[last] & SUFFIX:
        end -= 1
    closing = end
    if end - 1 > start and (text[end - 1] == 46 or (end < stop and _is_in(text[end - 1], 33, 44, 63, 33, 44, 63))):
        if (end < stop and not _is_in(last, 34, 39, 41, 95, 34, 34)) or (text[end - 1] == 46 and text[end - 2] < 97):
            return np.int64(-1), end, closing
        end -= 1
    return start, end, closing


@inlined
def _divide_plain(text, begin, stop, signs, tables, words, hashes, count, totals):
    """divide_words for a chunk of letters with a quote or bracket before, one or two signs behind, one sign within.

    signs: mask of what is no ASCII letter. As the rules for any chunk have it, but in half the time; -1 for
    other chunks, and those that hold a word with pieces of its own.
    """
    start, end, closing = _within_signs(text, begin, stop, tables)
    if start < 0:
        return np.int64(-1)
    within = signs >> np.uint64(start - begin) & first_bits(end - start)
    middle = start + min(lowest_bit(within), end - start)
    after = middle
    if within:
        curled = _curled(text, middle)
        after += 3 if curled == 0x94 or curled == 0x99 else text[middle] == 45 or text[middle] == 39
        rest = within >> np.uint64(middle - start)
        if after == middle or middle == start or after >= end or rest != first_bits(after - middle):
            return np.int64(-1)
    elif start == end:
        return np.int64(-1)
    if (
        _ends_special(text, begin, middle, end, closing, stop, tables)
        or (start > begin and _ends_special(text, start, middle, end, closing, stop, tables))
        or (after > middle and _ends_special(text, after, end, end, closing, stop, tables))
    ):
        return np.int64(-1)
    count = _add_word(text, begin, start, 1, words, hashes, count)
    is_quote = after > middle and text[after - 1] != 45 and text[after - 1] != 0x94
    is_possessive = is_quote and end - after == 1 and text[after] | 32 == 115
    parts = np.int64(1)
    if is_quote and not is_possessive:
        count = _add_word(text, start, end, end - start - (after - middle - 1), words, hashes, count)
        characters = end - start - (after - middle - 1)
    else:
        count = _add_word(text, start, middle, middle - start, words, hashes, count)
        characters = middle - start
        if is_possessive:
            count = _add_word(text, middle, end, 2, words, hashes, count)
            characters, parts = characters + 2, parts + 1
        else:
            count = _add_word(text, middle, after, 1, words, hashes, count)
            count = _add_word(text, after, end, end - after, words, hashes, count)
            characters, parts = characters + end - after, parts + (end > after)
    count = _add_word(text, end, closing, 1, words, hashes, count)
    # Of the signs before a word only this quote is no punctuation in datatrove's list.
    is_counted = _curled(text, begin) == 0x98
    totals[0] += parts + is_counted
    totals[1] += characters + is_counted
    totals[2] += parts
    return _add_word(text, closing, stop, 1, words, hashes, count)


@compiled
def _divide_other(text, begin, stop, signs, tables, words, hashes, count, totals):
    """divide_words for a chunk that is more than a word of letters and a sign."""
    after = np.int64(-1)
    if stop - begin < BLOCK:
        after = _divide_plain(text, begin, stop, signs, tables, words, hashes, count, totals)
    return divide_chunks(text, begin, stop, tables, words, hashes, count, totals) if after < 0 else after


@compiled
def divide_words(text, start, end, tables, words, hashes, count, totals):
    """Writes the words between two positions of a UTF-8 text from number `count` on; the number after them.

    words: (capacity, 3) int32: start, end, characters; hashes: (capacity,) uint64. totals: (3,) int64, to which are
    added the words with anything but punctuation, their characters, and the words with a letter. Returns -1 where the
    capacity could be exceeded.
    """
    classes, counted, characters = tables.classes, np.int64(0), np.int64(0)
    while start < end:
        if count + BLOCK + 3 > len(words):
            return np.int64(-1)
        # The chunks between spaces that end within a block; the next block begins with the one that does not.
        spaces = spaces_at(text, start) | ~first_bits(end - start)
        signs = ~(letters_at(text, start) | spaces)
        begins, ends = ~spaces & (spaces << ONE | ONE), spaces & ~(spaces << ONE | ONE)
        while ends:
            offset = lowest_bit(begins)
            size = lowest_bit(ends) - offset
            begins, ends = begins & (begins - ONE), ends & (ends - ONE)
            begin, stop = start + offset, start + offset + size
            of_chunk = signs >> np.uint64(offset) & ((ONE << np.uint64(size)) - ONE)
            # Most chunks are a word of letters, and most others such a word and one sign.
            is_marked = (
                size > 1 and of_chunk == ONE << np.uint64(size - 1) and _is_divided_off(text, stop - 1, classes)
            )
            word_end = stop - is_marked
            value = hash_of(text, begin, word_end)
            is_simple = (of_chunk == 0 or is_marked) and special_slot_of_hash(value, tables) < 0
            if is_simple and not (is_marked and special_slot(text, begin, stop, tables) >= 0):
                place = np.uintp(count)
                words[place, 0], words[place, 1], words[place, 2] = begin, word_end, word_end - begin
                hashes[place] = value
                count += 1
                counted += 1
                characters += word_end - begin
                if is_marked:
                    place = np.uintp(count)
                    words[place, 0], words[place, 1], words[place, 2] = word_end, stop, 1
                    hashes[place] = hash_of(text, word_end, stop)
                    count += 1
            else:
                count = _divide_other(text, begin, stop, of_chunk, tables, words, hashes, count, totals)
        offset = lowest_bit(begins)
        if offset == 0:
            stop = start + BLOCK
            while stop < end and not spaces_at(text, stop):
                stop += BLOCK
            stop = min(end, stop + lowest_bit(spaces_at(text, stop))) if stop < end else end
            if count + stop - start + 3 > len(words):
                return np.int64(-1)
            count = _divide_other(text, start, stop, signs, tables, words, hashes, count, totals)
            offset = stop - start
        start += offset
    totals[0] += counted
    totals[1] += characters
    totals[2] += counted
    return count


@compiled
def divide_documents(text, bounds, tables, words, hashes, word_bounds, totals):
    """Divides documents at `bounds`, (documents, 2), of one text; writes the numbers of each one's words.

    totals: (documents, 3) int64, zero, as of divide_words. The number of words; -1 where there was no room.
    """
    count = np.int64(0)
    for document in range(len(bounds)):
        word_bounds[document, 0] = count
        row = totals[document]
        count = divide_words(text, bounds[document, 0], bounds[document, 1], tables, words, hashes, count, row)
        if count < 0:
            return count
        word_bounds[document, 1] = count
    return count


class DividedTexts(NamedTuple):
    """Documents end to end and their words."""

    text: np.ndarray
    """(bytes,) uint8"""
    bounds: np.ndarray
    """(documents, 2) int64: first byte and end of each."""
    words: np.ndarray
    """(words, 3) int32: start and end in `text`, characters."""
    hashes: np.ndarray
    """(words,) uint64"""
    word_bounds: np.ndarray
    """(documents, 2) int64: first word and end of each."""
    totals: np.ndarray
    """(documents, 3) int64: words with anything but punctuation, their characters, words with a letter."""

    def taking(self, numbers: list[int]) -> "DividedTexts":
        """The same of some documents only."""
        return self._replace(
            bounds=self.bounds[numbers], word_bounds=self.word_bounds[numbers], totals=self.totals[numbers]
        )


def divided_texts(text: np.ndarray, bounds: np.ndarray) -> DividedTexts:
    """The words of documents of less than 2 GiB together, as joined_texts gives them; memory of 7 bytes per byte."""
    tables, word_bounds = word_tables(), np.zeros_like(bounds)
    for capacity in (len(text) // 3 + 1024, len(text) + 1024):
        words, hashes = np.empty((capacity, 3), np.int32), np.empty(capacity, np.uint64)
        totals = np.zeros((len(bounds), 3), np.int64)
        count = divide_documents(text, bounds, tables, words, hashes, word_bounds, totals)
        if count >= 0:
            break
    return DividedTexts(text, bounds, words[:count], hashes[:count], word_bounds, totals)
