"""Does a file look like an ONNX model at all? A walk over the outermost fields, nothing more.

Needs no ONNX package and reads a few bytes per field, so the web process can afford it. Finds files
of another kind and files that were cut off; the compiler does the real reading in a worker.

Format: protobuf encoding (varints, little endian; key = field number << 3 | wire type) of
`ModelProto` in onnx.proto: 1 ir_version, 7 graph, 8 opset_import are always there.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import BinaryIO, Final

from builds.errors import MalformedUploadError

MAX_FIELDS: Final = 100_000
MAX_VARINT_BYTES: Final = 10
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
FIXED_BYTES: Final[Mapping[int, int]] = MappingProxyType({FIXED64: 8, FIXED32: 4})
# ModelProto: field number -> wire type; others are later additions and may have any.
KNOWN: Final[Mapping[int, int]] = MappingProxyType(
    {1: VARINT, 5: VARINT} | dict.fromkeys((2, 3, 4, 6, 7, 8, 14, 20, 25, 26), LENGTH)
)
NEEDED: Final[Mapping[int, str]] = MappingProxyType(
    {1: "ir_version", 7: "graph", 8: "opset_import"}
)
HINT: Final = (
    "export the model again, run onnx.checker.check_model on it, and upload the whole file"
)


def require_onnx(stream: BinaryIO, name: str) -> None:
    """Check that a seekable stream, from its start, has the outline of an ONNX model.

    Raises:
        MalformedUploadError: It has not; the message says what is wrong and where.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    seen: set[int] = set()
    for _ in range(MAX_FIELDS):
        at = stream.tell()
        if at == size:
            break
        seen.add(_skip_field(stream, size, name))
    else:
        raise _malformed(name, f"more than {MAX_FIELDS} fields")
    missing = [label for number, label in NEEDED.items() if number not in seen]
    if missing:
        raise _malformed(name, f"it ends after {size} bytes without {', '.join(missing)}")


def _skip_field(stream: BinaryIO, size: int, name: str) -> int:
    """Move behind one field; return its number."""
    at = stream.tell()
    number, wire_type = divmod(_varint(stream, name), 8)
    if number == 0 or KNOWN.get(number, wire_type) != wire_type:
        raise _malformed(name, f"byte {at} starts no field of an ONNX model")
    if wire_type == VARINT:
        _varint(stream, name)
        return number
    if wire_type == LENGTH:
        length = _varint(stream, name)
    elif wire_type in FIXED_BYTES:
        length = FIXED_BYTES[wire_type]
    else:
        raise _malformed(name, f"byte {at} starts no field of an ONNX model")
    end = stream.tell() + length
    if end > size:
        raise _malformed(name, f"it is cut off: {size} bytes, the field at {at} ends at {end}")
    stream.seek(end)
    return number


def _varint(stream: BinaryIO, name: str) -> int:
    value = 0
    for index in range(MAX_VARINT_BYTES):
        byte = stream.read(1)
        if not byte:
            raise _malformed(name, f"it is cut off after {stream.tell()} bytes")
        value |= (byte[0] & 0x7F) << (7 * index)
        if byte[0] < 0x80:
            return value
    raise _malformed(name, f"no number ends before byte {stream.tell()}")


def _malformed(name: str, reason: str) -> MalformedUploadError:
    return MalformedUploadError(f"{name} is not an ONNX model: {reason}", hint=HINT)
