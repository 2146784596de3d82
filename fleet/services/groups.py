"""Groups: saved filters over devices."""

import re
from collections.abc import Mapping

from django.db import transaction

from builds.common.audit import audit
from builds.common.auth import Actor, require
from builds.common.errors import ConflictError, InvalidInputError, NotFoundError
from builds.common.roles import Permission
from builds.models import Model
from compiler.contract.manifest import NAME_PATTERN
from fleet.models import Group
from fleet.services.members import filter_require


@transaction.atomic
def group_create(
    *, actor: Actor, name: str, model: str, device_filter: Mapping[str, object]
) -> tuple[Group, bool]:
    """Make a group; the same group again returns the same row.

    Args:
        actor: Who makes it.
        name: Unique.
        model: Name of the model whose devices it is about.
        device_filter: `target`, `device_class` and `tags` (a device must have all), optional.

    Returns:
        The group and whether it is new.

    Raises:
        InvalidInputError: The name or the filter is wrong.
        NotFoundError: No such model.
        ConflictError: A group of this name has another model or filter.
    """
    require(actor, Permission.GROUP_EDIT)
    if re.fullmatch(NAME_PATTERN, name) is None:
        raise InvalidInputError(f"the name of a group must match {NAME_PATTERN.pattern}")
    filter_require(device_filter)
    found = Model.objects.filter(name=model).first()
    if found is None:
        raise NotFoundError(f"no model {model!r}")
    group, created = Group.objects.get_or_create(
        name=name, defaults={"model": found, "filter": dict(device_filter)}
    )
    if created:
        audit(actor=actor.name, action="group.create", obj=group, name=name, model=model)
    elif group.model_id != found.pk or group.filter != dict(device_filter):
        raise ConflictError(f"group {name!r} exists with another model or filter")
    return group, created
