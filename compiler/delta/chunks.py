"""Chunks: a range of one virtual stream before and after, and the record payload between them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import AFTER_MODES, MODES, Mode, RecordKind
from compiler.delta.blobs import BlobReader
from compiler.delta.estimates import likely_modes
from compiler.delta.residuals import CODERS, Bytes


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How elements of one kind differ. All arrays are uint8 (length,) of packed elements.

    Attributes:
        subtract: (new, old) -> residual, and (new, residual) -> old.
        add: (old, residual) -> new.
    """

    subtract: Callable[[Bytes, Bytes], Bytes]
    add: Callable[[Bytes, Bytes], Bytes]


_LOW: Final = np.uint8(0x0F)
_HIGH: Final = np.uint8(0xF0)


def _add_codes(left: Bytes, right: Bytes) -> Bytes:
    low = (left & _LOW) + (right & _LOW)
    high = (left & _HIGH) + (right & _HIGH)
    return (low & _LOW) | high


def _subtract_codes(left: Bytes, right: Bytes) -> Bytes:
    low = (left & _LOW) - (right & _LOW)
    high = (left & _HIGH) - (right & _HIGH)
    return (low & _LOW) | high


def _add_words(left: Bytes, right: Bytes) -> Bytes:
    total: npt.NDArray[np.uint32] = left.view("<u4") + right.view("<u4")
    return total.view(np.uint8)


def _subtract_words(left: Bytes, right: Bytes) -> Bytes:
    difference: npt.NDArray[np.uint32] = left.view("<u4") - right.view("<u4")
    return difference.view(np.uint8)


_BYTES: Final = Arithmetic(np.subtract, np.add)
_XOR: Final = Arithmetic(np.bitwise_xor, np.bitwise_xor)
_WORDS: Final = Arithmetic(_subtract_words, _add_words)
_ARITHMETIC: Final[Mapping[RecordKind, Arithmetic]] = {
    RecordKind.CODES4: Arithmetic(_subtract_codes, _add_codes),
    RecordKind.SCALES8: _BYTES,
    RecordKind.F32: _WORDS,
    RecordKind.RAW: _XOR,
    RecordKind.ADDED: _BYTES,
    RecordKind.DROPPED: _BYTES,
}


def encode_chunk(kind: RecordKind, old: bytes, new: bytes) -> tuple[Mode, bytes]:
    """Return the mode with the smallest payload, and that payload.

    Args:
        kind: A stream kind.
        old: The chunk before; zeros for what stands alone.
        new: The chunk after, of the same length.
    """
    if old == new and Mode.SAME in MODES[kind]:
        return Mode.SAME, b""
    found = []
    for arithmetic, modes in _by_arithmetic(kind, len(new)):
        residual = arithmetic.subtract(np.frombuffer(new, np.uint8), np.frombuffer(old, np.uint8))
        for mode in likely_modes(kind, residual, modes):
            payload = CODERS[mode].encode(residual)
            if payload is not None:
                found.append((mode, payload))
    return min(found, key=lambda pair: len(pair[1]))


def encode_alone(kind: RecordKind, before: bytes, content: bytes) -> tuple[Mode, bytes]:
    """Return the mode with the smallest payload for what only one section holds, and that payload.

    Args:
        kind: ADDED or DROPPED.
        before: What `gather_before` gives.
        content: As long.
    """
    new = np.frombuffer(content, np.uint8)
    found = []
    for mode in sorted(MODES[kind]):
        old = np.frombuffer(before if mode in AFTER_MODES else bytes(len(content)), np.uint8)
        payload = CODERS[mode].encode(_BYTES.subtract(new, old))
        if payload is not None:
            found.append((mode, payload))
    return min(found, key=lambda pair: len(pair[1]))


def is_exact(kind: RecordKind, mode: Mode, payload: bytes, old: bytes, new: bytes) -> bool:
    """Return whether a payload leads from `old` to `new` and back."""
    if mode is Mode.SAME:
        return old == new
    residual = _residual(mode, payload, len(new))
    return (
        _combine(kind, mode, old, residual, reverse=False) == new
        and _combine(kind, mode, new, residual, reverse=True) == old
    )


def decode_chunk(
    kind: RecordKind, mode: Mode, source: bytes, payload: bytes, *, reverse: bool
) -> bytes:
    """Return the chunk after, or with `reverse` the one before.

    Args:
        kind: A stream kind.
        mode: A mode of that kind.
        source: The chunk to start from; whole words for modes of words.
        payload: As it came.
        reverse: Whether `source` is the new chunk.

    Raises:
        DeltaFormatError: The payload is malformed.
    """
    if mode is Mode.SAME:
        return source
    residual = _residual(mode, payload, len(source))
    return _combine(kind, mode, source, residual, reverse=reverse)


def _by_arithmetic(kind: RecordKind, length: int) -> Iterator[tuple[Arithmetic, frozenset[Mode]]]:
    modes = (MODES[kind] & CODERS.keys()) - {Mode.COUNTERS}
    yield _ARITHMETIC[kind], modes
    if Mode.COUNTERS in MODES[kind] and length % 4 == 0:
        yield _WORDS, frozenset({Mode.COUNTERS})


def _residual(mode: Mode, payload: bytes, length: int) -> Bytes:
    reader = BlobReader(payload)
    residual = CODERS[mode].decode(reader, length)
    reader.finish()
    return residual


def _combine(
    kind: RecordKind, mode: Mode, source: bytes, residual: Bytes, *, reverse: bool
) -> bytes:
    arithmetic = _WORDS if mode is Mode.COUNTERS else _ARITHMETIC[kind]
    way = arithmetic.subtract if reverse else arithmetic.add
    return way(np.frombuffer(source, np.uint8), residual).tobytes()
