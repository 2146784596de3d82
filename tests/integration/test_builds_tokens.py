"""Online keys in a PKCS#11 token: made there, signing there, verified by devices.

SoftHSM is the token, a library with the interface of a hardware one. The keys never leave it.
"""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from builds.errors import SigningKeysError
from builds.keys import DIRECTOR, IMAGE, INDEX_NAME
from builds.models import MetadataFile
from builds.services import signing
from builds.services.signing import release_publish, repositories_init
from tests.factories.builds import make_bundle
from tests.factories.ceremonies import (
    WatchingDevice,
    assigned,
    bin_keyids,
    directed,
    hold,
    holders,
    keyids_of,
    stock_client,
)

LIBRARIES = [
    *Path("/usr/lib").glob("*/softhsm/libsofthsm2.so"),
    Path("/usr/lib/softhsm/libsofthsm2.so"),
    Path("/usr/local/lib/softhsm/libsofthsm2.so"),
]
LIBRARY = next((path for path in LIBRARIES if path.exists()), None)
PIN = "1234"
ROLES = ((IMAGE, "build"), (IMAGE, "approve"), (IMAGE, "snapshot"), (IMAGE, "timestamp"))
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(
        LIBRARY is None or shutil.which("softhsm2-util") is None,
        reason="SoftHSM is not installed (Debian: softhsm2)",
    ),
]


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a token in a temporary folder; the library reads its place when it is loaded."""
    import os

    folder = tmp_path_factory.mktemp("tokens")
    config = folder / "softhsm2.conf"
    config.write_text(f"directories.tokendir = {folder}\nlog.level = ERROR\n")
    before = dict(os.environ)
    os.environ |= {"SOFTHSM2_CONF": str(config), "PYKCS11LIB": str(LIBRARY)}
    for label in ("fleet", "other"):
        subprocess.run(
            [
                *("softhsm2-util", "--init-token", "--free"),
                *("--label", label, "--pin", PIN, "--so-pin", "5678"),
            ],
            check=True,
            capture_output=True,
        )
    yield folder
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def token(token_folder: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.SPARSEFLEET, "pkcs11_library", str(LIBRARY))
    monkeypatch.setattr(settings.SPARSEFLEET, "pkcs11_pin", PIN)


_used = iter(range(10, 250))


def in_token(folder: Path, repository: str, role: str) -> Path:
    """Make a key in the token and list it in this machine's ring; return its `public.json`."""
    number = next(_used)
    out = folder / f"token-{number}"
    uri = f"hsm:{number}?label=fleet"
    call_command("keys_make", repository, role, uri=uri, generate=True, ring=True, out=out)
    return out / "public.json"


@pytest.fixture
def installation(token: None, state_dir: Path, tmp_path: Path) -> None:
    """Hold the first ceremony: holders have files, what is online is in the token."""
    online = [in_token(tmp_path, *role) for role in (*ROLES, (DIRECTOR, "targets"))]
    offline = []
    for repository, role, count in (
        (IMAGE, "root", 3),
        (IMAGE, "targets", 2),
        (DIRECTOR, "root", 2),
    ):
        for number in range(1, count + 1):
            folder = state_dir / "keys-offline" / f"{repository}-{role}-{number}"
            call_command("keys_make", repository, role, out=folder)
            offline.append(folder)
    hold(
        tmp_path, offline, first=True, add=[*online, *(f / "public.json" for f in offline)], bits=2
    )


def test_devices_take_what_a_token_signed(
    installation: None, live_server: Any, tmp_path: Path, state_dir: Path
) -> None:
    assert [path.name for path in (state_dir / "keys").iterdir()] == [INDEX_NAME]
    bundle = make_bundle()
    assert release_publish(bundles=[bundle]) == 1
    rows = MetadataFile.objects.filter(repository__name=IMAGE, role="root")
    keys = json.loads(bytes(rows[0].data))["signed"]["keys"]
    [timestamp] = keyids_of(IMAGE, "root", "timestamp")
    assert keys[timestamp]["scheme"] == "ecdsa-sha2-nistp256"
    info = stock_client(live_server.url, tmp_path / "stock").get_targetinfo(
        f"releases/{bundle.version.model.name}/1-{bundle.target.name}.json"
    )
    assert info is not None
    device = WatchingDevice(live_server.url, tmp_path / "device")
    assert device.look_up(bundle) == bundle.manifest_sha256
    assert directed(device.director_root(), assigned(bundle, 1)) == 1
    device.http.close()


def test_production_starts_with_keys_in_a_token(
    installation: None, settings: Any, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from builds.checks import refuse_to_start

    (state_dir / "keys-offline").rename(state_dir / "away")
    monkeypatch.setattr(settings.SPARSEFLEET, "debug", False)
    refuse_to_start()
    assert release_publish(bundles=[make_bundle()]) == 1


def test_a_key_moves_from_a_file_into_the_token(
    token: None, state_dir: Path, live_server: Any, tmp_path: Path
) -> None:
    signing.keys_generate()
    repositories_init()
    bundle = make_bundle()
    release_publish(bundles=[bundle])
    device = WatchingDevice(live_server.url, tmp_path / "device")
    device.look_up(bundle)
    add = [in_token(tmp_path, *role) for role in ROLES]
    revoke = [
        *bin_keyids(),
        *keyids_of(IMAGE, "root", "snapshot"),
        *keyids_of(IMAGE, "root", "timestamp"),
    ]
    keys = [*holders("image-root")[:2], *holders("image-targets")]
    hold(tmp_path, keys, add=add, revoke=revoke)
    for path in (state_dir / "keys").glob("image-*.pem"):
        path.unlink()
    later = make_bundle()
    release_publish(bundles=[later])
    assert device.look_up(later) == later.manifest_sha256
    assert device.look_up(bundle) == bundle.manifest_sha256
    device.http.close()


def test_threads_take_turns_at_the_token(installation: None) -> None:
    ring = signing.key_ring()
    [signer] = ring.signers(DIRECTOR, keyids_of(DIRECTOR, "root", "targets"))
    failures: list[Exception] = []

    def many() -> None:
        try:
            for number in range(20):
                payload = f"{threading.get_ident()} {number}".encode()
                signer.public_key.verify_signature(signer.sign(payload), payload)
        except Exception as error:  # noqa: BLE001 -- shown below
            failures.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_wrong_pin_is_an_error_with_a_hint_and_publishes_nothing(
    installation: None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = MetadataFile.objects.count()
    for pin, said in (("9999", "failed"), ("", "PIN")):
        monkeypatch.setattr(settings.SPARSEFLEET, "pkcs11_pin", pin)
        with pytest.raises(SigningKeysError, match=said) as error:
            release_publish(bundles=[make_bundle()])
        assert "PIN" in error.value.hint
    assert MetadataFile.objects.count() == count


def test_a_token_keeps_the_keys_it_has(token: None, state_dir: Path, tmp_path: Path) -> None:
    public = in_token(tmp_path, IMAGE, "build")
    number = int(public.parent.name.removeprefix("token-"))
    again = {"uri": f"hsm:{number}?label=fleet", "out": tmp_path / "again"}
    with pytest.raises(CommandError, match="never overwritten"):
        call_command("keys_make", IMAGE, "build", generate=True, **again)
    call_command("keys_make", IMAGE, "build", **again)
    assert (tmp_path / "again" / "public.json").read_bytes() == public.read_bytes()
    with pytest.raises(CommandError, match="already"):
        call_command("keys_make", IMAGE, "build", ring=True, uri=again["uri"])


@pytest.mark.parametrize("uri", ["hsm:255?label=fleet", "hsm:3?label=absent", "hsm:3?label=other"])
def test_a_key_that_no_token_has_is_an_error(token: None, tmp_path: Path, uri: str) -> None:
    with pytest.raises(CommandError, match="hsm:"):
        call_command("keys_make", IMAGE, "build", uri=uri, out=tmp_path / "x")


def test_a_holder_signs_with_a_token_too(token: None, state_dir: Path, tmp_path: Path) -> None:
    signing.keys_generate()
    repositories_init()
    number = next(_used)
    uri, out = f"hsm:{number}?label=fleet", tmp_path / "holder"
    call_command("keys_make", IMAGE, "root", uri=uri, generate=True, out=out)
    hold(
        tmp_path,
        holders("image-root")[:2],
        add=[out / "public.json"],
    )
    ceremony = tmp_path / "next"
    call_command("keys_prepare", ceremony, renew=["image-root"])
    call_command("keys_sign", ceremony, uri=uri, public=out / "public.json", yes=True)
    call_command("keys_sign", ceremony, key=holders("image-root")[2], yes=True)
    call_command("keys_publish", ceremony, yes=True)
    row = MetadataFile.objects.get(repository__name=IMAGE, name="3.root.json")
    assert row.expires_at > datetime.now(UTC)
