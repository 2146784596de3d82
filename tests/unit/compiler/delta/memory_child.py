"""Encodes or applies in a fresh process and prints by how many bytes its resident set grew.

Usage: memory_child encode OLD NEW PLANES OUT | memory_child apply OLD DELTA LAYOUT OUT; OLD and NEW
are files of one section, PLANES is JSON [[kind, offset, length]], OUT is what is written.
"""

import json
import os
import sys
from pathlib import Path

from compiler.contract.planes import Plane
from compiler.delta import SectionFile, apply_delta, write_delta

COMPONENT = "weights.shared"


def resident() -> tuple[int, int]:
    """Bytes in memory now and at most."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (1024 * int(rows[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return now, most


class FileSection:
    """Base or sink over one file."""

    def __init__(self, path: str, flags: int) -> None:
        self._fd = os.open(path, flags, 0o600)

    def pread(self, _component: str, length: int, offset: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def pwrite(self, _component: str, data: bytes, offset: int) -> None:
        os.pwrite(self._fd, data, offset)


def encode(old: str, new: str, planes: str, out: str) -> None:
    layout = tuple(Plane(*row) for row in json.loads(planes))
    sides = [{COMPONENT: SectionFile(Path(path), layout)} for path in (old, new)]
    with Path(out).open("wb") as file:
        write_delta(*sides, file)


def apply(old: str, delta: str, _planes: str, out: str) -> None:
    with Path(delta).open("rb") as file:
        sink = FileSection(out, os.O_RDWR | os.O_CREAT)
        apply_delta(FileSection(old, os.O_RDONLY), file, sink)


def main(what: str, *arguments: str) -> None:
    Path("/proc/self/clear_refs").write_text("5")
    before = resident()[0]
    {"encode": encode, "apply": apply}[what](*arguments)
    print(resident()[1] - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
