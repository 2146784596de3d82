"""Degrade rules that release managers set for the fleet or for a group."""

from typing import Final

from django.db import models

from fleet.models.rollouts import Group

MAX_NOTE: Final = 200


class DegradeRules(models.Model):
    """One setting of rules; never changed, only followed by another. Its id is the revision.

    `group` is null for the whole fleet. `document` is `sparsefleet.degrade/1`; null takes the
    rules of that scope back.
    """

    group = models.ForeignKey(
        Group, null=True, blank=True, on_delete=models.PROTECT, related_name="degrade_rules"
    )
    document = models.JSONField(null=True, blank=True)
    note = models.CharField(max_length=MAX_NOTE, blank=True)
    created_by = models.CharField(max_length=128)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)
        verbose_name_plural = "degrade rules"

    def __str__(self) -> str:
        scope = "the fleet" if self.group is None else f"group {self.group.name}"
        return f"degrade rules {self.pk} of {scope}"
