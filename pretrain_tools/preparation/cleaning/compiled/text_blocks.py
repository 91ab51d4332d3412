"""A UTF-8 text 64 bytes at a time: which of them are of a kind, as the bits of an integer; and hashes of bytes.

One instruction compares 64 bytes where the processor has vectors of that size, so what most bytes have to do with
costs next to nothing. Functions read up to PADDING bytes beyond the end that they are given.
"""

import functools
from collections.abc import Sequence

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pretrain_tools.preparation.cleaning.compiled.kept import cached_njit

compiled = functools.partial(cached_njit, nogil=True, error_model="numpy", _nrt=False)
inlined = functools.partial(compiled, forceinline=True)
"""For what is called for every word: a call passes on seven numbers for each array."""
HASH_START, HASH_FACTOR = np.uint64(0xCBF29CE484222325), np.uint64(0x9E3779B97F4A7C15)
BLOCK = 64
PADDING = 2 * BLOCK
"""Bytes behind the last text that may be read; no result depends on them."""
ONE, ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


def _loaded(context, builder, array_type, array, position, loaded_type):
    """What stands at a position of an array of bytes, wherever it is aligned."""
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.bitcast(builder.gep(data, [position]), loaded_type.as_pointer())
    return builder.load(pointer, align=1)


@intrinsic
def mask_of(_, text, position, fold, first, last):
    """uint64: bit n is set where the byte n after `position`, or-ed with `fold`, is from `first` to `last`."""

    def generate(context, builder, signature, arguments):
        array, at, *limits = arguments
        block_type = ir.VectorType(ir.IntType(8), BLOCK)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)

        def everywhere(value):
            one = builder.insert_element(ir.Constant(block_type, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, ir.Constant(block_type, ir.Undefined), zeros)

        block = _loaded(context, builder, signature.args[0], array, at, block_type)
        folded, low, high = map(everywhere, limits)
        above = builder.sub(builder.or_(block, folded), low)
        return builder.bitcast(builder.icmp_unsigned("<=", above, builder.sub(high, low)), ir.IntType(BLOCK))

    return types.uint64(text, types.intp, types.uint8, types.uint8, types.uint8), generate


@intrinsic
def eight_bytes(_, text, position):
    """uint64 of the bytes at a position, the first in the lowest bits."""

    def generate(context, builder, signature, arguments):
        return _loaded(context, builder, signature.args[0], *arguments, ir.IntType(64))

    return types.uint64(text, types.intp), generate


@intrinsic
def lowest_bit(_, mask):
    """int64: the number of the lowest bit that is set; 64 where none is."""

    def generate(_, builder, __, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@inlined
def first_bits(count):
    """Mask of the first bits, all from 64 on."""
    return ALL if count >= 64 else (ONE << np.uint64(count)) - ONE


@inlined
def find_byte(text, start, end, byte):
    """Where a byte stands first; `end` where it does not."""
    while start < end:
        found = mask_of(text, start, 0, byte, byte)
        if found:
            return min(end, start + lowest_bit(found))
        start += BLOCK
    return end


@inlined
def mixed(value):
    """A hash whose low bits depend on all bits; never 0, which marks an empty slot."""
    value ^= value >> np.uint64(32)
    value *= HASH_FACTOR
    return (value ^ value >> np.uint64(29)) | ONE


@inlined
def hash_of(text, start, end):
    """A 64-bit hash of bytes; equal bytes have equal hashes."""
    value = HASH_START ^ np.uint64(end - start)
    while end - start > 8:
        value = (value ^ eight_bytes(text, start)) * HASH_FACTOR
        value ^= value >> np.uint64(32)
        start += 8
    if end > start:
        # Shifted, so that what follows the end does not count.
        value ^= eight_bytes(text, start) << np.uint64(8 * (8 - (end - start)))
    return mixed(value * HASH_FACTOR)


@inlined
def code_at(text, position):
    """(code point, bytes of it) at a position of UTF-8."""
    first = np.int64(text[position])
    if first < 0x80:
        return first, 1
    if first < 0xE0:
        return (first & 0x1F) << 6 | np.int64(text[position + 1]) & 0x3F, 2
    if first < 0xF0:
        return (
            (first & 0x0F) << 12 | (np.int64(text[position + 1]) & 0x3F) << 6 | np.int64(text[position + 2]) & 0x3F
        ), 3
    return (
        (first & 0x07) << 18
        | (np.int64(text[position + 1]) & 0x3F) << 12
        | (np.int64(text[position + 2]) & 0x3F) << 6
        | np.int64(text[position + 3]) & 0x3F
    ), 4


def joined_texts(texts: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """(text, bounds): documents end to end and PADDING, (bytes,) uint8; first byte and end, (documents, 2) int64."""
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    bounds = np.stack([np.concatenate([ends[:0], [0], ends[:-1]])[: len(ends)], ends], axis=1)
    # A bytearray, so that all arrays of bytes are writable and nothing is compiled twice.
    return np.frombuffer(bytearray().join([*texts, bytes(PADDING)]), np.uint8), np.ascontiguousarray(bounds)
