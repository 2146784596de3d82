"""Confidential models on the platform: sealed when built, and a key for each member that asks."""

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings as django_settings
from django.test import Client

from builds.common.clock import SystemClock
from builds.common.errors import ForbiddenError
from builds.common.roles import Role
from builds.errors import SigningKeysError
from builds.models import AuditEvent, BuildJob, Bundle, ContentKey, Delta, Model
from builds.services.bundles import BuildOutput, build_finish
from builds.services.content_keys import content_key_for_build, content_key_of, content_key_wrap
from builds.services.deltas import DeltaOutput, delta_finish
from builds.services.signing import keys_generate, repositories_init
from builds.services.versions import model_confidential_set
from builds.states import BuildState, DeltaState
from builds.storage import blob_store
from compiler.contract.canonical import sha256_hex
from compiler.contract.manifest import parse_manifest
from compiler.contract.protocol import OfferKind, UpdateState, assignment_from_json
from compiler.contract.sealing import DELTA_COMPONENT, WRAPPED_BYTES, unseal, unwrap_key
from device_agent.agent import Agent
from device_agent.config import AgentConfig
from fleet.edge.app import Edge
from fleet.edge.holder import BeatBuffer, SnapshotHolder
from fleet.edge.snapshot import snapshot_build
from fleet.errors import DeviceStateError
from fleet.models import Device, Rollout, Stage, Update
from fleet.services.assignments import update_assignment
from fleet.services.claims import claim_create
from fleet.services.enrolment import device_admit
from fleet.services.versions import fleet_version_bump
from fleet.states import DeviceEvent, RolloutState
from tests.factories.builds import make_job, make_model, make_target, make_version
from tests.factories.fleet import MANAGER, facts, make_device, make_group
from tests.simulators.bundles import ToySpec, toy_bundle
from tests.simulators.device import Device as RunningAgent
from tests.simulators.device import toy_ports
from tests.simulators.disk import FastDisk
from tests.simulators.platform_wire import URL, PlatformWire
from tests.unit.fleet.test_apis import Api

pytestmark = pytest.mark.django_db
NONCE = "ab" * 16
OWNER = "worker"
TARGET = "x86-64-v3"


@pytest.fixture(autouse=True)
def _keys(state_dir: Path) -> None:
    keys_generate()
    repositories_init()


@pytest.fixture
def model() -> Model:
    model = make_model("toy")
    return model_confidential_set(actor=MANAGER, name=model.name, confidential=True)


def build(model: Model, folder: Path, **spec: Any) -> Bundle:
    """Build a toy bundle as a worker does at its end."""
    model.refresh_from_db()
    version, target = make_version(model), make_target(TARGET)
    number = version.release_seq
    toy = toy_bundle(
        ToySpec(
            version=version.version, release_seq=number, target=TARGET, model=model.name, **spec
        )
    )
    folder = folder / f"build-{number}"
    folder.mkdir()
    paths = {}
    for component, section in toy.sections.items():
        paths[component] = folder / component
        paths[component].write_bytes(section.data)
    job = make_job(version, target, state=BuildState.VERIFYING)
    until = datetime.now(UTC) + timedelta(hours=1)
    BuildJob.objects.filter(pk=job.pk).update(lease_owner=OWNER, lease_until=until)
    job.refresh_from_db()
    bundle = build_finish(job=job, owner=OWNER, output=BuildOutput(toy.manifest, paths, {}, {}))
    assert sorted(path.name for path in folder.iterdir()) == sorted(paths)  # no drafts are left
    return bundle


def seal_pair() -> tuple[X25519PrivateKey, bytes]:
    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def offer(device: Device, bundle: Bundle, delta: Delta | None = None) -> Update:
    """Offer a bundle to a device, in a rollout of its own."""
    rollout = Rollout.objects.create(
        model=bundle.version.model,
        version=bundle.version,
        group=make_group(bundle.version.model),
        state=RolloutState.RUNNING.value,
        salt="s",
        gate={},
        created_by="t",
    )
    stage = Stage.objects.create(rollout=rollout, index=0)
    fleet_version_bump()
    return Update.objects.create(
        device=device,
        rollout=rollout,
        stage=stage,
        bundle=bundle,
        delta=delta,
        kind=OfferKind.INSTALL.value,
        state=UpdateState.QUEUED.value,
        is_offerable=True,
        queued_at=datetime.now(UTC),
    )


def assigned(device: Device, update: Update) -> tuple[Any, bytes]:
    """Return the assignment of a device, and the whole signed document."""
    data = update_assignment(device_pk=device.pk, update_id=update.pk, nonce=NONCE)
    (target,) = json.loads(data)["signed"]["targets"].values()
    return assignment_from_json(target["custom"]), data


def test_it_builds_bundles_that_travel_sealed(model, tmp_path):
    bundle = build(model, tmp_path)
    manifest = parse_manifest(bundle.manifest_bytes)
    assert bundle.is_sealed
    assert manifest.is_sealed
    assert manifest.requires.agent_min == 2
    key = content_key_of(bundle.version)
    assert key is not None
    for section in manifest.sections:
        box = blob_store().path(section.travels.sha256).read_bytes()
        plain = b"".join(unseal(key, section.component, section.sha256, [box]))
        assert sha256_hex(plain) == section.sha256
        assert section.size_bytes < 32 or plain[:32] not in box
    rows = {row.component: row.sealed_sha256 for row in bundle.sections.all()}
    assert rows == {row.component: row.travels.sha256 for row in manifest.sections}
    stored = bytes(ContentKey.objects.get().wrapped)
    assert key not in stored
    second = build(model, tmp_path)
    assert content_key_of(second.version) not in (None, key)


def test_it_builds_plain_bundles_of_other_models(tmp_path):
    bundle = build(make_model("toy"), tmp_path)
    assert not bundle.is_sealed
    assert b"sparsefleet.release/1" in bundle.manifest_bytes
    assert not ContentKey.objects.exists()
    assert {row.sealed_sha256 for row in bundle.sections.all()} == {""}


def test_it_sends_devices_sealed_sections_only(model, tmp_path):
    bundle = build(model, tmp_path)
    update = offer(make_device(model), bundle)
    download = snapshot_build().downloads[update.pk]
    for row in bundle.sections.all():
        assert download.allows(row.sealed_sha256)
        assert not download.allows(row.sha256)


def test_it_wraps_the_key_for_the_device_that_asks(model, tmp_path):
    bundle = build(model, tmp_path)
    device, (private, public) = make_device(model), seal_pair()
    Device.objects.filter(pk=device.pk).update(seal_key=public)
    assignment, _ = assigned(device, offer(device, bundle))
    wrapped = base64.b64decode(assignment.content_key)
    key = unwrap_key(wrapped, private, device.device_id, bundle.manifest_sha256)
    assert key == content_key_of(bundle.version)


def test_it_has_no_key_for_a_device_that_told_none(model, tmp_path):
    device = make_device(model)
    assert assigned(device, offer(device, build(model, tmp_path)))[0].content_key == ""


@pytest.mark.parametrize("event", [DeviceEvent.QUARANTINE, DeviceEvent.RETIRE])
def test_it_gives_no_key_to_who_left_the_fleet(model, tmp_path, event):
    bundle = build(model, tmp_path)
    device = make_device(model)
    Device.objects.filter(pk=device.pk).update(seal_key=seal_pair()[1])
    device_admit(actor=MANAGER, device_pk=device.pk, event=event)
    update = offer(device, bundle)  # even if somebody made an update for it
    with pytest.raises(DeviceStateError):
        assigned(device, update)


def test_it_keeps_assignments_small_for_a_thousand_devices(model, tmp_path):
    """Each device gets a key of its own; what one downloads does not grow with the fleet."""
    bundle = build(model, tmp_path)
    plain = build(make_model("open"), tmp_path / "..")
    other = make_device(plain.version.model)
    base = len(assigned(other, offer(other, plain))[1])
    device = make_device(model)
    Device.objects.filter(pk=device.pk).update(seal_key=seal_pair()[1])
    assert len(assigned(device, offer(device, bundle))[1]) - base < 2 * WRAPPED_BYTES
    keys = {
        content_key_wrap(bundle=bundle, device_id=f"{number:032x}", seal_key=seal_pair()[1])
        for number in range(1_000)
    }
    assert len(keys) == 1_000
    assert {len(base64.b64decode(key)) for key in keys} == {WRAPPED_BYTES}
    assert len(bundle.manifest_bytes) < 2 * len(plain.manifest_bytes)


def test_it_seals_deltas_to_a_confidential_bundle(model, tmp_path):
    base, new = build(model, tmp_path), build(model, tmp_path, changed=40)
    delta = Delta.objects.create(
        base=base,
        new=new,
        state=DeltaState.BUILDING.value,
        lease_owner=OWNER,
        lease_until=datetime.now(UTC) + timedelta(hours=1),
    )
    path = tmp_path / "delta"
    path.write_bytes(b"difference" * 20)
    delta_finish(delta=delta, owner=OWNER, output=DeltaOutput(path, 100_000, None, {}))
    delta.refresh_from_db()
    assert (delta.plain_sha256, delta.plain_bytes) == (sha256_hex(path.read_bytes()), 200)
    assert delta.size_bytes == 216
    box = blob_store().path(delta.sha256).read_bytes()
    key = content_key_of(new.version)
    assert key is not None
    opened = b"".join(unseal(key, DELTA_COMPONENT, delta.plain_sha256, [box]))
    assert opened == path.read_bytes()
    device = make_device(model, running=base)
    assignment, _ = assigned(device, offer(device, new, delta))
    assert assignment.delta.opened.sha256 == delta.plain_sha256


def test_it_says_when_its_own_key_is_gone(model, tmp_path, state_dir):
    bundle = build(model, tmp_path)
    kek = state_dir / "keys" / "content.kek"
    assert kek.stat().st_mode & 0o777 == 0o600
    kek.write_bytes(bytes(32))
    with pytest.raises(SigningKeysError, match="does not open"):
        content_key_of(bundle.version)
    kek.write_bytes(b"short")
    with pytest.raises(SigningKeysError, match="5 bytes"):
        content_key_of(bundle.version)
    kek.unlink()
    with pytest.raises(SigningKeysError, match="cannot be read"):
        build(model, tmp_path)  # it makes no other one while rows need the one that is lost
    assert not kek.exists()


def test_it_takes_the_key_of_keys_from_the_settings(model, tmp_path, state_dir, monkeypatch):
    chosen = django_settings.SPARSEFLEET
    monkeypatch.setattr(chosen, "content_kek", "ab" * 32)
    bundle = build(model, tmp_path)
    assert content_key_of(bundle.version) is not None
    assert not (state_dir / "keys" / "content.kek").exists()
    for wrong in ("ab" * 31, "zz" * 32):
        monkeypatch.setattr(chosen, "content_kek", wrong)
        with pytest.raises(SigningKeysError, match="64 hexadecimal"):
            content_key_of(bundle.version)


def test_it_makes_no_key_file_in_production(model, tmp_path, state_dir, monkeypatch):
    monkeypatch.setattr(type(django_settings.SPARSEFLEET), "allows_file_keys", False)
    with pytest.raises(SigningKeysError, match="key-encrypting"):
        content_key_for_build(make_version(model))
    assert not (state_dir / "keys" / "content.kek").exists()


def test_it_is_an_option_over_http(ci_bot):
    make_model("toy")
    manager, developer = Api(Role.RELEASE_MANAGER), Api(Role.DEVELOPER)

    def change(api: Api, name: str = "toy") -> Any:
        return api.client.patch(
            f"/api/v1/models/{name}",
            json.dumps({"confidential": True}),
            content_type="application/json",
            headers=api.headers,
        )

    assert change(developer).status_code == 403
    assert change(manager, "none").status_code == 404
    for _ in range(2):
        assert change(manager).json()["confidential"] is True
    assert developer.get("/models").json()["items"][0]["confidential"] is True
    assert AuditEvent.objects.filter(action="model.confidential").count() == 1
    with pytest.raises(ForbiddenError):
        model_confidential_set(actor=ci_bot, name="toy", confidential=False)


@pytest.mark.parametrize("seal_key", ["", "AAAA", "!!", 3])
def test_it_refuses_a_seal_key_that_is_none(model, seal_key):
    from tests.unit.fleet.test_enrolment import Newcomer

    answer = Newcomer().enrol("", model="toy", seal_key=seal_key)
    assert answer.status_code in (400, 403, 422)
    assert answer.status_code == 403 if seal_key == "" else answer.status_code != 403
    assert not Device.objects.exists()


def test_it_brings_a_confidential_bundle_onto_a_device(model, tmp_path, monkeypatch):
    """Platform and agent, from enrolment to an answer of the new bundle."""
    monkeypatch.setattr("fleet.edge.app.close_old_connections", lambda: None)
    bundle = build(model, tmp_path)
    wire = PlatformWire(_edge)
    claim = claim_create(actor=MANAGER, name="lab", uses=1)[1]
    config = AgentConfig(
        server_url=URL,
        state_dir=tmp_path / "device",
        claim=claim,
        serial="card-1",
        model="toy",
        poll_s=0.01,
        probation_s=0.0,
        reserve_bytes=0,
    )
    ports = toy_ports(transport=wire, disk=FastDisk(), fingerprint=lambda _config: facts())
    agent = Agent(config, ports)
    try:
        agent.enrol()
        agent.boot()
        row = Device.objects.get()
        told = agent.keys.seal.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        assert bytes(row.seal_key) == told
        Device.objects.update(seal_key=b"")  # enrolled by an agent that made none
        agent.api._token = ""
        agent.api.poll("")
        assert bytes(Device.objects.get().seal_key) == told
        update = offer(row, bundle)
        running = RunningAgent(None, agent)  # type: ignore[arg-type]
        running.run(lambda: _state(update) == UpdateState.SUCCEEDED)
        assert running.says() == bundle.version.version
        plain = {section.sha256 for section in parse_manifest(bundle.manifest_bytes).sections}
        kept = {path.name for path in (config.state_dir / "objects").iterdir()}
        assert kept == {*plain, bundle.manifest_sha256}
    finally:
        agent.close()


def _state(update: Update) -> str:
    update.refresh_from_db()
    return update.state


def _edge(django: Any) -> Edge:
    return Edge(
        django,
        holder=SnapshotHolder(0.0),
        beats=BeatBuffer(),
        keeper=None,
        clock=SystemClock(),
    )


def test_it_shows_the_option_on_the_page_of_models(model, settings):
    from tests.factories.builds import make_user

    settings.ROOT_URLCONF = "tests.unit.dashboards.urls"
    client = Client()
    client.force_login(make_user(Role.RELEASE_MANAGER))
    assert "Confidential" in client.get("/models").content.decode()
    client.post("/models/toy/confidential", {"confidential": "no"})
    model.refresh_from_db()
    assert not model.confidential
    client.force_login(make_user(Role.DEVELOPER))
    assert client.post("/models/toy/confidential", {"confidential": "yes"}).status_code == 403
