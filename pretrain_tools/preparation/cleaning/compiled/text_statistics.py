"""What filters measure of documents, compiled: repeated runs of words, characters, features of a classifier."""

import numpy as np

from pretrain_tools.preparation.cleaning.compiled.characters import ALPHABETIC, DIGIT, IS_SPACE
from pretrain_tools.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    HASH_FACTOR,
    HASH_START,
    ONE,
    code_at,
    compiled,
    first_bits,
    inlined,
    lowest_bit,
    mask_of,
    mixed,
)

GRAM_RULES = ("top_2_gram", "top_3_gram", "top_4_gram", *(f"duplicate_{n}_gram" for n in range(5, 11)))


PHRASES = {
    "javascript": ("javascript",),
    "policy": ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"),
    "lorem_ipsum": ("lorem ipsum",),
    "curly_bracket": ("{",),
}
"""{what C4's rules ask for in a line: phrases}"""
_RARE = ("{", "ja", "ki", "cy", "ps", "ms")
"""Letters that are rare in English prose. Each phrase has one of these, which is looked for, 64 bytes at a time."""


def _phrase_table() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the phrases, (phrases, 16) uint8, their facts and what _places_of_rare looks for.

    facts: (phrases, 3), size of each, its kind and the place of its rare letters. The last array: (len(_RARE), 3)
    uint8, a letter and the smallest and largest byte after it.
    """
    kinds = {phrase: kind for kind, several in enumerate(PHRASES.values()) for phrase in several}
    places = (next(phrase.index(letters) for letters in _RARE if letters in phrase) for phrase in kinds)
    facts = np.array([[len(phrase), kinds[phrase], place] for phrase, place in zip(kinds, places, strict=True)])
    table = np.array([list(phrase.encode().ljust(16)) for phrase in kinds], np.uint8)
    rare = [[ord(letters[0]), *([ord(letters[1])] * 2 if len(letters) > 1 else (0, 255))] for letters in _RARE]
    return table, facts, np.array(rare, np.uint8)


PHRASE_TABLE = _phrase_table()


@inlined
def _places_of_rare(text, position, rare):
    """Mask of the next 64 bytes: set where rare letters begin, in any case. Some other signs look the same."""
    found = np.uint64(0)
    for number in range(len(rare)):
        letter, low, high = rare[number, 0], rare[number, 1], rare[number, 2]
        found |= mask_of(text, position, 32, letter, letter) & mask_of(text, position + 1, 32, low, high)
    return found


@compiled
def count_phrases(text, starts, stops, phrases, facts, rare, found):
    """Adds how often each of PHRASES stands in each line, in any case, to `found`, (lines, len(PHRASES))."""
    for line in range(len(starts)):
        start, stop = np.int64(starts[line]), np.int64(stops[line])
        for first in range(start, stop, BLOCK):
            places = _places_of_rare(text, first, rare) & first_bits(stop - first)
            while places:
                position = first + lowest_bit(places)
                places &= places - ONE
                for number in range(len(phrases)):
                    size, begin = facts[number, 0], position - facts[number, 2]
                    if begin < start or begin + size > stop:
                        continue
                    index = 0
                    while index < size and _small(text[begin + index]) == phrases[number, index]:
                        index += 1
                    found[line, facts[number, 1]] += index == size


@compiled
def _small(byte):
    return byte | np.uint8(32) if 65 <= byte <= 90 else byte


@compiled
def different_words(hashes, word_bounds, sought, enough, found):
    """Writes how many different ones of the sought words, at most 64, each document has, `enough` if it has more."""
    for document in range(len(word_bounds)):
        seen = np.uint64(0)
        for word in range(word_bounds[document, 0], word_bounds[document, 1]):
            for index in range(len(sought)):
                if hashes[word] == sought[index] and not seen >> np.uint64(index) & ONE:
                    seen |= ONE << np.uint64(index)
                    found[document] += 1
            if found[document] >= enough:
                break


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
def mark_repeated(hashes, document, keys, stamps, repeated):
    """Marks the lines, (lines,), of which the same document has the same hash before.

    keys, stamps: a hash table of twice as many entries, a power of two, with zeros for stamps.
    """
    mask = np.uint64(len(keys) - 1)
    for line in range(len(hashes)):
        stamp = document[line] + 1
        slot, seen = _find(keys, stamps, stamp, mask, hashes[line])
        repeated[line] = seen
        keys[slot], stamps[slot] = hashes[line], stamp


@compiled
def _mask_for(count):
    size = 16
    while size < 2 * count:
        size *= 2
    return np.uint64(size - 1)


class Scratch:
    """Hash tables that one batch after another is counted in: new ones would have to be zeroed."""

    def __init__(self) -> None:
        self._tables: tuple[np.ndarray, ...] = (np.empty(0, np.uint64),)

    def tables(self, word_bounds: np.ndarray) -> tuple[np.ndarray, ...]:
        """(keys, stamps, counts, first positions, the last stamp) with room for all words of a document."""
        size = 64
        while size < 2 * (word_bounds[:, 1] - word_bounds[:, 0]).max():
            size *= 2
        if size > len(self._tables[0]):
            integers = (np.zeros(length, np.int64) for length in (size, size, size, 1))
            self._tables = (np.zeros(size, np.uint64), *integers)
        return self._tables


@compiled
def repetitions(lengths, hashes, word_bounds, characters, limits, skipped, scratch, broken, values):
    """Writes the first of GRAM_RULES whose limit each document exceeds to `broken`, and the share to `values`.

    limits: (9,) shares of `characters`, (documents,), inf where a rule is off. skipped: (documents,) bool.
    """
    stamp = scratch[4][0]
    for document in range(len(word_bounds)):
        if skipped[document] or not characters[document]:
            continue
        total, first, end = characters[document], word_bounds[document, 0], word_bounds[document, 1]
        most, covered = _most_grams(lengths, hashes, first, end, scratch)
        for rule in range(len(limits)):
            n = rule + 2
            # An n-gram of three or four words is made of two pairs: no more than twice the most of any.
            bound = most * min(n - 1, 2) if n < 5 else covered
            if bound <= limits[rule] * total or broken[document] >= 0:
                continue
            stamp += 1
            if n < 5:
                repeated = _top_characters(lengths, hashes, first, end, n, scratch, stamp)
            else:
                repeated = _duplicate_characters(lengths, hashes, first, end, n, scratch, stamp)
            if repeated / total > limits[rule]:
                broken[document], values[document] = rule, repeated / total
    scratch[4][0] = stamp


@compiled
def _most_grams(lengths, hashes, start, end, scratch):
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
    size, value = np.int64(lengths[first]), hashes[first]
    for place in range(first + np.uintp(1), stop):
        following, pair = np.int64(lengths[place]), value + (hashes[place] << ONE)
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
                covered += lengths[number]
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
def _top_characters(lengths, hashes, start, end, n, scratch, stamp):
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
        best += lengths[index]
    return best * best_count


@compiled
def _duplicate_characters(lengths, hashes, start, end, n, scratch, stamp):
    """Characters of n-grams that have occurred before, none of which overlap."""
    keys, stamps, _, _, _ = scratch
    mask = _mask_for(end - start)
    position, repeated, value, known = start, np.int64(0), np.uint64(0), np.int64(0)
    highest = ONE
    for _ in range(n - 1):
        highest *= HASH_FACTOR
    while position < end - n + 1:
        # A polynomial of the words' hashes, of which the next one drops the first word and takes up another.
        while known < n:
            value = value * HASH_FACTOR + hashes[np.uintp(position + known)]
            known += 1
        key = mixed(value)
        slot, seen = _find(keys, stamps, stamp, mask, key)
        if seen:
            for index in range(position, position + n):
                repeated += lengths[index]
            position += n
            value, known = np.uint64(0), np.int64(0)
        else:
            keys[slot], stamps[slot] = key, stamp
            value -= hashes[np.uintp(position)] * highest
            position += 1
            known -= 1
    return repeated


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
def mark_brackets(text, bounds, marks):
    """Marks documents, (documents,) bool, with an opening bracket before what a citation begins with."""
    for document in range(len(bounds)):
        position, end = bounds[document, 0], bounds[document, 1]
        signs = np.uint64(0)
        while position < end:
            following = mask_of(text, position + 1, 0, 48, 57) | mask_of(text, position + 1, 0, 93, 93)
            following |= mask_of(text, position + 1, 0, 99, 99) | mask_of(text, position + 1, 0, 101, 101)
            signs |= mask_of(text, position, 0, 91, 91) & following & first_bits(end - position)
            position += BLOCK
        marks[document] = signs != 0


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
