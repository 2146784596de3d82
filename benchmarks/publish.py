"""What it takes to publish a batch of releases among 100,000: `python -m benchmarks.publish`.

A platform with a database of its own has 100,000 releases in 1,024 bins. Batches of 80 are
published one after the other, the way a build of ten versions for eight targets is; the figure is
the median, bins signed by two keys, snapshot and timestamp included. One release at a time is what
it costs without batches. Bytes are what a device without a cache downloads to learn of a release.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from benchmarks.runner import Claim, main

RELEASES: Final = 100_000
BITS: Final = 10
BATCH: Final = 80
ROUNDS: Final = 5
LIMIT_S: Final = 5.0
GOAL_S: Final = 2.0


def measure() -> list[Claim]:
    """Set up a platform, publish, and return the claims."""
    with tempfile.TemporaryDirectory(prefix="sparsefleet-publish-") as folder:
        os.environ |= {
            "SPARSEFLEET_STATE_DIR": folder,
            "SPARSEFLEET_DATABASE_URL": "",
            "SPARSEFLEET_DEMO_KEYS": "1",
            "SPARSEFLEET_METADATA_BIN_BITS": str(BITS),
            "DJANGO_SETTINGS_MODULE": "dashboards.conf.settings",
        }
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)
        call_command("keys_init")
        return _measured()


def _measured() -> list[Claim]:
    from builds.models import MetadataFile
    from tests.factories.many_releases import make_releases, publish_many

    for bundle in publish_many(RELEASES):
        print(f"published up to {bundle}", file=sys.stderr)
    batches = [_seconds(make_releases(BATCH, model="fresh")) for _ in range(ROUNDS)]
    singles = [_seconds(make_releases(1, model="fresh")) for _ in range(ROUNDS)]
    one = statistics.median(batches)
    sizes = {
        role: len(MetadataFile.objects.filter(role=role).order_by("-version")[0].data)
        for role in ("root", "targets", "snapshot", "timestamp", f"bin-{0:03x}")
    }
    note = f"worst {max(batches):.2f} s; goal {GOAL_S:g} s"
    return [
        Claim(
            *("publish.batch80", one, "s", "the limit", "", LIMIT_S, LIMIT_S / one, 1.0, "host"),
            note,
        ),
        Claim(
            *("publish.one", statistics.median(singles), "s", "", "", None, None, None, "host"),
            "one release alone; a batch of 80 is not 80 of these",
        ),
        Claim(
            *("publish.cold_client", sum(sizes.values()) / 1024, "KiB", "", "", None, None, None),
            "host",
            ", ".join(f"{role} {size}" for role, size in sizes.items()),
        ),
    ]


def _seconds(bundles: Sequence[object]) -> float:
    from builds.models import Bundle
    from builds.services.signing import release_publish

    rows = list(Bundle.objects.filter(pk__in=[bundle.pk for bundle in bundles]))  # type: ignore[attr-defined]
    start = perf_counter()
    release_publish(bundles=rows)
    return perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main("publish", measure, sys.argv[1:]))
