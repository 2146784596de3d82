"""How fast this machine reads memory: a plain loop over the same number of bytes, in the same run.

The limit of decoding, because every weight is read once. Written in C, compiled for the same target
as the kernels it is compared with, on memory with huge pages, shared between threads by halves.
"""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.loaded_code import loaded_code
from compiler.contract.native_memory import Memory

SOURCE = """
#include <stdint.h>
typedef uint64_t lanes __attribute__((vector_size(64), aligned(64)));
__attribute__((visibility("default"))) uint64_t read_bytes(const uint8_t *from, uint64_t bytes) {
  lanes sum[8] = {0};
  const lanes *at = (const lanes *)(const void *)from;
  for (uint64_t i = 0; i < bytes / 64; i += 8)
    for (int j = 0; j < 8; j++) sum[j] += at[i + j];
  lanes all = sum[0];
  for (int j = 1; j < 8; j++) all += sum[j];
  return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}
"""
CHUNK: Final = 512
PASSES: Final = 4
"""Starting a thread takes about 0.1 ms; four passes over 107 MB take 7 and more."""


class Reader:
    """Reads a block of memory of its own; the block is larger than any cache."""

    def __init__(self, target_id: str, size: int, cache: Path) -> None:
        size -= size % (2 * CHUNK)
        self._size = size
        self._memory = Memory(size)
        ctypes.memset(self._memory.address, 1, size)
        self._read = loaded_code(SOURCE, target_id, cache).read_bytes
        self._read.argtypes, self._read.restype = (
            (ctypes.c_void_p, ctypes.c_uint64),
            ctypes.c_uint64,
        )

    def read(self, threads: int) -> Callable[[], None]:
        """Return a function that reads the block `PASSES` times with that many threads, 1 or 2."""
        half = self._size // threads

        def part(at: int) -> None:
            for _ in range(PASSES):
                self._read(self._memory.address + at, half)

        def run() -> None:
            others = [threading.Thread(target=part, args=(half,)) for _ in range(threads - 1)]
            for other in others:
                other.start()
            part(0)
            for other in others:
                other.join()

        return run

    @property
    def size(self) -> int:
        """Bytes that one call reads."""
        return self._size * PASSES
