"""A careful reader of BSDIFF40 patches.

Format: `BSDIFF40`, three sign-magnitude i64 (bytes of the packed control and diff blocks, length of
the result), then control, diff and extra blocks, each bzip2. A control triple (x, y, z) says: add x
bytes of diff to the old bytes at the cursor, append y bytes of extra, move the cursor by z.

The known readers trusted these numbers (CVE-2014-9862, CVE-2020-14315, CVE-2020-15904). Here every
one is compared with what must come out before anything is inflated or copied, no native patch code
is called, and so a device does not need the bsdiff4 package.
"""

import bz2
import io
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from compiler.contract.delta import DeltaFormatError

_MAGIC: Final = b"BSDIFF40"
_HEADER: Final = struct.Struct("<8sQQQ")
_CONTROL: Final = struct.Struct("<QQQ")
_SIGN: Final = 1 << 63
MAX_CONTROL_BYTES: Final = _CONTROL.size * (1 << 16)


class _Step(NamedTuple):
    """One control triple with the positions it acts on."""

    old: int
    new: int
    diff: int
    extra: int


def apply_bsdiff4(patch: bytes, source: bytes, length: int) -> bytes:
    """Return the `length` bytes that `patch` makes of `source`.

    Raises:
        DeltaFormatError: The patch is malformed, reads outside `source`, or makes another length.
    """
    if len(patch) < _HEADER.size:
        raise DeltaFormatError("bsdiff4: no header")
    magic, control_length, diff_length, new_length = _HEADER.unpack_from(patch)
    if magic != _MAGIC or new_length != length:
        raise DeltaFormatError("bsdiff4: not a patch for this length")
    if control_length + diff_length > len(patch) - _HEADER.size:
        raise DeltaFormatError("bsdiff4: negative or too large a block")
    diff_start = _HEADER.size + control_length
    extra_start = diff_start + diff_length
    control = _inflate(patch[_HEADER.size : diff_start], MAX_CONTROL_BYTES)
    diff_total = sum(step.diff for step in _steps(control, len(source), length))
    diff = _inflate(patch[diff_start:extra_start], diff_total)
    extra = _inflate(patch[extra_start:], length - diff_total)
    if len(diff) != diff_total or len(extra) != length - diff_total:
        raise DeltaFormatError("bsdiff4: a block does not fit the control block")
    return _build(_steps(control, len(source), length), source, diff, extra, length)


def make_bsdiff4(source: bytes, target: bytes) -> bytes | None:
    """Return a patch from `source` to `target`, or None if `apply_bsdiff4` would refuse its size.

    Needs the bsdiff4 package, which only a server has.
    """
    from bsdiff4 import core
    from bsdiff4 import format as bsdiff4_format

    control, diff, extra = core.diff(source, target)
    if len(control) > MAX_CONTROL_BYTES:
        return None
    patch = io.BytesIO()
    bsdiff4_format.write_patch(patch, len(target), control, diff, extra)
    return patch.getvalue()


def _steps(control: bytes, source_length: int, length: int) -> Iterator[_Step]:
    if len(control) % _CONTROL.size:
        raise DeltaFormatError("bsdiff4: broken control block")
    old = new = 0
    for row in _CONTROL.iter_unpack(control):
        diff, extra, seek = (_signed(value) for value in row)
        if diff < 0 or extra < 0 or diff + extra > length - new:
            raise DeltaFormatError("bsdiff4: control length out of range")
        if diff and not 0 <= old <= source_length - diff:
            raise DeltaFormatError("bsdiff4: control seeks outside the old bytes")
        yield _Step(old, new, diff, extra)
        new += diff + extra
        old += diff + seek
    if new != length:
        raise DeltaFormatError("bsdiff4: control block makes another length")


def _build(steps: Iterator[_Step], source: bytes, diff: bytes, extra: bytes, length: int) -> bytes:
    result = np.empty(length, np.uint8)
    old, added, appended = (np.frombuffer(data, np.uint8) for data in (source, diff, extra))
    diff_at = extra_at = 0
    for step in steps:
        middle = step.new + step.diff
        end = middle + step.extra
        result[step.new : middle] = (
            old[step.old : step.old + step.diff] + added[diff_at : diff_at + step.diff]
        )
        result[middle:end] = appended[extra_at : extra_at + step.extra]
        diff_at += step.diff
        extra_at += step.extra
    return result.tobytes()


def _signed(value: int) -> int:
    return -(value - _SIGN) if value & _SIGN else value


def _inflate(packed: bytes, most: int) -> bytes:
    inflater = bz2.BZ2Decompressor()
    try:
        data = inflater.decompress(packed, most + 1)
    except (OSError, ValueError) as error:
        raise DeltaFormatError(f"bsdiff4: {error}") from error
    if len(data) > most or not inflater.eof or inflater.unused_data:
        raise DeltaFormatError("bsdiff4: a block is too long, unfinished or followed by bytes")
    return data
