"""Cursor pagination, newest first: `?limit=&cursor=` and `{"items": [...], "next": "..."}`.

The cursor is the primary key of the last row seen, so a page costs the same at any depth and rows
that arrive in between shift nothing.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from django.db.models import Model, QuerySet

from builds.common.errors import InvalidInputError

DEFAULT_LIMIT: Final = 50
MAX_LIMIT: Final = 200
MAX_CURSOR_DIGITS: Final = 18

RowT = TypeVar("RowT", bound=Model)


@dataclass(frozen=True, slots=True)
class Page(Generic[RowT]):
    """One page of rows; `next` is the cursor of the following page, or None at the end."""

    items: list[RowT]
    next: str | None


def page_of(rows: QuerySet[RowT], *, limit: int = DEFAULT_LIMIT, cursor: str = "") -> Page[RowT]:
    """Return one page of `rows`, newest first, in one query.

    Raises:
        InvalidInputError: The limit or the cursor is out of range.
    """
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidInputError(f"limit must be in 1..{MAX_LIMIT}")
    if cursor:
        if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= MAX_CURSOR_DIGITS):
            raise InvalidInputError("the cursor is not one that this list handed out")
        rows = rows.filter(pk__lt=int(cursor))
    found = list(rows.order_by("-pk")[: limit + 1])
    more = len(found) > limit
    items = found[:limit]
    return Page(items=items, next=str(items[-1].pk) if more else None)
