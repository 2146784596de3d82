"""How fast this machine moves memory and reads its storage, measured in milliseconds.

The memory figure is STREAM's ADD kernel over arrays that no cache holds: `a = b + c` moves 24 bytes
per element of 8 bytes (McCalpin, "Memory Bandwidth and Machine Balance", 1995). The best of several
passes counts, since everything that disturbs a pass makes it slower.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from compiler.contract.native_errors import NativeError
from compiler.contract.native_memory import Memory

ARRAY_BYTES: Final = 64 * 1024 * 1024 // 3
"""Of each of the three arrays: 64 MB in all."""
ARRAYS: Final = 3
MOST_PASSES: Final = 8
READ_BYTES: Final = 8 * 1024 * 1024
BLOCK_BYTES: Final = 1024 * 1024
LEAST_READ_BYTES: Final = 1024 * 1024
Clock = Callable[[], float]


def memory_bytes_per_s(deadline: float, clock: Clock = time.perf_counter) -> float | None:
    """Return bytes per second that one core moves; None if not one pass fits before `deadline`.

    Args:
        deadline: When to stop, on `clock`.
        clock: Monotonic seconds.
    """
    count = ARRAY_BYTES // 8
    try:
        first, second, to = _arrays(count)
    except NativeError:  # less than 64 MB left: what little there is, is not ours to take
        return None
    best: float | None = None
    for _ in range(MOST_PASSES):
        start = clock()
        if start >= deadline:
            break
        np.add(first, second, out=to)
        seconds = clock() - start
        best = seconds if best is None else min(best, seconds)
    return None if not best else ARRAYS * count * 8 / best


def storage_bytes_per_s(
    folder: Path, deadline: float, clock: Clock = time.perf_counter
) -> float | None:
    """Return bytes per second read from the largest file of `folder`, past the page cache.

    The pages of the file are dropped from the cache first, which costs their next reader this much
    and nothing else; nothing is written, for flash wears. None if there is no file of at least
    1 MiB, or it cannot be read, or the time is up.
    """
    path = _largest(folder)
    if path is None or clock() >= deadline:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start, read = clock(), 0
        while read < READ_BYTES and clock() < deadline:
            block = os.pread(descriptor, BLOCK_BYTES, read)
            if not block:
                break
            read += len(block)
        seconds = clock() - start
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return read / seconds if read >= LEAST_READ_BYTES and seconds > 0 else None


def _arrays(count: int) -> np.ndarray:
    """Return the arrays, written once: on huge pages that takes 10 ms, on small ones 100."""
    memory = Memory(ARRAYS * count * 8)
    arrays = np.frombuffer(memory.view, np.float64, ARRAYS * count).reshape(ARRAYS, count)
    arrays.fill(1.0)
    return arrays


def _largest(folder: Path) -> Path | None:
    best, size = None, LEAST_READ_BYTES - 1
    for path in sorted(folder.rglob("*")):
        try:
            found = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
        except OSError:
            continue
        if found > size:
            best, size = path, found
    return best
