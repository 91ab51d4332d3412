"""C4's rules, which drop lines and then documents, compiled: published.C4Quality."""

import numpy as np

from pretrain.preparation.cleaning.word_rules import IS_SPACE, LINE_END, PUNCTUATION_CATEGORY, SENTENCE_END
from pretrain.preparation.cleaning.words import before, code_at, compiled, divide_words

DOCUMENT_RULES = ("", "lorem_ipsum", "curly_bracket", "few_sentences")
LINE_RULES = ("long_word", "no_end", "few_words", "javascript", "policy")
LOREM, JAVASCRIPT, POLICY, CITATION_NEEDED = 1, 2, 4, 8


def _as_array(phrase: str) -> np.ndarray:
    return np.frombuffer(phrase.encode(), np.uint8).copy()


_LOREM, _JAVASCRIPT, _COOKIE = _as_array("lorem ipsum"), _as_array("javascript"), _as_array("cookie")
_PRIVACY, _TERMS, _CITATION = _as_array("privacy policy"), _as_array("terms of use"), _as_array("[citation needed]")
_COOKIE_POLICY, _USES, _USE_OF, _USE = map(
    _as_array, ("cookie policy", "uses cookies", "use of cookies", "use cookies")
)
_EDIT = _as_array("[edit]")
_IS_RARE = np.zeros(256, bool)
_IS_RARE[list(b"jkvfpJKVFP")] = True


@compiled
def _is_at(text, start, end, position, phrase):
    """Whether a phrase in lower case stands at a position, in any case."""
    if position < start or position + len(phrase) > end:
        return False
    for index in range(len(phrase)):
        byte = text[position + index]
        if 65 <= byte <= 90:
            byte |= 32
        if byte != phrase[index]:
            return False
    return True


@compiled
def _phrases_in(text, start, end):
    """Which of the phrases are in a line: found by a rare letter of theirs."""
    found = 0
    for position in range(start, end):
        if not _IS_RARE[text[position]]:
            continue
        letter = text[position] | 32
        if letter == 106:  # j
            if _is_at(text, start, end, position, _JAVASCRIPT):
                found |= JAVASCRIPT
        elif letter == 107:  # k
            cookie = position - 3
            if _is_at(text, start, end, cookie, _COOKIE) and (
                _is_at(text, start, end, cookie, _COOKIE_POLICY)
                or _is_at(text, start, end, cookie - 5, _USES)
                or _is_at(text, start, end, cookie - 7, _USE_OF)
                or _is_at(text, start, end, cookie - 4, _USE)
            ):
                found |= POLICY
        elif letter == 118:  # v
            if _is_at(text, start, end, position - 3, _PRIVACY):
                found |= POLICY
        elif letter == 102:  # f
            if _is_at(text, start, end, position - 7, _TERMS):
                found |= POLICY
        elif letter == 112 and _is_at(text, start, end, position - 7, _LOREM):  # p
            found |= LOREM
    return found


@compiled
def _citation_bytes(text, position, end):
    """Bytes of a citation at a position: [12], [], [edit] or [citation needed]; 0 for none."""
    stop = position + 1
    while stop < end and 48 <= text[stop] <= 57:
        stop += 1
    if stop < end and text[stop] == 93:
        return stop + 1 - position
    for phrase in (_EDIT, _CITATION):
        if position + len(phrase) <= end:
            same = True
            for index in range(len(phrase)):
                same = same and text[position + index] == phrase[index]
            if same:
                return len(phrase)
    return 0


@compiled
def _sentences(text, start, end, tables, words, hashes):
    """Sentences of a line: one more after each end of a sentence that is followed by a word."""
    count = divide_words(text, start, end, tables, words, hashes, 0)
    sentences, ended = 1, False
    for number in range(count):
        position, stop = words[number, 0], words[number, 1]
        code, size = code_at(text, position)
        if position + size == stop and tables.classes[code] & SENTENCE_END:
            ended = True
        elif ended:
            is_sign = True
            while position < stop and is_sign:
                code, size = code_at(text, position)
                is_sign = tables.classes[code] & PUNCTUATION_CATEGORY != 0
                position += size
            if not is_sign:
                sentences, ended = sentences + 1, False
    return sentences


@compiled
def _stripped(text, start, end, classes):
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
    return start, end


@compiled
def clean_lines(text, bounds, tables, numbers, switches, left, left_bounds, words, hashes, rules, counts):
    """Writes what is left of each document to `left` and its bounds, and which of DOCUMENT_RULES it broke.

    numbers: least sentences, least words of a line, most characters of a word. switches: endings, citations,
    placeholders, javascript, curly brackets, policies. counts: lines dropped by each of LINE_RULES.
    """
    classes = tables.classes
    min_sentences, min_words, max_characters = numbers
    written = np.int64(0)
    for document in range(len(bounds)):
        position, end = bounds[document, 0], bounds[document, 1]
        first, sentences, rule, kept = written, 0, 0, 0
        while position < end and rule == 0:
            begin, line_words, characters, longest, size = position, 0, 0, 0, 1
            stop = end
            while position < end:
                byte = text[position]
                size = 1
                if byte < 0x80:
                    kind = classes[byte]
                else:
                    code, size = code_at(text, position)
                    kind = classes[code]
                if kind & IS_SPACE:
                    characters = 0
                    if kind & LINE_END:
                        stop = position
                        if byte == 13 and position + 1 < end and text[position + 1] == 10:
                            size = 2
                        position += size
                        break
                else:
                    line_words += characters == 0
                    characters += 1
                    longest = max(longest, characters)
                position += size
            start, stop = _stripped(text, begin, stop, classes)
            if longest > max_characters:
                counts[0] += 1
                continue
            line = written + (kept > 0)
            out = line
            while start < stop:
                byte = text[start]
                skipped = _citation_bytes(text, start, stop) if byte == 91 and switches[1] else 0
                if skipped:
                    start += skipped
                else:
                    left[out] = byte
                    out, start = out + 1, start + 1
            last = left[out - 1] if out > line else np.uint8(0)
            ends = last == 46 or last == 63 or last == 33 or last == 34 or last == 39
            if ends and last == 46 and out - line >= 3 and left[out - 2] == 46 and left[out - 3] == 46:
                ends = False
            if switches[0] and not ends:
                counts[1] += 1
                continue
            if line_words < min_words:
                counts[2] += 1
                continue
            found = _phrases_in(left, line, out)
            if switches[2] and found & LOREM:
                rule = 1
                break
            if switches[3] and found & JAVASCRIPT:
                counts[3] += 1
                continue
            if switches[4]:
                for index in range(line, out):
                    if left[index] == 123:
                        rule = 2
                        break
                if rule:
                    break
            if switches[5] and found & POLICY:
                counts[4] += 1
                continue
            if sentences < min_sentences:
                sentences += _sentences(left, line, out, tables, words, hashes)
            if kept:
                left[written] = 10
            kept, written = kept + 1, out
        if rule == 0 and sentences < min_sentences:
            rule = 3
        rules[document] = rule
        if rule:
            written = first
        start, stop = _stripped(left, first, written, classes)
        left_bounds[document, 0], left_bounds[document, 1] = start, stop
