"""What loading or running native code can raise: one class per status that callers tell apart."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Final, NoReturn

from compiler.contract.errors import ContractError
from compiler.contract.plan_format import Status


class NativeError(ContractError):
    """The native plan could not be loaded or refused an argument."""

    code: ClassVar[str] = "contract.native"


class UnsupportedPlanError(NativeError):
    """The kernels do not offer an operation of the plan, or speak another ABI."""

    code: ClassVar[str] = "contract.native.unsupported"


class TooManyTokensError(NativeError):
    """More tokens than one run takes: feed them in several runs."""

    code: ClassVar[str] = "contract.native.too_many_tokens"


class ContextFullError(NativeError):
    """The key/value cache has no room: truncate it or start again."""

    code: ClassVar[str] = "contract.native.context_full"


class ContextLostError(NativeError):
    """The rows to go back to were overwritten by later ones: start again from length 0."""

    code: ClassVar[str] = "contract.native.context_lost"


class BadTokenError(NativeError):
    """A token id is not in the vocabulary."""

    code: ClassVar[str] = "contract.native.bad_token"


class BadPositionError(NativeError):
    """A position is beyond the model's table."""

    code: ClassVar[str] = "contract.native.bad_position"


class BadIndexError(NativeError):
    """An index computed by the model points nowhere."""

    code: ClassVar[str] = "contract.native.bad_index"


class NotFiniteError(NativeError):
    """An activation became infinite or NaN; there is no answer."""

    code: ClassVar[str] = "contract.native.not_finite"


class ExpertAbsentError(NativeError):
    """An expert that is needed now is not in memory; the run may be made again when it is."""

    code: ClassVar[str] = "contract.native.expert_absent"


_ERRORS: Final[Mapping[Status, tuple[type[NativeError], str]]] = MappingProxyType(
    {
        Status.BAD_PLAN: (NativeError, "the runtime refuses the plan"),
        Status.UNSUPPORTED_OP: (UnsupportedPlanError, "the kernels lack an operation of the plan"),
        Status.TOO_SMALL: (NativeError, "the memory given to the runtime is too small"),
        Status.BAD_ARGUMENT: (NativeError, "the runtime refuses an argument"),
        Status.TOO_MANY_TOKENS: (TooManyTokensError, "too many tokens in one run"),
        Status.CONTEXT_LOST: (ContextLostError, "the context's older rows were overwritten"),
        Status.CONTEXT_FULL: (ContextFullError, "the context is full"),
        Status.BAD_TOKEN: (BadTokenError, "a token id is outside the vocabulary"),
        Status.BAD_POSITION: (BadPositionError, "a position is outside the model's table"),
        Status.BAD_INDEX: (BadIndexError, "an index points outside its operand"),
        Status.EXPERT_ABSENT: (ExpertAbsentError, "an expert is not in memory"),
        Status.NOT_FINITE: (NotFiniteError, "an activation is infinite or NaN"),
    }
)


def raise_status(status: int, where: str) -> NoReturn:
    """Raise the typed error of a status that is not OK."""
    try:
        kind, message = _ERRORS[Status(status)]
    except (KeyError, ValueError):
        raise NativeError(f"{where}: unknown status {status}") from None
    raise kind(f"{where}: {message}")


def status_of(error: ContractError) -> Status:
    """Return the status that a native plan's error stands for; `BAD_ARGUMENT` for any other."""
    found = (status for status, (kind, _) in _ERRORS.items() if kind is type(error))
    return Status.BAD_ARGUMENT if type(error) is NativeError else next(found, Status.BAD_ARGUMENT)
