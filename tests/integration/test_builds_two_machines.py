"""The key that builds and the key that approves on two machines; publishers that die half way."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from securesystemslib.signer import CryptoSigner

from builds.common.auth import Actor
from builds.common.errors import ForbiddenError
from builds.common.roles import Role
from builds.errors import SigningKeysError
from builds.keys import DIRECTOR, IMAGE
from builds.models import AuditEvent, Bundle, MetadataDraft, MetadataFile
from builds.services import signing
from builds.services.approvals import drafts_sign, release_approve
from builds.services.publishing import bundle_path
from builds.services.signing import (
    keys_generate,
    metadata_refresh,
    release_publish,
    repositories_init,
    trust_anchors,
)
from builds.states import VersionState
from tests.conftest import FakeClock
from tests.factories.builds import make_bundle, make_model, make_target, make_user, make_version
from tests.factories.ceremonies import (
    bin_keyids,
    hold,
    holders,
    keyids_of,
    new_holder,
    new_online,
    prepare,
    publish,
    sign,
    stock_client,
)

pytestmark = pytest.mark.django_db(transaction=True)
ONLINE = {
    "worker": [(IMAGE, "build"), (IMAGE, "snapshot"), (IMAGE, "timestamp"), (DIRECTOR, "targets")],
    "desk": [(IMAGE, "approve")],
}


class Machines:
    """Two machines with one database: each has a `keys.json` with its own keys."""

    def __init__(self, folder: Path, environment: Any) -> None:
        self.folder = folder
        self.environment = environment
        whole = json.loads((environment.key_path / "keys.json").read_text())
        for name, roles in ONLINE.items():
            mine = {"schema": whole["schema"], IMAGE: {}, DIRECTOR: {}}
            (folder / name).mkdir()
            for repository, role in roles:
                slots = whole[repository][role]
                mine[repository][role] = slots
                for slot in slots:
                    file = slot["uri"].removeprefix("file2:")
                    (folder / name / file).write_bytes((environment.key_path / file).read_bytes())
            (folder / name / "keys.json").write_text(json.dumps(mine))
        (folder / "nobody").mkdir()

    def at(self, name: str) -> None:
        """Go on at this machine."""
        self.environment.signing_keys = str(self.folder / name)


@pytest.fixture
def machines(settings: Any, state_dir: Path, tmp_path: Path) -> Any:
    keys_generate()
    repositories_init()
    environment = settings.SPARSEFLEET
    before = environment.signing_keys
    made = Machines(tmp_path, environment)
    made.at("worker")
    yield made
    environment.signing_keys = before


@pytest.fixture
def seen(live_server: Any, tmp_path: Path) -> Callable[[Bundle], bool]:
    def look(bundle: Bundle) -> bool:
        client = stock_client(live_server.url, tmp_path / "stock")
        info = client.get_targetinfo(bundle_path(bundle))
        return info is not None and info.hashes == {"sha256": bundle.manifest_sha256}

    return look


def test_half_a_signature_is_kept_aside_and_not_served(
    machines: Machines, seen: Callable[[Bundle], bool], release_manager: Actor, client: Client
) -> None:
    bundle = make_bundle(published=False)
    assert not seen(bundle)
    machines.at("desk")
    [approved] = release_approve(actor=release_manager, bundles=[bundle])
    assert (approved.approved_by, approved.published_at) == (release_manager.name, None)
    [draft] = MetadataDraft.objects.all()
    build, approve = bin_keyids()
    assert draft.waits_for == [build]
    assert not seen(bundle)
    name = f"{draft.version}.{draft.role}.json"
    assert client.get(f"/tuf/image/metadata/{name}").status_code == 404
    folder, _, base = bundle_path(bundle).rpartition("/")
    target = f"/tuf/image/targets/{folder}/{bundle.manifest_sha256}.{base}"
    assert client.get(target).status_code == 404
    # The worker's next tick adds what is missing.
    machines.at("worker")
    assert draft.role in metadata_refresh()
    bundle.refresh_from_db()
    assert bundle.published_at is not None
    assert MetadataDraft.objects.count() == 0
    assert seen(bundle)
    assert client.get(target).content == bundle.manifest_bytes
    signatures = json.loads(client.get(f"/tuf/image/metadata/{name}").content)["signatures"]
    assert {one["keyid"] for one in signatures} == {build, approve}
    [row] = AuditEvent.objects.filter(action="bundle.approve")
    assert (row.actor, row.detail["manifest_sha256"]) == (
        release_manager.name,
        bundle.manifest_sha256,
    )


def test_the_order_of_machines_does_not_matter(
    machines: Machines, seen: Callable[[Bundle], bool], release_manager: Actor
) -> None:
    bundle = make_bundle(published=False)
    machines.at("nobody")
    release_approve(actor=release_manager, bundles=[bundle])
    assert set(MetadataDraft.objects.get().waits_for) == set(bin_keyids())
    machines.at("worker")
    assert metadata_refresh() == []
    assert MetadataDraft.objects.get().waits_for == [bin_keyids()[1]]
    assert metadata_refresh() == []
    machines.at("desk")
    assert drafts_sign() == []
    assert MetadataDraft.objects.get().waits_for == []
    assert not seen(bundle)
    machines.at("worker")
    assert metadata_refresh()
    assert seen(bundle)


def test_what_is_approved_later_does_not_wait_for_what_was_before(
    machines: Machines, seen: Callable[[Bundle], bool], release_manager: Actor
) -> None:
    """Several bundles of one bin, approved one after the other while the first draft waits."""
    model = make_model()
    bundles = [make_bundle(make_version(model), published=False) for _ in range(40)]
    machines.at("desk")
    for bundle in bundles[:-1]:
        release_approve(actor=release_manager, bundles=[bundle])
    machines.at("worker")
    metadata_refresh()
    assert all(seen(bundle) for bundle in bundles[:5])
    assert not seen(bundles[-1])
    assert Bundle.objects.exclude(published_at=None).count() == 39


def test_a_renewal_needs_both_machines_and_no_person(
    machines: Machines, seen: Callable[[Bundle], bool], clock: FakeClock
) -> None:
    bundle = make_bundle()
    clock.advance(21 * 86_400)
    machines.at("nobody")
    with pytest.raises(SigningKeysError, match="no signing keys"):
        metadata_refresh(clock=clock)
    machines.at("worker")
    assert metadata_refresh(clock=clock) == ["snapshot", "timestamp"]
    assert {len(draft.waits_for) for draft in MetadataDraft.objects.all()} == {1}
    count = MetadataDraft.objects.count()
    assert count == 16
    # Nothing goes round in circles while the desk is closed.
    assert metadata_refresh(clock=clock) == []
    machines.at("desk")
    drafts_sign(clock=clock)
    machines.at("worker")
    clock.advance(60)
    assert len(metadata_refresh(clock=clock)) == count + 2
    assert not seen(bundle)


def test_a_stolen_build_key_is_of_no_use_from_the_moment_of_publishing(
    machines: Machines, seen: Callable[[Bundle], bool], tmp_path: Path
) -> None:
    from tuf.api.exceptions import UnsignedMetadataError

    bundle = make_bundle(published=False)
    machines.at("desk")
    release_publish(bundles=[bundle])
    machines.at("worker")
    metadata_refresh()
    assert seen(bundle)
    add = new_online(tmp_path / "online", IMAGE, "build")
    revoke = [bin_keyids()[0]]
    ceremony = sign(prepare(tmp_path, add=[add], revoke=revoke), *holders("image-targets"))
    publish(ceremony, at_once=True)
    with pytest.raises(UnsignedMetadataError):
        seen(bundle)
    machines.at("desk")
    drafts_sign()
    machines.at("worker")
    metadata_refresh()
    assert seen(bundle)


def test_a_planned_change_of_the_build_key_serves_devices_all_the_time(
    machines: Machines, seen: Callable[[Bundle], bool], tmp_path: Path, release_manager: Actor
) -> None:
    bundle = make_bundle(published=False)
    machines.at("desk")
    release_publish(bundles=[bundle])
    machines.at("worker")
    metadata_refresh()
    old = bin_keyids()[0]
    add = new_online(tmp_path / "online", IMAGE, "build")
    hold(tmp_path, holders("image-targets"), add=[add], revoke=[old])
    assert seen(bundle)
    assert old in bin_keyids()
    later = make_bundle(published=False)
    machines.at("desk")
    release_approve(actor=release_manager, bundles=[later])
    assert not seen(later)
    machines.at("worker")
    metadata_refresh()
    assert old not in bin_keyids()
    assert seen(bundle)
    assert seen(later)
    assert MetadataDraft.objects.count() == 0


def test_a_first_ceremony_needs_no_machine_with_all_keys(
    settings: Any,
    state_dir: Path,
    tmp_path: Path,
    seen: Callable[[Bundle], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = settings.SPARSEFLEET
    monkeypatch.setattr(environment, "signing_keys", "")
    publics, offline = [], []
    for repository, role, count in (
        (IMAGE, "root", 3),
        (IMAGE, "targets", 2),
        (DIRECTOR, "root", 2),
    ):
        offline += [new_holder(tmp_path, repository, role) for _ in range(count)]
    for name, roles in ONLINE.items():
        environment.signing_keys = str(tmp_path / name)
        publics += [new_online(tmp_path / "public", *role) for role in roles]
    environment.signing_keys = str(tmp_path / "worker")
    publics += [folder / "public.json" for folder in offline]
    hold(tmp_path, offline, first=True, add=publics, bits=2)
    assert MetadataFile.objects.filter(name="timestamp.json").count() == 0
    environment.signing_keys = str(tmp_path / "desk")
    call_command("release_approve")
    environment.signing_keys = str(tmp_path / "worker")
    metadata_refresh()
    assert MetadataFile.objects.filter(name="timestamp.json").count() == 1
    bundle = make_bundle(published=False)
    assert release_publish(bundles=[bundle]) == 0
    environment.signing_keys = str(tmp_path / "desk")
    drafts_sign()
    environment.signing_keys = str(tmp_path / "worker")
    metadata_refresh()
    assert seen(bundle)


def test_only_some_may_approve_and_never_their_own(
    machines: Machines, ci_bot: Actor, release_manager: Actor
) -> None:
    bundle = make_bundle(published=False)
    for role in (Role.VIEWER, Role.DEVELOPER):
        with pytest.raises(ForbiddenError):
            release_approve(actor=Actor("somebody", role), bundles=[bundle])
    own = Actor(bundle.version.submitted_by, Role.RELEASE_MANAGER)
    with pytest.raises(ForbiddenError, match="submitted"):
        release_approve(actor=own, bundles=[bundle])
    bundle.refresh_from_db()
    assert bundle.approved_at is None
    release_approve(actor=Actor("a", Role.APPROVER), bundles=[bundle])
    again = release_approve(actor=release_manager, bundles=[bundle])
    assert [row.approved_by for row in again] == ["a"]


def test_the_button_the_api_and_the_command_approve(
    settings: Any, state_dir: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    keys_generate()
    repositories_init()
    client.force_login(make_user(Role.RELEASE_MANAGER))
    by_button, by_api, by_command = (make_bundle(published=False) for _ in range(3))
    assert "somebody approves" in client.get("/").content.decode()
    page = client.get(f"/bundles/{by_button.manifest_sha256}").content.decode()
    assert 'id="action-approve"' in page
    answer = client.post(f"/bundles/{by_button.manifest_sha256}/approve", follow=True)
    assert "Approved, signed and published." in answer.content.decode()
    body = client.post(f"/api/v1/bundles/{by_api.manifest_sha256}/approve").json()
    assert body["published_at"] is not None
    version = make_version()
    several = [
        make_bundle(version, make_target(name), published=False)
        for name in ("x86-64-v1", "x86-64-v2", "x86-64-v3")
    ]
    address = f"models/{version.model.name}/versions/{version.version}"
    assert "Approve 3 bundles" in client.get(f"/{address}").content.decode()
    body = client.post(f"/api/v1/{address}/approve").json()
    assert {row["manifest_sha256"] for row in body} == {row.manifest_sha256 for row in several}
    by_page = make_bundle(version, make_target("aarch64"), published=False)
    answer = client.post(f"/{address}/approve", follow=True)
    assert "Approved, signed and published." in answer.content.decode()
    by_page.refresh_from_db()
    assert by_page.published_at is not None
    assert client.post(f"/api/v1/{address}/approve").json() == []
    call_command("release_approve", by_command.version.model.name, "1.0.0", yes=True)
    assert f"{by_command.manifest_sha256[:16]} published" in capsys.readouterr().out
    assert Bundle.objects.filter(published_at=None).count() == 0
    client.force_login(make_user(Role.VIEWER))
    assert client.post(f"/bundles/{by_button.manifest_sha256}/approve").status_code == 403


def test_a_build_waits_for_approval_in_production(
    settings: Any, state_dir: Path, release_manager: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from builds.compile_runner.run import build_run_one
    from tests.factories.builds import make_files, make_job

    keys_generate()
    repositories_init()
    command = f"{sys.executable} -m tests.simulators.compiler_child"
    monkeypatch.setattr(settings.SPARSEFLEET, "compile_command", command)
    monkeypatch.setattr(settings.SPARSEFLEET, "release_approval", "operator")
    version = make_version(state=VersionState.SUBMITTED)
    version.files = make_files(model__onnx=b"ok")
    version.save()
    job = make_job(version, make_target())
    build_run_one(job.pk)
    job.refresh_from_db()
    assert job.state == "ready"
    bundle = Bundle.objects.get(job=job)
    assert (bundle.approved_at, bundle.published_at) == (None, None)
    release_approve(actor=release_manager, bundles=[bundle])
    bundle.refresh_from_db()
    assert bundle.published_at is not None


def test_a_signer_that_fails_half_way_leaves_what_was(
    machines: Machines, seen: Callable[[Bundle], bool], state_dir: Path, tmp_path: Path
) -> None:
    machines.environment.signing_keys = ""
    first, second = make_bundle(), make_bundle()
    release_publish(bundles=[first])
    before = MetadataFile.objects.get(name="timestamp.json").version
    (pem,) = (state_dir / "keys").glob("image-timestamp-*")
    good = pem.read_bytes()
    pem.write_bytes(CryptoSigner.generate_ed25519().private_bytes)
    signing._ring.cache_clear()
    with pytest.raises(SigningKeysError, match="image-timestamp"):
        release_publish(bundles=[second])
    assert MetadataFile.objects.get(name="timestamp.json").version == before
    assert seen(first)
    assert not seen(second)
    pem.write_bytes(good)
    signing._ring.cache_clear()
    release_publish(bundles=[second])
    assert seen(second)


def test_it_counts_what_the_root_says_and_not_what_keys_json_says(
    machines: Machines, tmp_path: Path
) -> None:
    assert len(keyids_of(IMAGE, "root", "timestamp")) == 1
    new_online(tmp_path / "online", IMAGE, "timestamp")
    assert len(signing.key_ring().public(IMAGE, "timestamp")) == 2
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    assert trust_anchors()["image_root"]["signed"]["version"] == 1
