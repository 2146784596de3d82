"""Memory for weights and contexts: anonymous, aligned, on huge pages where the system gives them.

Standard library only.
"""

import ctypes
import mmap
from pathlib import Path
from typing import Final

from compiler.contract.native_errors import NativeError
from compiler.contract.plan_format import align

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
"""Python maps shared memory unless told otherwise, and that gets no huge pages."""
_SMAPS: Final = Path("/proc/self/smaps")


class Memory:
    """One anonymous mapping, its start aligned to a huge page, huge pages advised."""

    def __init__(self, size: int) -> None:
        """Map `size` bytes of zeros.

        Raises:
            NativeError: There is no memory.
        """
        try:
            self._map = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=_PRIVATE)
        except (OSError, ValueError, OverflowError) as error:
            raise NativeError(f"cannot map {size} bytes: {error}") from error
        anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(anchor)
        del anchor
        skip = -base % HUGE_PAGE_BYTES
        self.address: Final = base + skip
        self.view: Final = memoryview(self._map)[skip : skip + size]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, skip, align(size, mmap.PAGESIZE))
            except OSError:  # a kernel without huge pages; slower, not wrong
                return

    def huge_bytes(self) -> int | None:
        """Return how many bytes written so far lie on huge pages; None if the system does not say.

        The kernel gives them when it can: without them reading weights takes twice as long.
        """
        return huge_bytes_of(self.address, self.address + len(self.view))


def huge_bytes_of(start: int, end: int) -> int | None:
    """Return how many bytes of [start, end) lie on huge pages; None if the system does not say."""
    try:
        lines = _SMAPS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return huge_bytes_between(lines, start, end)


def huge_bytes_between(lines: list[str], start: int, end: int) -> int | None:
    """Add up AnonHugePages of the mappings within [start, end) of the text of smaps.

    A mapping that the kernel merged with a neighbour counts whole, up to what is asked for.
    """
    found: int | None = None
    is_inside = False
    for line in lines:
        head, _, rest = line.partition(" ")
        low, dash, high = head.partition("-")
        if dash and not head.endswith(":"):
            is_inside = int(low, 16) < end and int(high, 16) > start
        elif is_inside and head == "AnonHugePages:":
            found = (found or 0) + int(rest.split()[0]) * 1024
    return None if found is None else min(found, end - start)
