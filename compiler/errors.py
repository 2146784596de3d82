"""Errors of the compiler: one root, a stable code per class, a hint where one helps."""

import lzma
import struct
import tokenize
import zipfile
import zlib
from typing import ClassVar, Final

MAX_MESSAGE: Final = 4_000
"""Characters of a message: names in a file may be as long as the file."""
_LINE: Final = "\n"
UNREADABLE: Final = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, EOFError, SyntaxError),
    *(RuntimeError, MemoryError),  # a password, an unknown compression, calls nested too deep
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, tokenize.TokenError, struct.error),
)
"""What reading bytes that are no archive of arrays ends in, besides `OSError`."""


def printable(text: str | bytes) -> str:
    r"""Return `text` with every character that is not printable written as an escape.

    Names come from strangers' files and end on terminals, in logs and in XML: line ends, control
    sequences and marks that turn the direction of writing stand there as `\n`, `\x1b`, `\u202e`.
    """
    if isinstance(text, bytes):  # protobuf's answer to a name that is no UTF-8
        text = text.decode("utf-8", "backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class CompilerError(Exception):
    """Root of everything the compiler raises on purpose.

    Attributes:
        code: Stable, dotted identifier; `build.user.*` is the submitter's fault, `build.app.*`
            ours.
        hint: What the reader can do about it, or an empty string.
        retryable: Whether the same input may succeed when tried again.
    """

    code: ClassVar[str] = "build.app.compiler"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(CompilerError):
    """An argument or option makes no sense: exit status 2 of the command line."""

    code: ClassVar[str] = "build.user.arguments"


class UserModelError(CompilerError):
    """The submission itself is at fault: tell the submitter and do not retry.

    Message and hint are printable and of bounded length, whatever the names in the submission are.

    Attributes:
        usual_hint: The hint where none is given.
    """

    code: ClassVar[str] = "build.user.model"
    usual_hint: ClassVar[str] = (
        "mend what the message names, in the file or in pipeline.json, or export the model again"
    )

    def __init__(self, message: str, *, hint: str = "") -> None:
        hints = [_bounded(line) for line in (hint or self.usual_hint).split(_LINE)]
        super().__init__(_bounded(message), hint=_LINE.join(hints))


class UnsupportedOperatorError(UserModelError):
    """An operator without a kernel; the message names it, its node and what is supported."""

    code: ClassVar[str] = "build.user.unsupported_op"


class MalformedModelError(UserModelError):
    """The file is not ONNX, is truncated, or contradicts its own pipeline description."""

    code: ClassVar[str] = "build.user.malformed_model"


class MissingExpertsError(UserModelError):
    """A router chooses among more experts than the file holds; the message lists the others."""

    code: ClassVar[str] = "build.user.missing_experts"


class LimitError(UserModelError):
    """The submission needs more than a named limit allows; the hint names the option."""

    code: ClassVar[str] = "build.user.limit"


class ToolchainError(CompilerError):
    """The C compiler could not be run, crashed or refused our own code."""

    code: ClassVar[str] = "build.app.toolchain"
    retryable: ClassVar[bool] = True


class SelfTestError(CompilerError):
    """Native code and the bit-exact simulator disagree; the bundle must not be signed."""

    code: ClassVar[str] = "build.app.self_test"


class SparsityInvariantError(CompilerError):
    """A pass claims zeros that the program before it does not have; the build must stop."""

    code: ClassVar[str] = "build.app.sparsity_invariant"


def _bounded(text: str) -> str:
    """Return `text` printable, its middle left out if it is long."""
    half = MAX_MESSAGE // 2
    if len(text) > MAX_MESSAGE:
        text = f"{text[:half]} ... {text[-half:]}"
    return printable(text)
