"""Residuals: the difference of two chunks as bytes, and the ways to write it.

A residual is taken modulo the element (`new - old`, or xor for raw planes), so one residual leads
both ways. Every coder here sees packed residual bytes, uint8 (length,), mostly zero:

    GAPS          codes4: positions of changed codes, a sign bit each, magnitudes above 1 apart
    DENSE         all bytes
    BLOCKS        positions of changed aligned blocks of 2^k bytes, and their bytes
    BITS          raw: positions of flipped bits
    WORDS         f32: zigzag of the bit-pattern difference, four byte planes
    SPARSE_WORDS  f32: positions of changed words, four byte planes of those

In the packed weight layout a tile is 16 rows x 32 columns in 256 bytes, and 4 bytes are 8 columns
of one row; so blocks of 4, 16, 64 and 256 bytes are 1 x 8, 4 x 8, 16 x 8 and 16 x 32 codes.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import DeltaFormatError, Mode
from compiler.delta.blobs import BlobReader, pack_blob
from compiler.delta.gaps import pack_gaps, read_gaps

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_BLOCK_LOGS: Final = (0, 2, 4, 6, 7, 8)
_MAX_BLOCK_LOG: Final = 8
_BLOCK_LOG: Final = struct.Struct("<B")
_LOW: Final = np.uint8(15)
_MODULUS: Final = np.uint8(16)


@dataclass(frozen=True, slots=True)
class ResidualCoder:
    """One way to write a residual.

    Attributes:
        encode: Residual -> payload, or None where this way cannot pay.
        decode: (payload reader, length) -> residual; raises `DeltaFormatError`.
    """

    encode: Callable[[Bytes], bytes | None]
    decode: Callable[[BlobReader, int], Bytes]


def _encode_dense(residual: Bytes) -> bytes:
    return pack_blob(residual.tobytes())


def _decode_dense(reader: BlobReader, length: int) -> Bytes:
    return np.frombuffer(reader.blob(length, exact=True), np.uint8)


def _encode_gaps(residual: Bytes) -> bytes | None:
    codes = np.empty(2 * residual.size, np.uint8)
    codes[0::2], codes[1::2] = residual & _LOW, residual >> 4
    positions = np.flatnonzero(codes)
    if positions.size > residual.size:
        return None
    values = codes[positions]
    negative = values > 8
    magnitudes = np.where(negative, _MODULUS - values, values)
    large = np.flatnonzero(magnitudes > 1)
    return (
        pack_gaps(positions)
        + np.packbits(negative).tobytes()
        + pack_gaps(large)
        + pack_blob(magnitudes[large].tobytes())
    )


def _decode_gaps(reader: BlobReader, length: int) -> Bytes:
    positions = read_gaps(reader, limit=2 * length, most=length)
    count = positions.size
    signs = np.frombuffer(reader.take((count + 7) // 8), np.uint8)
    values = np.ones(count, np.uint8)
    large = read_gaps(reader, limit=count, most=count)
    values[large] = np.frombuffer(reader.blob(large.size, exact=True), np.uint8)
    values = np.where(np.unpackbits(signs, count=count), _MODULUS - values, values) & _LOW
    residual = np.zeros(length, np.uint8)
    odd = (positions & 1).astype(bool)
    residual[positions[~odd] >> 1] = values[~odd]
    residual[positions[odd] >> 1] |= values[odd] << 4
    return residual


def _encode_blocks(residual: Bytes) -> bytes | None:
    payloads = [_encode_block_size(residual, log) for log in _BLOCK_LOGS]
    return min((payload for payload in payloads if payload), key=len, default=None)


def _encode_block_size(residual: Bytes, log: int) -> bytes | None:
    if residual.size % (1 << log):
        return None
    blocks = residual.reshape(-1, 1 << log)
    changed = np.flatnonzero(blocks.any(axis=1))
    if 2 * changed.size > len(blocks):
        return None
    return _BLOCK_LOG.pack(log) + pack_gaps(changed) + pack_blob(blocks[changed].tobytes())


def _decode_blocks(reader: BlobReader, length: int) -> Bytes:
    (log,) = _BLOCK_LOG.unpack(reader.take(_BLOCK_LOG.size))
    if log > _MAX_BLOCK_LOG or length % (1 << log):
        raise DeltaFormatError(f"blocks of 2^{log} bytes in {length}")
    blocks = np.zeros((length >> log, 1 << log), np.uint8)
    changed = read_gaps(reader, limit=len(blocks), most=len(blocks))
    content = reader.blob(changed.size << log, exact=True)
    blocks[changed] = np.frombuffer(content, np.uint8).reshape(-1, 1 << log)
    return blocks.reshape(-1)


def _encode_bits(residual: Bytes) -> bytes | None:
    flipped = np.flatnonzero(np.unpackbits(residual, bitorder="little"))
    return pack_gaps(flipped) if flipped.size <= residual.size else None


def _decode_bits(reader: BlobReader, length: int) -> Bytes:
    flipped = read_gaps(reader, limit=8 * length, most=length)
    bits = np.zeros(8 * length, np.uint8)
    bits[flipped] = 1
    return np.packbits(bits, bitorder="little")


def _encode_words(residual: Bytes) -> bytes:
    return _pack_planes(residual.view("<u4"))


def _decode_words(reader: BlobReader, length: int) -> Bytes:
    return _read_planes(reader, length // 4).view(np.uint8)


def _encode_sparse_words(residual: Bytes) -> bytes | None:
    words = residual.view("<u4")
    changed = np.flatnonzero(words)
    if 2 * changed.size > words.size:
        return None
    return pack_gaps(changed) + _pack_planes(words[changed])


def _decode_sparse_words(reader: BlobReader, length: int) -> Bytes:
    words = np.zeros(length // 4, "<u4")
    changed = read_gaps(reader, limit=words.size, most=words.size)
    words[changed] = _read_planes(reader, changed.size)
    return words.view(np.uint8)


def _pack_planes(words: Words) -> bytes:
    zigzag = (words << np.uint32(1)) ^ (np.uint32(0) - (words >> np.uint32(31)))
    planes = zigzag.astype("<u4").view(np.uint8).reshape(-1, 4).T
    return b"".join(pack_blob(plane.tobytes()) for plane in planes)


def _read_planes(reader: BlobReader, count: int) -> Words:
    planes = [np.frombuffer(reader.blob(count, exact=True), np.uint8) for _ in range(4)]
    zigzag = np.stack(planes, axis=1).reshape(-1).view("<u4")
    return (zigzag >> np.uint32(1)) ^ (np.uint32(0) - (zigzag & np.uint32(1)))


CODERS: Final[Mapping[Mode, ResidualCoder]] = {
    Mode.GAPS: ResidualCoder(_encode_gaps, _decode_gaps),
    Mode.DENSE: ResidualCoder(_encode_dense, _decode_dense),
    Mode.BLOCKS: ResidualCoder(_encode_blocks, _decode_blocks),
    Mode.BITS: ResidualCoder(_encode_bits, _decode_bits),
    Mode.WORDS: ResidualCoder(_encode_words, _decode_words),
    Mode.SPARSE_WORDS: ResidualCoder(_encode_sparse_words, _decode_sparse_words),
}
