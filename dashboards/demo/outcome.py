"""What the demo saw: figures, checks with their reasons, and how both are printed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that had to come out right."""

    name: str
    ok: bool
    seen: str


@dataclass(slots=True)
class Outcome:
    """Everything one run of the demo learned.

    Attributes:
        figures: Machine-readable figures by name; units are in the names.
        checks: What had to be so, and was or was not.
        rows: The summary for people: (subject, what, value).
    """

    figures: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    rows: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether every check came out right and there was at least one."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def check(self, name: str, *, ok: bool, seen: object) -> None:
        """Record one check."""
        self.checks.append(Check(name, bool(ok), str(seen)))

    def row(self, subject: str, what: str, value: str) -> None:
        """Add a line to the summary for people."""
        self.rows.append((subject, what, value))

    def write_json(self, path: Path) -> None:
        """Write figures and checks for machines."""
        document = {
            "ok": self.ok,
            "figures": self.figures,
            "checks": [asdict(check) for check in self.checks],
        }
        path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def print(self, console: Console) -> None:
        """Print the summary table, then the checks."""
        table = Table(title="What happened", title_justify="left", show_lines=False)
        for heading in ("", "", ""):
            table.add_column(heading, overflow="fold")
        previous = ""
        for subject, what, value in self.rows:
            table.add_row("" if subject == previous else subject, what, value)
            previous = subject
        console.print(table)
        checks = Table(title="Checks", title_justify="left")
        checks.add_column("")
        checks.add_column("what had to be so", overflow="fold")
        checks.add_column("seen", overflow="fold")
        for item in self.checks:
            mark = "[green]ok[/]" if item.ok else "[red]NO[/]"
            checks.add_row(mark, item.name, item.seen)
        console.print(checks)


def percent(part: float, whole: float) -> str:
    """Return a ratio as text, or a dash when there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def kilobytes(count: int) -> str:
    """Return a byte count as text with thousands separated."""
    return f"{count:,} B"


def joined(items: Sequence[str]) -> str:
    """Return the items as one line, or a dash."""
    return ", ".join(items) or "-"
