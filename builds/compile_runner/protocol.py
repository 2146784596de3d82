"""What the runner and the child say to each other. Standard library and contract only.

The child reads one job (a JSON object) from stdin until its end, writes JSON lines to stdout, and
leaves with 0 (done) or `EXIT_REPORTED` (an error line was written). A line that is no JSON object
is a line for the log: compilers and libraries print too.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MANIFEST_NAME: Final = "manifest.json"
REPORT_NAME: Final = "report.json"
DELTA_NAME: Final = "delta.bin"
IR_NAME: Final = "ir.mlir"
SOURCE_NAME: Final = "kernels.c"
REPLAYS_NAME: Final = "replays.bin"
SECTIONS_NAME: Final = "sections"
REPLAYS: Final = "replays"
"""The artifact of a build with the factors of merged adapters."""
EXIT_REPORTED: Final = 3
MAX_LINE: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work is: a stage of the compiler and the share of the whole, 0 to 1."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Log:
    """A line for people."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there will be no result."""

    code: str
    message: str
    hint: str
    retryable: bool


Event = Progress | Log | Failure


def encode(event: Event) -> str:
    """Return the line of an event, without the line end."""
    return json.dumps(
        {"event": type(event).__name__.lower()}
        | {name: getattr(event, name) for name in event.__slots__}
    )


def decode(line: str) -> Event:
    """Return the event of a line; what is not an event is a line for the log."""
    try:
        document = json.loads(line)
        return _decoders[document["event"]](document)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Log("output", line)


def _progress(document: dict[str, object]) -> Progress:
    fraction = float(str(document["fraction"]))
    return Progress(str(document["stage"]), min(1.0, max(0.0, fraction)))


def _log(document: dict[str, object]) -> Log:
    return Log(str(document["level"]), str(document["text"]))


def _failure(document: dict[str, object]) -> Failure:
    return Failure(
        code=str(document["code"]),
        message=str(document["message"]),
        hint=str(document["hint"]),
        retryable=document["retryable"] is True,
    )


_decoders: dict[str, Callable[[dict[str, object]], Event]] = {
    "progress": _progress,
    "log": _log,
    "failure": _failure,
}
