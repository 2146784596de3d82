"""Who has a loaded plan just now: one call at a time, closing while one goes on, no forks.

    call -(_take)-> the library, if it is not closed and nobody else is at a call -(_give)-> free
    close -> at once, or by the call that goes on, when it ends

`native.NativePlan` stands on it and says what has to be unloaded. Standard library only.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from compiler.contract.native_errors import NativeError
from compiler.contract.native_fork import require_opened_here
from compiler.contract.native_library import KernelLibrary

BUSY: Final = "the plan is closed, or already running in another thread"


class Held(ABC):
    """A library that one thread at a time calls; a second caller is refused."""

    def __init__(self, library: KernelLibrary) -> None:
        """Hold it open."""
        self._lock = threading.Lock()
        self._pid: Final = os.getpid()
        self._holder: int | None = None
        self._library: KernelLibrary | None = library
        self._loaded: KernelLibrary | None = library

    @abstractmethod
    def _is_bound(self) -> bool:
        """Return whether it needs threads of the process that opened it."""

    @abstractmethod
    def _unload(self, library: KernelLibrary) -> None:
        """Free what was made with the library, and the library; called once."""

    @contextmanager
    def _held(self, refusal: str = BUSY, *, waits: bool = False) -> Iterator[KernelLibrary]:
        library = self._take(refusal, waits=waits)
        try:
            yield library
        finally:
            self._give()

    def _take(self, refusal: str, *, waits: bool = False) -> KernelLibrary:
        """Have the plan for one call, until `_give`.

        Raises:
            NativeError: It is closed or, if one does not wait, at a call; or as a fork.
        """
        self._require_here()
        waits &= self._holder != threading.get_ident() and os.getpid() == self._pid
        if self._lock.acquire(blocking=waits):
            self._holder = threading.get_ident()
            if self._library is not None:
                return self._library
            self._give()
        raise NativeError(refusal)

    def _require_here(self) -> None:
        """Refuse a fork, which has none of the threads that this plan needs."""
        if self._is_bound():
            require_opened_here(self._pid)

    def _give(self) -> None:
        """Give the plan back; one that was closed meanwhile is unloaded now."""
        self._holder = None
        self._lock.release()
        if self._library is None:
            self.close()

    def close(self) -> None:
        """Unload the kernels; where another thread is at a call, it does so after it.

        Memory goes when the last result view goes. Threads that a damaged context does not let go
        keep kernels and memory as they are.
        """
        self._library = None
        if not self._lock.acquire(blocking=False):
            return
        try:
            library, self._loaded = self._loaded, None
            if library is not None:
                self._unload(library)
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
