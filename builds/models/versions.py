"""Models, their immutable versions, and what we compile for."""

from django.core.validators import RegexValidator
from django.db import models

from builds.common.transitions import TransitionBase
from builds.states import VersionState
from compiler.contract.manifest import NAME_PATTERN

_name_validator = RegexValidator(f"^(?:{NAME_PATTERN.pattern})\\Z")


class Blob(models.Model):
    """Content-addressed bytes that are in the blob store."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    size_bytes = models.BigIntegerField()
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.sha256


class Model(models.Model):
    """A product line, e.g. `doc-reader`; the bundles of a confidential one travel sealed."""

    name = models.CharField(max_length=64, unique=True, validators=[_name_validator])
    title = models.CharField(max_length=200, blank=True)
    confidential = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class ModelVersion(models.Model):
    """One immutable submission by CI.

    `files` is a list of `{"name", "sha256", "size_bytes"}`; `claim` is what CI says about quality.
    """

    model = models.ForeignKey(Model, on_delete=models.PROTECT, related_name="versions")
    version = models.CharField(max_length=64, validators=[_name_validator])
    release_seq = models.PositiveBigIntegerField()
    security_epoch = models.PositiveIntegerField(default=0)
    constant_time = models.BooleanField(default=False)
    state = models.CharField(max_length=32, default=VersionState.SUBMITTED.value)
    files = models.JSONField()
    base_version = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="+"
    )
    claim = models.JSONField(default=dict)
    notes = models.TextField(blank=True)
    submission_sha256 = models.CharField(max_length=64)
    error_code = models.CharField(max_length=64, blank=True)
    error_message = models.TextField(blank=True)
    error_hint = models.TextField(blank=True)
    submitted_by = models.CharField(max_length=128)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("model", "-release_seq")
        constraints = (
            models.UniqueConstraint(fields=("model", "version"), name="version_unique"),
            models.UniqueConstraint(fields=("model", "release_seq"), name="version_seq_unique"),
        )

    def __str__(self) -> str:
        return f"{self.model.name} {self.version}"


class ContentKey(models.Model):
    """The key of a confidential release, itself encrypted; see `builds.services.content_keys`."""

    version = models.OneToOneField(
        ModelVersion, on_delete=models.CASCADE, related_name="content_key"
    )
    wrapped = models.BinaryField(max_length=128)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"content key of version {self.version_id}"


class VersionTransition(TransitionBase):
    """One recorded state change of a version."""

    subject = models.ForeignKey(ModelVersion, on_delete=models.CASCADE, related_name="transitions")


class Target(models.Model):
    """What we compile for; active once a device of this kind has enrolled or an admin said so."""

    name = models.CharField(max_length=64, unique=True)
    title = models.CharField(max_length=200, blank=True)
    active = models.BooleanField(default=False)
    verified_on = models.CharField(max_length=16, default="unverified")

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name
