"""The fleet's version number: counted up in every transaction that may change a poll's answer.

The one row is the last that a transaction locks, so that nobody who holds it waits for anything and
no two transactions can wait for each other. Services that may change an answer therefore run in
`fleet_atomic` instead of `transaction.atomic`: it counts up at the very end, in the same commit.
"""

import threading
from contextlib import ContextDecorator
from types import TracebackType

from django.db import transaction
from django.db.models import F

from fleet.models import FleetVersion

ROW_ID = 1


class _Scope(threading.local):
    depth = 0
    is_changed = False


_scope = _Scope()


class fleet_atomic(ContextDecorator):  # noqa: N801 -- used like `transaction.atomic`
    """A transaction that counts the fleet version up at its end if `fleet_version_bump` was called.

    Nested ones leave that to the outermost.
    """

    def __init__(self) -> None:
        self._atomics: list[transaction.Atomic] = []

    def __enter__(self) -> None:
        atomic = transaction.atomic()
        atomic.__enter__()
        self._atomics.append(atomic)
        _scope.depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _scope.depth -= 1
        atomic = self._atomics.pop()
        is_due = _scope.depth == 0 and _scope.is_changed
        if _scope.depth == 0:
            _scope.is_changed = False
        try:
            if is_due and kind is None:
                _count_up()
        except BaseException as failure:
            atomic.__exit__(type(failure), failure, failure.__traceback__)
            raise
        atomic.__exit__(kind, error, trace)

    def _recreate_cm(self) -> "fleet_atomic":
        return fleet_atomic()  # a decorated function may run in many threads at once


def fleet_version_bump() -> None:
    """Tell every process that its snapshot is old, as soon as the transaction has committed."""
    if _scope.depth:
        _scope.is_changed = True
    else:
        _count_up()


def _count_up() -> None:
    if not FleetVersion.objects.filter(pk=ROW_ID).update(number=F("number") + 1):
        FleetVersion.objects.get_or_create(pk=ROW_ID)
        FleetVersion.objects.filter(pk=ROW_ID).update(number=F("number") + 1)
