"""Chunks: a range of one virtual stream before and after, and the record payload between them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from compiler.contract.delta import MODES, Mode, RecordKind
from compiler.delta.blobs import BlobReader
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


_ARITHMETIC: Final[Mapping[RecordKind, Arithmetic]] = {
    RecordKind.CODES4: Arithmetic(_subtract_codes, _add_codes),
    RecordKind.SCALES8: Arithmetic(np.subtract, np.add),
    RecordKind.F32: Arithmetic(_subtract_words, _add_words),
    RecordKind.RAW: Arithmetic(np.bitwise_xor, np.bitwise_xor),
}


def encode_chunk(kind: RecordKind, old: bytes, new: bytes) -> tuple[Mode, bytes]:
    """Return the mode with the smallest payload, and that payload.

    Args:
        kind: A stream kind.
        old: The chunk before.
        new: The chunk after, of the same length.
    """
    if old == new:
        return Mode.SAME, b""
    residual = _ARITHMETIC[kind].subtract(
        np.frombuffer(new, np.uint8), np.frombuffer(old, np.uint8)
    )
    payloads = (
        (mode, CODERS[mode].encode(residual)) for mode in sorted(MODES[kind]) if mode in CODERS
    )
    found = [(mode, payload) for mode, payload in payloads if payload is not None]
    return min(found, key=lambda pair: len(pair[1]))


def decode_chunk(
    kind: RecordKind, mode: Mode, source: bytes, payload: bytes, *, reverse: bool
) -> bytes:
    """Return the chunk after, or with `reverse` the one before.

    Args:
        kind: A stream kind.
        mode: A mode of that kind.
        source: The chunk to start from; whole words for f32.
        payload: As it came.
        reverse: Whether `source` is the new chunk.

    Raises:
        DeltaFormatError: The payload is malformed.
    """
    if mode is Mode.SAME:
        return source
    reader = BlobReader(payload)
    residual = CODERS[mode].decode(reader, len(source))
    reader.finish()
    arithmetic = _ARITHMETIC[kind]
    combine = arithmetic.subtract if reverse else arithmetic.add
    return combine(np.frombuffer(source, np.uint8), residual).tobytes()
