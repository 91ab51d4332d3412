"""The validation split: documents by the hash of their text; with too few documents, the tail of one."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pretrain_tools.preparation.documents.records import Record

DIVIDERS = (b"\n\n", b"\r\n\r\n", b"\n", b" ")
"""Places to cut a text, if one is near: between paragraphs, else lines, else words."""


@dataclass(frozen=True)
class ValidationSplit:
    """Assigns every document by its text alone, so that workers, order and other documents make no difference."""

    fraction: float
    divided_sha256: str | None = None
    """Hash of the text whose tail is held out; None: no text is divided."""
    tail_from: int = 0
    """First byte of the tail."""

    def pieces(self, record: Record) -> list[Record]:
        """Returns the document with its split, or its head for training and its tail for validation."""
        text = record.text
        if record.is_validation is not None:
            return [record]
        if self.divided_sha256 is None or hashlib.sha256(text).hexdigest() != self.divided_sha256:
            return [record._replace(is_validation=is_validation_text(text, self.fraction))]
        head = text[: self.tail_from]
        place_of_tail = record.place + head.count(b"\n")
        return [
            record._replace(text=head, is_validation=False),
            record._replace(text=text[self.tail_from :], is_validation=True, place=place_of_tail),
        ]

    def as_plan(self) -> dict:
        """Returns what a manifest records beside the fraction; {} if no text is divided."""
        tail = {"document_sha256": self.divided_sha256, "first_byte": self.tail_from}
        return {"held_out_tail": tail} if self.divided_sha256 else {}


def is_validation_text(text: bytes, fraction: float) -> bool:
    """Tells whether a document is for validation, by the first 8 bytes of its text's SHA-256."""
    # Never change this: folders prepared earlier must agree on the side of a document.
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2.0**64


def split_with_tail(texts: Iterable[bytes], fraction: float) -> ValidationSplit:
    """Splits by hash if that leaves documents to both splits; else the largest gives its tail to validation.

    The tail has that fraction of all bytes, at most about half of its document. Reads until both splits have a
    document: 1 / fraction of them on average.
    """
    largest = b""
    total = 0
    splits = set()
    for text in texts:
        splits.add(is_validation_text(text, fraction))
        if len(splits) == 2:
            return ValidationSplit(fraction)
        largest = max(largest, text, key=len)
        total += len(text)
    wanted = min(round(fraction * total), len(largest) // 2)
    if not wanted:
        return ValidationSplit(fraction)
    return ValidationSplit(fraction, hashlib.sha256(largest).hexdigest(), cut_before(largest, len(largest) - wanted))


def cut_before(text: bytes, end: int) -> int:
    """Finds where to divide a UTF-8 text: after the last divider before `end`, else at the character of `end`."""
    first = end - (len(text) - end) // 2
    for divider in DIVIDERS:
        found = text.rfind(divider, first, end)
        if found >= 0:
            return found + len(divider)
    while text[end] & 0xC0 == 0x80:  # within a character
        end -= 1
    return end
