"""What the published filters measure of documents, compiled: words, lines, and what is repeated."""

import numpy as np

from pretrain.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    HASH_FACTOR,
    HASH_START,
    ONE,
    before,
    bits_in,
    characters_in,
    code_at,
    compiled,
    count_bytes,
    eight_bytes,
    find_byte,
    first_bits,
    hash_of,
    line_at,
    lowest_bit,
    mask_of,
    mixed,
    spaces_at,
    stripped,
)
from pretrain.preparation.cleaning.compiled.word_rules import ALPHABETIC, DIGIT, IS_SPACE, TERMINAL

QUALITY = (
    "words", "counted_words", "counted_characters", "alphabetic_words", "stop_words", "hashes", "ellipses", "lines",
    "bullet_lines", "ellipsis_lines",
)  # fmt: skip
"""Columns of quality_statistics; `counted` words have a character that is no punctuation."""
REPETITION_RULES = (
    "duplicate_paragraphs", "duplicate_paragraph_characters", "duplicate_lines", "duplicate_line_characters",
    "top_2_gram", "top_3_gram", "top_4_gram", *(f"duplicate_{n}_gram" for n in range(5, 11)),
)  # fmt: skip
LINE_MEASURES = ("lines", "ending_lines", "short_lines", "duplicate_characters", "characters", "newlines", "chunks")
"""Columns of line_statistics."""


@compiled
def quality_statistics(text, bounds, hashes, word_bounds, totals, classes, stop_words, enough, statistics):
    """Fills `statistics`, (documents, len(QUALITY)) int64.

    stop_words: hashes, at most 64; no more than `enough` different ones are counted.
    """
    for document in range(len(bounds)):
        start, end = bounds[document, 0], bounds[document, 1]
        first, last = word_bounds[document, 0], word_bounds[document, 1]
        found, different = np.uint64(0), np.int64(0)
        while first < last and different < enough:
            for index in range(len(stop_words)):
                if hashes[first] == stop_words[index]:
                    found |= ONE << np.uint64(index)
                    different = bits_in(found)
            first += 1
        lines = bullets = ending = np.int64(0)
        position = start
        while position < end:
            stop, following = line_at(text, position, end)
            begin, stop = stripped(text, position, stop, classes)
            lines += 1
            bullets += begin < stop and (text[begin] == 45 or code_at(text, begin)[0] == 0x2022)
            ending += _ends_with_ellipsis(text, begin, stop)
            position = following
        hashes_in_text, ellipses = _marks(text, start, end)
        row = statistics[document]
        row[0], row[4], row[5], row[6] = (
            word_bounds[document, 1] - word_bounds[document, 0],
            different,
            hashes_in_text,
            ellipses,
        )
        row[1], row[2], row[3] = totals[document, 0], totals[document, 1], totals[document, 2]
        row[7], row[8], row[9] = lines, bullets, ending


@compiled
def _marks(text, start, end):
    """(number signs, ellipses of one character or of three) in a document."""
    signs = ellipses = np.int64(0)
    free = position = start
    while position < end:
        signs += bits_in(mask_of(text, position, 0, 35, 35) & first_bits(end - position))
        dots = mask_of(text, position, 0, 46, 46)
        dots &= mask_of(text, position + 1, 0, 46, 46) & mask_of(text, position + 2, 0, 46, 46)
        dots |= (
            mask_of(text, position, 0, 0xE2, 0xE2)
            & mask_of(text, position + 1, 0, 0x80, 0x80)
            & mask_of(text, position + 2, 0, 0xA6, 0xA6)
        )
        while dots:
            place = position + lowest_bit(dots)
            if free <= place <= end - 3:
                ellipses += 1
                free = place + 3
            dots &= dots - ONE
        position += BLOCK
    return signs, ellipses


@compiled
def _ends_with_ellipsis(text, begin, last):
    if last - begin < 3:
        return False
    if text[last - 1] == 46:
        return text[last - 2] == 46 and text[last - 3] == 46
    return text[last - 3] == 0xE2 and text[last - 2] == 0x80 and text[last - 1] == 0xA6


@compiled
def _find(keys, stamps, stamp, mask, value):
    """(slot, whether the value is in it) in a table of which entries with another stamp are empty."""
    slot = value >> np.uint64(11) & mask
    while stamps[slot] == stamp:
        if keys[slot] == value:
            return slot, True
        slot = (slot + np.uint64(1)) & mask
    return slot, False


@compiled
def _mask_for(count):
    size = 16
    while size < 2 * count:
        size *= 2
    return np.uint64(size - 1)


@compiled
def _most_lines(text, bounds):
    most = np.int64(0)
    for document in range(len(bounds)):
        most = max(most, count_bytes(text, bounds[document, 0], bounds[document, 1], 10, 10))
    return most + 1


class Scratch:
    """Hash tables that one batch after another is counted in: new ones would have to be zeroed."""

    def __init__(self) -> None:
        self._tables: tuple[np.ndarray, ...] = (np.empty(0, np.uint64),)

    def tables(self, text: np.ndarray, bounds: np.ndarray, most_words: int = 0) -> tuple[np.ndarray, ...]:
        """(keys, stamps, counts, first positions, the last stamp) with room for all words or lines of a document."""
        size = 64
        while size < 2 * max(most_words, _most_lines(text, bounds)):
            size *= 2
        if size > len(self._tables[0]):
            integers = (np.zeros(length, np.int64) for length in (size, size, size, 1))
            self._tables = (np.zeros(size, np.uint64), *integers)
        return self._tables


@compiled
def repetitions(text, bounds, words, hashes, word_bounds, classes, limits, scratch, rules):
    """Writes the first of REPETITION_RULES whose limit each document exceeds to `rules`, (documents,); -1 for none.

    limits: (13,) shares of the characters or elements, inf where a rule is off.
    """
    stamp, smallest = scratch[4][0], np.inf
    for limit in limits[7:]:
        smallest = min(smallest, limit)
    for document in range(len(bounds)):
        start, end = bounds[document, 0], bounds[document, 1]
        characters = characters_in(text, start, end)
        first_word, words_end = word_bounds[document, 0], word_bounds[document, 1]
        rule = -1
        for first_rule in (0, 2):
            begin, stop, least = start, end, 1
            if first_rule == 0:
                begin, stop = stripped(text, start, end, classes)
                least = 2
            stamp, elements, duplicates, repeated = _repeated_blocks(
                text, begin, stop, least, False, classes, scratch, stamp
            )
            if duplicates / elements > limits[first_rule]:
                rule = first_rule
                break
            if repeated / characters > limits[first_rule + 1]:
                rule = first_rule + 1
                break
        if rule >= 0:
            rules[document], scratch[4][0] = rule, stamp
            continue
        most, covered = _most_grams(words, hashes, first_word, words_end, scratch)
        for n in range(2, 5):
            # An n-gram of three or four words is made of two pairs: no more than twice the most of any.
            if most * min(n - 1, 2) <= limits[2 + n] * characters or rule >= 0:
                continue
            stamp += 1
            top = _top_characters(words, hashes, first_word, words_end, n, scratch, stamp)
            if top / characters > limits[2 + n]:
                rule = 2 + n
        if rule < 0 and covered > smallest * characters:
            for n in range(5, 11):
                if not np.isfinite(limits[2 + n]):
                    continue
                stamp += 1
                repeated = _duplicate_characters(words, hashes, first_word, words_end, n, scratch, stamp)
                if repeated / characters > limits[2 + n]:
                    rule = 2 + n
                    break
        rules[document], scratch[4][0] = rule, stamp


@compiled
def _outline(text, start, end):
    """A hash of some of the bytes, by which most pieces differ."""
    if end - start <= 32:
        return hash_of(text, start, end)
    value = hash_of(text, start, start + 16) ^ eight_bytes(text, (start + end) // 2)
    return mixed(value * HASH_FACTOR ^ eight_bytes(text, end - 8) ^ np.uint64(end - start))


@compiled
def _repeated_blocks(text, start, end, least, without_blank, classes, scratch, stamp):
    """(stamp, elements, duplicates, their characters) of what is divided by `least` newlines or more.

    First by outlines: where all differ, nothing is repeated. without_blank: elements of spaces do not count.
    """
    keys, stamps, _, _, _ = scratch
    mask = _mask_for(count_bytes(text, start, end, 10, 10) + 1)
    elements = duplicates = repeated = np.int64(0)
    for is_exact in (False, True):
        stamp += 1
        elements = duplicates = repeated = np.int64(0)
        begin = position = start
        while position <= end:
            position = find_byte(text, position, end, 10)
            newlines = 0
            while position + newlines < end and text[position + newlines] == 10:
                newlines += 1
            if position == end or newlines >= least:
                if not without_blank or not _is_blank(text, begin, position, classes):
                    elements += 1
                    value = hash_of(text, begin, position) if is_exact else _outline(text, begin, position)
                    slot, seen = _find(keys, stamps, stamp, mask, value)
                    if seen:
                        duplicates += 1
                        repeated += characters_in(text, begin, position)
                    else:
                        keys[slot], stamps[slot] = value, stamp
                begin = position + newlines
                if position == end:
                    break
            position += newlines
        if not duplicates:
            break
    return stamp, elements, duplicates, repeated


@compiled
def _is_blank(text, start, end, classes):
    while start < end:
        code, size = code_at(text, start)
        if not classes[code] & IS_SPACE:
            return False
        start += size
    return True


@compiled
def _most_grams(words, hashes, start, end, scratch):
    """Upper bounds, from tables that small that they stay in the core's cache: each entry stands for several n-grams.

    (characters of all occurrences of any pair of words, a space added; characters of words in any five that have
    occurred before, which is no less than _duplicate_characters of five and more).
    """
    bits, _, counts, _, _ = scratch
    entries, shift = np.int64(64), np.uint64(58)
    while 2 * entries < end - start and entries < 2048:
        entries, shift = 2 * entries, shift - ONE
    bit_words, bit_shift = np.int64(64), np.uint64(52)
    while bit_words < end - start:
        bit_words, bit_shift = 2 * bit_words, bit_shift - ONE
    for index in range(entries):
        counts[index] = 0
    for index in range(bit_words):
        bits[index] = 0
    if end - start < 2:
        return np.int64(0), np.int64(0)
    # Unsigned places, and each word read once: a check for negative places would take as long as the rest.
    most = covered = np.int64(0)
    first, stop = np.uintp(start), np.uintp(end)
    size, value = np.int64(words[first, 2]), hashes[first]
    for place in range(first + np.uintp(1), stop):
        following, pair = np.int64(words[place, 2]), value + (hashes[place] << ONE)
        value = hashes[place]
        entry = pair >> shift
        counts[entry] += size + following + 2
        most = max(most, counts[entry])
        size = following
    covered_until = first
    for place in range(first, stop - np.uintp(4) if end - start > 4 else first):
        pair = hashes[place] + (hashes[place + np.uintp(1)] << ONE)
        other = hashes[place + np.uintp(2)] + (hashes[place + np.uintp(3)] << ONE)
        five = ((pair * HASH_FACTOR + other) * HASH_FACTOR + hashes[place + np.uintp(4)]) * HASH_FACTOR >> bit_shift
        bit, of_five = ONE << (five & np.uint64(63)), five >> np.uint64(6)
        if bits[of_five] & bit:
            for number in range(max(place, covered_until), place + np.uintp(5)):
                covered += words[number, 2]
            covered_until = place + np.uintp(5)
        bits[of_five] |= bit
    return most, covered


@compiled
def _gram(hashes, start, n):
    value = np.uint64(0)
    for index in range(start, start + n):
        value = (value ^ hashes[index]) * HASH_FACTOR
        value ^= value >> np.uint64(31)
    return value | np.uint64(1)


@compiled
def _top_characters(words, hashes, start, end, n, scratch, stamp):
    """Characters of the most frequent n-gram, the first of equals, times its count."""
    keys, stamps, counts, firsts, _ = scratch
    mask = _mask_for(end - start)
    best_count = best_first = best = np.int64(0)
    for position in range(start, end - n + 1):
        value = _gram(hashes, position, n)
        slot, seen = _find(keys, stamps, stamp, mask, value)
        if seen:
            counts[slot] += 1
        else:
            keys[slot], stamps[slot] = value, stamp
            counts[slot], firsts[slot] = 1, position
        count, first = counts[slot], firsts[slot]
        if count > best_count or (count == best_count and first < best_first):
            best_count, best_first = count, first
    best = np.int64(n - 1)
    for index in range(best_first, best_first + n if best_count else 0):
        best += words[index, 2]
    return best * best_count


@compiled
def _duplicate_characters(words, hashes, start, end, n, scratch, stamp):
    """Characters of n-grams that have occurred before, none of which overlap."""
    keys, stamps, _, _, _ = scratch
    mask = _mask_for(end - start)
    position, repeated = start, np.int64(0)
    while position < end - n + 1:
        value = _gram(hashes, position, n)
        slot, seen = _find(keys, stamps, stamp, mask, value)
        if seen:
            for index in range(position, position + n):
                repeated += words[index, 2]
            position += n
        else:
            keys[slot], stamps[slot] = value, stamp
            position += 1
    return repeated


@compiled
def line_statistics(text, bounds, classes, short_line_characters, scratch, statistics):
    """Fills `statistics`, (documents, len(LINE_MEASURES)) int64; lines that are blank do not count."""
    stamp = scratch[4][0]
    for document in range(len(bounds)):
        start, end = bounds[document, 0], bounds[document, 1]
        stamp, lines, _, repeated = _repeated_blocks(text, start, end, 1, True, classes, scratch, stamp)
        ending = short = newlines = np.int64(0)
        position = start
        while position < end:
            stop = find_byte(text, position, end, 10)
            if not _is_blank(text, position, stop, classes):
                ending += classes[code_at(text, before(text, position, stop))[0]] & TERMINAL != 0
                size = stop - position
                short += size <= short_line_characters or (
                    size <= 4 * short_line_characters and characters_in(text, position, stop) <= short_line_characters
                )
            newlines += stop < end
            position = stop + 1
        row = statistics[document]
        row[0], row[1], row[2], row[3], row[4], row[5], row[6] = (
            lines, ending, short, repeated, characters_in(text, start, end) - newlines, newlines,
            _chunks(text, start, end),
        )  # fmt: skip
        scratch[4][0] = stamp


@compiled
def _chunks(text, start, end):
    """What ASCII spaces divide, in number."""
    chunks, begins = np.int64(0), ONE
    while start < end:
        visible = ~spaces_at(text, start) & first_bits(end - start)
        chunks += bits_in(visible & ~(visible << ONE | (ONE - begins)))
        begins = ONE - (visible >> np.uint64(BLOCK - 1))
        start += BLOCK
    return chunks


@compiled
def character_statistics(text, bounds, classes, counts):
    """Fills `counts`, (documents, 4) int64: characters that are not space, letters, digits, damaged ones."""
    for document in range(len(bounds)):
        position, end = bounds[document, 0], bounds[document, 1]
        visible = letters = digits = damaged = 0
        while position < end:
            code, size = code_at(text, position)
            kind = classes[code]
            if not kind & IS_SPACE:
                visible += 1
                letters += kind & ALPHABETIC != 0
                digits += kind & DIGIT != 0
                damaged += code == 0xFFFD or code < 32 or 127 <= code < 160
            position += size
        counts[document, 0], counts[document, 1], counts[document, 2], counts[document, 3] = (
            visible, letters, digits, damaged
        )  # fmt: skip


@compiled
def mark_addresses(text, bounds, marks):
    """Marks documents, (documents, 2) bool, with an @ and with a digit behind a full stop, as all addresses have."""
    for document in range(len(bounds)):
        position, end = bounds[document, 0], bounds[document, 1]
        signs = numbers = np.uint64(0)
        while position < end:
            within = first_bits(end - position)
            signs |= mask_of(text, position, 0, 64, 64) & within
            numbers |= mask_of(text, position, 0, 46, 46) & mask_of(text, position + 1, 0, 48, 57) & within
            position += BLOCK
        marks[document, 0], marks[document, 1] = signs != 0, numbers != 0


@compiled
def hashed_features(text, bounds, buckets, features, ends):
    """Writes the buckets of words, in lower case, and of pairs of them; returns their number. No sign is a word."""
    count = np.int64(0)
    mask = np.uint64(buckets - 1)
    for document in range(len(bounds)):
        value, previous, inside = HASH_START, np.uint64(0), False
        for position in range(bounds[document, 0], bounds[document, 1] + 1):
            byte = text[position] if position < bounds[document, 1] else np.uint8(32)
            if 65 <= byte <= 90:
                byte |= 32
            if 97 <= byte <= 122 or 48 <= byte <= 57 or byte >= 0x80:
                value, inside = (value ^ np.uint64(byte)) * HASH_FACTOR, True
            elif inside:
                word = mixed(value)
                features[count] = np.int32(word >> np.uint64(9) & mask)
                count += 1
                if previous:
                    features[count] = np.int32(mixed(previous * HASH_FACTOR ^ word) >> np.uint64(9) & mask)
                    count += 1
                value, previous, inside = HASH_START, word, False
        ends[document] = count
    return count


@compiled
def linear_scores(features, ends, weights, scores):
    """Writes the mean weight of each document's features, plus the bias."""
    start = np.int64(0)
    for document in range(len(ends)):
        total = 0.0
        for index in range(start, ends[document]):
            total += weights[features[index]]
        scores[document] = total / max(1, ends[document] - start) + weights[len(weights) - 1]
        start = ends[document]


@compiled
def fit_logistic(features, ends, labels, shares, weights, squares, epochs, rate, decay):
    """Fits `weights` to labels of 0 and 1, each with its share of the loss, a document at a time by AdaGrad.

    squares: (len(weights),) float64, the sums of squared gradients.
    """
    bias = len(weights) - 1
    for _ in range(epochs):
        start = np.int64(0)
        for document in range(len(ends)):
            size = max(1, ends[document] - start)
            total = 0.0
            for index in range(start, ends[document]):
                total += weights[features[index]]
            score = total / size + weights[bias]
            error = (1.0 / (1.0 + np.exp(-score)) - labels[document]) * shares[document]
            for index in range(start, ends[document]):
                feature = features[index]
                gradient = error / size + decay * weights[feature]
                squares[feature] += gradient * gradient
                weights[feature] -= rate * gradient / np.sqrt(squares[feature])
            squares[bias] += error * error
            weights[bias] -= rate * error / np.sqrt(squares[bias])
            start = ends[document]
