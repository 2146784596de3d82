"""Rollouts: groups, stages, who is in which arm, updates, and every look of the gate."""

from django.db import models

from builds.common.transitions import TransitionBase
from builds.models import Bundle, Delta, Model, ModelVersion
from compiler.contract.protocol import NetworkPolicy
from fleet.models.counts import AnswerCounts
from fleet.models.devices import Device
from fleet.networks import DEFAULT_WAIT_S
from fleet.states import OPEN_STATES, RolloutState, StageState, UpdateState

ARMS = [("treatment", "treatment"), ("control", "control")]
# Column of a fact beside the state of an update, and the words for it.
FACTS = (
    ("denied_at", "not tried again by itself"),
    ("unconfirmed_at", "unconfirmed at its deadline"),
    ("too_late_at", "too late to withdraw"),
    ("regressed_at", "left the bundle later"),
)


class FleetVersion(models.Model):
    """The one row that is counted up whenever an answer to a poll may have changed."""

    number = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return str(self.number)


class Group(models.Model):
    """A saved filter over devices, evaluated when a stage is formed.

    `filter` may hold `target`, `device_class` and `tags` (all of them must be on the device).
    """

    name = models.CharField(max_length=64, unique=True)
    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="groups")
    filter = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name

    def has(self, device: Device) -> bool:
        """Return whether a device passes the filter, whatever its state; needs `target` joined."""
        wanted = self.filter
        return bool(
            self.model_id == device.model_id
            and wanted.get("target") in (None, "", device.target.name)
            and wanted.get("device_class") in (None, "", device.device_class)
            and set(wanted.get("tags", ())) <= set(device.tags)
        )


class Rollout(models.Model):
    """A gray release of one version to one group. `gate` is a `fleet.gates.GateSpec`.

    `network_policy` says what devices on metered networks may fetch, `unmetered_wait_s` how long
    `wait_unmetered` may keep an update waiting.
    """

    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="rollouts")
    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="rollouts")
    base_version = models.ForeignKey(
        ModelVersion, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    group = models.ForeignKey(Group, on_delete=models.PROTECT, related_name="rollouts")
    name = models.CharField(max_length=100)
    state = models.CharField(max_length=32, default=RolloutState.DRAFT.value, db_index=True)
    salt = models.CharField(max_length=32)
    gate = models.JSONField()
    is_first_install = models.BooleanField(default=False)
    needs_approval = models.BooleanField(default=False)
    network_policy = models.CharField(max_length=16, default=NetworkPolicy.ANY.value)
    unmetered_wait_s = models.FloatField(default=DEFAULT_WAIT_S)
    starts_by_itself = models.BooleanField(default=False)
    looked_at = models.DateTimeField(null=True, blank=True)
    created_by = models.CharField(max_length=128)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    halted_at = models.DateTimeField(null=True, blank=True)
    end_reason = models.TextField(blank=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"rollout {self.pk}"


class RolloutTransition(TransitionBase):
    """One recorded state change of a rollout."""

    subject = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="transitions")


class Stage(models.Model):
    """One step of a rollout.

    `treatment_target` is the number of treatment devices up to and including this stage, fixed when
    the rollout starts. `ledger` holds what the gate has counted so far (see
    `fleet.services.looks`).
    """

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="stages")
    index = models.PositiveSmallIntegerField()
    percent = models.FloatField(null=True, blank=True)
    count = models.PositiveIntegerField(null=True, blank=True)
    is_release = models.BooleanField(default=False)
    state = models.CharField(max_length=32, default=StageState.PENDING.value)
    treatment_target = models.PositiveIntegerField(null=True, blank=True)
    ledger = models.JSONField(default=dict)
    opened_at = models.DateTimeField(null=True, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    reason = models.TextField(blank=True)

    class Meta:
        ordering = ("rollout", "index")
        constraints = (models.UniqueConstraint(fields=("rollout", "index"), name="stage_index"),)

    def __str__(self) -> str:
        return f"stage {self.index} of rollout {self.rollout_id}"


class StageTransition(TransitionBase):
    """One recorded state change of a stage."""

    subject = models.ForeignKey(Stage, on_delete=models.CASCADE, related_name="transitions")


class Enrolment(models.Model):
    """A device takes part in a stage, in one arm; committed before any offer leaves.

    `bundle_sha256` is the manifest whose answers count for it: the new bundle's in treatment, that
    of the bundle it keeps running in control. `slow_ms` and `thirsty_above` are fixed here: answers
    above the one are slow; windows of answering in which the battery lost more than the other per
    active hour, thousandths of a percent, are thirsty. Null: not known.
    """

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="enrolments")
    stage = models.ForeignKey(Stage, on_delete=models.CASCADE, related_name="enrolments")
    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="enrolments")
    arm = models.CharField(max_length=16, choices=ARMS)
    stratum = models.CharField(max_length=100)
    bundle_sha256 = models.CharField(max_length=64)
    slow_ms = models.FloatField(null=True, blank=True)
    thirsty_above = models.FloatField(null=True, blank=True)
    baseline = models.JSONField(default=dict)
    at = models.DateTimeField()
    silent_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("pk",)
        constraints = (
            models.UniqueConstraint(fields=("stage", "device"), name="enrolled_once_per_stage"),
        )
        indexes = (
            models.Index(fields=("device", "rollout"), name="enrolment_device"),
            models.Index(fields=("rollout", "arm"), name="enrolment_arm"),
        )

    def __str__(self) -> str:
        return f"{self.arm} device {self.device_id} in stage {self.stage_id}"


class EnrolmentStats(AnswerCounts):
    """Answers that count for one enrolment; `timed` and `slow` leave out its warm-up.

    `drained` windows of answering were counted by the device's battery, `thirsty` of them are above
    the enrolment's limit; they leave out the warm-up too.
    """

    enrolment = models.OneToOneField(
        Enrolment, primary_key=True, on_delete=models.CASCADE, related_name="stats"
    )
    timed = models.BigIntegerField(default=0)
    slow = models.BigIntegerField(default=0)
    drained = models.BigIntegerField(default=0)
    thirsty = models.BigIntegerField(default=0)
    updated_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"answers of enrolment {self.enrolment_id}"


class Update(models.Model):
    """One device takes one bundle in one rollout. Facts about it are ordered by (attempt, seq).

    `is_offerable` is false while an install waits for its delta. `waits_for` says why the device
    was told to wait when it last asked, empty if it was not. `activated_at` is set when the device
    first said that it switches to the bundle: from then on it counts as exposed.
    With `retry_failed` the device is told to try a bundle again that failed there before.

    Facts beside the state: `denied_at`, the device will not try the bundle again by itself;
    `unconfirmed_at`, it had not committed by the deadline; `too_late_at`, it ran the bundle when
    the update was withdrawn; `regressed_at`, it ran another bundle after it had succeeded.
    """

    device = models.ForeignKey(Device, on_delete=models.CASCADE, related_name="updates")
    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="updates")
    stage = models.ForeignKey(Stage, null=True, on_delete=models.CASCADE, related_name="updates")
    bundle = models.ForeignKey(Bundle, on_delete=models.PROTECT, related_name="updates")
    base_bundle = models.ForeignKey(
        Bundle, null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    delta = models.ForeignKey(
        Delta, null=True, blank=True, on_delete=models.PROTECT, related_name="updates"
    )
    kind = models.CharField(max_length=16, default="install")
    state = models.CharField(max_length=32, default=UpdateState.QUEUED.value)
    attempt = models.PositiveIntegerField(default=1)
    seq = models.PositiveBigIntegerField(default=0)
    is_offerable = models.BooleanField(default=False)
    waits_for = models.CharField(max_length=200, blank=True)
    retry_failed = models.BooleanField(default=False)
    used_delta = models.BooleanField(default=False)
    downloaded_bytes = models.BigIntegerField(default=0)
    code = models.CharField(max_length=64, blank=True)
    message = models.TextField(blank=True)
    queued_at = models.DateTimeField()
    offered_at = models.DateTimeField(null=True, blank=True)
    activated_at = models.DateTimeField(null=True, blank=True)
    reported_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    denied_at = models.DateTimeField(null=True, blank=True)
    unconfirmed_at = models.DateTimeField(null=True, blank=True)
    too_late_at = models.DateTimeField(null=True, blank=True)
    regressed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-pk",)
        constraints = (
            models.UniqueConstraint(
                fields=("device",),
                condition=models.Q(state__in=sorted(state.value for state in OPEN_STATES)),
                name="one_open_update_per_device",
            ),
            models.UniqueConstraint(
                fields=("rollout", "device", "kind", "attempt"), name="update_attempt"
            ),
        )
        indexes = (
            models.Index(fields=("rollout", "kind", "state"), name="update_rollout_state"),
            models.Index(fields=("state", "reported_at"), name="update_state_reported"),
        )

    def __str__(self) -> str:
        return f"update {self.pk}"

    @property
    def facts(self) -> tuple[str, ...]:
        """Return what is known beside the state, in words."""
        return tuple(words for column, words in FACTS if getattr(self, column) is not None)


class UpdateTransition(TransitionBase):
    """One recorded state change of an update."""

    subject = models.ForeignKey(Update, on_delete=models.CASCADE, related_name="transitions")


class UpdateReportRow(models.Model):
    """One report as it came; also those that moved nothing (late, repeated, after the end)."""

    update = models.ForeignKey(Update, on_delete=models.CASCADE, related_name="reports")
    attempt = models.PositiveIntegerField()
    seq = models.PositiveBigIntegerField()
    state = models.CharField(max_length=32)
    running_manifest_sha256 = models.CharField(max_length=64, blank=True)
    downloaded_bytes = models.BigIntegerField(default=0)
    code = models.CharField(max_length=64, blank=True)
    message = models.TextField(blank=True)
    fact = models.CharField(max_length=32, blank=True)
    was_applied = models.BooleanField()
    at = models.DateTimeField()

    class Meta:
        ordering = ("attempt", "seq")
        constraints = (
            models.UniqueConstraint(fields=("update", "attempt", "seq"), name="report_once"),
        )

    def __str__(self) -> str:
        return f"report {self.attempt}.{self.seq} of update {self.update_id}"


class GateLook(models.Model):
    """One look of the gate with all its inputs: `manage.py gate_replay` decides it again."""

    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="looks")
    stage = models.ForeignKey(Stage, on_delete=models.CASCADE, related_name="looks")
    at = models.DateTimeField()
    spec = models.JSONField()
    evidence = models.JSONField()
    verdict = models.JSONField()
    decision = models.CharField(max_length=16)
    log_evidence = models.FloatField()
    action = models.CharField(max_length=32, blank=True)

    class Meta:
        ordering = ("pk",)
        indexes = (models.Index(fields=("rollout", "-id"), name="look_rollout"),)

    def __str__(self) -> str:
        return f"look {self.pk}"
