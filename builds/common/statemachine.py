"""State tables: one enum of states, one of events, one mapping, and these two functions.

Used by every `states.py` of the server. Pure: no ORM, no clock.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from builds.common.errors import IllegalTransitionError

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


def next_state(
    table: Mapping[tuple[StateT, EventT], StateT], state: StateT, event: EventT
) -> StateT:
    """Return the state that `event` leads to from `state`.

    Raises:
        IllegalTransitionError: The pair is not in the table; the message lists the events that are.
    """
    try:
        return table[state, event]
    except KeyError:
        allowed = sorted(row_event.value for row_state, row_event in table if row_state == state)
        raise IllegalTransitionError(
            f"{event.value!r} is not possible in state {state.value!r}",
            hint=f"possible now: {', '.join(allowed)}" if allowed else "this state is final",
        ) from None


def mermaid(table: Mapping[tuple[StateT, EventT], StateT]) -> str:
    """Return the table as a Mermaid state diagram, for `docs/states/`."""
    lines = ["stateDiagram-v2"]
    lines += [
        f"    {state.value} --> {target.value}: {event.value}"
        for (state, event), target in table.items()
    ]
    return "\n".join(lines) + "\n"
