"""Update metadata over a real HTTP server, read by python-tuf's own client; and attacks on it."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.exceptions import (
    BadVersionNumberError,
    DownloadError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
    UnsignedMetadataError,
)
from tuf.api.metadata import Metadata, Root, Targets
from tuf.ngclient import Updater

from builds.errors import BuildOutputError, SigningKeysError
from builds.metadata import new_timestamp, signed_bytes
from builds.models import Bundle, MetadataFile, Repository
from builds.services import signing
from builds.services.publishing import bundle_path
from builds.services.signing import (
    assignment_sign,
    keys_generate,
    metadata_refresh,
    release_publish,
    repositories_init,
    trust_anchors,
)
from compiler.contract.manifest import parse_manifest
from compiler.contract.protocol import OfferKind, assignment_from_json
from tests.conftest import FakeClock
from tests.factories.builds import make_bundle, make_model, make_target, make_version
from tests.factories.ceremonies import keyids_of, stock_client

pytestmark = pytest.mark.django_db(transaction=True)
MetadataJson = dict[str, Any]


@pytest.fixture
def repository(clock: FakeClock) -> None:
    keys_generate()
    assert repositories_init(clock=clock)


@pytest.fixture
def client(live_server: Any, tmp_path: Path, repository: None) -> Callable[[], Updater]:
    """Return a maker of clients that share one cache, as restarts of one device do."""
    root = json.dumps(trust_anchors()["image_root"]).encode()
    return lambda: stock_client(live_server.url, tmp_path, root)


def fetch(client: Callable[[], Updater], bundle: Bundle) -> bytes:
    updater = client()
    info = updater.get_targetinfo(bundle_path(bundle))
    assert info is not None
    return Path(updater.download_target(info)).read_bytes()


def rewrite(name: str, change: Callable[[MetadataJson], object]) -> None:
    """Change a published file behind the publisher's back."""
    row = MetadataFile.objects.get(repository__name="image", name=name)
    document = json.loads(bytes(row.data))
    change(document)
    MetadataFile.objects.filter(pk=row.pk).update(
        data=json.dumps(document, separators=(",", ":")).encode()
    )


def head_name(role: str) -> str:
    rows = MetadataFile.objects.filter(repository__name="image", role=role)
    return rows.order_by("-version")[0].name


def bin_of(bundle: Bundle) -> str:
    targets = Metadata[Targets].from_bytes(
        bytes(MetadataFile.objects.get(name="1.targets.json").data)
    )
    assert targets.signed.delegations is not None
    roles = targets.signed.delegations.succinct_roles
    assert roles is not None
    return roles.get_role_for_target(bundle_path(bundle))


def test_it_serves_a_release_to_the_stock_client(client: Callable[[], Updater]) -> None:
    bundle = make_bundle()
    assert client().get_targetinfo(bundle_path(bundle)) is None
    assert release_publish(bundles=[bundle]) == 1
    data = fetch(client, bundle)
    assert data == bundle.manifest_bytes
    assert parse_manifest(data).sha256 == bundle.manifest_sha256


def test_it_publishes_a_batch_at_once_and_repeats_change_nothing(
    client: Callable[[], Updater],
) -> None:
    model = make_model()
    bundles = [
        make_bundle(make_version(model), make_target(name))
        for name in ("x86-64-v1", "x86-64-v2", "x86-64-v3")
    ]
    assert release_publish(bundles=bundles) >= 1
    before = MetadataFile.objects.count()
    assert release_publish(bundles=bundles) == 0
    assert MetadataFile.objects.count() == before
    for bundle in bundles:
        assert fetch(client, bundle) == bundle.manifest_bytes


def test_it_lets_a_running_client_follow_later_releases(client: Callable[[], Updater]) -> None:
    model = make_model()
    for _ in range(3):
        bundle = make_bundle(make_version(model))
        release_publish(bundles=[bundle])
        assert fetch(client, bundle) == bundle.manifest_bytes


def test_it_never_changes_what_a_path_names(repository: None) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    bundle.manifest = bundle.manifest_bytes + b" "
    with pytest.raises(BuildOutputError, match="other content"):
        release_publish(bundles=[bundle])


def test_a_client_refuses_a_manifest_with_one_flipped_bit(client: Callable[[], Updater]) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    data = bytearray(bundle.manifest_bytes)
    data[10] ^= 1
    Bundle.objects.filter(pk=bundle.pk).update(manifest=bytes(data))
    with pytest.raises(LengthOrHashMismatchError):
        fetch(client, bundle)


def test_a_client_refuses_a_manifest_that_is_cut_short(client: Callable[[], Updater]) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    Bundle.objects.filter(pk=bundle.pk).update(manifest=bundle.manifest_bytes[:-1])
    with pytest.raises((LengthOrHashMismatchError, DownloadError)):
        fetch(client, bundle)


@pytest.mark.parametrize("role", ["timestamp", "snapshot", "targets", "bin"])
def test_a_client_refuses_metadata_that_was_changed(
    client: Callable[[], Updater], role: str
) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    name = head_name(bin_of(bundle) if role == "bin" else role)
    rewrite(name, lambda document: document["signed"].update(expires="2999-01-01T00:00:00Z"))
    with pytest.raises(RepositoryError):
        fetch(client, bundle)


def test_a_client_refuses_a_release_that_only_one_key_signed(
    client: Callable[[], Updater],
) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    rewrite(head_name(bin_of(bundle)), lambda document: document["signatures"].pop())
    with pytest.raises(UnsignedMetadataError):
        fetch(client, bundle)


def test_a_client_refuses_a_release_signed_by_a_stranger(client: Callable[[], Updater]) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    row = MetadataFile.objects.get(name=head_name(bin_of(bundle)))
    forged = Metadata[Targets].from_bytes(bytes(row.data))
    forged.signatures.clear()
    for _ in range(2):
        forged.sign(CryptoSigner.generate_ed25519(), append=True)
    MetadataFile.objects.filter(pk=row.pk).update(data=forged.to_bytes())
    with pytest.raises(UnsignedMetadataError):
        fetch(client, bundle)


def test_a_client_refuses_an_older_timestamp(client: Callable[[], Updater]) -> None:
    model = make_model()
    release_publish(bundles=[make_bundle(make_version(model))])
    old = bytes(MetadataFile.objects.get(name="timestamp.json").data)
    bundle = make_bundle(make_version(model))
    release_publish(bundles=[bundle])
    fetch(client, bundle)
    MetadataFile.objects.filter(name="timestamp.json").update(data=old)
    # A client keeps what it had when the answer is older: it must not go back.
    with pytest.raises(BadVersionNumberError):
        client().refresh()


def test_a_client_refuses_metadata_that_was_frozen(
    client: Callable[[], Updater], clock: FakeClock
) -> None:
    row = MetadataFile.objects.get(name="timestamp.json")
    clock.at = datetime.now(UTC) - timedelta(days=3)
    signing.metadata_refresh(clock=clock)
    stale = new_timestamp(1, b"x", 2, clock.at)
    [key] = keyids_of("image", "root", "timestamp")
    data = signed_bytes(stale, signing.key_ring().signers("image", [key]))
    MetadataFile.objects.filter(pk=row.pk).update(data=data)
    with pytest.raises(ExpiredMetadataError):
        client().refresh()


def test_it_signs_again_before_the_end_and_not_earlier(
    client: Callable[[], Updater], clock: FakeClock
) -> None:
    bundle = make_bundle()
    release_publish(bundles=[bundle], clock=clock)
    assert metadata_refresh(clock=clock) == []
    clock.advance(13 * 3600)
    assert metadata_refresh(clock=clock) == ["snapshot", "timestamp"]
    assert metadata_refresh(clock=clock) == []
    clock.advance(21 * 86_400)
    due = metadata_refresh(clock=clock)
    assert {"timestamp", "snapshot", bin_of(bundle)} <= set(due)
    assert fetch(client, bundle) == bundle.manifest_bytes


def test_it_forgets_superseded_files_but_no_root(repository: None, clock: FakeClock) -> None:
    model = make_model()
    for _ in range(3):
        release_publish(bundles=[make_bundle(make_version(model))], clock=clock)
    assert MetadataFile.objects.filter(role="snapshot").count() == 4
    clock.at = datetime.now(UTC) + timedelta(days=8)
    metadata_refresh(clock=clock)
    assert MetadataFile.objects.filter(role="snapshot").count() == 1
    assert MetadataFile.objects.filter(role="root").count() == 2


def test_it_signs_an_assignment_that_only_the_director_could_sign(repository: None) -> None:
    bundle = make_bundle()
    data = assignment_sign(
        device_id="ab" * 16,
        key_thumbprint="cd" * 32,
        assignment_seq=7,
        nonce="0f" * 16,
        kind=OfferKind.INSTALL,
        bundle=bundle,
        delta=None,
        security_floor=3,
    )
    anchors = trust_anchors()
    director = Metadata[Root].from_dict(anchors["director_root"])
    director.verify_delegate("root", director)
    document = Metadata[Targets].from_bytes(data)
    director.verify_delegate("targets", document)
    image = Metadata[Root].from_dict(anchors["image_root"])
    with pytest.raises(UnsignedMetadataError):
        image.verify_delegate("targets", document)
    [target] = document.signed.targets.values()
    assert target.path == bundle_path(bundle)
    assert target.hashes["sha256"] == bundle.manifest_sha256
    assert (document.signed.version, target.length) == (7, len(bundle.manifest_bytes))
    assignment = assignment_from_json(target.custom)
    assert (assignment.device_id, assignment.nonce) == ("ab" * 16, "0f" * 16)
    assert (assignment.security_floor, assignment.delta) == (3, None)
    document.signed.targets[target.path].length += 1
    with pytest.raises(UnsignedMetadataError):
        director.verify_delegate("targets", Metadata[Targets].from_dict(document.to_dict()))


def test_it_serves_the_directors_root(live_server: Any, repository: None) -> None:
    import httpx

    newest = httpx.get(f"{live_server.url}/tuf/director/root.json")
    first = httpx.get(f"{live_server.url}/tuf/director/1.root.json")
    assert newest.json() == first.json() == trust_anchors()["director_root"]
    assert httpx.get(f"{live_server.url}/tuf/director/2.root.json").status_code == 404
    assert httpx.get(f"{live_server.url}/tuf/image/metadata/2.root.json").status_code == 404


@pytest.mark.parametrize(
    "path", ["x", "releases/m/zz.1-x.json", "../../etc/passwd", f"other/{'0' * 64}.1-x.json"]
)
def test_it_serves_no_other_target(
    client: Callable[[], Updater], live_server: Any, path: str
) -> None:
    import httpx

    assert httpx.get(f"{live_server.url}/tuf/image/targets/{path}").status_code == 404


def test_it_needs_keys_to_publish() -> None:
    with pytest.raises(SigningKeysError) as error:
        release_publish(bundles=[])
    assert "keys_init" in error.value.hint
    assert Repository.objects.count() == 0


def test_it_never_overwrites_keys_and_hides_them(state_dir: Path, repository: None) -> None:
    online = list((state_dir / "keys").iterdir())
    assert len(online) == 1 + 5
    folders = list((state_dir / "keys-offline").iterdir())
    assert len(folders) == 3 + 2 + 2
    offline = [file for folder in folders for file in folder.iterdir()]
    assert {file.name for file in offline} == {"key.pem", "public.json"}
    assert {file.stat().st_mode & 0o777 for file in (*online, *offline)} == {0o600}
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    with pytest.raises(SigningKeysError, match="never overwritten"):
        keys_generate()


def test_it_refuses_a_private_key_that_is_not_the_listed_one(
    state_dir: Path, repository: None
) -> None:
    stranger = CryptoSigner.generate_ed25519()
    (state_dir / "keys" / "image-build-1.pem").write_bytes(stranger.private_bytes)
    signing._ring.cache_clear()
    with pytest.raises(SigningKeysError, match="image-build-1"):
        release_publish(bundles=[make_bundle()])
