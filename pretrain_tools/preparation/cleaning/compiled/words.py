"""Texts to words and lines, compiled: what stands between spaces, and what stands between line ends."""

from typing import NamedTuple

import numpy as np

from pretrain_tools.preparation.cleaning.compiled.characters import (
    ALPHABETIC,
    CLOSING,
    DIGIT,
    IS_SPACE,
    IS_VISIBLE,
    LINE_END,
    SENTENCE_END,
    SIGN,
    SMALL_LETTER,
    character_classes,
)
from pretrain_tools.preparation.cleaning.compiled.text_blocks import (
    HASH_FACTOR,
    HASH_START,
    code_at,
    compiled,
    hash_of,
    inlined,
    lowest_bit,
    mask_of,
    mixed,
)

COLUMNS = (
    "start", "stop", "characters", "words", "sentences", "longest_word", "first_kind", "first_code", "last_kind",
    "last_code", "numbers", "gaps", "tabs", "pipes", "commas", "semicolons", "opening", "closed", "signs", "hashes",
    "ellipses",
)  # fmt: skip
(
    START, STOP, CHARACTERS, WORDS, SENTENCES, LONGEST_WORD, FIRST_KIND, FIRST_CODE, LAST_KIND,
    LAST_CODE, NUMBERS, GAPS, TABS, PIPES, COMMAS, SEMICOLONS, OPENING, CLOSED, SIGNS, HASHES, ELLIPSES,
) = range(len(COLUMNS))  # fmt: skip
TOTALS = ("words", "word_characters", "alphabetic_words")
_WIDE = 0x3000


@inlined
def _character(text, position, classes):
    """(code point, bytes of it, classes) at a position."""
    # Unsigned, so that it is not checked whether they count from the end.
    byte = text[np.uintp(position)]
    if byte < 0x80:
        return np.int64(byte), np.int64(1), np.int64(classes[byte])
    code, size = code_at(text, position)
    return code, np.int64(size), np.int64(classes[np.uintp(code)])


@compiled
def _count_sign(text, begin, position, code, row):
    """Counts one of the signs that rules ask for, in a word that begins at `begin`."""
    if code == 46:
        dots = 1
        while position - dots >= begin and text[position - dots] == 46:
            dots += 1
        row[ELLIPSES] += dots % 3 == 0
        return
    if code == 0x2026:
        row[ELLIPSES] += 1
        return
    if code == 124:
        row[PIPES] += 1
    elif code == 44:
        row[COMMAS] += 1
    elif code == 35:
        row[HASHES] += 1
    elif code == 40 or code == 91:
        row[OPENING] += 1
    elif code == 41 or code == 93:
        row[CLOSED] += 1
    else:
        row[SEMICOLONS] += code == 59
        row[OPENING] += code == 123
        row[CLOSED] += code == 125
        row[SIGNS] += 1


@compiled
def _divide(text, bounds, classes, row, lengths, hashes, word_bounds, totals, table, line_hashes, places, line_bounds):
    """Fills the arrays of DividedTexts; returns the number of words and of lines. row: (COLUMNS,) of one line."""
    word = line = block = np.int64(0)
    for document in range(len(bounds)):
        word_bounds[document, 0], line_bounds[document, 0] = word, line
        position, end = bounds[document, 0], bounds[document, 1]
        counted = counted_characters = alphabetic = np.int64(0)
        block += 1
        while True:
            # One line.
            row_hash = HASH_START
            row[:] = 0
            words = sentences = longest = stop = spaces = characters = np.int64(0)
            last_code, last_kind, is_ended, size = np.int64(0), np.int64(0), False, np.int64(1)
            while position < end:
                if text[np.uintp(position)] == 32:
                    spaces += 1
                    position += 1
                    continue
                code, size, kind = _character(text, position, classes)
                if kind & IS_SPACE:
                    if kind & LINE_END and not (code == 13 and position + 1 < end and text[position + 1] == 10):
                        break
                    row[TABS] += code == 9
                    spaces += 1
                    position += size
                    continue
                # One word.
                if words == 0:
                    row[START], row[FIRST_KIND], row[FIRST_CODE] = position, kind, code
                else:
                    row[GAPS] += spaces > 1
                    sentences += is_ended
                    characters += spaces
                spaces, is_ended = np.int64(0), False
                begin, length, kinds = position, np.int64(0), np.int64(0)
                while position < end:
                    # Wide signs end sentences without a space.
                    is_wide_end = last_kind & SENTENCE_END and last_code >= _WIDE and length > 0
                    # Most words are small letters; counted at once, since a loop over them is mispredicted in each.
                    letters = min(lowest_bit(~mask_of(text, position, 0, 97, 122)), end - position)
                    if letters:
                        position += letters
                        length, kinds = length + letters, kinds | SMALL_LETTER
                        sentences += is_wide_end
                        last_kind, last_code, is_wide_end = np.int64(SMALL_LETTER), np.int64(97), False
                        if position >= end:
                            break
                    if text[np.uintp(position)] == 32:
                        break
                    code, size, kind = _character(text, position, classes)
                    if kind & IS_SPACE:
                        break
                    length, kinds = length + 1, kinds | kind
                    if kind & SIGN:
                        _count_sign(text, begin, position, code, row)
                    if not kind & CLOSING:
                        sentences += is_wide_end
                        last_kind, last_code = kind, code
                    position += size
                value = hash_of(text, begin, position)
                hashes[word], lengths[word] = value, length
                row_hash = (row_hash ^ value) * HASH_FACTOR
                word, words, stop = word + 1, words + 1, position
                characters, longest = characters + length, max(longest, length)
                is_ended = last_kind & SENTENCE_END != 0
                row[NUMBERS] += kinds & DIGIT != 0
                if kinds & IS_VISIBLE:
                    counted += 1
                    counted_characters += length
                    alphabetic += kinds & ALPHABETIC != 0
            if words == 0:
                block += 1
            else:
                row[STOP], row[CHARACTERS], row[WORDS], row[LONGEST_WORD] = stop, characters, words, longest
                row[SENTENCES], row[LAST_KIND], row[LAST_CODE] = sentences + 1, last_kind, last_code
                for column in range(len(row)):
                    table[column, line] = row[column]
                line_hashes[line], places[0, line], places[1, line] = mixed(row_hash), block, document
                line += 1
            if position >= end:
                break
            position += size
        word_bounds[document, 1], line_bounds[document, 1] = word, line
        totals[document, 0], totals[document, 1], totals[document, 2] = counted, counted_characters, alphabetic
    return word, line


@compiled
def _most_lines(text):
    """No fewer than the lines that the text has beside the last."""
    count = np.int64(0)
    for byte in text:
        count += 10 <= byte <= 13 or 28 <= byte <= 30 or byte == 0x85 or byte == 0xA8 or byte == 0xA9
    return count


@compiled
def join_lines(text, starts, stops, joined):
    """Writes lines one after another, each with a line end behind it."""
    position = np.int64(0)
    for line in range(len(starts)):
        for place in range(starts[line], stops[line]):
            joined[np.uintp(position)] = text[np.uintp(place)]
            position += 1
        joined[position] = 10
        position += 1


class DividedTexts(NamedTuple):
    """Documents end to end, their words and their lines."""

    text: np.ndarray
    """(bytes,) uint8"""
    bounds: np.ndarray
    """(documents, 2) int64: first byte and end of each."""
    lengths: np.ndarray
    """(words,) int32: characters."""
    hashes: np.ndarray
    """(words,) uint64"""
    word_bounds: np.ndarray
    """(documents, 2) int64: first word and end of each."""
    totals: np.ndarray
    """(documents, len(TOTALS)) int64, of the words that are not punctuation alone."""
    lines: np.ndarray
    """(len(COLUMNS), lines) int32, of the lines that are not blank."""
    line_hashes: np.ndarray
    """(lines,) uint64, of the words: spaces do not count."""
    places: np.ndarray
    """(2, lines) int64: number of the block, which blank lines divide, and of the document."""
    line_bounds: np.ndarray
    """(documents, 2) int64: first line and end of each."""

    def words_of(self, numbers: list[int]) -> "DividedTexts":
        """Takes some of the documents; the lines stay those of all, since Lines selects among them itself."""
        return self._replace(
            bounds=self.bounds[numbers], word_bounds=self.word_bounds[numbers], totals=self.totals[numbers]
        )


def divided_texts(text: np.ndarray, bounds: np.ndarray) -> DividedTexts:
    """Divides documents of less than 2 GiB together, as joined_texts gives them, into words and lines."""
    most_words, most_lines = len(text) // 2 + len(bounds), _most_lines(text) + len(bounds)
    lengths, hashes = np.empty(most_words, np.int32), np.empty(most_words, np.uint64)
    lines, row = np.empty((len(COLUMNS), most_lines), np.int32), np.empty(len(COLUMNS), np.int32)
    line_hashes, places = np.empty(most_lines, np.uint64), np.empty((2, most_lines), np.int64)
    word_bounds, line_bounds = np.zeros_like(bounds), np.zeros_like(bounds)
    totals = np.zeros((len(bounds), len(TOTALS)), np.int64)
    of_words, of_lines = (lengths, hashes, word_bounds, totals), (lines, line_hashes, places, line_bounds)
    words, count = _divide(text, bounds, character_classes(), row, *of_words, *of_lines)
    return DividedTexts(
        text=text,
        bounds=bounds,
        lengths=lengths[:words],
        hashes=hashes[:words],
        word_bounds=word_bounds,
        totals=totals,
        lines=lines[:, :count],
        line_hashes=line_hashes[:count],
        places=places[:, :count],
        line_bounds=line_bounds,
    )
