"""Batches of releases among many: few queries, and every target still found by the stock client."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from builds.models import Bundle, MetadataFile
from builds.services.publishing import bundle_path
from builds.services.signing import (
    keys_generate,
    release_publish,
    repositories_init,
    trust_anchors,
)
from device_agent.update.image_repository import LIMITS
from tests.factories.ceremonies import WatchingDevice, stock_client
from tests.factories.many_releases import make_releases, publish_many

pytestmark = pytest.mark.django_db(transaction=True)


def set_up(settings: Any, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(settings.SPARSEFLEET, "metadata_bin_bits", bits)
    keys_generate()
    repositories_init()


def test_a_batch_costs_the_same_queries_as_one(
    settings: Any, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up(settings, monkeypatch, 6)
    counts = []
    for size in (1, 80):
        bundles = list(Bundle.objects.filter(pk__in=[b.pk for b in make_releases(size, model="m")]))
        with CaptureQueriesContext(
            connection,
        ) as queries:
            release_publish(bundles=bundles)
        counts.append(len(queries))
    assert counts[1] <= counts[0] + 2
    assert counts[1] < 35


@pytest.mark.full
def test_it_publishes_80_among_100_000(
    settings: Any,
    state_dir: Path,
    live_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up(settings, monkeypatch, 10)
    root = json.dumps(trust_anchors()["image_root"]).encode()
    old = list(publish_many(100_000))
    before = MetadataFile.objects.count()
    fresh = make_releases(80, model="fresh")
    signed = release_publish(bundles=fresh)
    assert 60 <= signed <= 80
    assert MetadataFile.objects.count() == before + signed + 1
    assert Bundle.objects.filter(published_at=None).count() == 0
    client = stock_client(live_server.url, tmp_path / "stock", root)
    for bundle in (*old, *fresh):
        info = client.get_targetinfo(bundle_path(bundle))
        assert info is not None
        assert info.hashes == {"sha256": bundle.manifest_sha256}
    device = WatchingDevice(live_server.url, tmp_path / "device")
    assert device.look_up(fresh[7]) == fresh[7].manifest_sha256
    device.http.close()
    # What a device downloads stays far below what it takes.
    newest = MetadataFile.objects.filter(role="snapshot").order_by("-version")[0]
    assert len(newest.data) < LIMITS.snapshot_max_length // 8
    bins = MetadataFile.objects.filter(role__startswith="bin-", version__gt=1)
    assert max(len(row.data) for row in bins.iterator()) < LIMITS.targets_max_length // 50
