"""Renewal, rotation, revocation and recovery, held by the commands of the runbook.

python-tuf's own client and our agent watch from before, over a real server.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from tuf.api.exceptions import (
    BadVersionNumberError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, Timestamp

from builds.ceremony import read_folder, write_document
from builds.keys import DIRECTOR, IMAGE, load_key_folder
from builds.metadata import add_signatures, signed_bytes
from builds.models import AuditEvent, Bundle, MetadataDraft, MetadataFile
from builds.services import signing
from builds.services.publishing import bundle_path
from builds.services.signing import (
    keys_generate,
    metadata_refresh,
    release_publish,
    repositories_init,
)
from device_agent.errors import ExpiredError, ReplayError, SignatureRefusedError, TrustError
from device_agent.update.verify import IMAGE_ROOT
from tests.conftest import FakeClock
from tests.factories.builds import make_bundle
from tests.factories.ceremonies import (
    WatchingDevice,
    assigned,
    bin_keyids,
    directed,
    hold,
    holders,
    keyid,
    keyids_of,
    new_holder,
    new_online,
    prepare,
    publish,
    sign,
    stock_client,
)

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Watchers:
    """Two devices that enrolled before anything changed."""

    url: str
    folder: Path
    root: bytes
    device: WatchingDevice

    def see(self, bundle: Bundle) -> None:
        """Both find the bundle, with the right digest."""
        info = self.stock().get_targetinfo(bundle_path(bundle))
        assert info is not None
        assert info.hashes == {"sha256": bundle.manifest_sha256}
        assert self.device.look_up(bundle) == bundle.manifest_sha256

    def stock(self) -> Any:
        return stock_client(self.url, self.folder, self.root)

    def refuse(self, bundle: Bundle, stock: type[Exception], ours: type[TrustError]) -> None:
        """Both refuse what the repository says now."""
        with pytest.raises(stock):
            self.stock().get_targetinfo(bundle_path(bundle))
        with pytest.raises(ours):
            self.device.look_up(bundle)


@pytest.fixture
def bundle(clock: FakeClock) -> Bundle:
    keys_generate()
    repositories_init(clock=clock)
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    return bundle


@pytest.fixture
def watchers(live_server: Any, tmp_path: Path, bundle: Bundle) -> Iterator[Watchers]:
    root = json.dumps(signing.trust_anchors()["image_root"]).encode()
    device = WatchingDevice(live_server.url, tmp_path / "device")
    made = Watchers(live_server.url, tmp_path / "stock", root, device)
    made.see(bundle)
    yield made
    device.http.close()


def published_after(watchers: Watchers) -> Bundle:
    """Publish one more bundle and check that both devices take it."""
    bundle = make_bundle()
    assert release_publish(bundles=[bundle]) == 1
    watchers.see(bundle)
    return bundle


def test_it_replaces_every_root_key_in_several_steps(watchers: Watchers, tmp_path: Path) -> None:
    ring = holders("image-root")
    for _ in range(3):
        new = new_holder(tmp_path, IMAGE, "root")
        old = ring.pop(0)
        hold(tmp_path, [ring[0], old, new], add=[new / "public.json"], revoke=[keyid(old)])
        ring.append(new)
    assert set(keyids_of(IMAGE, "root", "root")) == {keyid(key) for key in ring}
    # A device that slept through all of it follows the chain of four roots.
    published_after(watchers)
    assert watchers.device.root_version() == 4


def test_it_renews_root_and_targets_and_writes_it_down(watchers: Watchers, tmp_path: Path) -> None:
    keys = [*holders("image-root")[1:], *holders("image-targets"), *holders("director-root")]
    hold(tmp_path, keys, renew=["image-root", "image-targets", "director-root"])
    assert {
        name: MetadataFile.objects.filter(name=name).count()
        for name in ("2.root.json", "2.targets.json")
    } == {"2.root.json": 2, "2.targets.json": 1}
    rows = list(AuditEvent.objects.filter(action="signing.ceremony").order_by("pk"))
    for lines, written in ((rows[:3], 1), (rows[3:], 2)):
        assert {(row.detail["role"], row.detail["version"]) for row in lines} == {
            ("image root", written),
            ("image targets", written),
            ("director root", written),
        }
    published_after(watchers)


def test_it_replaces_the_keys_of_targets_together_with_the_targets(
    watchers: Watchers, tmp_path: Path
) -> None:
    old = holders("image-targets")
    new = [new_holder(tmp_path, IMAGE, "targets") for _ in old]
    hold(
        tmp_path,
        [*holders("image-root")[:2], *new],
        add=[key / "public.json" for key in new],
        revoke=[keyid(key) for key in old],
    )
    published_after(watchers)


@pytest.mark.parametrize("role", ["build", "approve"])
def test_it_replaces_a_key_of_the_bins_and_devices_refuse_the_old_one_at_once(
    watchers: Watchers, bundle: Bundle, tmp_path: Path, role: str
) -> None:
    old = bin_keyids()[("build", "approve").index(role)]
    hold(
        tmp_path,
        holders("image-targets"),
        add=[new_online(tmp_path, IMAGE, role)],
        revoke=[old],
    )
    assert old not in bin_keyids()
    watchers.see(bundle)
    later = published_after(watchers)
    # Whoever kept the old key signs a release with it: versions are right, all other keys too.
    forge_bin(
        later, signer_ids=[old, *bin_keyids()][:2] if role == "build" else [bin_keyids()[0], old]
    )
    watchers.refuse(later, UnsignedMetadataError, SignatureRefusedError)


def forge_bin(bundle: Bundle, signer_ids: list[str]) -> None:
    """Publish the bin of a bundle anew, signed by these keys, under true heads."""
    from builds.metadata import expiry, renewed, succinct_roles
    from builds.models import Repository
    from builds.services.ceremony import documents_current
    from builds.services.metadata_files import file_put, head_versions, heads_of
    from builds.services.publishing import heads_publish

    image = Repository.objects.get(name=IMAGE)
    current = documents_current()
    roles = succinct_roles(current[IMAGE, "targets"])
    name = roles.get_role_for_target(bundle_path(bundle))
    document = heads_of(image, {name: head_versions(image)[name]})[name]
    now = datetime.now(UTC)
    renewed(document, name, now)
    assert document.signed.expires == expiry(name, now)
    ring = signing.key_ring()
    file_put(image, name, document, signed_bytes(document, ring.signers(IMAGE, signer_ids)))
    heads_publish(
        image, current[IMAGE, "root"].signed, ring, now, bins=frozenset(roles.get_roles())
    )


@pytest.mark.parametrize("role", ["snapshot", "timestamp"])
def test_it_replaces_a_key_of_the_heads(watchers: Watchers, tmp_path: Path, role: str) -> None:
    [old] = keyids_of(IMAGE, "root", role)
    hold(
        tmp_path,
        holders("image-root")[:2],
        add=[new_online(tmp_path, IMAGE, role)],
        revoke=[old],
    )
    assert old not in keyids_of(IMAGE, "root", role)
    published_after(watchers)


def test_it_recovers_from_a_fast_forward_by_replacing_both_keys_of_the_heads(
    watchers: Watchers, bundle: Bundle, tmp_path: Path
) -> None:
    honest = bytes(MetadataFile.objects.get(name="timestamp.json").data)
    fast_forward()
    watchers.see(bundle)
    MetadataFile.objects.filter(name="timestamp.json").update(data=honest)
    watchers.refuse(bundle, BadVersionNumberError, ReplayError)
    hold(
        tmp_path,
        holders("image-root")[:2],
        add=[new_online(tmp_path, IMAGE, role) for role in ("snapshot", "timestamp")],
        revoke=[*keyids_of(IMAGE, "root", "snapshot"), *keyids_of(IMAGE, "root", "timestamp")],
    )
    published_after(watchers)


def fast_forward() -> None:
    """Do what a thief of both head keys does: serve versions that nothing honest will reach."""
    far = 1 << 31
    ring = signing.key_ring()
    row = MetadataFile.objects.filter(role="snapshot").order_by("-version")[0]
    snapshot = Metadata[Snapshot].from_bytes(bytes(row.data))
    snapshot.signed.version = far
    [key] = keyids_of(IMAGE, "root", "snapshot")
    data = signed_bytes(snapshot, ring.signers(IMAGE, [key]))
    stolen = MetadataFile.objects.create(
        repository=row.repository,
        role="stolen",  # not what our own publisher goes on from
        version=far,
        name=f"{far}.snapshot.json",
        data=data,
        expires_at=row.expires_at,
    )
    assert stolen.pk
    stamp = MetadataFile.objects.get(name="timestamp.json")
    timestamp = Metadata[Timestamp].from_bytes(bytes(stamp.data))
    timestamp.signed.version = far
    timestamp.signed.snapshot_meta = MetaFile(far)
    [key] = keyids_of(IMAGE, "root", "timestamp")
    data = signed_bytes(timestamp, ring.signers(IMAGE, [key]))
    MetadataFile.objects.filter(pk=stamp.pk).update(data=data)


def test_it_replaces_the_keys_of_the_director(bundle: Bundle, tmp_path: Path) -> None:
    pinned = json.dumps(signing.trust_anchors()["director_root"]).encode()
    recorded = assigned(bundle, 1)
    assert directed(pinned, recorded) == 1
    [old] = keyids_of(DIRECTOR, "root", "targets")
    hold(
        tmp_path,
        holders("director-root"),
        add=[new_online(tmp_path, DIRECTOR, "targets")],
        revoke=[old],
    )
    assert directed(pinned, assigned(bundle, 2)) == 2
    with pytest.raises(SignatureRefusedError):
        directed(pinned, recorded)
    first, second = holders("director-root")
    new = new_holder(tmp_path, DIRECTOR, "root")
    hold(tmp_path, [first, second, new], add=[new / "public.json"], revoke=[keyid(first)])
    hold(tmp_path, [second, new], renew=["director-root"])
    assert directed(pinned, assigned(bundle, 3)) == 4


def test_it_says_when_this_machine_lacks_the_new_key_of_the_director(
    bundle: Bundle, tmp_path: Path, state_dir: Path
) -> None:
    before = (state_dir / "keys" / "keys.json").read_bytes()
    add = new_online(tmp_path, DIRECTOR, "targets")
    hold(
        tmp_path,
        holders("director-root"),
        add=[add],
        revoke=keyids_of(DIRECTOR, "root", "targets"),
    )
    (state_dir / "keys" / "keys.json").write_bytes(before)
    signing._ring.cache_clear()
    with pytest.raises(signing.SigningKeysError, match="assignments"):
        assigned(bundle, 1)


@pytest.mark.parametrize(
    ("signers", "wanted"),
    [
        (lambda old, new: [new], "root before"),
        (lambda old, new: [old[0], new], "root before"),
        (lambda old, new: [], "root before"),
        (lambda old, new: [old[0], old[1]], "itself"),
    ],
    ids=["new", "one-old", "nobody", "not-enough-of-the-new"],
)
def test_it_publishes_no_root_that_a_device_would_refuse(
    bundle: Bundle, tmp_path: Path, signers: Callable[[Any, Any], list[Path]], wanted: str
) -> None:
    old = holders("image-root")
    new = new_holder(tmp_path, IMAGE, "root")
    revoke = [keyid(old[0]), keyid(old[1])] if wanted == "itself" else [keyid(old[2])]
    more = [new_holder(tmp_path, IMAGE, "root")] if wanted == "itself" else []
    ceremony = prepare(tmp_path, add=[key / "public.json" for key in (new, *more)], revoke=revoke)
    sign(ceremony, *signers(old, new))
    with pytest.raises(CommandError, match=wanted):
        publish(ceremony)
    assert MetadataFile.objects.filter(name="2.root.json").count() == 0


def test_devices_refuse_a_root_that_only_the_new_key_signed(
    watchers: Watchers, bundle: Bundle, tmp_path: Path
) -> None:
    stranger = new_holder(tmp_path, IMAGE, "root")
    public, signer = load_key_folder(stranger)
    root = Metadata[Root].from_bytes(watchers.root)
    root.signed.version = 2
    for old in keyids_of(IMAGE, "root", "root"):
        root.signed.revoke_key(old, "root")
    root.signed.add_key(public.key, "root")
    root.signed.roles["root"].threshold = 1
    row = MetadataFile.objects.get(repository__name=IMAGE, name="1.root.json")
    MetadataFile.objects.create(
        repository=row.repository,
        role="stolen",
        version=2,
        name="2.root.json",
        data=signed_bytes(root, [signer]),
        expires_at=row.expires_at,
    )
    watchers.refuse(bundle, UnsignedMetadataError, SignatureRefusedError)


def test_an_expired_root_is_followed_to_one_that_is_not(
    watchers: Watchers, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root 2 is past its time before root 3 is published; devices know root 1 only."""
    ceremony = prepare(tmp_path, renew=["image-root"])
    documents, _ = read_folder(ceremony)
    root = documents[IMAGE, "root"]
    root.signed.expires = (datetime.now(UTC) + timedelta(seconds=60)).replace(microsecond=0)
    write_document(ceremony, (IMAGE, "root"), root)
    publish(sign(ceremony, *holders("image-root")[:2]))
    expired = Metadata[Root].from_bytes(
        bytes(MetadataFile.objects.get(repository__name=IMAGE, name="2.root.json").data)
    )
    expired.signed.expires = datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)
    expired.signatures.clear()
    for key in holders("image-root")[:2]:
        add_signatures(expired, [load_key_folder(key)[1]])
    MetadataFile.objects.filter(repository__name=IMAGE, name="2.root.json").update(
        data=expired.to_bytes(), expires_at=expired.signed.expires
    )
    watchers.refuse(bundle, RepositoryError, ExpiredError)
    hold(tmp_path, holders("image-root")[1:], renew=["image-root"])
    published_after(watchers)
    assert watchers.device.root_version() == 3


def test_a_device_keeps_the_newest_root_as_its_pin(
    watchers: Watchers, bundle: Bundle, tmp_path: Path
) -> None:
    hold(tmp_path, holders("image-root")[:2], renew=["image-root"])
    watchers.see(bundle)
    assert watchers.device.root_version() == 2
    for path in watchers.device.trust.cache.rglob("*.json"):
        path.unlink()
    MetadataFile.objects.filter(repository__name=IMAGE, name="2.root.json").update(data=b"gone")
    # The pin is root 2 now: nobody asks for it again.
    assert watchers.device.look_up(bundle) == bundle.manifest_sha256
    assert watchers.device.trust.root(IMAGE_ROOT) != watchers.root


def test_it_spreads_releases_over_more_bins(watchers: Watchers, tmp_path: Path) -> None:
    bundles = [make_bundle() for _ in range(5)]
    release_publish(bundles=bundles)
    hold(tmp_path, holders("image-targets"), bits=6)
    for bundle in bundles:
        watchers.see(bundle)
    published_after(watchers)
    assert MetadataDraft.objects.count() == 0


def test_a_second_publishing_changes_nothing(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ceremony = sign(prepare(tmp_path, renew=["image-root"]), *holders("image-root")[:2])
    publish(ceremony)
    count = MetadataFile.objects.count()
    publish(ceremony)
    assert "already" in capsys.readouterr().out
    assert MetadataFile.objects.count() == count


def test_two_ceremonies_at_once_do_not_both_count(bundle: Bundle, tmp_path: Path) -> None:
    first, second = (prepare(tmp_path, renew=["image-root"]) for _ in range(2))
    documents, _ = read_folder(second)
    documents[IMAGE, "root"].signed.expires += timedelta(days=1)
    write_document(second, (IMAGE, "root"), documents[IMAGE, "root"])
    for ceremony in (first, second):
        sign(ceremony, *holders("image-root")[:2])
    publish(first)
    with pytest.raises(CommandError, match="the next one is 3"):
        publish(second)


def test_status_warns_early_and_of_the_director_root_too(
    bundle: Bundle, capsys: pytest.CaptureFixture[str], client: Any
) -> None:
    call_command("keys_status", keys=True)
    assert "director root expires in 365" in capsys.readouterr().out
    assert client.get("/readyz").json()["warnings"] == []
    soon = datetime.now(UTC) + timedelta(days=59)
    MetadataFile.objects.filter(repository__name=DIRECTOR).update(expires_at=soon)
    with pytest.raises(CommandError, match="needs a person"):
        call_command("keys_status")
    assert "! director root expires in 59.0 days; hold a" in capsys.readouterr().out
    [warning] = client.get("/readyz").json()["warnings"]
    assert "director root" in warning


def test_the_worker_warns_of_what_only_people_can_renew(
    bundle: Bundle, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.advance(310 * 86_400)
    metadata_refresh(clock=clock)
    assert "image root expires in 55.0 days; hold a signing ceremony" in caplog.text
    assert "director root expires in 55.0 days" in caplog.text
