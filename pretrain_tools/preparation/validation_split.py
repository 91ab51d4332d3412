"""Chooses validation documents by the hash of their text, or the tail of one document if there are too few."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from pretrain_tools.preparation.documents.records import Record

DIVIDERS = (b"\n\n", b"\r\n\r\n", b"\n", b" ")
"""Preferred places to cut a text: between paragraphs, otherwise between lines, otherwise between words."""


@dataclass(frozen=True)
class ValidationSplit:
    """Assigns every document by its text only, so that workers, order and other documents make no difference."""

    fraction: float
    divided_sha256: str | None = None
    """Hash of the text whose tail is held out; None if no text is split."""
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
        """Returns the manifest's record, without the fraction; {} if no text is split."""
        tail = {"document_sha256": self.divided_sha256, "first_byte": self.tail_from}
        return {"held_out_tail": tail} if self.divided_sha256 else {}


def is_validation_text(text: bytes, fraction: float) -> bool:
    """Returns True for a validation document, by the first 8 bytes of its text's SHA-256."""
    # Never change this, because all folders must agree on a document's split.
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2.0**64


def split_with_tail(texts: Iterable[bytes], fraction: float) -> ValidationSplit:
    """Splits by hash if both splits then have documents. Otherwise, holds out the tail of the largest document.

    The tail has this fraction of all bytes, but at most about half of its document. Reads until both splits have a
    document, on average 1 / fraction documents.
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
    """Finds a place to cut a UTF-8 text: after the last divider before `end`, otherwise at the character at `end`."""
    first = end - (len(text) - end) // 2
    for divider in DIVIDERS:
        found = text.rfind(divider, first, end)
        if found >= 0:
            return found + len(divider)
    while text[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end
