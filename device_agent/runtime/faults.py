"""What can go wrong while answering, and what is tried then: one table, twelve kinds.

    exception -(kind_of)-> FaultKind -(REMEDIES)-> ways to try again, in order

Pure. `answers` names the kind in its record, `guard` walks the table. A remedy that keeps all
experts gives the same bits; one that takes fewer, or does without routers, marks the answer as
degraded. What the caller did
wrong is no fault of the device: it is named, never retried, and moves no rung.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from errno import ENOMEM
from types import MappingProxyType
from typing import Final

from compiler.contract.backend import BackendCrashedError
from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.native_errors import (
    ContextLostError,
    ExpertAbsentError,
    NotFiniteError,
)
from compiler.contract.pager import PrefetchStallError
from device_agent.errors import AgentError, RequestError


class FaultKind(StrEnum):
    """What went wrong; the value is the label of the counter."""

    OUT_OF_MEMORY = "oom"
    NOT_FINITE = "not_finite"
    TIMEOUT = "timeout"
    MISSING_EXPERT = "missing_expert"
    CORRUPT_WEIGHTS = "corrupt_weights"
    DEAD_WORKER = "dead_worker"
    CRASH = "crash"
    BAD_INPUT = "bad_input"
    KERNEL_STATUS = "kernel_status"
    DISK = "disk"
    THERMAL = "thermal"
    PREFETCH_STALL = "prefetch_stall"


@dataclass(frozen=True, slots=True)
class Way:
    """How one attempt runs.

    Attributes:
        alone: On the caller's thread and by the plain policy; the same bits.
        fewest: With the fewest experts that the bundle has a variant for; other bits.
        dense: Without routers, by the substitute that answers best and fits; other bits.
        prefetch: Experts are fetched ahead; without, when they are needed; the same bits.
    """

    alone: bool = False
    fewest: bool = False
    dense: bool = False
    prefetch: bool = True

    @property
    def changes_answers(self) -> bool:
        """Whether an answer may have other bits than as asked: it is degraded then."""
        return self.fewest or self.dense


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to try after a fault.

    Attributes:
        check: Hash the weights first and load again what was changed. Where nothing was, an attempt
            that differs from the one before in nothing else is left out.
        restart: Build the plan anew from the verified sections first.
        way: How the next attempt runs.
    """

    check: bool = False
    restart: bool = False
    way: Way = Way()


AS_ASKED: Final = Way()
"""As the bundle asks for."""
_FEWEST: Final = Remedy(way=Way(fewest=True))
_DENSE: Final = Remedy(way=Way(dense=True))
REMEDIES: Final[Mapping[FaultKind, tuple[Remedy, ...]]] = MappingProxyType(
    {
        FaultKind.OUT_OF_MEMORY: (
            Remedy(way=Way(alone=True, prefetch=False)),
            Remedy(way=Way(alone=True, prefetch=False, fewest=True)),
            Remedy(way=Way(alone=True, prefetch=False, dense=True)),
        ),
        FaultKind.NOT_FINITE: (Remedy(check=True), _FEWEST, _DENSE),
        FaultKind.TIMEOUT: (),
        FaultKind.MISSING_EXPERT: (Remedy(way=Way(prefetch=False)), _FEWEST, _DENSE),
        FaultKind.CORRUPT_WEIGHTS: (),
        FaultKind.DEAD_WORKER: (Remedy(restart=True),),
        FaultKind.CRASH: (Remedy(restart=True), Remedy(check=True, way=Way(alone=True))),
        FaultKind.BAD_INPUT: (),
        FaultKind.KERNEL_STATUS: (
            Remedy(check=True, restart=True, way=Way(alone=True)),
            _FEWEST,
            _DENSE,
        ),
        FaultKind.DISK: (Remedy(way=Way(prefetch=False)), _FEWEST, _DENSE),
        FaultKind.THERMAL: (),
        FaultKind.PREFETCH_STALL: (Remedy(way=Way(prefetch=False)),),
    }
)
"""What is tried, in order, while the time of the answer lasts. A timeout has none: its time is
over. Heat is met before the attempt, and weights are loaded again before it: where they cannot be,
there is nothing left to try."""

BY_BUNDLE: Final = frozenset(
    {FaultKind.NOT_FINITE, FaultKind.KERNEL_STATUS, FaultKind.CRASH, FaultKind.TIMEOUT}
)
"""Faults that a bundle on trial has to answer for, even where a remedy gave an answer."""

_KINDS: Final[tuple[tuple[type[BaseException], FaultKind], ...]] = (
    (RequestError, FaultKind.BAD_INPUT),
    (LimitExceededError, FaultKind.BAD_INPUT),
    (MemoryError, FaultKind.OUT_OF_MEMORY),
    (NotFiniteError, FaultKind.NOT_FINITE),
    (ExpertAbsentError, FaultKind.MISSING_EXPERT),
    (PrefetchStallError, FaultKind.PREFETCH_STALL),
    (ContextLostError, FaultKind.CRASH),
    (BackendCrashedError, FaultKind.CRASH),
    (TimeoutError, FaultKind.TIMEOUT),
    (OSError, FaultKind.DISK),
    (ContractError, FaultKind.KERNEL_STATUS),
    (AgentError, FaultKind.DISK),
)
"""The first row that fits; anything else is a crash of our own code."""


class FaultError(Exception):
    """There is no plan to make an attempt on, or it was left; the kind is known."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class GivenUpError(FaultError):
    """A call of the plan did not return in time: the plan was left to it."""


def kind_of(error: BaseException) -> FaultKind:
    """Return the kind of an exception that ended an attempt, by its class and its causes."""
    if isinstance(error, FaultError):
        return error.kind
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == ENOMEM:
            return FaultKind.OUT_OF_MEMORY
        cause = cause.__cause__ or cause.__context__
    for kind, fault in _KINDS:
        if isinstance(error, kind):
            return fault
    return FaultKind.CRASH
