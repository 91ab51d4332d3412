"""Classes of characters, by which texts are divided and judged."""

import sys
import unicodedata

import numpy as np

from pretrain.preparation.cleaning.compiled.kept import kept_array

IS_SPACE, LINE_END, ALPHABETIC, LOWER, DIGIT, PUNCTUATION, SENTENCE_END, CLOSING, SIGN = (1 << bit for bit in range(9))
"""LINE_END: as str.splitlines has it. CLOSING: quotes and brackets that may follow the end of a sentence. SIGN: what
the columns of module lines_and_words count."""

_SENTENCE_ENDS = ".!?…。．！？｡؟۔।॥։።၊။។៕᠃᠉‼‽⁇⁈⁉"
_LINE_ENDS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
_SIGNS = "|,;()[]{}<>=_"


@kept_array
def character_classes() -> np.ndarray:
    """(0x110000,) uint16: the classes of every code point."""
    classes = np.zeros(sys.maxunicode + 1, np.uint16)
    # Beyond these planes no character is a letter, a space or punctuation.
    for code in range(0x32000):
        character = chr(code)
        category = unicodedata.category(character)
        classes[code] = (
            IS_SPACE * character.isspace()
            | ALPHABETIC * character.isalpha()
            | LOWER * character.islower()
            | DIGIT * ("0" <= character <= "9")
            | PUNCTUATION * (category[0] == "P")
            | CLOSING * (category in ("Pe", "Pf", "Pi") or character in "\"'`*_")
        )
    for characters, flag in ((_SENTENCE_ENDS, SENTENCE_END), (_LINE_ENDS, LINE_END), (_SIGNS, SIGN)):
        classes[list(map(ord, characters))] |= flag
    return classes
