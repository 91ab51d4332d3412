"""Texts to words, compiled: the division into English words that the published filters count by.

Words are spaCy's for English (word_rules), as far as these rules go: at spaces, then signs off both ends, then within.
"""

import functools
from typing import NamedTuple

import numba
import numpy as np

from pretrain.preparation.cleaning.word_rules import (
    ALPHABETIC,
    CURRENCY,
    DIGIT,
    ICON,
    IS_SPACE,
    JOINED,
    LOWER,
    PREFIX,
    QUOTE,
    SIGN,
    SUFFIX,
    UNITS_OF_MEASURE,
    UPPER,
    character_classes,
    special_words,
)

compiled = functools.partial(numba.njit, cache=True, nogil=True, error_model="numpy", _nrt=False)
HASH_START, HASH_FACTOR = np.uint64(0xCBF29CE484222325), np.uint64(0x9E3779B97F4A7C15)
SPECIAL_SLOTS = 1 << 13
MOST_SPECIAL_BYTES = 31
_LETTER = LOWER | UPPER
_EMOTICON_TOKENS = 5


class WordTables(NamedTuple):
    """What the division looks up."""

    classes: np.ndarray
    """(0x110000,) uint32: of every code point."""
    specials: np.ndarray
    """(SPECIAL_SLOTS,) uint64 hashes; 0: empty."""
    pieces: np.ndarray
    """(SPECIAL_SLOTS,) uint32: the number of pieces, then the bytes of the first two."""
    hints: np.ndarray
    """(1 << 15,) bool, by first byte, last byte and length: whether there is such a special word at all."""
    emoticons: np.ndarray
    units: np.ndarray


@compiled
def mixed(value):
    """A hash whose low bits depend on all bits; never 0, which marks an empty slot."""
    value ^= value >> np.uint64(32)
    value *= HASH_FACTOR
    return (value ^ value >> np.uint64(29)) | np.uint64(1)


@compiled
def hash_of(text, start, end):
    """A 64-bit hash of bytes; equal bytes have equal hashes."""
    value = HASH_START
    for position in range(start, end):
        value = (value ^ np.uint64(text[position])) * HASH_FACTOR
    return mixed(value)


@compiled
def find_slot(slots, value):
    """The slot of a hash in an open-addressed table, or -1 - the empty slot where it belongs."""
    mask = np.uint64(len(slots) - 1)
    slot = (value >> np.uint64(7)) & mask
    while slots[slot] != np.uint64(0):
        if slots[slot] == value:
            return np.int64(slot)
        slot = (slot + np.uint64(1)) & mask
    return -1 - np.int64(slot)


def hash_of_bytes(text: bytes) -> np.uint64:
    """The hash that a word of these bytes has."""
    return np.uint64(hash_of(np.frombuffer(text, np.uint8), 0, len(text)))


@functools.cache
def word_tables() -> WordTables:
    """The tables, built once in a process."""

    def table(words: dict[str, list[str]], slots: int) -> tuple[np.ndarray, np.ndarray]:
        hashes, pieces = np.zeros(slots, np.uint64), np.zeros(slots, np.uint32)
        for word, parts in words.items():
            value = hash_of_bytes(word.encode())
            slot = -1 - find_slot(hashes, value)
            lengths = [len(part.encode()) for part in parts] + [0]
            hashes[slot], pieces[slot] = value, len(parts) | lengths[0] << 8 | lengths[1] << 16
        return hashes, pieces

    specials, hints = special_words(), np.zeros(1 << 15, bool)
    for word in specials:
        text = word.encode()
        hints[(text[0] & 31) << 10 | (text[-1] & 31) << 5 | len(text)] = True
    emoticons, _ = table({word: [word] for word in JOINED}, 1 << 10)
    units, _ = table({unit: [unit] for unit in UNITS_OF_MEASURE}, 1 << 9)
    return WordTables(character_classes(), *table(specials, SPECIAL_SLOTS), hints, emoticons, units)


@compiled
def code_at(text, position):
    """(code point, bytes of it) at a position of UTF-8."""
    first = np.int64(text[position])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(text[position + 1]) & 0x3F, 2
    if first < 0xF0:
        return (
            (first & 0x0F) << 12 | (np.int64(text[position + 1]) & 0x3F) << 6 | np.int64(text[position + 2]) & 0x3F
        ), 3
    return (
        (first & 0x07) << 18
        | (np.int64(text[position + 1]) & 0x3F) << 12
        | (np.int64(text[position + 2]) & 0x3F) << 6
        | np.int64(text[position + 3]) & 0x3F
    ), 4


@compiled
def characters_in(text, start, end):
    """Characters between two positions."""
    count = 0
    for position in range(start, end):
        count += text[position] & 0xC0 != 0x80
    return count


@compiled
def before(text, start, position):
    """Where the character before a position begins; `start` - 1 where there is none."""
    position -= 1
    while position > start and text[position] & 0xC0 == 0x80:
        position -= 1
    return position


@compiled
def _class_before(text, start, position, classes):
    if position <= start:
        return np.uint32(0)
    return classes[code_at(text, before(text, start, position))[0]]


@compiled
def _class_at(text, position, end, classes):
    return classes[code_at(text, position)[0]] if position < end else np.uint32(0)


@compiled
def _special(text, start, end, tables):
    """The slot of a word with pieces of its own; negative for none."""
    size = end - start
    if size > MOST_SPECIAL_BYTES or size <= 0:
        return np.int64(-1)
    if not tables.hints[(np.int64(text[start]) & 31) << 10 | (np.int64(text[end - 1]) & 31) << 5 | size]:
        return np.int64(-1)
    return find_slot(tables.specials, hash_of(text, start, end))


@compiled
def _prefix_bytes(text, start, end, classes):
    first = text[start]
    if first == 46:  # .
        run = start
        while run < end and text[run] == 46:
            run += 1
        return run - start if run - start > 1 else 0
    if first == 43:  # +
        return 0 if start + 1 < end and 48 <= text[start + 1] <= 57 else 1
    if (first == 85 or first == 67 or first == 65) and end - start > 1:  # US$ C$ A$
        if text[start + 1] == 36 and first != 85:
            return 2
        if first == 85 and end - start > 2 and text[start + 1] == 83 and text[start + 2] == 36:
            return 3
    code, size = code_at(text, start)
    return size if classes[code] & PREFIX else 0


@compiled
def _suffix_bytes(text, start, end, has_digit, tables):
    if end <= start:
        return 0
    classes = tables.classes
    last = before(text, start, end)
    code = code_at(text, last)[0]
    previous = _class_before(text, start, last, classes)
    if code == 46:  # .
        run = end
        while run > start and text[run - 1] == 46:
            run -= 1
        if end - run > 1:
            return end - run
        before_it = code_at(text, before(text, start, last))[0] if last > start else 0
        if (
            last - start >= 3
            and text[last - 2] == 0xB0
            and text[last - 3] == 0xC2
            and before_it | 32 in (99, 102, 107)
        ):
            return 1  # °C.
        if previous & (DIGIT | LOWER | SIGN | QUOTE) or before_it in (0x25, 0xB2, 0x2D, 0x2B):
            return 1
        if previous & UPPER and _class_before(text, start, before(text, start, last), classes) & UPPER:
            return 1
        return 0
    if (code == 115 or code == 83) and last > start:  # 's
        mark = before(text, start, last)
        if code_at(text, mark)[0] in (0x27, 0x2019):
            return end - mark
    if classes[code] & SUFFIX:
        return end - last
    if previous & DIGIT and (code == 43 or classes[code] & CURRENCY):
        return end - last
    if has_digit:
        position = last
        for _ in range(5):
            if position < start:
                break
            if 48 <= text[position] <= 57:
                break
            position = before(text, start, position)
        is_digit = start <= position <= last and 48 <= text[position] <= 57
        if is_digit and position + 1 < end and find_slot(tables.units, hash_of(text, position + 1, end)) >= 0:
            return end - position - 1
    return 0


@compiled
def _infix_bytes(text, position, start, end, classes):
    """Bytes of what divides a word at a position; 0 where nothing does."""
    first = text[position]
    if first < 0x80 and classes[first] & (ALPHABETIC | DIGIT):
        return 0
    if first == 46:  # .
        run = position
        while run < end and text[run] == 46:
            run += 1
        if run - position > 1:
            return run - position
        around = _class_before(text, start, position, classes) & (LOWER | QUOTE)
        return 1 if around and _class_at(text, position + 1, end, classes) & (UPPER | QUOTE) else 0
    code, size = code_at(text, position)
    if code == 0x2026 or classes[code] & ICON:
        return size
    previous = _class_before(text, start, position, classes)
    following = _class_at(text, position + size, end, classes)
    is_before_number = following & DIGIT != 0 or (position + 1 < end and text[position + 1] == 0x2D)
    if previous & DIGIT and is_before_number and code in (0x2B, 0x2D, 0x2A, 0x5E):
        return 1
    if code == 0x2C:
        return 1 if previous & _LETTER and following & _LETTER else 0
    if previous & (_LETTER | DIGIT):
        if code in (0x2013, 0x2014, 0x7E, 0x3A, 0x3C, 0x3E, 0x3D, 0x2F) and following & _LETTER:
            return size
        if code == 0x2D:
            run = position
            while run < end and text[run] == 0x2D:
                run += 1
            if run - position <= 3 and _class_at(text, run, end, classes) & _LETTER:
                return run - position
    return 0


@compiled
def _is_host(text, start, end, classes):
    """Whether an address without its protocol begins here: names divided by dots, then the end, a port or a path."""
    stop, label, dots = start, start, 0
    while stop < end:
        code, size = code_at(text, stop)
        if code == 46:
            if stop == label or text[stop - 1] in (45, 95) or text[label] in (45, 95):
                return False
            label, dots = stop + 1, dots + 1
        elif not (
            (code < 0x80 and classes[code] & (ALPHABETIC | DIGIT)) or code in (45, 95) or 0xA1 <= code <= 0xFFFF
        ):
            break
        stop += size
    if not dots or stop == label:
        return False
    numbers, letters, position = dots == 3, 0, label
    while position < stop:
        code, size = code_at(text, position)
        if not classes[code] & LOWER:
            letters = -1000
        letters += 1
        position += size
    for position in range(start, stop):
        numbers = numbers and (text[position] == 46 or 48 <= text[position] <= 57)
    if not numbers and not 2 <= letters <= 63:
        return False
    if stop < end and text[stop] == 58:
        digits = stop + 1
        while digits < end and 48 <= text[digits] <= 57:
            digits += 1
        if not 2 <= digits - stop - 1 <= 5:
            return False
        stop = digits
    return stop == end or text[stop] in (47, 63, 35)


@compiled
def _is_address(text, start, end, classes):
    """Whether a word is a web or mail address, which is not divided."""
    if _is_host(text, start, end, classes):
        return True
    for position in range(start + 1, end - 2):
        if text[position] == 58 and text[position + 1] == 47 and text[position + 2] == 47:
            if position - start >= 2 and _is_host(text, position + 3, end, classes):
                return True
        elif text[position] == 64 and _is_host(text, position + 1, end, classes):
            return True
    return False


@compiled
def _add_pieces(words, count, start, end, slot, tables):
    pieces = tables.pieces[slot]
    number = np.int64(pieces & 0xFF)
    for index in range(number - 1):
        size = np.int64(pieces >> np.uint32(8 * (index + 1)) & 0xFF)
        words[count, 0], words[count, 1] = start, start + size
        start, count = start + size, count + 1
    words[count, 0], words[count, 1] = start, end
    return count + 1


@compiled
def _divide_chunk(text, start, end, has_digit, tables, words, count):
    """Divides what stands between spaces; the number of words after it."""
    classes, first_word = tables.classes, count
    suffix_stop = end
    slot = np.int64(-1)
    while start < end:
        slot = _special(text, start, end, tables)
        if slot >= 0:
            break
        prefix = _prefix_bytes(text, start, end, classes)
        if prefix and prefix < end - start and _special(text, start + prefix, end, tables) >= 0:
            words[count, 0], words[count, 1] = start, start + prefix
            count, start = count + 1, start + prefix
            continue
        suffix = _suffix_bytes(text, start + prefix, end, has_digit, tables)
        if suffix and suffix < end - start and _special(text, start, end - suffix, tables) >= 0:
            end -= suffix
            continue
        if not prefix and not suffix:
            break
        if prefix:
            words[count, 0], words[count, 1] = start, start + prefix
            count, start = count + 1, start + prefix
        end -= suffix
    if start < end:
        count = _add_middle(text, start, end, slot, tables, words, count)
    # The suffixes were taken from the end inwards, by the same rule from each end.
    count = _add_suffixes(text, end, suffix_stop, has_digit, tables, words, count, start)
    if count - first_word > 1:
        count = _join_emoticons(text, tables, words, first_word, count)
    return count


@compiled
def _add_middle(text, start, end, slot, tables, words, count):
    if slot >= 0:
        return _add_pieces(words, count, start, end, slot, tables)
    classes = tables.classes
    begin, position = start, start
    is_first = True
    while position < end:
        size = _infix_bytes(text, position, start, end, classes)
        # What stands at the very start is no division.
        if size and position > start:
            if is_first and _is_address(text, start, end, classes):
                break
            is_first = False
            if position > begin:
                words[count, 0], words[count, 1] = begin, position
                count += 1
            words[count, 0], words[count, 1] = position, position + size
            count += 1
            begin = position = position + size
        else:
            position += max(size, code_at(text, position)[1])
    if begin < end:
        words[count, 0], words[count, 1] = begin, end
        count += 1
    return count


@compiled
def _add_suffixes(text, start, stop, has_digit, tables, words, count, first):
    """Adds the suffixes between `start` and `stop` in the order of the text."""
    begin = count
    while stop > start:
        size = _suffix_bytes(text, first, stop, has_digit, tables)
        size = min(max(size, 1), stop - start)
        words[count, 0], words[count, 1] = stop - size, stop
        stop, count = stop - size, count + 1
    for index in range((count - begin) // 2):
        low, high = begin + index, count - 1 - index
        a, b = words[low, 0], words[low, 1]
        words[low, 0], words[low, 1] = words[high, 0], words[high, 1]
        words[high, 0], words[high, 1] = a, b
    return count


@compiled
def _join_emoticons(text, tables, words, first, count):
    """Puts signs that are an emoticon together again."""
    written, index = first, first
    while index < count:
        last = index
        if words[index, 1] - words[index, 0] <= 5:
            for other in range(min(count, index + _EMOTICON_TOKENS) - 1, index, -1):
                size = words[other, 1] - words[index, 0]
                if size <= 16 and find_slot(tables.emoticons, hash_of(text, words[index, 0], words[other, 1])) >= 0:
                    last = other
                    break
        words[written, 0], words[written, 1] = words[index, 0], words[last, 1]
        written, index = written + 1, last + 1
    return written


@compiled
def _is_word_and_sign(text, start, sign, end, tables):
    """Whether it is a word of ASCII letters with one comma, semicolon, colon or full stop: by far the most common."""
    if sign != end - 1 or sign - start < 3:
        return False
    mark = text[sign]
    if not (mark == 44 or mark == 46 or mark == 58 or mark == 59):
        return False
    for position in range(start, sign):
        if text[position] >= 0x80:
            return False
    if mark == 46 and text[sign - 1] < 97:
        return False
    return _special(text, start, end, tables) < 0 and _special(text, start, sign, tables) < 0


@compiled
def divide_words(text, start, end, tables, words, hashes, count):
    """Writes the words between two positions of a UTF-8 text from number `count` on; the number after them.

    words: (capacity, 3) int32: start, end, characters; hashes: (capacity,) uint64. Returns -1 where the capacity could
    be exceeded.
    """
    classes = tables.classes
    position = start
    while position < end:
        # Between spaces: most are of letters only, and are whole.
        begin, plain, has_digit = position, True, False
        value, characters, sign = HASH_START, 0, position
        value_before_sign = value
        while position < end:
            byte = text[position]
            if byte < 0x80:
                kind = classes[byte]
                if not kind & ALPHABETIC:
                    if kind & IS_SPACE:
                        break
                    if plain:
                        sign, value_before_sign = position, value
                    plain = False
                    has_digit = has_digit or kind & DIGIT != 0
                value = (value ^ np.uint64(byte)) * HASH_FACTOR
                position += 1
                characters += 1
            else:
                code, size = code_at(text, position)
                kind = classes[code]
                if kind & IS_SPACE:
                    break
                plain = plain and kind & ALPHABETIC != 0 and not kind & (PREFIX | SUFFIX)
                for index in range(position, position + size):
                    value = (value ^ np.uint64(text[index])) * HASH_FACTOR
                position += size
                characters += 1
        if position > begin:
            if count + position - begin + 3 > len(words):
                return np.int64(-1)
            first = count
            slot = np.int64(-1)
            if plain:
                slot = _special(text, begin, position, tables)
                if slot >= 0:
                    count = _add_pieces(words, count, begin, position, slot, tables)
                else:
                    words[count, 0], words[count, 1] = begin, position
                    words[count, 2] = characters
                    hashes[count] = mixed(value)
                    count += 1
            elif _is_word_and_sign(text, begin, sign, position, tables):
                words[count, 0], words[count, 1], words[count, 2] = begin, sign, characters - 1
                words[count + 1, 0], words[count + 1, 1], words[count + 1, 2] = sign, position, 1
                hashes[count], hashes[count + 1] = mixed(value_before_sign), hash_of(text, sign, position)
                count += 2
                plain = True
            else:
                count = _divide_chunk(text, begin, position, has_digit, tables, words, count)
            if not plain or slot >= 0:
                for number in range(first, count):
                    words[number, 2] = characters_in(text, words[number, 0], words[number, 1])
                    hashes[number] = hash_of(text, words[number, 0], words[number, 1])
        while position < end:
            byte = text[position]
            if byte < 0x80:
                if not classes[byte] & IS_SPACE:
                    break
                position += 1
            else:
                code, size = code_at(text, position)
                if not classes[code] & IS_SPACE:
                    break
                position += size
    return count


@compiled
def divide_documents(text, bounds, tables, words, hashes, word_bounds):
    """Divides documents at `bounds`, (documents, 2), of one text; writes the numbers of each one's words.

    The number of words; -1 where there was no room.
    """
    count = 0
    for document in range(len(bounds)):
        word_bounds[document, 0] = count
        count = divide_words(text, bounds[document, 0], bounds[document, 1], tables, words, hashes, count)
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

    def taking(self, numbers: list[int]) -> "DividedTexts":
        """The same of some documents only."""
        return self._replace(bounds=self.bounds[numbers], word_bounds=self.word_bounds[numbers])


def joined_texts(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(text, bounds) of documents end to end."""
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    bounds = np.stack([np.concatenate([ends[:0], [0], ends[:-1]])[: len(ends)], ends], axis=1)
    return np.frombuffer(b"".join(texts), np.uint8), np.ascontiguousarray(bounds)


def divided_texts(texts: list[bytes]) -> DividedTexts:
    """The words of documents of less than 2 GiB together; memory of about 5 bytes per byte of text."""
    text, bounds = joined_texts(texts)
    tables, word_bounds = word_tables(), np.zeros((len(texts), 2), np.int64)
    for capacity in (len(text) // 3 + 1024, len(text) + 1024):
        words, hashes = np.empty((capacity, 3), np.int32), np.empty(capacity, np.uint64)
        count = divide_documents(text, bounds, tables, words, hashes, word_bounds)
        if count >= 0:
            break
    return DividedTexts(text, bounds, words[:count], hashes[:count], word_bounds)
