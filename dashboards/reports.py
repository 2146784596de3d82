"""A JSON report as people read it: facts, and tables of equal objects. Pure.

The compiler's report grows with the compiler. Names carry their unit (`_bytes`, `_ms`, `_s`,
`_ratio`), so that a new figure is shown properly without anybody touching the pages.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.templatetags.sparsefleet import (
    NONE,
    bytesize,
    duration,
    figure,
    milliseconds,
    percent,
)

MAX_ROWS: Final = 200
MAX_ITEMS: Final = 2_000
MAX_TEXT: Final = 200
TITLES: Final[Mapping[str, str]] = {
    "stages": "Compiler stages",
    "seconds": "Took",
    "explain": "Which kernel does what, and why",
    "sqnr_db": "Signal to quantisation noise, dB",
    "sizes": "Sizes of sections",
    "native_check": "Self-test of the compiled code",
}
FIRST_COLUMNS: Final = ("node", "name", "value", "operation", "number", "kind")
"""What a row is about stands before what is said of it, however the report was stored."""
OPEN_TABLES: Final = frozenset({"stages", "explain"})
_UNIT_OF_VALUES: Final[Mapping[str, str]] = {"sizes": "size_bytes"}
_UNITS: Final[tuple[tuple[str, Callable[[object], str]], ...]] = (
    ("_bytes", bytesize),
    ("_ms", milliseconds),
    ("_seconds", duration),
    ("_s", duration),
    ("_ratio", percent),
)


@dataclass(frozen=True, slots=True)
class ReportTable:
    """Equal objects, one a row; every cell is text. `note` stands above them."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rows_left_out: int
    is_open: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A report laid out for a page."""

    facts: tuple[tuple[str, str], ...]
    tables: tuple[ReportTable, ...]

    def __bool__(self) -> bool:
        return bool(self.facts or self.tables)


def report_of(document: object, *, without: Collection[str] = ()) -> Report:
    """Lay out a report: scalars become facts, lists of objects and flat objects become tables.

    What is empty is not shown.

    Args:
        document: The report.
        without: Names that are shown elsewhere.
    """
    facts: list[tuple[str, str]] = []
    tables: list[ReportTable] = []
    if isinstance(document, Mapping):
        for name, value in document.items():
            if name not in without:
                _place(str(name), value, facts, tables)
    return Report(tuple(facts), tuple(tables))


def cell_text(name: str, value: object) -> str:
    """Return one value as text, in the unit that its name says."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        for suffix, show in _UNITS:
            if name.endswith(suffix) or name == suffix[1:]:
                return show(value)
        return figure(value)
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {cell_text(str(key), item)}" for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        text = ", ".join(cell_text("", item) for item in value)
    else:
        text = str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def items_in(document: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    """Return the objects of a list, at most so many; none if it is something else."""
    found = document.get(key)
    if not isinstance(found, list):
        return []
    return [item for item in found[:MAX_ITEMS] if isinstance(item, Mapping)]


def text_in(item: Mapping[str, object], key: str) -> str:
    """Return a field as text, empty if there is none."""
    value = item.get(key)
    return "" if value is None else cell_text("", value)


def title_of(name: str) -> str:
    """Return a field name as a heading, without its unit."""
    if name in TITLES:
        return TITLES[name]
    for suffix, _ in _UNITS:
        name = name.removesuffix(suffix)
    return name.replace("_", " ").strip().capitalize() or "Value"


def _place(
    name: str, value: object, facts: list[tuple[str, str]], tables: list[ReportTable]
) -> None:
    if isinstance(value, Mapping) and value:
        tables.append(_table(name, _rows_of_mapping(name, value)))
    elif isinstance(value, (list, tuple)) and value:
        rows = [item if isinstance(item, Mapping) else {"": item} for item in value]
        tables.append(_table(name, rows))
    elif value not in (None, "", [], (), {}):
        facts.append((title_of(name), cell_text(name, value)))


def _rows_of_mapping(name: str, value: Mapping[str, object]) -> list[Mapping[str, object]]:
    if all(isinstance(item, Mapping) for item in value.values()):
        return [{"name": key, **item} for key, item in value.items() if isinstance(item, Mapping)]
    unit = _UNIT_OF_VALUES.get(name, name)
    return [
        {"name": key, "value": cell_text(unit if _has_unit(unit) else str(key), item)}
        for key, item in value.items()
    ]


def _has_unit(name: str) -> bool:
    return any(name.endswith(suffix) for suffix, _ in _UNITS)


def _table(name: str, rows: Sequence[Mapping[str, object]]) -> ReportTable:
    found = list(dict.fromkeys(str(key) for row in rows for key in row))
    columns: list[str] = [name for name in FIRST_COLUMNS if name in found]
    columns += [name for name in found if name not in FIRST_COLUMNS]
    shown = rows[:MAX_ROWS]
    return ReportTable(
        title=title_of(name),
        columns=tuple(title_of(column) if column else "Text" for column in columns),
        rows=tuple(
            tuple(cell_text(column, row.get(column)) for column in columns) for row in shown
        ),
        rows_left_out=len(rows) - len(shown),
        is_open=name in OPEN_TABLES,
    )
