"""Who may do what, and who did what."""

from typing import Any, NoReturn

from django.conf import settings
from django.db import models

from builds.common.roles import Role

ROLE_CHOICES = [(role.value, role.value.replace("_", " ")) for role in Role]


class Membership(models.Model):
    """The role of one user; a user without one may do nothing."""

    user = models.OneToOneField(
        settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="membership"
    )
    role = models.CharField(max_length=32, choices=ROLE_CHOICES, default=Role.VIEWER.value)

    def __str__(self) -> str:
        return f"{self.user}: {self.role}"


class ApiToken(models.Model):
    """A token of CI or another program: `sf_<id>_<secret>`, of which only a digest is kept."""

    name = models.CharField(max_length=100)
    secret_sha256 = models.CharField(max_length=64)
    role = models.CharField(max_length=32, choices=ROLE_CHOICES)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"token {self.pk} ({self.name})"


class AuditHead(models.Model):
    """The one row that a writer locks to append to the audit chain."""

    sha256 = models.CharField(max_length=64)

    def __str__(self) -> str:
        return self.sha256


class AuditEvent(models.Model):
    """One line of the append-only audit chain: each line's digest covers the digest before it."""

    at = models.DateTimeField()
    actor = models.CharField(max_length=128)
    action = models.CharField(max_length=64)
    object_type = models.CharField(max_length=64)
    object_id = models.CharField(max_length=64)
    detail = models.JSONField(default=dict)
    previous_sha256 = models.CharField(max_length=64)
    sha256 = models.CharField(max_length=64, unique=True)

    class Meta:
        ordering = ("pk",)
        indexes = (models.Index(fields=("object_type", "object_id"), name="audit_object"),)

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.object_type} {self.object_id}"

    def save(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Insert; an existing line cannot be changed."""
        if not self._state.adding:
            raise TypeError("audit events are append-only")
        super().save(*args, **kwargs)

    def delete(self, *_args: Any, **_kwargs: Any) -> NoReturn:  # noqa: ANN401 -- Django's
        """Refuse: audit events are append-only."""
        raise TypeError("audit events are append-only")


class IdempotencyKey(models.Model):
    """The stored answer to a request that carried an `Idempotency-Key`."""

    key = models.CharField(max_length=200)
    actor = models.CharField(max_length=128)
    body_sha256 = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField()
    response = models.BinaryField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=("key", "actor"), name="idempotency_key_actor"),
        )

    def __str__(self) -> str:
        return self.key
