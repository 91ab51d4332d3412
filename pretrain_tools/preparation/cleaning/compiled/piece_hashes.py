"""Lines and paragraphs of documents and their XXH3 hashes, compiled: repeated_text.RepeatedText.

XXH3_64bits by its specification (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md), without a seed, up to
MOST_HASHED_BYTES; longer pieces are marked, for their hash costs little where a library computes it.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pretrain_tools.preparation.cleaning.compiled.text_blocks import (
    BLOCK,
    ONE,
    compiled,
    eight_bytes,
    find_byte,
    first_bits,
    inlined,
    mask_of,
    mixed,
)

MOST_HASHED_BYTES = 240
LONGER = np.uint64(1)
"""Instead of the hash of a piece that is longer; no hash is taken for it, as that of a long one replaces it."""
_SECRET = np.frombuffer(
    bytearray.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
_PRIME_1, _PRIME_2, _PRIME_3 = map(np.uint64, (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_MIX_1, _MIX_2 = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LAST_OFFSET, _START_OFFSET = 119, 3
"""Where the secret is read for the last 16 of more than 128 bytes, and for those after the first 128."""


def _secret_at(*places: int) -> np.uint64:
    """The secret's eight bytes at two places, combined."""
    return np.bitwise_xor.reduce([_SECRET[place : place + 8].view("<u8")[0] for place in places])


_OF_4, _OF_8, _OF_16_LOW, _OF_16_HIGH = _secret_at(0), _secret_at(8, 16), _secret_at(24, 32), _secret_at(40, 48)


@intrinsic
def _folded_product(_, one, other):
    """uint64: the two halves of the 128 bits of a product, combined."""

    def generate(_, builder, __, arguments):
        wide = [builder.zext(argument, ir.IntType(128)) for argument in arguments]
        product = builder.mul(*wide)
        low = builder.trunc(product, ir.IntType(64))
        return builder.xor(low, builder.trunc(builder.lshr(product, ir.Constant(ir.IntType(128), 64)), ir.IntType(64)))

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _bytes_turned(_, value):
    """uint64 with its bytes in the other order."""

    def generate(_, builder, __, arguments):
        return builder.bswap(arguments[0])

    return types.uint64(types.uint64), generate


@inlined
def _avalanche(value):
    value = (value ^ value >> np.uint64(37)) * _MIX_1
    return value ^ value >> np.uint64(32)


@inlined
def _sixteen(text, position, secret, place):
    return _folded_product(
        eight_bytes(text, position) ^ eight_bytes(secret, place),
        eight_bytes(text, position + 8) ^ eight_bytes(secret, place + 8),
    )


@inlined
def _four_bytes(text, position):
    return eight_bytes(text, position) & np.uint64(0xFFFFFFFF)


@compiled
def xxh3_of(text, start, end, secret):
    """XXH3_64bits of 1 to MOST_HASHED_BYTES bytes; up to 7 more are read."""
    size = end - start
    length = np.uint64(size)
    if size <= 3:
        one, two, three = text[start], text[start + (size >> 1)], text[end - 1]
        together = np.uint64(one) << np.uint64(16) | np.uint64(two) << np.uint64(24) | np.uint64(three)
        value = (together | length << np.uint64(8)) ^ (_OF_4 & np.uint64(0xFFFFFFFF)) ^ _OF_4 >> np.uint64(32)
        value = (value ^ value >> np.uint64(33)) * _PRIME_2
        value = (value ^ value >> np.uint64(29)) * _PRIME_3
        return value ^ value >> np.uint64(32)
    if size <= 8:
        value = (_four_bytes(text, end - 4) + (_four_bytes(text, start) << np.uint64(32))) ^ _OF_8
        value ^= (value << np.uint64(49) | value >> np.uint64(15)) ^ (value << np.uint64(24) | value >> np.uint64(40))
        value *= _MIX_2
        value = (value ^ (value >> np.uint64(35)) + length) * _MIX_2
        return value ^ value >> np.uint64(28)
    if size <= 16:
        low, high = eight_bytes(text, start) ^ _OF_16_LOW, eight_bytes(text, end - 8) ^ _OF_16_HIGH
        return _avalanche(length + _bytes_turned(low) + high + _folded_product(low, high))
    value = length * _PRIME_1
    if size <= 128:
        for turn in range((size - 1) // 32, -1, -1):
            value += _sixteen(text, start + 16 * turn, secret, 32 * turn)
            value += _sixteen(text, end - 16 * (turn + 1), secret, 32 * turn + 16)
        return _avalanche(value)
    for turn in range(8):
        value += _sixteen(text, start + 16 * turn, secret, 16 * turn)
    value = _avalanche(value)
    for turn in range(8, size // 16):
        value += _sixteen(text, start + 16 * turn, secret, 16 * (turn - 8) + _START_OFFSET)
    return _avalanche(value + _sixteen(text, end - 16, secret, _LAST_OFFSET))


@inlined
def _has_letter_or_digit(text, start, end):
    """Of ASCII, or anything else that is not."""
    while start < end:
        found = mask_of(text, start, 32, 97, 122) | mask_of(text, start, 0, 48, 57) | mask_of(text, start, 0, 128, 255)
        if found & first_bits(end - start):
            return True
        start += BLOCK
    return False


@inlined
def _is_space(byte):
    return byte == 32 or 9 <= byte <= 13


@compiled
def _divide(text, bounds, newlines, secret, pieces, hashes):
    """Writes (document, start, end) of each piece, its hash without the spaces around it; the number of pieces.

    The hash is 0 of a piece without a letter or digit, LONGER of one that is too long.
    """
    count = np.int64(0)
    for document in range(len(bounds)):
        begin = position = bounds[document, 0]
        end = bounds[document, 1]
        while position <= end:
            position = find_byte(text, position, end, 10)
            if newlines == 2 and position < end and not (position + 1 < end and text[position + 1] == 10):
                position += 1
                continue
            start, stop = begin, position
            while start < stop and _is_space(text[start]):
                start += 1
            while stop > start and _is_space(text[stop - 1]):
                stop -= 1
            pieces[count, 0], pieces[count, 1], pieces[count, 2] = document, begin, position
            hashes[count] = np.uint64(0)
            if _has_letter_or_digit(text, start, stop):
                hashes[count] = LONGER
                if stop - start <= MOST_HASHED_BYTES:
                    hashes[count] = xxh3_of(text, start, stop, secret)
            count += 1
            position += newlines
            begin = position
    return count


@compiled
def _count_newlines(text, bounds):
    count = np.int64(0)
    for document in range(len(bounds)):
        position = bounds[document, 0]
        while position < bounds[document, 1]:
            position = find_byte(text, position, bounds[document, 1], 10) + 1
            count += 1
    return count


@compiled
def _mark_first(documents, hashes, keys, stamps, is_first):
    """Marks each hash where it comes first in its document. keys, stamps: (2^n,), zero, more than twice the pieces."""
    mask = np.uint64(len(keys) - 1)
    for number in range(len(hashes)):
        slot = mixed(hashes[number]) >> np.uint64(8) & mask
        stamp = documents[number] + 1
        while stamps[slot] == stamp and keys[slot] != hashes[number]:
            slot = (slot + ONE) & mask
        is_first[number] = stamps[slot] != stamp
        keys[slot], stamps[slot] = hashes[number], stamp


def piece_hashes(text: np.ndarray, bounds: np.ndarray, newlines: int) -> tuple[np.ndarray, np.ndarray]:
    """((pieces, 3) int64: document, start, end; (pieces,) uint64: their hashes) of documents as of joined_texts.

    newlines: that divide pieces, 1 or 2. A hash is XXH3_64bits without the spaces around the piece, 0 of one without a
    letter or digit.
    """
    from xxhash import xxh3_64_intdigest

    room = int(_count_newlines(text, bounds)) + len(bounds)
    pieces, hashes = np.empty((room, 3), np.int64), np.empty(room, np.uint64)
    count = _divide(text, bounds, newlines, _SECRET, pieces, hashes)
    pieces, hashes = pieces[:count], hashes[:count]
    for number in np.flatnonzero(hashes == LONGER).tolist():
        hashes[number] = xxh3_64_intdigest(text[pieces[number, 1] : pieces[number, 2]].tobytes().strip())
    return pieces, hashes


def distinct_in_documents(documents: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """The hashes but 0, each once per document. documents: (pieces,) int64, ascending."""
    size = 1 << (2 * len(hashes) + 16).bit_length()
    is_first = np.zeros(len(hashes), bool)
    _mark_first(documents, hashes, np.zeros(size, np.uint64), np.zeros(size, np.int64), is_first)
    return hashes[is_first & (hashes != 0)]
