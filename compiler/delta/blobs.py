"""Blobs: the byte strings inside a payload, packed by zstd where that helps.

A blob is `u32 raw length | u32 stored length | stored bytes`. Stored as long as raw means verbatim;
shorter means exactly one zstd frame that declares the raw length and needs no dictionary.
"""

import struct
from collections.abc import Mapping
from typing import Final

import zstandard

from compiler.contract.delta import DeltaFormatError

_LENGTHS: Final = struct.Struct("<II")
_FRAME_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_THOROUGH_BYTES: Final = 32 * 1024
MAX_WINDOW_BYTES: Final = 1 << 24

# Almost no match search, but the optimal parser's block splitter: a gap stream has no repeats to
# find, its statistics change from expert to expert. 8 % smaller than level 1, 4 x faster than 16.
_ENTROPY: Final = {
    "compression_level": 16,
    "strategy": zstandard.STRATEGY_BTOPT,
    "window_log": 17,
    "search_log": 1,
    "min_match": 7,
    "hash_log": 6,
    "chain_log": 6,
}

_QUICK: Final = {"compression_level": 3}
_THOROUGH: Final = {"compression_level": 19}
_WORTH: Final = 0.9
"""Quick search below this share of coding without any: there are repeats, search for all."""


def pack_blob(raw: bytes) -> bytes:
    """Return `raw` as a blob, by the smallest of the coders tried."""
    candidates = [raw, _compress(raw, _ENTROPY), _compress(raw, _QUICK)]
    if len(raw) <= _THOROUGH_BYTES:
        candidates.append(_compress(raw, _THOROUGH))
    stored = min(candidates, key=len)
    return _LENGTHS.pack(len(raw), len(stored)) + stored


def open_frame(frame: bytes, length: int, *, source: bytes = b"", checksum: bool = False) -> bytes:
    """Return the content of one zstd frame, decided by its header before anything is allocated.

    Args:
        frame: Exactly one frame.
        length: Bytes it must declare and hold.
        source: Raw dictionary, if not empty.
        checksum: Whether the frame must carry one.

    Raises:
        DeltaFormatError: The frame is anything else.
    """
    if frame[:4] != _FRAME_MAGIC:
        raise DeltaFormatError("not a zstd frame")
    try:
        parameters = zstandard.get_frame_parameters(frame)
        _require_frame(parameters, length, checksum)
        decoder = zstandard.ZstdDecompressor(
            dict_data=_dictionary(source), max_window_size=MAX_WINDOW_BYTES
        )
        data = decoder.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaFormatError(f"zstd: {error}") from error
    if len(data) != length:
        raise DeltaFormatError("a zstd frame holds another length than it declares")
    return data


def make_frame(raw: bytes, *, source: bytes = b"", thorough: bool = True) -> bytes:
    """Return `raw` as one zstd frame of level 19 with content size and checksum.

    Args:
        raw: The content.
        source: Raw dictionary, if not empty.
        thorough: If not, level 19 is left out where a look finds no repeats worth its time.
    """
    if not thorough:
        plain, quick = (_compress(raw, p, checksum=True) for p in (_ENTROPY, _QUICK))
        if len(quick) > _WORTH * len(plain):
            return min(plain, quick, key=len)
    window = max(10, min(24, (len(raw) + len(source)).bit_length()))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19, window_log=window, write_content_size=True, write_checksum=True, write_dict_id=False
    )
    return zstandard.ZstdCompressor(
        dict_data=_dictionary(source), compression_params=parameters
    ).compress(raw)


class BlobReader:
    """Strict reading of a payload; lengths are compared with what may be there before use."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._position = 0

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes.

        Raises:
            DeltaFormatError: The payload is shorter.
        """
        end = self._position + length
        if end > len(self._payload):
            raise DeltaFormatError("the payload ends early")
        data = self._payload[self._position : end]
        self._position = end
        return data

    def rest(self) -> bytes:
        """Return everything that is left."""
        return self.take(len(self._payload) - self._position)

    def blob(self, most: int, *, exact: bool = False) -> bytes:
        """Return the content of the next blob.

        Args:
            most: Largest raw length allowed.
            exact: Whether it must be just that.

        Raises:
            DeltaFormatError: The length is wrong, or the blob is malformed.
        """
        raw, stored = _LENGTHS.unpack(self.take(_LENGTHS.size))
        if raw > most or stored > raw or (exact and raw != most):
            raise DeltaFormatError(f"blob of {stored} for {raw} bytes, at most {most}")
        data = self.take(stored)
        return data if stored == raw else open_frame(data, raw)

    def finish(self) -> None:
        """Check that nothing is left.

        Raises:
            DeltaFormatError: Bytes are left.
        """
        if self._position != len(self._payload):
            raise DeltaFormatError("bytes are left in the payload")


def _compress(raw: bytes, parameters: Mapping[str, int], *, checksum: bool = False) -> bytes:
    chosen = zstandard.ZstdCompressionParameters(
        **parameters, write_content_size=True, write_checksum=checksum, write_dict_id=False
    )
    return zstandard.ZstdCompressor(compression_params=chosen).compress(raw)


def _require_frame(parameters: zstandard.FrameParameters, length: int, checksum: bool) -> None:
    if parameters.content_size != length:
        raise DeltaFormatError("a zstd frame declares another length")
    if parameters.dict_id or parameters.window_size > MAX_WINDOW_BYTES:
        raise DeltaFormatError("a zstd frame wants a dictionary or too large a window")
    if checksum and not parameters.has_checksum:
        raise DeltaFormatError("a zstd frame without checksum")


def _dictionary(source: bytes) -> zstandard.ZstdCompressionDict | None:
    if not source:
        return None
    return zstandard.ZstdCompressionDict(source, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
