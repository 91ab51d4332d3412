"""What stands between spaces, divided into words by all the rules: signs off both ends, then within.

Words are spaCy's for English (word_rules), as far as these rules go.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pretrain.preparation.cleaning.compiled.kept import kept_array
from pretrain.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    ONE,
    before,
    characters_in,
    code_at,
    compiled,
    first_bits,
    hash_of,
    inlined,
    joined_texts,
    letters_at,
    mask_of,
)
from pretrain.preparation.cleaning.compiled.word_rules import (
    ALPHABETIC,
    CURRENCY,
    DIGIT,
    ICON,
    IS_SPACE,
    JOINED,
    LOWER,
    PREFIX,
    PUNCTUATION,
    QUOTE,
    SIGN,
    SUFFIX,
    UNITS_OF_MEASURE,
    UPPER,
    character_classes,
    special_words,
)

SPECIAL_BITS = 15
SPECIAL_SLOTS, UNIT_SLOTS = 1 << 13, 1 << 9
SPECIALS_FROM = 1 << (SPECIAL_BITS - 6)
PIECES_FROM = SPECIALS_FROM + SPECIAL_SLOTS
UNITS_FROM = PIECES_FROM + SPECIAL_SLOTS
MOST_SPECIAL_BYTES = 31
_LETTER = LOWER | UPPER
_EMOTICON_TOKENS = 5


class WordTables(NamedTuple):
    """What the division looks up. Few arrays, for all of them are passed on to every function that is called."""

    classes: np.ndarray
    """(0x110000,) uint32: of every code point."""
    lookups: np.ndarray
    """uint64: bits by the highest SPECIAL_BITS of a hash, whether a special word may have it; from SPECIALS_FROM on,
    their hashes, 0 where a slot is empty; from PIECES_FROM on, by slot, in bytes: the number of their pieces, the
    lengths of the first two, whether pieces are joined to it; from UNITS_FROM on, hashes as well."""


@inlined
def find_slot(lookups, first, size, value):
    """The slot of a hash in the open-addressed table of `size` from `first` on, or -1 - the empty slot for it."""
    mask = np.uint64(size - 1)
    slot = value >> np.uint64(7) & mask
    while lookups[np.uint64(first) + slot] != np.uint64(0):
        if lookups[np.uint64(first) + slot] == value:
            return np.int64(slot)
        slot = (slot + ONE) & mask
    return -1 - np.int64(slot)


def hash_of_bytes(text: bytes) -> np.uint64:
    """The hash that a word of these bytes has."""
    return np.uint64(hash_of(joined_texts([text])[0], 0, len(text)))


@kept_array
def _lookups() -> np.ndarray:
    lookups = np.zeros(UNITS_FROM + UNIT_SLOTS, np.uint64)

    def fill(first: int, size: int, words: Iterable[str]) -> None:
        for word in words:
            value = hash_of_bytes(word.encode())
            lookups[first - 1 - find_slot(lookups, first, size, value)] = value

    specials = special_words()
    fill(SPECIALS_FROM, SPECIAL_SLOTS, specials)
    fill(UNITS_FROM, UNIT_SLOTS, UNITS_OF_MEASURE)
    for word, parts in specials.items():
        value = hash_of_bytes(word.encode())
        lengths = [len(part.encode()) for part in parts] + [0]
        slot = find_slot(lookups, SPECIALS_FROM, SPECIAL_SLOTS, value)
        lookups[PIECES_FROM + slot] = len(parts) | lengths[0] << 8 | lengths[1] << 16 | (word in JOINED) << 24
        bits = ONE << (value >> np.uint64(24) & np.uint64(63)) | ONE << (value >> np.uint64(18) & np.uint64(63))
        lookups[int(value) >> (64 - SPECIAL_BITS + 6)] |= bits
    return lookups


@functools.cache
def word_tables() -> WordTables:
    """The tables, the same ones throughout a process."""
    return WordTables(character_classes(), _lookups())


@inlined
def _class_before(text, start, position, classes):
    if position <= start:
        return np.uint32(0)
    return classes[code_at(text, before(text, start, position))[0]]


@inlined
def _class_at(text, position, end, classes):
    return classes[code_at(text, position)[0]] if position < end else np.uint32(0)


@inlined
def special_slot(text, start, end, tables):
    """The slot of a word with pieces of its own; negative for none."""
    if end - start > MOST_SPECIAL_BYTES or end <= start:
        return np.int64(-1)
    return special_slot_of_hash(hash_of(text, start, end), tables)


@inlined
def special_slot_of_hash(value, tables):
    bits = tables.lookups[value >> np.uint64(64 - SPECIAL_BITS + 6)]
    if not bits >> (value >> np.uint64(24) & np.uint64(63)) & bits >> (value >> np.uint64(18) & np.uint64(63)) & ONE:
        return np.int64(-1)
    return find_slot(tables.lookups, SPECIALS_FROM, SPECIAL_SLOTS, value)


@inlined
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
def _suffix_bytes_of_any(text, start, end, has_digit, tables):
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
        if (
            is_digit
            and position + 1 < end
            and find_slot(tables.lookups, UNITS_FROM, UNIT_SLOTS, hash_of(text, position + 1, end)) >= 0
        ):
            return end - position - 1
    return 0


@inlined
def _suffix_bytes(text, start, end, has_digit, tables):
    if end <= start:
        return 0
    last = text[end - 1]
    if last < 0x80 and last != 46:
        if tables.classes[last] & SUFFIX:
            return 1
        if tables.classes[last] & ALPHABETIC and last | 32 != 115 and not has_digit:
            return 0
    return _suffix_bytes_of_any(text, start, end, has_digit, tables)


@inlined
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
    is_protocol = True
    for position in range(start, end - 2):
        if text[position] == 58 and text[position + 1] == 47 and text[position + 2] == 47:
            if is_protocol and position - start >= 2 and _is_host(text, position + 3, end, classes):
                return True
        elif text[position] == 64 and position > start and _is_host(text, position + 1, end, classes):
            return True
        if text[position] & 0xC0 != 0x80:
            code = code_at(text, position)[0]
            is_protocol = is_protocol and (code in (43, 45, 46, 95) or classes[code] & (_LETTER | DIGIT) != 0)
    return False


@inlined
def _add_pieces(words, count, start, end, slot, tables):
    pieces = tables.lookups[PIECES_FROM + slot]
    number = np.int64(pieces & np.uint64(0xFF))
    for index in range(number - 1):
        size = np.int64(pieces >> np.uint64(8 * (index + 1)) & np.uint64(0xFF))
        words[count, 0], words[count, 1] = start, start + size
        start, count = start + size, count + 1
    words[count, 0], words[count, 1] = start, end
    return count + 1


@inlined
def _divide_chunk(text, start, end, has_digit, tables, words, count):
    """Divides what stands between spaces; the number of words after it."""
    classes, first_word = tables.classes, count
    suffix_stop = end
    slot = np.int64(-1)
    while start < end:
        slot = special_slot(text, start, end, tables)
        if slot >= 0:
            break
        prefix = _prefix_bytes(text, start, end, classes)
        if prefix and prefix < end - start and special_slot(text, start + prefix, end, tables) >= 0:
            words[count, 0], words[count, 1] = start, start + prefix
            count, start = count + 1, start + prefix
            continue
        suffix = _suffix_bytes(text, start + prefix, end, has_digit, tables)
        if suffix and suffix < end - start and special_slot(text, start, end - suffix, tables) >= 0:
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


@inlined
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


@inlined
def _add_suffixes(text, start, stop, has_digit, tables, words, count, first):
    """Adds the suffixes between `start` and `stop` in the order of the text."""
    begin = count
    while stop > start:
        size = 1
        if stop - start > 1:
            size = min(max(_suffix_bytes(text, first, stop, has_digit, tables), 1), stop - start)
        words[count, 0], words[count, 1] = stop - size, stop
        stop, count = stop - size, count + 1
    for index in range((count - begin) // 2):
        low, high = begin + index, count - 1 - index
        a, b = words[low, 0], words[low, 1]
        words[low, 0], words[low, 1] = words[high, 0], words[high, 1]
        words[high, 0], words[high, 1] = a, b
    return count


@inlined
def _join_emoticons(text, tables, words, first, count):
    """Puts signs that are an emoticon together again."""
    written, index = first, first
    while index < count:
        last = index
        if words[index, 1] - words[index, 0] <= 5:
            for other in range(min(count, index + _EMOTICON_TOKENS) - 1, index, -1):
                slot = special_slot(text, words[index, 0], words[other, 1], tables)
                if slot >= 0 and tables.lookups[PIECES_FROM + slot] >> np.uint64(24):
                    last = other
                    break
        words[written, 0], words[written, 1] = words[index, 0], words[last, 1]
        written, index = written + 1, last + 1
    return written


@compiled
def _count_word(text, start, end, classes):
    """(1 if there is anything but punctuation, 1 if there is a letter) in a word."""
    has_other = has_letter = False
    while start < end and not (has_other and has_letter):
        code, size = code_at(text, start)
        has_other = has_other or not classes[code] & PUNCTUATION
        has_letter = has_letter or classes[code] & ALPHABETIC != 0
        start += size
    return np.int64(has_other), np.int64(has_letter)


@inlined
def divide_chunks(text, start, end, tables, words, hashes, count, totals):
    """`divide_words` of module words for what has no ASCII space in it."""
    classes = tables.classes
    while start < end:
        stop, is_plain, has_digit = start, True, False
        size, kind = np.int64(0), np.uint32(0)
        block = first_bits(end - start)
        is_ascii = end - start <= BLOCK and not mask_of(text, start, 0, 0x80, 0xFF) & block
        if is_ascii:
            stop, is_plain = end, not ~letters_at(text, start) & block
            has_digit = mask_of(text, start, 0, 48, 57) & block != 0
        while stop < end:
            code, size = code_at(text, stop)
            kind = classes[code]
            if kind & IS_SPACE:
                break
            is_plain = is_plain and kind & ALPHABETIC != 0 and not kind & (PREFIX | SUFFIX)
            has_digit = has_digit or kind & DIGIT != 0
            stop += size
        first = count
        slot = special_slot(text, start, stop, tables) if is_plain else np.int64(-1)
        if slot >= 0:
            count = _add_pieces(words, count, start, stop, slot, tables)
        elif is_plain and stop > start:
            words[count, 0], words[count, 1] = start, stop
            count += 1
        elif stop > start:
            count = _divide_chunk(text, start, stop, has_digit, tables, words, count)
        for number in range(first, count):
            begin, close = words[number, 0], words[number, 1]
            words[number, 2] = close - begin if is_ascii else characters_in(text, begin, close)
            hashes[number] = hash_of(text, begin, close)
            counted, alphabetic = _count_word(text, begin, close, classes)
            totals[0] += counted
            totals[1] += counted * words[number, 2]
            totals[2] += alphabetic
        start = stop + (size if stop < end else 0)
    return count
