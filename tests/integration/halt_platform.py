"""Sets up a platform with a running rollout in its own state folder; prints what a client needs.

Run as a module by `test_fleet_halt.py`: a real server process shall read what this one wrote.
"""

import json
import sys
from datetime import UTC, datetime

import django

BLOB_BYTES = 48 << 20


def main() -> None:
    """Make rows and print them as JSON."""
    django.setup()
    from django.conf import settings
    from django.core.management import call_command

    from builds.common.auth import token_create
    from builds.common.roles import Role
    from builds.models import BundleSection
    from fleet.common.tokens import SessionToken, issue, token_key
    from tests.factories.builds import make_blob
    from tests.factories.fleet import SimulatedFleet

    call_command("migrate", verbosity=0)
    fleet = SimulatedFleet(per_target=2)
    fleet.clock.at = datetime.now(UTC)
    fleet.answers_per_s = 0
    fleet.release()
    rollout = fleet.rollout(percents=(50, 100))
    fleet.run(1)
    key = token_key(settings.SECRET_KEY)
    expires_at = int(datetime.now(UTC).timestamp()) + 3_600
    updates = list(rollout.updates.order_by("pk"))
    # A device may have the sections of its own update and nothing else: give each bundle a big one.
    blob = make_blob(bytes(BLOB_BYTES))
    for bundle in {update.bundle for update in updates}:
        BundleSection.objects.create(
            bundle=bundle, component="expert.L9.E9", sha256=blob.sha256, size_bytes=BLOB_BYTES
        )
    json.dump(
        {
            "api_token": token_create(name="halt", role=Role.RELEASE_MANAGER)[1],
            "rollout": rollout.pk,
            "updates": {update.device_id: update.pk for update in updates},
            "tokens": {
                device.pk: issue(key, SessionToken(device.pk, 0, expires_at))
                for device in fleet.devices
            },
            "blob": blob.sha256,
            "blob_bytes": BLOB_BYTES,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
