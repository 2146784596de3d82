"""Telemetry: which batches were counted, and sums per minute."""

from django.db import models

from fleet.models.counts import AnswerCounts
from fleet.models.devices import Device
from fleet.models.rollouts import Rollout


class TelemetryBatchKey(models.Model):
    """One batch that was counted; the same batch again changes nothing."""

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="batches")
    boot_id = models.CharField(max_length=64)
    seq = models.PositiveBigIntegerField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("device", "boot_id", "seq"), name="batch_once"),
        )

    def __str__(self) -> str:
        return f"batch {self.boot_id}.{self.seq}"


class TelemetryRollup(AnswerCounts):
    """Sums of all batches of one minute (server time) that came from the same kind of device.

    `stage_index` is -1 and `arm` is empty outside a rollout, so that the key has no nulls but one.
    """

    rollout = models.ForeignKey(
        Rollout, null=True, blank=True, on_delete=models.CASCADE, related_name="rollups"
    )
    stage_index = models.SmallIntegerField(default=-1)
    arm = models.CharField(max_length=16, blank=True)
    manifest_sha256 = models.CharField(max_length=64)
    target = models.CharField(max_length=64)
    minute = models.DateTimeField()
    batches = models.PositiveIntegerField(default=0)
    devices = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("rollout", "stage_index", "arm", "manifest_sha256", "target", "minute"),
                name="rollup_key",
                condition=models.Q(rollout__isnull=False),
            ),
            models.UniqueConstraint(
                fields=("manifest_sha256", "target", "minute"),
                name="rollup_key_outside",
                condition=models.Q(rollout__isnull=True),
            ),
        )
        indexes = (models.Index(fields=("manifest_sha256", "minute"), name="rollup_manifest"),)

    def __str__(self) -> str:
        return f"answers of {self.minute:%H:%M}"
