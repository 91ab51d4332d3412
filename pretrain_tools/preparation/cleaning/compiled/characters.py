"""Classes of characters, by which texts are divided and judged."""

import sys
import unicodedata

import numpy as np

from pretrain_tools.preparation.cleaning.compiled.kept import kept_array

IS_SPACE, LINE_END, ALPHABETIC, LOWER, DIGIT, IS_VISIBLE, SENTENCE_END, CLOSING, SIGN = (1 << bit for bit in range(9))
"""LINE_END: as str.splitlines has it. IS_VISIBLE: neither space nor punctuation. CLOSING: quotes and brackets that may
follow the end of a sentence. SIGN: what the columns of module words count."""
SMALL_LETTER = ALPHABETIC | LOWER | IS_VISIBLE
"""The classes of a to z."""

_SENTENCE_ENDS = ".!?…。．！？｡؟۔।॥։።၊။។៕᠃᠉‼‽⁇⁈⁉"
_LINE_ENDS = "\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"
_SIGNS = ".…#|,;()[]{}<>=_"


@kept_array
def character_classes() -> np.ndarray:
    """(0x110000,) uint16: the classes of every code point."""
    classes = np.full(sys.maxunicode + 1, IS_VISIBLE, np.uint16)
    # Beyond these planes there are no letters, spaces and punctuation.
    for code in range(0x32000):
        character = chr(code)
        category = unicodedata.category(character)
        classes[code] = (
            IS_SPACE * character.isspace()
            | ALPHABETIC * character.isalpha()
            | LOWER * character.islower()
            | DIGIT * ("0" <= character <= "9")
            | IS_VISIBLE * (category[0] != "P" and not character.isspace())
            | CLOSING * (category in ("Pe", "Pf", "Pi") or character in "\"'`*_")
        )
    for characters, flag in ((_SENTENCE_ENDS, SENTENCE_END), (_LINE_ENDS, LINE_END), (_SIGNS, SIGN)):
        classes[list(map(ord, characters))] |= flag
    return classes
