"""Memory for weights and contexts: anonymous, aligned, on huge pages where the system gives them.

Standard library only.
"""

import ctypes
import mmap
from typing import Final

from compiler.contract.native_errors import NativeError
from compiler.contract.plan_format import align

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024


class Memory:
    """One anonymous mapping, its start aligned to a huge page, huge pages advised."""

    def __init__(self, size: int) -> None:
        """Map `size` bytes of zeros.

        Raises:
            NativeError: There is no memory.
        """
        try:
            self._map = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
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
