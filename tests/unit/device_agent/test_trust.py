"""Attacks on what a device believes: each ends in a typed error, and the old bundle answers."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from compiler.contract.protocol import DeltaOffer, OfferKind, UpdateState
from device_agent.errors import TrustError
from device_agent.states import State
from device_agent.storage.floors import EARLIEST
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import QUESTION, Device
from tests.simulators.release_server import ReleaseServer, Update
from tests.simulators.tuf_repository import Director, ImageRepository, now, signed

Assign = Callable[[Update, str], bytes]


@pytest.fixture
def device(start: Callable[..., Device], v1: ToyBundle) -> Device:
    device = start(update_deadline_s=0.3)
    device.install(v1)
    return device


def refused(device: Device, update: Update, code: str, outcome=UpdateState.FAILED) -> None:
    """Check that an update ended with this code and changed nothing."""
    device.take(update)
    assert (update.outcome, device.code) == (outcome, code)
    assert update.reports[-1].code == code
    assert device.says() == "1"
    assert device.agent.slots.table.other is None


def change(server: ReleaseServer, **values: Any) -> Assign:
    return lambda update, nonce: server._assign(update, nonce, **values)


class TestAssignment:
    @pytest.mark.parametrize(
        ("values", "code"),
        [
            ({"device_id": "f" * 32}, "agent.trust.device"),
            ({"key_thumbprint": "f" * 64}, "agent.trust.device"),
            ({"nonce": "0" * 32}, "agent.trust.nonce"),
            ({"nonce": ""}, "agent.trust.nonce"),
            ({"assignment_seq": 1}, "agent.trust.replay"),
            ({"kind": OfferKind.ROLLBACK}, "agent.trust.disagreement"),
        ],
    )
    def test_it_must_be_for_this_device_now(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, values: Any, code: str
    ) -> None:
        server.assign = change(server, **values)
        refused(device, server.offer(v2), code)

    def test_it_must_be_signed_by_the_director(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.director.online_key = Director().online_key
        refused(device, server.offer(v2), "agent.trust.signature")

    def test_it_must_be_signed_at_all(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        def unsigned(update: Update, nonce: str) -> bytes:
            document = json.loads(server._assign(update, nonce))
            return json.dumps({**document, "signatures": []}).encode()

        server.assign = unsigned
        refused(device, server.offer(v2), "agent.trust.signature")

    def test_it_must_be_unchanged(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        def other_hash(update: Update, nonce: str) -> bytes:
            data = server._assign(update, nonce)
            return data.replace(v2.sha256.encode(), b"e" * 64)

        server.assign = other_hash
        refused(device, server.offer(v2), "agent.trust.signature")

    def test_it_must_not_be_a_recording(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        recorded: list[bytes] = []

        def record(update: Update, nonce: str) -> bytes:
            recorded.append(server._assign(update, nonce))
            return recorded[-1]

        server.assign = record
        assert device.install(v2).outcome is UpdateState.SUCCEEDED
        v1 = toy_bundle(ToySpec())
        device.install(v1)
        server.assign = lambda _update, _nonce: recorded[0]
        refused_update = server.offer(v2)
        device.take(refused_update)
        assert device.code == "agent.trust.nonce"
        assert device.says() == "1"

    def test_it_must_be_in_time(self, server: ReleaseServer, device: Device, v2: ToyBundle) -> None:
        original = server.director.assign

        def expired(*args: Any, **kwargs: Any) -> bytes:
            return original(*args, **{**kwargs, "expires": now() - timedelta(seconds=1)})

        server.director.assign = expired  # type: ignore[method-assign]
        refused(device, server.offer(v2), "agent.trust.expired")

    @pytest.mark.parametrize(
        "path",
        [
            "../../etc/passwd",
            "/etc/passwd",
            "releases/toy/../../x/1-x86-64-v1.json",
            "releases/toy/2-x86-64-v1.json\0",
            "releases/TOY/2-x86-64-v1.json",
            f"releases/{'a' * 300}/2-x86-64-v1.json",
            "releases/toy/0-x86-64-v1.json",
        ],
    )
    def test_it_must_name_a_release(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, path: str
    ) -> None:
        original = server.director.assign

        def renamed(assignment: Any, _path: str, manifest: bytes, **kwargs: Any) -> bytes:
            return original(assignment, path, manifest, **kwargs)

        server.director.assign = renamed  # type: ignore[method-assign]
        refused(device, server.offer(v2), "agent.trust.name")

    @pytest.mark.parametrize("count", [0, 2])
    def test_it_must_name_exactly_one(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, count: int
    ) -> None:
        from tuf.api.metadata import Metadata, Targets

        def several(update: Update, nonce: str) -> bytes:
            document = Metadata[Targets].from_bytes(server._assign(update, nonce))
            (path, target), *_ = document.signed.targets.items()
            document.signed.targets = {path: target, "releases/toy/9-x86-64-v1.json": target}
            while len(document.signed.targets) > count:
                document.signed.targets.popitem()
            return signed(document, [server.director.online_key])

        server.assign = several
        refused(device, server.offer(v2), "agent.trust.metadata")

    @pytest.mark.parametrize(
        ("data", "code"),
        [
            (b"", "agent.trust.metadata"),
            (b"[" * 20_000, "agent.trust.metadata"),
            (b"{}", "agent.trust.metadata"),
            (b"null", "agent.trust.metadata"),
            (b" " * 300_000, "agent.oversized"),
        ],
    )
    def test_it_must_be_metadata_of_a_sane_size(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, data: bytes, code: str
    ) -> None:
        server.assign = lambda _update, _nonce: data
        refused(device, server.offer(v2), code)

    def test_it_follows_the_chain_of_director_roots(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.director.rotate_online_key()
        assert device.install(v2).outcome is UpdateState.SUCCEEDED
        assert device.agent.floors.load().versions["director-root"] == 2
        server.director.files.pop("2.root.json")
        assert device.install(toy_bundle(ToySpec())).outcome is UpdateState.SUCCEEDED

    def test_it_refuses_a_root_that_the_old_one_did_not_sign(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        stranger = Director()
        stranger.rotate_online_key()
        server.director.files["2.root.json"] = stranger.files["2.root.json"]
        server.director.online_key = stranger.online_key
        refused(device, server.offer(v2), "agent.trust.signature")


class TestImageRepository:
    def test_it_must_name_the_bytes_that_the_director_names(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        other = toy_bundle(ToySpec(version="2b", release_seq=2))
        server.image.add(other.path, other.manifest_bytes)
        refused(device, server.offer(v2), "agent.trust.disagreement")

    def test_it_must_know_the_release(self, server: ReleaseServer, device: Device) -> None:
        unknown = toy_bundle(ToySpec(version="5", release_seq=5))
        refused(device, server.offer(unknown), "agent.trust.metadata")

    def test_it_must_not_be_offered_under_another_hash(
        self, server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        update = server.offer(v2)
        server.assign = lambda update, nonce: server.director.assign(
            _assignment(server, update, nonce), v1.path, v1.manifest_bytes
        )
        refused(device, update, "agent.trust.disagreement")

    def test_it_must_be_in_time(self, server: ReleaseServer, device: Device, v2: ToyBundle) -> None:
        server.image.timestamp.signed.expires = now() - timedelta(seconds=1)
        server.image.timestamp.signed.version += 1
        server.image.sign_timestamp()
        refused(device, server.offer(v2), "agent.trust.expired")

    def test_it_must_be_signed_by_both_keys_of_a_bin(
        self, server: ReleaseServer, device: Device
    ) -> None:
        keys = server.image.bin_keys
        server.image.bin_keys = [keys[0], ImageRepository(1).bin_keys[0]]
        bundle = server.publish(toy_bundle(ToySpec(version="2", release_seq=2)))
        refused(device, server.offer(bundle), "agent.trust.signature")

    def test_it_must_not_go_back(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        old = dict(server.image.files)
        server.image.next_heads()
        device.install(v2)
        server.image.files = old
        update = device.take(server.offer(toy_bundle(ToySpec())))
        assert (update.outcome, device.code) == (UpdateState.FAILED, "agent.trust.replay")
        assert device.says() == "2"

    def test_it_must_not_go_back_when_the_cache_was_lost(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        old = dict(server.image.files)
        server.image.next_heads()
        device.install(v2)
        for path in device.agent.trust.cache.glob("*.json"):
            path.unlink()
        server.image.files = old
        update = device.take(server.offer(toy_bundle(ToySpec())))
        assert (update.outcome, device.code) == (UpdateState.FAILED, "agent.trust.replay")

    def test_it_recovers_from_a_fast_forward_by_a_new_root(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.image.timestamp.signed.version = 1 << 30
        server.image.snapshot.signed.version = 1 << 30
        server.image.sign_heads()
        device.install(v2)
        server.image.rotate_online_keys()
        assert device.install(toy_bundle(ToySpec())).outcome is UpdateState.SUCCEEDED
        assert device.agent.floors.load().versions["timestamp"] == 1

    def test_it_follows_several_roots_at_once_and_pins_the_newest(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        for _ in range(3):
            server.image.rotate_online_keys()
        assert device.install(v2).outcome is UpdateState.SUCCEEDED
        pinned = json.loads(device.agent.trust.root("image_root.json"))
        assert pinned["signed"]["version"] == 4
        for number in (1, 2, 3, 4):
            server.image.files.pop(f"metadata/{number}.root.json")
        for path in device.agent.trust.cache.rglob("*.json"):
            path.unlink()
        assert device.install(toy_bundle(ToySpec())).outcome is UpdateState.SUCCEEDED

    def test_it_refuses_a_root_that_only_its_own_keys_signed(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        server.image.root_keys = ImageRepository(1).root_keys
        for old in list(server.image.root.signed.roles["root"].keyids):
            server.image.root.signed.revoke_key(old, "root")
        for key in server.image.root_keys:
            server.image.root.signed.add_key(key.public_key, "root")
        server.image.rotate_online_keys()
        refused(device, server.offer(v2), "agent.trust.signature")

    @pytest.mark.parametrize("name", ["timestamp", "2.snapshot", "1.targets", "1.root"])
    def test_it_recovers_from_a_damaged_cache(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, name: str
    ) -> None:
        for damage in (b"", b"garbage"):
            for path in device.agent.trust.cache.rglob(f"*{name.partition('.')[2] or name}*.json"):
                path.unlink()
                path.write_bytes(damage)
            bundle = v2 if device.says() == "1" else toy_bundle(ToySpec())
            assert device.install(bundle).outcome is UpdateState.SUCCEEDED

    @pytest.mark.parametrize("size", [17_000, 100_000])
    def test_it_must_have_a_sane_size(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, size: int
    ) -> None:
        server.image.files["metadata/timestamp.json"] = b" " * size
        refused(device, server.offer(v2), "agent.trust.metadata")

    def test_it_leaves_no_answer_open_for_the_garbage_collector(
        self, server: ReleaseServer, device: Device, v2: ToyBundle, monkeypatch
    ) -> None:
        from device_agent.update.image_repository import MetadataFetcher

        fetch, abandoned = MetadataFetcher._fetch, []

        def remember(fetcher: MetadataFetcher, url: str):
            abandoned.append(fetch(fetcher, url))
            return iter(())

        monkeypatch.setattr(MetadataFetcher, "_fetch", remember)
        refused(device, server.offer(v2), "agent.trust.metadata")
        assert abandoned
        assert not any(hasattr(chunks, "gi_frame") for chunks in abandoned)

    def test_it_does_not_believe_a_clock_that_was_set_back(
        self, server: ReleaseServer, start: Callable[..., Device], v1: ToyBundle, v2: ToyBundle
    ) -> None:
        from device_agent.clock import SystemClock
        from tests.simulators.device import toy_ports

        class Settable(SystemClock):
            at = None

            def now(self):
                return self.at or super().now()

        clock = Settable()
        device = start(ports=toy_ports(clock=clock), update_deadline_s=0.3)
        device.install(v1)
        device.agent.api.poll("")
        server.image.timestamp.signed.expires = now() - timedelta(seconds=1)
        server.image.timestamp.signed.version += 1
        server.image.sign_timestamp()
        clock.at = EARLIEST
        refused(device, server.offer(v2), "agent.trust.expired")


class TestManifest:
    @pytest.mark.parametrize(
        "spec",
        [
            {"target": "x86-64-v3"},
            {"target": "aarch64"},
            {"plan_abi": 99},
        ],
    )
    def test_it_must_fit_the_device(
        self, server: ReleaseServer, device: Device, spec: dict[str, Any]
    ) -> None:
        bundle = server.publish(toy_bundle(ToySpec(version="2", release_seq=2, **spec)))
        refused(device, server.offer(bundle), "agent.incompatible", UpdateState.REJECTED)

    def test_it_must_be_of_the_model_of_the_device(
        self, server: ReleaseServer, device: Device
    ) -> None:
        bundle = server.publish(toy_bundle(ToySpec(version="2", release_seq=2, model="other")))
        refused(device, server.offer(bundle), "agent.incompatible", UpdateState.REJECTED)

    def test_it_must_be_the_release_that_its_name_says(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        path = "releases/toy/77-x86-64-v1.json"
        server.image.add(path, v2.manifest_bytes)
        server.assign = lambda update, nonce: server.director.assign(
            _assignment(server, update, nonce), path, v2.manifest_bytes
        )
        refused(device, server.offer(v2), "agent.trust.disagreement")

    def test_it_must_be_a_manifest(self, server: ReleaseServer, device: Device) -> None:
        bundle = toy_bundle(ToySpec(version="2", release_seq=2))
        data = bundle.manifest_bytes.replace(b'"version":"2"', b'"version":"2","x":1')
        fake = type("Fake", (), {"path": bundle.path, "manifest_bytes": data})()
        fake.manifest, fake.sha256 = bundle.manifest, __import__("hashlib").sha256(data).hexdigest()
        server.image.add(bundle.path, data)
        refused(device, server.offer(fake), "agent.protocol")


class TestEpoch:
    """The cells: epoch same or up, three ways to end, then the server wants the old one back."""

    @pytest.mark.parametrize("epoch", [0, 1])
    @pytest.mark.parametrize("ending", ["committed", "failed", "crashed"])
    def test_it_goes_back_unless_a_higher_epoch_was_committed(
        self,
        server: ReleaseServer,
        start: Callable[..., Device],
        v1: ToyBundle,
        epoch: int,
        ending: str,
    ) -> None:
        behaviour = {"answer": "error"} if ending == "failed" else {}
        spec = ToySpec(version="2", release_seq=2, security_epoch=epoch, behaviour=behaviour)
        new = server.publish(toy_bundle(spec))
        device = start(activation_tries=1)
        device.install(v1)
        end_as = {"committed": UpdateState.SUCCEEDED}.get(ending, UpdateState.ROLLED_BACK)
        if ending != "committed":
            object.__setattr__(device.agent.config, "probation_s", 60.0)
        update = server.offer(new)
        device.run(lambda: device.state is State.PROBATION or update.outcome is not None)
        if ending == "failed":
            for _ in range(5):
                device.agent.probation.record(device.agent.host.answer(QUESTION))
        while ending == "crashed" and device.says() == "2":
            device.stop()
            device = start(activation_tries=1, probation_s=60.0)
        device.take(update)
        assert update.outcome is end_as
        is_up = epoch > 0 and ending == "committed"
        assert device.agent.floors.load().security_floor == (epoch if is_up else 0)
        back = device.take(server.offer(v1, kind=OfferKind.ROLLBACK))
        assert back.outcome is (UpdateState.REJECTED if is_up else UpdateState.SUCCEEDED)
        assert device.says() == ("2" if is_up else "1")

    def test_it_raises_the_floor_when_a_bundle_is_committed(
        self, server: ReleaseServer, device: Device
    ) -> None:
        up = server.publish(toy_bundle(ToySpec(version="2", release_seq=2, security_epoch=3)))
        device.install(up)
        assert device.agent.floors.load().security_floor == 3
        update = device.take(server.offer(toy_bundle(ToySpec()), kind=OfferKind.ROLLBACK))
        assert (update.outcome, device.code) == (UpdateState.REJECTED, "agent.epoch")
        assert device.says() == "2"

    def test_it_does_not_raise_it_when_a_bundle_fails(
        self, server: ReleaseServer, device: Device
    ) -> None:
        spec = ToySpec(
            version="2", release_seq=2, security_epoch=3, behaviour={"self_test": "fail"}
        )
        refused(device, server.offer(server.publish(toy_bundle(spec))), "agent.self_test")
        assert device.agent.floors.load().security_floor == 0

    def test_it_goes_back_within_an_epoch(
        self, server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
    ) -> None:
        device.install(v2)
        update = device.take(server.offer(v1, kind=OfferKind.ROLLBACK))
        assert update.outcome is UpdateState.SUCCEEDED
        assert device.says() == "1"

    def test_it_obeys_a_floor_that_the_director_demands(
        self, server: ReleaseServer, device: Device, v2: ToyBundle
    ) -> None:
        update = server.offer(v2)
        update.security_floor = 1
        refused(device, update, "agent.epoch", UpdateState.REJECTED)


def test_it_does_not_run_when_it_would_believe_anything(
    start: Callable[..., Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuf.api.metadata import Root

    start("healthy").stop()
    monkeypatch.setattr(Root, "verify_delegate", lambda *_args: None)
    with pytest.raises(TrustError, match="forged"):
        start("broken")


def test_it_answers_on_when_its_floors_are_lost(
    server: ReleaseServer, device: Device, v2: ToyBundle
) -> None:
    for path in (device.agent.config.state_dir / "trust").glob("floors.*"):
        path.write_bytes(b"junk")
    refused(device, server.offer(v2), "agent.state_lost")


def test_it_drops_a_delta_with_another_base(
    server: ReleaseServer, device: Device, v1: ToyBundle, v2: ToyBundle
) -> None:
    other = toy_bundle(ToySpec(version="9", release_seq=9, changed=41))
    real = server.publish_delta(other, v2)
    lie = DeltaOffer(v1.sha256, real.sha256, real.size_bytes)
    update = device.take(server.offer(v2, delta=lie))
    assert update.outcome is UpdateState.SUCCEEDED
    assert device.says() == "2"
    assert update.states.count(UpdateState.DOWNLOADING) == 2


def _assignment(server: ReleaseServer, update: Update, nonce: str) -> Any:
    from tuf.api.metadata import Metadata, Targets

    from compiler.contract.protocol import assignment_from_json

    document = Metadata[Targets].from_bytes(server._assign(update, nonce))
    return assignment_from_json(next(iter(document.signed.targets.values())).custom)
