"""Splits documents into training and validation splits, based on a hash of their text.

If there are too few documents, holds out the tail of the largest one instead.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pretrain_tools.preparation.documents.records import Record, is_drawn

DIVIDERS = (b"\n\n", b"\r\n\r\n", b"\n", b" ")
"""Preferred places to split a document: between paragraphs, otherwise between lines, otherwise between words."""


@dataclass(frozen=True)
class ValidationSplit:
    """Assigns each document to a split, based only on its text."""

    fraction: float
    divided_sha256: str | None = None
    """Hash of the document whose tail is held out; None if no document is divided."""
    tail_from: int = 0
    """Byte offset of the tail."""

    def pieces(self, record: Record) -> list[Record]:
        """Returns the document with its split assigned. Returns the divided document as two records, head and tail."""
        text = record.text
        if record.is_validation is not None:
            return [record]
        if self.divided_sha256 is None or hashlib.sha256(text).hexdigest() != self.divided_sha256:
            return [record._replace(is_validation=is_drawn(text, self.fraction))]
        head = text[: self.tail_from]
        place_of_tail = record.place + head.count(b"\n")
        return [
            record._replace(text=head, is_validation=False),
            record._replace(text=text[self.tail_from :], is_validation=True, place=place_of_tail),
        ]

    def as_plan(self) -> dict:
        """Returns the manifest entry; {} if no document is divided."""
        tail = {"document_sha256": self.divided_sha256, "first_byte": self.tail_from}
        return {"held_out_tail": tail} if self.divided_sha256 else {}


def split_with_tail(texts: Iterable[bytes], fraction: float) -> ValidationSplit:
    """Splits by hash, or holds out the tail of the largest document if one split would be empty.

    The tail contains `fraction` of all bytes, but at most about half of the document.
    """
    largest = b""
    total = 0
    splits = set()
    for text in texts:
        splits.add(is_drawn(text, fraction))
        if len(splits) == 2:
            return ValidationSplit(fraction)
        largest = max(largest, text, key=len)
        total += len(text)
    wanted = min(round(fraction * total), len(largest) // 2)
    if not wanted:
        return ValidationSplit(fraction)
    return ValidationSplit(fraction, hashlib.sha256(largest).hexdigest(), cut_before(largest, len(largest) - wanted))


def cut_before(text: bytes, end: int) -> int:
    """Returns the byte offset at which to split a document: after the last nearby divider before `end`, or at `end`.

    Never splits a UTF-8 character.
    """
    first = end - (len(text) - end) // 2
    for divider in DIVIDERS:
        found = text.rfind(divider, first, end)
        if found >= 0:
            return found + len(divider)
    while text[end] & 0xC0 == 0x80:  # a UTF-8 continuation byte
        end -= 1
    return end
