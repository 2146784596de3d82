"""Compare-and-set state changes: the only code on the server that writes a `state` column.

The protocol: read the row, ask the pure table, then `UPDATE ... WHERE pk AND state = old`. Exactly
one row must change, otherwise somebody else was faster and `ConcurrentTransitionError` is raised. A
transition row (old, event, new, actor, reason) is written in the same transaction.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from django.db import models, transaction

from builds.common.errors import ConcurrentTransitionError
from builds.common.statemachine import next_state

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)


class TransitionBase(models.Model):
    """One recorded state change; concrete subclasses add a foreign key called `subject`."""

    old = models.CharField(max_length=32)
    event = models.CharField(max_length=48)
    new = models.CharField(max_length=32)
    actor = models.CharField(max_length=128)
    reason = models.TextField(blank=True)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        abstract = True
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.old} --{self.event}--> {self.new}"


def apply_transition(
    instance: models.Model,
    *,
    table: Mapping[tuple[StateT, EventT], StateT],
    event: EventT,
    log: type[TransitionBase],
    actor: str,
    reason: str = "",
    changes: Mapping[str, Any] | None = None,
) -> StateT:
    """Move `instance.state` by `event`, with `changes` in the same UPDATE, and log the transition.

    Args:
        instance: Row with a `state` column; its fields are refreshed in memory on success.
        table: The state table of its kind.
        event: What happened.
        log: Concrete subclass of `TransitionBase`.
        actor: Who did it: a user name, `token <name> (#<id>)`, `device:<id>` or `system`.
        reason: Free text for people.
        changes: Further columns to set together with the state.

    Returns:
        The new state.

    Raises:
        IllegalTransitionError: The table has no such row.
        ConcurrentTransitionError: The state changed under us; read again and decide again.
    """
    state_type = type(event_target(table))
    old = state_type(instance.state)  # type: ignore[attr-defined]
    new = next_state(table, old, event)
    values = {"state": new.value, **(changes or {})}
    with transaction.atomic():
        manager = type(instance)._default_manager
        changed = manager.filter(pk=instance.pk, state=old.value).update(**values)
        if changed != 1:
            raise ConcurrentTransitionError(f"{instance} left state {old.value!r} in the meantime")
        log.objects.create(  # type: ignore[attr-defined]
            subject=instance,
            old=old.value,
            event=event.value,
            new=new.value,
            actor=actor,
            reason=reason,
        )
    for name, value in values.items():
        setattr(instance, name, value)
    return new


def event_target(table: Mapping[tuple[StateT, EventT], StateT]) -> StateT:
    """Return any state of the table (its type is what the caller wants)."""
    return next(iter(table.values()))
