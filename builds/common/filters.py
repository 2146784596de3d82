"""Filters of the API's lists: an empty one means any, a word that is no state is refused.

A list that silently answers "nothing" to a misspelt state would keep a CI job waiting for ever.
"""

from enum import StrEnum


def any_if_empty(value: object) -> object:
    """Return None for an empty word; for a validator in front of an optional enumeration."""
    return value or None


def word(state: StrEnum | None) -> str:
    """Return a chosen state as selectors take it: a word, empty for any."""
    return "" if state is None else state.value
