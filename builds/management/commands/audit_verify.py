"""`manage.py audit_verify`: follow the audit chain from its first line to its head."""

from typing import Any

from django.core.management.base import CommandError

from builds.common.audit import GENESIS, first_broken_line
from builds.common.commands import DatabaseCommand
from builds.models import AuditEvent, AuditHead


class Command(DatabaseCommand):
    """Fail when a line of the audit chain was changed, removed, or cut off at the end."""

    help = "Check the digests of the audit chain."

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 -- Django's signature
        """Run."""
        broken = first_broken_line(AuditEvent.objects.order_by("pk").iterator())
        if broken is not None:
            raise CommandError(f"the chain breaks at line {broken.pk}: {broken}")
        head = AuditHead.objects.first()
        last = AuditEvent.objects.order_by("-pk").first()
        if (head.sha256 if head else GENESIS) != (last.sha256 if last else GENESIS):
            raise CommandError("lines are missing at the end of the chain")
        print(f"{AuditEvent.objects.count()} lines, unbroken")
