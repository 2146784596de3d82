"""Signed update metadata, as published."""

from django.db import models


class Repository(models.Model):
    """One TUF repository (`image` or `director`); the row is the publisher's lock.

    `refresh_at` is when the first of its files has to be signed again, well before it expires.
    """

    name = models.CharField(max_length=16, unique=True)
    refresh_at = models.DateTimeField(null=True, blank=True)
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return self.name


class MetadataFile(models.Model):
    """One metadata file.

    Every name carries a version and is immutable, except `timestamp.json`, which is swapped last.
    """

    repository = models.ForeignKey(Repository, on_delete=models.PROTECT, related_name="files")
    role = models.CharField(max_length=32)
    version = models.PositiveBigIntegerField()
    name = models.CharField(max_length=64)
    data = models.BinaryField()
    expires_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("repository", "name"), name="metadata_name"),
        )
        indexes = (models.Index(fields=("repository", "role", "-version"), name="metadata_role"),)

    def __str__(self) -> str:
        return self.name


class MetadataDraft(models.Model):
    """The next version of a role that not enough keys have signed yet; it is never served.

    Processes with different keys sign it one after the other. `waits_for` has the keys that may
    still sign; a draft of `targets` is signed by all and waits for the bins that fit it.
    """

    repository = models.ForeignKey(Repository, on_delete=models.PROTECT, related_name="drafts")
    role = models.CharField(max_length=32)
    version = models.PositiveBigIntegerField()
    data = models.BinaryField()
    waits_for = models.JSONField(default=list)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("repository", "role"), name="metadata_draft_role"),
        )

    def __str__(self) -> str:
        return f"draft {self.version} of {self.role}"
