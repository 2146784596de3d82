"""Seconds and memory of an import, as hard bounds: the part of `ImportLimits` that is not counted.

`lower_submission` and `compiler.driver.vet` import inside `bounded`. What Python can see ends in a
`LimitError`; a library that dies or does not return is the business of `compiler.driver.vet`.
"""

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from compiler.errors import LimitError
from compiler.frontend.limits import ImportLimits, exceeded

_AT_ONCE: Final = 1e-3


@contextlib.contextmanager
def bounded(limits: ImportLimits) -> Iterator[None]:
    """Bound wall time and address space of the block; what runs out becomes a named error.

    The bounds are the process's own: the address space is everybody's while the block runs, and the
    time is only bounded in the main thread, where signals arrive. An alarm that was set before and
    rings earlier stands; one that rings later is set again behind the block.

    Raises:
        LimitError: Time or memory ran out, or calls nested too deep.
    """
    try:
        with _memory(limits), _alarm(limits):
            yield
    except MemoryError as error:
        raise exceeded("max_memory_bytes", "the import ran out of memory", limits) from error
    except RecursionError as error:
        raise exceeded("max_nesting", "the model is nested too deep", limits) from error


@contextlib.contextmanager
def _memory(limits: ImportLimits) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    others = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limits.max_memory_bytes, *others]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _alarm(limits: ImportLimits) -> Iterator[None]:
    earlier, interval = signal.getitimer(signal.ITIMER_REAL)
    stands = 0.0 < earlier <= limits.max_seconds
    if threading.current_thread() is not threading.main_thread() or stands:
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _late(limits)

    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limits.max_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if earlier:
            left = max(earlier - (time.monotonic() - start), _AT_ONCE)
            signal.setitimer(signal.ITIMER_REAL, left, interval)


def _late(limits: ImportLimits) -> LimitError:
    return exceeded("max_seconds", "the import takes too long", limits)
