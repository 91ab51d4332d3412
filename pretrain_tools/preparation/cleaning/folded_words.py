"""Normalizes text to compare documents with each other and with benchmark items.

Folded words consist of letters and digits. Differences in case, accents, ligatures and character width are removed. In
scripts without spaces, each character is a word.
"""

import re
import unicodedata
from collections.abc import Sequence

from pretrain_tools.preparation.cleaning.compiled import DividedTexts, divided_texts

SCRIPTS_WITHOUT_SPACES = (
    range(0x0E00, 0x0F00),  # Thai, Lao
    range(0x1000, 0x10A0),  # Myanmar
    range(0x1780, 0x1800),  # Khmer
    range(0x2E80, 0xA4D0),  # Chinese, Japanese, Yi
    range(0xF900, 0xFB00),
    range(0xFF66, 0xFFA0),
    range(0x1B000, 0x1B300),
    range(0x20000, 0x40000),
)
APOSTROPHES = "'\u2018\u2019\u02bc\uff07"
HYPHENS = "-\u2010\u2011\ufe63\uff0d"
LINE_ENDS = "\r\n"
TATWEEL = "\u0640"
HYPHEN_WITHIN_A_WORD = re.compile(r"-(?<=[^\s-]-)(?:\n[\n ]*)?(?=[^\s-])")
"""Matches a hyphen inside a word, including at a line break."""


class _FoldedCharacters(dict):
    """Cache for str.translate: {code point: folded letters, " ", "-" or line end; None to delete it}."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        category = unicodedata.category(character)
        folded = " "
        if character in HYPHENS:
            folded = "-"
        elif character in LINE_ENDS:
            folded = "\n"
        elif category == "Cf" or character in APOSTROPHES + TATWEEL:
            folded = None
        elif category[0] in "LNM":
            # Marks are dropped, except the Greek iota subscript, which folds to a letter.
            letters = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
            folded = "".join(filter(str.isalnum, letters)) or None
            if folded and any(code in script for script in SCRIPTS_WITHOUT_SPACES):
                folded = f" {folded} "
        self[code] = folded
        return folded


_FOLDED = _FoldedCharacters()


def folded_texts(texts: Sequence[bytes], least_words: int = 0) -> DividedTexts:
    """Splits documents into folded words.

    A document with fewer than `least_words` words is replaced by `least_words` copies of a single word made from the
    whole document.
    """
    return divided_texts([_folded(text, least_words).encode() for text in texts])


def _folded(text: bytes, least_words: int) -> str:
    words = HYPHEN_WITHIN_A_WORD.sub("", text.decode().translate(_FOLDED)).replace("-", " ")
    if least_words and len(first := words.split(None, least_words - 1)) < least_words:
        whole = "-".join(first) or "".join(text.decode().split())
        return " ".join([f"-{whole}"] * least_words)
    return words
