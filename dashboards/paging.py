"""Keyset paging: the next page starts below a key, so that a page costs the same at any depth."""

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from django.db.models import Model, QuerySet

PAGE_ROWS: Final = 50
MAX_KEY: Final = 1 << 62
RowT = TypeVar("RowT", bound=Model)


@dataclass(frozen=True, slots=True)
class Slice(Generic[RowT]):
    """Some rows of a list; `next_key` is None on the last page."""

    rows: tuple[RowT, ...]
    next_key: int | None
    is_first: bool


def slice_below(rows: QuerySet[RowT], key: object, *, size: int = PAGE_ROWS) -> Slice[RowT]:
    """Return the `size` rows with the highest primary keys below `key`. One query.

    Args:
        rows: Must be ordered by `-pk`.
        key: From the address; anything but a positive integer means the first page.
        size: Rows a page.
    """
    limit = _positive(key)
    if limit is not None:
        rows = rows.filter(pk__lt=limit)
    found: list[Any] = list(rows[: size + 1])
    following = found[size - 1].pk if len(found) > size else None
    return Slice(rows=tuple(found[:size]), next_key=following, is_first=limit is None)


def _positive(key: object) -> int | None:
    text = str(key or "")
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        return None
    return int(text) if 0 < int(text) < MAX_KEY else None
