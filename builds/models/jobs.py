"""Build jobs, bundles and deltas."""

from django.db import models

from builds.common.transitions import TransitionBase
from builds.models.versions import ModelVersion, Target
from builds.states import BuildState, DeltaState


class LeasedModel(models.Model):
    """A row of work: whoever holds the lease works on it, and an expired lease frees it.

    `not_before` holds the wait after a failure of ours; `rung_at` is when the queue was last told.
    """

    lease_owner = models.CharField(max_length=128, blank=True)
    lease_until = models.DateTimeField(null=True, blank=True)
    not_before = models.DateTimeField(null=True, blank=True)
    rung_at = models.DateTimeField(null=True, blank=True)
    attempt = models.PositiveIntegerField(default=0)
    error_code = models.CharField(max_length=64, blank=True)
    error_message = models.TextField(blank=True)
    error_hint = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        abstract = True


class VersionCheck(LeasedModel):
    """A version that waits for its first look; gone when done."""

    version = models.OneToOneField(ModelVersion, on_delete=models.CASCADE, related_name="check_row")

    def __str__(self) -> str:
        return f"check {self.pk}"


class BuildJob(LeasedModel):
    """One version compiled for one target.

    `base_bundle` is fixed by the first lease, so that every run of the job has the same input
    and the same output.
    """

    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="jobs")
    target = models.ForeignKey(Target, on_delete=models.PROTECT, related_name="jobs")
    base_bundle = models.ForeignKey(
        "builds.Bundle", null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    state = models.CharField(max_length=32, default=BuildState.QUEUED.value, db_index=True)
    stage = models.CharField(max_length=64, blank=True)
    progress = models.FloatField(default=0.0)
    report = models.JSONField(default=dict)

    class Meta:
        ordering = ("-pk",)
        constraints = (
            models.UniqueConstraint(fields=("version", "target"), name="build_version_target"),
        )

    def __str__(self) -> str:
        return f"build {self.pk}"


class BuildTransition(TransitionBase):
    """One recorded state change of a build job."""

    subject = models.ForeignKey(BuildJob, on_delete=models.CASCADE, related_name="transitions")


class BuildLogLine(models.Model):
    """One line of a build's log."""

    job = models.ForeignKey(BuildJob, on_delete=models.CASCADE, related_name="log")
    at = models.DateTimeField()
    level = models.CharField(max_length=16)
    text = models.TextField()

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return self.text


class Bundle(models.Model):
    """The finished output of one build job: a manifest and its content-addressed sections.

    Nothing of it is offered before it is published: approved by somebody, and signed by the key
    that builds and the key that approves.
    """

    job = models.OneToOneField(BuildJob, on_delete=models.PROTECT, related_name="bundle")
    version = models.ForeignKey(ModelVersion, on_delete=models.PROTECT, related_name="bundles")
    target = models.ForeignKey(Target, on_delete=models.PROTECT, related_name="bundles")
    manifest_sha256 = models.CharField(max_length=64, unique=True)
    manifest = models.BinaryField()
    total_bytes = models.BigIntegerField()
    verified_on = models.CharField(max_length=16)
    is_sealed = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    approved_at = models.DateTimeField(null=True, blank=True)
    approved_by = models.CharField(max_length=150, blank=True)
    published_at = models.DateTimeField(null=True, blank=True, db_index=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"bundle {self.manifest_sha256[:12]}"

    @property
    def manifest_bytes(self) -> bytes:
        """Return the canonical bytes of the manifest (PostgreSQL hands out a memoryview)."""
        return bytes(self.manifest)


class BundleSection(models.Model):
    """One content-addressed file of a bundle; in a confidential one `sealed_sha256` is sent."""

    bundle = models.ForeignKey(Bundle, on_delete=models.CASCADE, related_name="sections")
    component = models.CharField(max_length=64)
    sha256 = models.CharField(max_length=64, db_index=True)
    size_bytes = models.BigIntegerField()
    sealed_sha256 = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ("bundle", "component")
        constraints = (
            models.UniqueConstraint(fields=("bundle", "component"), name="section_component"),
        )

    def __str__(self) -> str:
        return self.component


class Delta(LeasedModel):
    """How to make the sections of `new` from those of `base`; `sha256` is the blob to download.

    `is_urgent`: devices of a rollout under way wait for it, so it is built before others.
    If `new` is confidential, the blob is sealed; `plain_sha256` and `plain_bytes` are what it opens
    to.
    """

    base = models.ForeignKey(Bundle, on_delete=models.PROTECT, related_name="deltas_from")
    new = models.ForeignKey(Bundle, on_delete=models.PROTECT, related_name="deltas_to")
    state = models.CharField(max_length=32, default=DeltaState.QUEUED.value, db_index=True)
    is_urgent = models.BooleanField(default=False)
    sha256 = models.CharField(max_length=64, blank=True)
    size_bytes = models.BigIntegerField(default=0)
    plain_sha256 = models.CharField(max_length=64, blank=True)
    plain_bytes = models.BigIntegerField(default=0)
    bsdiff4_bytes = models.BigIntegerField(null=True, blank=True)
    report = models.JSONField(default=dict)

    class Meta:
        ordering = ("-pk",)
        constraints = (models.UniqueConstraint(fields=("base", "new"), name="delta_pair"),)

    def __str__(self) -> str:
        return f"delta {self.pk}"


class DeltaTransition(TransitionBase):
    """One recorded state change of a delta."""

    subject = models.ForeignKey(Delta, on_delete=models.CASCADE, related_name="transitions")
