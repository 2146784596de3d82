"""Factors that a release was merged with, as a file beside its bundle (`replays.bin`).

    "SFR1" | u32 weights | per weight, ascending: u8 n | n bytes section | u32 plane | factors

Factors as at the beginning of a LOWRANK payload (`compiler.delta.lowrank`). Devices never see the
file. The compiler writes it, and whoever makes a delta to the bundle reads it.
"""

import struct
from typing import Final

from compiler.contract.delta import DeltaFormatError, DeltaLimitError
from compiler.contract.planes import require_component
from compiler.delta.blobs import BlobReader
from compiler.delta.lowrank import Factors, read_factors
from compiler.delta.records import Replays

MAGIC: Final = b"SFR1"
MAX_WEIGHTS: Final = 1 << 16
_COUNT: Final = struct.Struct("<I")


def pack_replays(replays: Replays) -> bytes:
    """Return the file."""
    parts = [MAGIC, _COUNT.pack(len(replays))]
    for (section, plane), factors in sorted(replays.items()):
        name = section.encode()
        parts += [bytes([len(name)]), name, _COUNT.pack(plane), factors.to_bytes()]
    return b"".join(parts)


def read_replays(data: bytes) -> Replays:
    """Return what `pack_replays` wrote.

    Raises:
        DeltaFormatError: It did not write this.
        DeltaLimitError: A number is above its limit.
        ContractError: A section has no name of the grammar.
    """
    reader = BlobReader(data)
    if reader.take(len(MAGIC)) != MAGIC:
        raise DeltaFormatError("no file of factors")
    (count,) = _COUNT.unpack(reader.take(_COUNT.size))
    if count > MAX_WEIGHTS:
        raise DeltaLimitError(f"factors of {count} weights")
    found: dict[tuple[str, int], Factors] = {}
    for _ in range(count):
        name = reader.take(reader.take(1)[0]).decode("ascii", "replace")
        (plane,) = _COUNT.unpack(reader.take(_COUNT.size))
        found[require_component(name), plane] = read_factors(reader)
    reader.finish()
    if len(found) != count:
        raise DeltaFormatError("factors of a weight stand twice")
    return found
