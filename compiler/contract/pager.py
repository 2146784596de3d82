"""The hook of a caller that keeps experts elsewhere than in memory.

    runtime -(event, number of the expert's first weight)-> pager -(is it there?)-> runtime

Events come in the order of the tape; `ExpertEvent` says what each one means. Without a pager all
experts are in memory. An exception inside a pager cannot pass through native code: it counts as
"not there" and is raised again when the run has ended.
"""

import ctypes
from collections.abc import Callable
from typing import ClassVar, Final

from compiler.contract.native_errors import NativeError
from compiler.contract.operations import ExpertEvent

Pager = Callable[[ExpertEvent, int], bool]
"""Takes an event and the number, in the plan, of the expert's first weight."""
C_PAGER: Final = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)


class PrefetchStallError(NativeError):
    """A pager waited too long for what it fetches ahead: run without fetching ahead."""

    code: ClassVar[str] = "contract.native.prefetch_stall"


class PagerSwitch:
    """A pager that can be told not to fetch ahead: each load step then fetches what it needs."""

    def __init__(self, pager: Pager) -> None:
        """Pass every event on."""
        self._pager = pager
        self.is_fetching_ahead = True

    def __call__(self, event: ExpertEvent, weight: int) -> bool:
        """Return whether the expert is there; what is not fetched ahead is not there yet."""
        if event is ExpertEvent.PREFETCH and not self.is_fetching_ahead:
            return False
        return self._pager(event, weight)


class PagerHook:
    """A pager as C calls it; keep it as long as the context that knows it."""

    def __init__(self, pager: Pager) -> None:
        self.error: BaseException | None = None
        self._pager = pager
        self.function = C_PAGER(self._call)

    def _call(self, _user: object, event: int, weight: int) -> int:
        if self.error is not None:
            return 1
        try:
            return 0 if self._pager(ExpertEvent(event), weight) else 1
        except BaseException as error:  # noqa: BLE001 - raised again by `reraise`
            self.error = error
            return 1

    def reraise(self) -> None:
        """Raise what the pager raised since the last call, if it did."""
        error, self.error = self.error, None
        if error is not None:
            raise error
