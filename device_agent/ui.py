"""How the command line talks.

Results go to stdout and nothing else does; every other word goes to stderr; a failure is one
`error:` line, then `hint:` lines, and the exit status says so.
"""

import logging
import os
import sys
from typing import Final, TextIO

from compiler.contract.errors import ContractError
from device_agent.errors import AgentError, DiskError

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C ended it: 128 + SIGINT, as shells say it."""
_FORMAT: Final = "%(asctime)s %(threadName)s %(message)s"


def result(text: str, end: str = "\n") -> None:
    """Print a result, at once.

    Raises:
        DiskError: It cannot be written: stdout is closed, or where it goes is full.
        BrokenPipeError: Who read the results has left.
    """
    stdout: TextIO | None = sys.stdout
    if stdout is None:
        raise DiskError("the result cannot be written: stdout is closed")
    try:
        stdout.write(f"{text}{end}")
        stdout.flush()
    except BrokenPipeError:
        discard_results()
        raise
    except OSError as error:
        discard_results()
        raise DiskError(f"the result cannot be written: {error.strerror or error}") from error


def discard_results() -> None:
    """Have what is not written yet go nowhere, so that the program ends without another error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: str) -> None:
    """Tell how far a command is, to stderr."""
    sys.stderr.write(f"{text}\n")


def failure(error: AgentError | ContractError) -> int:
    """Print an error with its hint and return the exit status."""
    sys.stderr.write(f"error: {error} [{error.code}]\n")
    if error.hint:
        sys.stderr.write(f"hint: {error.hint}\n")
    return EXIT_FAILED


def set_up_log(*, verbose: bool) -> None:
    """Log to stderr: one line per change of state, everything when `verbose`."""
    logging.basicConfig(stream=sys.stderr, format=_FORMAT, level=logging.WARNING)
    logging.getLogger("device_agent").setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("httpx", "httpcore", "tuf", "securesystemslib"):
        logging.getLogger(noisy).setLevel(logging.INFO if verbose else logging.ERROR)
