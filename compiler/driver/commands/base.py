"""What a command is, and how it speaks: results on standard output, all else on standard error."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json
from compiler.errors import UsageError, printable

BAR_CELLS: Final = 24
_LINE: Final = "\n"
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        description: What it does, for `--help`.
        example: A line that works when typed, without the program name.
        add_arguments: Declares its arguments.
        run: Does it; what it returns is printed by `Console.show`.
    """

    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, "Console"], "Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found: for people, and for programs.

    Attributes:
        lines: Printed without `--json`.
        document: Printed with it.
    """

    lines: Sequence[str]
    document: Json


class Console:
    """Prints results and shows progress: a bar on a terminal, lines elsewhere."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_terminal = sys.stderr.isatty()
        self._open = False
        self._last = ""

    def progress(self, stage: str, fraction: float) -> None:
        """Show that `stage` has begun and how much of the whole work is done."""
        if not self._is_terminal:
            line = f"{fraction:>5.0%} {stage}\n"
            sys.stderr.write(line if line != self._last else "")
            self._last = line
            return
        done = round(fraction * BAR_CELLS)
        bar = "#" * done + "." * (BAR_CELLS - done)
        sys.stderr.write(f"\r\x1b[K[{bar}] {fraction:>4.0%} {stage}")
        sys.stderr.flush()
        self._open = True

    def clear(self) -> None:
        """Take the bar away, so that what follows starts on a line of its own."""
        if self._open:
            sys.stderr.write("\r\x1b[K")
            self._open = False

    def show(self, answer: Answer) -> None:
        """Print what a command found."""
        self.clear()
        text = json.dumps(answer.document, indent=1) if self._as_json else _shown(answer.lines)
        sys.stdout.write(text + "\n" if text else "")
        sys.stdout.flush()

    def fail(self, error: Exception | str, hint: str, code: str) -> None:
        """Print an error: a line, its hints and, with `--json`, a document."""
        self.clear()
        sys.stderr.write(f"error: {_shown(str(error).split(_LINE))}\n")
        for line in hint.splitlines():
            sys.stderr.write(f"hint: {printable(line)}\n")
        if self._as_json:
            document = {"error": {"code": code, "message": str(error), "hint": hint}}
            sys.stdout.write(json.dumps(document, indent=1) + "\n")


def _shown(lines: Iterable[str]) -> str:
    """Return lines in which no name from a file can steer the terminal."""
    return _LINE.join(printable(part) for line in lines for part in line.split(_LINE))


def size_bytes(text: str) -> int:
    """Parse `500M`, `2G` or a plain number of bytes; for argparse."""
    number, unit = text.rstrip("KMGTkmgt"), text[len(text.rstrip("KMGTkmgt")) :].upper()
    if unit not in _UNITS or not number.isascii() or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 2G")
    return int(number) * _UNITS[unit]


def positive(text: str) -> int:
    """Parse a whole number from 1 on; for argparse."""
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def shown_bytes(count: int) -> str:
    """Return a number of bytes for people: at most four digits and a unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def table(rows: Sequence[Sequence[object]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Return rows as aligned lines; columns in `right` are aligned to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    if not texts:
        return []
    widths = [max(len(row[at]) for row in texts) for at in range(len(texts[0]))]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    ]


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines as they stand below a heading."""
    return [f"  {line}" for line in lines]


def require_writable(directory: Path) -> None:
    """Refuse a directory that could not be made or written, before any work is done for it.

    Raises:
        UsageError: Something else stands there, or its nearest folder refuses new files.
    """
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UsageError(
            f"{directory} cannot be a directory: {place} is a file", hint="name another directory"
        )
    if not _accepts_files(place):
        raise UsageError(f"{place} is not writable", hint="name another directory")


def _accepts_files(directory: Path) -> bool:
    probe = directory / f".sparsefleet-{id(directory)}"
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError:
        return False
    return True
