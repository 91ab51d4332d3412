"""What the published filters measure of documents, compiled: words, lines, and what is repeated."""

import numpy as np

from pretrain.preparation.cleaning.word_rules import ALPHABETIC, DIGIT, IS_SPACE, LINE_END, PUNCTUATION, TERMINAL
from pretrain.preparation.cleaning.words import HASH_FACTOR, HASH_START, before, code_at, compiled, mixed

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
def quality_statistics(text, bounds, words, hashes, word_bounds, classes, stop_words, statistics):
    """Fills `statistics`, (documents, len(QUALITY)) int64. stop_words: hashes, at most 64."""
    for document in range(len(bounds)):
        counted = counted_characters = alphabetic_words = 0
        found = np.uint64(0)
        for number in range(word_bounds[document, 0], word_bounds[document, 1]):
            start, end = words[number, 0], words[number, 1]
            has_other = has_letter = False
            position = start
            while position < end and not (has_other and has_letter):
                code, size = code_at(text, position)
                kind = classes[code]
                has_other = has_other or not kind & PUNCTUATION
                has_letter = has_letter or kind & ALPHABETIC != 0
                position += size
            if has_other:
                counted += 1
                counted_characters += words[number, 2]
            if has_letter:
                alphabetic_words += 1
                for index in range(len(stop_words)):
                    if hashes[number] == stop_words[index]:
                        found |= np.uint64(1) << np.uint64(index)
        different = 0
        while found:
            different += 1
            found &= found - np.uint64(1)
        row = statistics[document]
        row[0] = word_bounds[document, 1] - word_bounds[document, 0]
        row[1], row[2], row[3], row[4] = counted, counted_characters, alphabetic_words, different
        _line_marks(text, bounds[document, 0], bounds[document, 1], classes, row)


@compiled
def _line_marks(text, start, end, classes, row):
    hashes = ellipses = lines = bullets = ending = 0
    position, begin = start, start
    first = last = np.int64(-1)  # of what is not space in a line
    dots = 0
    while position < end:
        byte = text[position]
        if byte >= 0x80:
            code, size = code_at(text, position)
        else:
            code, size = np.int64(byte), 1
        kind = classes[code]
        if code == 46:
            dots += 1
            if dots == 3:
                ellipses += 1
                dots = 0
        else:
            dots = 0
            if code == 35:
                hashes += 1
            elif code == 0x2026:
                ellipses += 1
        if not kind & IS_SPACE:
            if first < 0:
                first = position
            last = position + size
        elif kind & LINE_END:
            lines += 1
            bullets += _is_bullet(text, first)
            ending += _ends_with_ellipsis(text, begin, last)
            if code == 13 and position + 1 < end and text[position + 1] == 10:
                size = 2
            first = last = np.int64(-1)
            begin = position + size
        position += size
    if begin < end:
        lines += 1
        bullets += _is_bullet(text, first)
        ending += _ends_with_ellipsis(text, begin, last)
    row[5], row[6], row[7], row[8], row[9] = hashes, ellipses, lines, bullets, ending


@compiled
def _is_bullet(text, first):
    return first >= 0 and (text[first] == 45 or (text[first] == 0xE2 and code_at(text, first)[0] == 0x2022))


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


def repetition_scratch(largest: int) -> tuple[np.ndarray, ...]:
    """(keys, stamps, counts, first positions) with room for documents of so many words and lines at most."""
    size = 16
    while size < 2 * largest:
        size *= 2
    return np.zeros(size, np.uint64), np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)


@compiled
def repetitions(text, bounds, words, hashes, word_bounds, classes, limits, scratch, rules):
    """Writes the first of REPETITION_RULES whose limit each document exceeds to `rules`, (documents,); -1 for none.

    limits: (13,) shares of the characters or elements, inf where a rule is off.
    """
    stamp = 0
    smallest = np.inf
    for limit in limits[7:]:
        smallest = min(smallest, limit)
    for document in range(len(bounds)):
        start, end = bounds[document, 0], bounds[document, 1]
        characters = 0
        for position in range(start, end):
            characters += text[position] & 0xC0 != 0x80
        first_word, words_end = word_bounds[document, 0], word_bounds[document, 1]
        rule = -1
        for paragraphs in (True, False):
            stamp += 1
            elements, duplicates, repeated = _repeated_blocks(text, start, end, paragraphs, classes, scratch, stamp)
            first_rule = 0 if paragraphs else 2
            if duplicates / elements > limits[first_rule]:
                rule = first_rule
                break
            if repeated / characters > limits[first_rule + 1]:
                rule = first_rule + 1
                break
        most = np.int64(0)
        for n in range(2, 5):
            # An n-gram of three or four words is made of two pairs: no more than twice the most of any.
            if rule >= 0 or (n > 2 and np.isfinite(limits[4]) and 2 * most <= limits[2 + n] * characters):
                continue
            if not np.isfinite(limits[2 + n]) or words_end - first_word < n:
                continue
            stamp += 1
            top, largest = _top_characters(words, hashes, first_word, words_end, n, scratch, stamp)
            if n == 2:
                most = largest
            if top / characters > limits[2 + n]:
                rule = 2 + n
        if rule < 0 and np.isfinite(smallest) and words_end - first_word >= 5:
            stamp += 1
            covered = _covered_characters(words, hashes, first_word, words_end, 5, scratch, stamp)
            if covered > smallest * characters:
                for n in range(5, 11):
                    if not np.isfinite(limits[2 + n]):
                        continue
                    stamp += 1
                    repeated = _duplicate_characters(words, hashes, first_word, words_end, n, scratch, stamp)
                    if repeated / characters > limits[2 + n]:
                        rule = 2 + n
                        break
        rules[document] = rule


@compiled
def _repeated_blocks(text, start, end, paragraphs, classes, scratch, stamp):
    """(elements, duplicates, their characters) of lines, or of paragraphs between empty lines."""
    keys, stamps, _, _ = scratch
    if paragraphs:
        while start < end:
            code, size = code_at(text, start)
            if not classes[code] & IS_SPACE:
                break
            start += size
        while end > start:
            last = before(text, start, end)
            if not classes[code_at(text, last)[0]] & IS_SPACE:
                break
            end = last
    newlines = 0
    for position in range(start, end):
        newlines += text[position] == 10
    mask = _mask_for(newlines + 1)
    elements = duplicates = repeated = characters = 0
    value, position = HASH_START, start
    while True:
        run = 0
        while position + run < end and text[position + run] == 10:
            run += 1
        if position >= end or run >= (2 if paragraphs else 1):
            elements += 1
            slot, seen = _find(keys, stamps, stamp, mask, mixed(value))
            if seen:
                duplicates += 1
                repeated += characters
            else:
                keys[slot], stamps[slot] = mixed(value), stamp
            value, characters = HASH_START, 0
            if position >= end:
                return elements, duplicates, repeated
            position += run
            if position >= end and not paragraphs:
                continue
        else:
            byte = text[position]
            value = (value ^ np.uint64(byte)) * HASH_FACTOR
            characters += byte & 0xC0 != 0x80
            position += 1


@compiled
def _gram(hashes, start, n):
    value = np.uint64(0)
    for index in range(start, start + n):
        value = (value ^ hashes[index]) * HASH_FACTOR
        value ^= value >> np.uint64(31)
    return value | np.uint64(1)


@compiled
def _top_characters(words, hashes, start, end, n, scratch, stamp):
    """(characters of the most frequent n-gram, the first of equals, times its count; most of any, a space added)."""
    keys, stamps, counts, firsts = scratch
    mask = _mask_for(end - start)
    best_count = best_first = best = largest = np.int64(0)
    for position in range(start, end - n + 1):
        value = _gram(hashes, position, n)
        slot, seen = _find(keys, stamps, stamp, mask, value)
        if seen:
            counts[slot] += 1
        else:
            keys[slot], stamps[slot] = value, stamp
            counts[slot], firsts[slot] = 1, position
        characters = np.int64(n - 1)
        for index in range(position, position + n):
            characters += words[index, 2]
        count, first = counts[slot], firsts[slot]
        largest = max(largest, count * (characters + 1))
        if count > best_count or (count == best_count and first < best_first):
            best_count, best_first, best = count, first, count * characters
    return best, largest


@compiled
def _covered_characters(words, hashes, start, end, n, scratch, stamp):
    """Characters of words in any n-gram that has occurred before: no less than _duplicate_characters of n and more."""
    keys, stamps, _, _ = scratch
    mask = _mask_for(end - start)
    covered, covered_until = np.int64(0), start
    for position in range(start, end - n + 1):
        value = _gram(hashes, position, n)
        slot, seen = _find(keys, stamps, stamp, mask, value)
        if seen:
            for index in range(max(position, covered_until), position + n):
                covered += words[index, 2]
            covered_until = position + n
        else:
            keys[slot], stamps[slot] = value, stamp
    return covered


@compiled
def _duplicate_characters(words, hashes, start, end, n, scratch, stamp):
    """Characters of n-grams that have occurred before, none of which overlap."""
    keys, stamps, _, _ = scratch
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
    keys, stamps, _, _ = scratch
    for document in range(len(bounds)):
        start, end = bounds[document, 0], bounds[document, 1]
        newlines = 0
        for position in range(start, end):
            newlines += text[position] == 10
        mask = _mask_for(newlines + 1)
        lines = ending = short = repeated = total = chunks = 0
        position = start
        while position <= end:
            value, characters, blank, in_chunk = HASH_START, 0, True, False
            last = np.uint32(0)
            while position < end and text[position] != 10:
                byte = text[position]
                size = 1
                if byte < 0x80:
                    last = classes[byte]
                    value = (value ^ np.uint64(byte)) * HASH_FACTOR
                else:
                    code, size = code_at(text, position)
                    last = classes[code]
                    for index in range(position, position + size):
                        value = (value ^ np.uint64(text[index])) * HASH_FACTOR
                if last & IS_SPACE:
                    in_chunk = False
                else:
                    blank = False
                    chunks += not in_chunk
                    in_chunk = True
                characters += 1
                position += size
            total += characters
            if not blank:
                lines += 1
                ending += last & TERMINAL != 0
                short += characters <= short_line_characters
                slot, seen = _find(keys, stamps, document + 1, mask, mixed(value))
                if seen:
                    repeated += characters
                else:
                    keys[slot], stamps[slot] = mixed(value), document + 1
            position += 1
        row = statistics[document]
        row[0], row[1], row[2], row[3], row[4], row[5], row[6] = (
            lines, ending, short, repeated, total, newlines, chunks
        )  # fmt: skip


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
