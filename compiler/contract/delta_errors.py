"""Errors of the delta format; import them from `compiler.contract.delta`."""

from typing import ClassVar

from compiler.contract.errors import ContractError


class DeltaError(ContractError):
    """Root of what a delta file can do wrong; the base is untouched, fetch the sections whole."""

    code: ClassVar[str] = "contract.delta"


class DeltaFormatError(DeltaError):
    """The bytes do not keep the format: a broken encoder or a changed file; do not retry."""

    code: ClassVar[str] = "contract.delta.format"


class DeltaTruncatedError(DeltaError):
    """The file ends early: fetch the rest and start again."""

    code: ClassVar[str] = "contract.delta.truncated"
    retryable: ClassVar[bool] = True


class DeltaLimitError(DeltaError):
    """A length or count is above its named limit; nothing was allocated for it."""

    code: ClassVar[str] = "contract.delta.limit"


class DeltaVersionError(DeltaError):
    """The file has a version that this reader does not know."""

    code: ClassVar[str] = "contract.delta.version"


class DeltaBaseError(DeltaError):
    """The bytes to start from are not those of the delta: fetch the sections whole."""

    code: ClassVar[str] = "contract.delta.base"


class DeltaResultError(DeltaError):
    """The bytes made are not those promised: drop them and fetch the sections whole."""

    code: ClassVar[str] = "contract.delta.result"


class DeltaDirectionError(DeltaError):
    """Backwards was asked of a file that stores only the way forward."""

    code: ClassVar[str] = "contract.delta.direction"
