"""Runs mutants of one delta under a memory limit and prints what became of them, as JSON.

Usage: fuzz_child FILE SEED COUNT, where FILE holds a JSON object of base64 strings: `delta`, and
the sections `old` and `new`. Every mutant must end in a DeltaError or in exactly the new sections.
"""

import base64
import collections
import io
import json
import random
import resource
import struct
import sys
import zlib
from pathlib import Path

from compiler.contract.delta import DeltaError
from compiler.delta import MemorySections, apply_delta, verify_sections

FIXED = struct.Struct("<4sHHQIIIII")
ALLOWANCE_BYTES = 96 << 20
EXTREMES = (b"\xff" * 8, b"\0" * 7 + b"\x80", b"\0" * 5 + b"\1\0\0", b"\xff\xff\xff\x7f\0\0\0\0")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return a mutant: damage somewhere, in the table with lengths mended, or in the last bytes."""
    kind = rng.choice(["anywhere", "anywhere", "front", "cut", "insert", "table", "extreme"])
    changed = bytearray(data)
    if kind == "cut":
        return data[: rng.randrange(len(data))]
    if kind == "insert":
        at = rng.randrange(len(data))
        changed[at:at] = rng.randbytes(rng.randrange(1, 20))
    elif kind == "table":
        return mutate_table(data, rng)
    elif kind == "extreme":
        at = rng.randrange(len(data) - 8)
        changed[at : at + 8] = rng.choice(EXTREMES)
    else:
        reach = 64 if kind == "front" else len(data)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(reach)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(changed)


def mutate_table(data: bytes, rng: random.Random) -> bytes:
    """Damage the inflated table and pack it again, so that the parser behind it is reached."""
    fields = list(FIXED.unpack_from(data))
    end = FIXED.size + fields[8]
    table = bytearray(zlib.decompress(data[FIXED.size : end]))
    for _ in range(rng.randrange(1, 4)):
        table[rng.randrange(len(table))] = rng.randrange(256)
    stored = zlib.compress(bytes(table))
    fields[3] += len(stored) - fields[8]
    fields[8] = len(stored)
    return FIXED.pack(*fields) + stored + data[end:]


def outcome(data: bytes, old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """Apply, verify as a device does, and name the result."""
    sink = MemorySections()
    try:
        report = apply_delta(MemorySections(old), io.BytesIO(data), sink)
        verify_sections(report.header, sink)
    except DeltaError as error:
        return error.code
    made = {result.component for result in report.sections}
    digests_kept = {result.component: sink.section(result.component) for result in report.sections}
    return "exact" if digests_kept == {name: new.get(name) for name in made} else "WRONG"


def main() -> None:
    path, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    case = json.loads(Path(path).read_text())
    old, new = (
        {name: base64.b64decode(data) for name, data in case[side].items()}
        for side in ("old", "new")
    )
    delta = base64.b64decode(case["delta"])
    assert outcome(delta, old, new) == "exact"
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWANCE_BYTES,) * 2)
    seen = collections.Counter(
        outcome(mutate(delta, random.Random(number)), old, new)
        for number in range(seed, seed + count)
    )
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
