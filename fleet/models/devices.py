"""Devices: identity, capabilities, what they run, when they were heard."""

from django.core.validators import RegexValidator
from django.db import models

from builds.common.transitions import TransitionBase
from builds.models import Bundle, Model, Target
from compiler.contract.protocol import Network
from fleet.models.counts import AnswerCounts
from fleet.states import DeviceState

CLASS_PATTERN = r"[a-z0-9][a-z0-9._-]{0,31}"
class_validator = RegexValidator(f"^(?:{CLASS_PATTERN})\\Z")


class ClaimToken(models.Model):
    """What a device shows to join: `sfc_<id>_<secret>`, of which only a digest is kept."""

    name = models.CharField(max_length=100)
    secret_sha256 = models.CharField(max_length=64)
    uses_left = models.PositiveIntegerField()
    expires_at = models.DateTimeField(null=True, blank=True)
    device_class = models.CharField(max_length=32, blank=True)
    accepts = models.BooleanField(default=True)
    created_by = models.CharField(max_length=128)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"claim token {self.pk} ({self.name})"


class Fingerprint(models.Model):
    """Capability facts of a kind of device, stored once."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    document = models.JSONField()
    first_seen_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.sha256


class Device(models.Model):
    """One device. Its identity is an Ed25519 key; the serial number is its owner's name for it.

    `running_bundle` is what the device itself said it runs, never what it was sent; null means
    nothing yet, for a manifest that is no bundle of the device is not believed. `running_at` is
    when the server heard it change. `last_seen_at` is the last report or token exchange; polls are
    counted in `Heartbeat`, because they are many. `network` is what the device said about its
    network when it last asked for an assignment. `device_id` is that of the first key and stays
    when the key is replaced. `seal_key` is its X25519 key, for confidential bundles. `clock_skew_s`
    is how far its clock was ahead at the last token exchange.
    """

    device_id = models.CharField(max_length=32, unique=True)
    serial = models.CharField(max_length=96, unique=True)
    name = models.CharField(max_length=96)
    key_thumbprint = models.CharField(max_length=64, unique=True)
    public_key = models.BinaryField(max_length=32)
    seal_key = models.BinaryField(max_length=32, default=b"", blank=True)
    state = models.CharField(max_length=32, default=DeviceState.PENDING.value, db_index=True)
    fingerprint = models.ForeignKey(Fingerprint, on_delete=models.PROTECT, related_name="devices")
    target = models.ForeignKey(Target, on_delete=models.PROTECT, related_name="devices")
    device_class = models.CharField(max_length=32, validators=[class_validator])
    tags = models.JSONField(default=list, blank=True)
    model = models.ForeignKey(
        Model, null=True, blank=True, on_delete=models.PROTECT, related_name="devices"
    )
    running_bundle = models.ForeignKey(
        Bundle, null=True, blank=True, on_delete=models.PROTECT, related_name="running_devices"
    )
    running_manifest_sha256 = models.CharField(max_length=64, blank=True)
    previous_bundle = models.ForeignKey(
        Bundle, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    assignment_seq = models.PositiveBigIntegerField(default=0)
    network = models.CharField(max_length=16, default=Network.UNKNOWN.value)
    token_generation = models.PositiveIntegerField(default=0)
    claim = models.ForeignKey(
        ClaimToken, null=True, blank=True, on_delete=models.SET_NULL, related_name="devices"
    )
    enrolled_at = models.DateTimeField()
    running_at = models.DateTimeField(null=True, blank=True)
    last_seen_at = models.DateTimeField(null=True, blank=True)
    clock_skew_s = models.BigIntegerField(null=True, blank=True)

    class Meta:
        ordering = ("-pk",)
        indexes = (models.Index(fields=("model", "state"), name="device_model_state"),)

    def __str__(self) -> str:
        return f"device {self.device_id}"

    @property
    def stratum(self) -> str:
        """Return target and device class: the strata of stages. Needs `target` joined."""
        return f"{self.target.name}/{self.device_class}"


class DeviceTransition(TransitionBase):
    """One recorded state change of a device's membership."""

    subject = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="transitions")


class DeviceNonce(models.Model):
    """A nonce of a signed request that was used; kept while the signature could be replayed."""

    key_thumbprint = models.CharField(max_length=64)
    nonce = models.CharField(max_length=64)
    at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("key_thumbprint", "nonce"), name="nonce_once"),
        )

    def __str__(self) -> str:
        return self.nonce


class Heartbeat(models.Model):
    """When a device polled last and what it said it runs; narrow, because it is written often.

    `trail` are its last boots, see `fleet.clones`.
    """

    device = models.OneToOneField(
        Device, primary_key=True, on_delete=models.CASCADE, related_name="heartbeat"
    )
    at = models.DateTimeField(db_index=True)
    manifest_sha256 = models.CharField(max_length=64, blank=True)
    trail = models.JSONField(default=dict, blank=True)

    def __str__(self) -> str:
        return f"heartbeat of device {self.device_id}"


class DeviceStats(AnswerCounts):
    """What one device measured while it ran one bundle, over all time; its newest gauges.

    `degraded_by` adds up degraded answers by reason; `rung` is the newest gauge of that name;
    `drain` is a sketch of what its battery lost per active hour, thousandths of a percent.
    """

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="stats")
    manifest_sha256 = models.CharField(max_length=64, db_index=True)
    updated_at = models.DateTimeField(null=True, blank=True)
    gauges = models.JSONField(default=dict, blank=True)
    degraded_by = models.JSONField(default=dict, blank=True)
    rung = models.PositiveSmallIntegerField(default=0, db_index=True)
    drain = models.JSONField(default=list, blank=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("device", "manifest_sha256"), name="stats_of_bundle"),
        )

    def __str__(self) -> str:
        return f"answers of device {self.device_id} by {self.manifest_sha256[:12]}"
