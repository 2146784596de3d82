"""Residuals: the difference of two chunks as bytes, and the ways to write it.

A residual is taken modulo the element (`new - old`, or xor for raw planes), so one residual leads
both ways. Every coder here sees packed residual bytes, uint8 (length,), mostly zero:

    GAPS          codes4: positions of changed codes, a sign bit each, magnitudes above 1 apart
    DENSE         all bytes
    BLOCKS        positions of changed aligned blocks of 2^k bytes, and their bytes
    WIDE_GAPS     as GAPS, two bytes a gap: where one code in 32 changed, or fewer
    HALVES        codes4: positions of changed half blocks, of low or of high codes, and their codes
    BITS          raw: positions of flipped bits
    WORDS         f32: zigzag of the bit-pattern difference, four byte planes
    SPARSE_WORDS  f32: positions of changed words, four byte planes of those
    QUADS         words, four byte planes: of what stands alone, where bytes have their own meaning
    COUNTERS      raw: words, each less the one before it, as WORDS; for running counts that shifted

In the packed weight layout a tile is 16 rows x 32 columns in 256 bytes, and 4 bytes are 8 columns
of one row; so blocks of 4, 16, 64 and 256 bytes are 1 x 8, 4 x 8, 16 x 8 and 16 x 32 codes. Half
of one has half the columns: 16 bytes are two blocks of 4 x 4 codes.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import DeltaFormatError, Mode
from compiler.delta.blobs import BlobReader, pack_blob
from compiler.delta.estimates import MARGIN, THOROUGH_BYTES, block_bytes, half_bytes, in_halves
from compiler.delta.gaps import Positions, pack_gaps, pack_wide_gaps, read_gaps, read_wide_gaps

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

WIDE_SHARE: Final = 16
"""WIDE_GAPS of at most one byte in so many."""
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
    return _encode_positions(residual, pack_gaps, residual.size)


def _encode_wide_gaps(residual: Bytes) -> bytes | None:
    return _encode_positions(residual, pack_wide_gaps, residual.size // WIDE_SHARE)


def _encode_positions(
    residual: Bytes, pack: Callable[[Positions], bytes], most: int
) -> bytes | None:
    codes = np.empty(2 * residual.size, np.uint8)
    codes[0::2], codes[1::2] = residual & _LOW, residual >> 4
    positions = np.flatnonzero(codes)
    if positions.size > most:
        return None
    values = codes[positions]
    negative = values > 8
    magnitudes = np.where(negative, _MODULUS - values, values)
    large = np.flatnonzero(magnitudes > 1)
    return (
        pack(positions)
        + np.packbits(negative).tobytes()
        + pack_gaps(large)
        + pack_blob(magnitudes[large].tobytes())
    )


def _decode_gaps(reader: BlobReader, length: int) -> Bytes:
    return _decode_positions(reader, length, read_gaps(reader, limit=2 * length, most=length))


def _decode_wide_gaps(reader: BlobReader, length: int) -> Bytes:
    most = length // WIDE_SHARE
    return _decode_positions(reader, length, read_wide_gaps(reader, limit=2 * length, most=most))


def _decode_positions(reader: BlobReader, length: int, positions: Positions) -> Bytes:
    count = positions.size
    signs = np.frombuffer(reader.take((count + 7) // 8), np.uint8)
    values = np.ones(count, np.uint8)
    large = read_gaps(reader, limit=count, most=count)
    values[large] = np.frombuffer(reader.blob(large.size, exact=True), np.uint8)
    values = np.where(np.unpackbits(signs, count=count), _MODULUS - values, values) & _LOW
    residual = np.zeros(length, np.uint8)
    odd = (positions & 1) != 0
    residual[positions[~odd] >> 1] = values[~odd]
    residual[positions[odd] >> 1] |= values[odd] << 4
    return residual


def _encode_blocks(residual: Bytes) -> bytes | None:
    logs = _likely_logs(residual, block_bytes(residual))
    return min((_encode_block_size(residual, log) for log in logs), key=len, default=None)


def _likely_logs(residual: Bytes, costs: Mapping[int, float]) -> list[int]:
    margin = MARGIN if residual.size > THOROUGH_BYTES else np.inf
    return [log for log, cost in costs.items() if cost <= margin * min(costs.values())]


def _encode_block_size(residual: Bytes, log: int) -> bytes:
    blocks = residual.reshape(-1, 1 << log)
    changed = np.flatnonzero(blocks.any(axis=1))
    return _BLOCK_LOG.pack(log) + pack_gaps(changed) + pack_blob(blocks[changed].tobytes())


def _encode_halves(residual: Bytes) -> bytes | None:
    logs = _likely_logs(residual, half_bytes(residual))
    return min((_encode_half_size(residual, log) for log in logs), key=len, default=None)


def _encode_half_size(residual: Bytes, log: int) -> bytes:
    halves = in_halves(residual, log)
    changed = np.flatnonzero(halves.any(axis=1))
    codes = halves[changed].reshape(-1, 2)
    content = codes[:, 0] | codes[:, 1] << 4
    return _BLOCK_LOG.pack(log) + pack_gaps(changed) + pack_blob(content.tobytes())


def _decode_halves(reader: BlobReader, length: int) -> Bytes:
    (log,) = _BLOCK_LOG.unpack(reader.take(_BLOCK_LOG.size))
    if not 0 < log <= _MAX_BLOCK_LOG or length % (1 << log):
        raise DeltaFormatError(f"half blocks of 2^{log} bytes in {length}")
    most = 2 * (length >> log)
    changed = read_gaps(reader, limit=most, most=most)
    content = np.frombuffer(reader.blob(changed.size << (log - 1), exact=True), np.uint8)
    codes = np.stack((content & _LOW, content >> 4), axis=1).reshape(-1, 1 << log)
    blocks = np.zeros((length >> log, 1 << log), np.uint8)
    is_high = (changed & 1) != 0
    blocks[changed[~is_high] >> 1] = codes[~is_high]
    blocks[changed[is_high] >> 1] |= codes[is_high] << 4
    return blocks.reshape(-1)


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


def _encode_words(residual: Bytes) -> bytes | None:
    if residual.size % 4:
        return None
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


def _encode_counters(residual: Bytes) -> bytes | None:
    if residual.size % 4:
        return None
    words = residual.view("<u4")
    steps = words.copy()
    steps[1:] -= words[:-1]
    return _pack_planes(steps)


def _decode_counters(reader: BlobReader, length: int) -> Bytes:
    steps = _read_planes(reader, length // 4)
    return np.cumsum(steps, dtype=np.uint32).astype("<u4").view(np.uint8)


def _encode_quads(residual: Bytes) -> bytes | None:
    if residual.size % 4:
        return None
    return b"".join(pack_blob(plane.tobytes()) for plane in residual.reshape(-1, 4).T)


def _decode_quads(reader: BlobReader, length: int) -> Bytes:
    planes = [np.frombuffer(reader.blob(length // 4, exact=True), np.uint8) for _ in range(4)]
    return np.stack(planes, axis=1).reshape(-1)


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
    Mode.WIDE_GAPS: ResidualCoder(_encode_wide_gaps, _decode_wide_gaps),
    Mode.HALVES: ResidualCoder(_encode_halves, _decode_halves),
    Mode.BITS: ResidualCoder(_encode_bits, _decode_bits),
    Mode.WORDS: ResidualCoder(_encode_words, _decode_words),
    Mode.SPARSE_WORDS: ResidualCoder(_encode_sparse_words, _decode_sparse_words),
    Mode.COUNTERS: ResidualCoder(_encode_counters, _decode_counters),
    Mode.QUADS: ResidualCoder(_encode_quads, _decode_quads),
    Mode.DENSE_AFTER: ResidualCoder(_encode_dense, _decode_dense),
    Mode.QUADS_AFTER: ResidualCoder(_encode_quads, _decode_quads),
}
