"""Who may join without a claim, keys that were replaced, and alerts about identities."""

from django.db import models
from django.db.models import Q

from fleet.models.devices import Device, class_validator


class Preauthorisation(models.Model):
    """One device that may join with this very key; used once.

    `replaces`: the serial number is enrolled, and its device gets this key instead of its own.
    """

    serial = models.CharField(max_length=96)
    key_thumbprint = models.CharField(max_length=64, unique=True)
    device_class = models.CharField(max_length=32, blank=True, validators=[class_validator])
    replaces = models.BooleanField(default=False)
    created_by = models.CharField(max_length=128)
    created_at = models.DateTimeField(auto_now_add=True)
    used_at = models.DateTimeField(null=True, blank=True)
    device = models.ForeignKey(
        Device, null=True, blank=True, on_delete=models.CASCADE, related_name="preauthorisations"
    )

    class Meta:
        ordering = ("-pk",)
        constraints = (
            models.UniqueConstraint(
                fields=("serial",), condition=Q(used_at=None), name="preauthorised_once"
            ),
        )

    def __str__(self) -> str:
        return f"pre-authorisation of {self.serial}"


class ReplacedKey(models.Model):
    """A key that a device had before; nobody may join with it again."""

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="replaced_keys")
    key_thumbprint = models.CharField(max_length=64, unique=True)
    replaced_at = models.DateTimeField()
    reason = models.CharField(max_length=200)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"replaced key {self.key_thumbprint[:12]}"


class IdentityAlert(models.Model):
    """Something about an identity that a person has to look at; one open row per kind and serial.

    `count` is how often it happened, each time at least a minute after the one before.
    """

    kind = models.CharField(max_length=16)
    serial = models.CharField(max_length=96)
    device = models.ForeignKey(
        Device, null=True, blank=True, on_delete=models.CASCADE, related_name="alerts"
    )
    key_thumbprint = models.CharField(max_length=64)
    text = models.TextField()
    count = models.PositiveIntegerField(default=1)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    settled_at = models.DateTimeField(null=True, blank=True)
    settled_by = models.CharField(max_length=128, blank=True)
    note = models.TextField(blank=True)

    class Meta:
        ordering = ("-pk",)
        constraints = (
            models.UniqueConstraint(
                fields=("kind", "serial"), condition=Q(settled_at=None), name="alert_open_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} alert {self.pk} of {self.serial}"
