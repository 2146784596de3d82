"""Commands of ceremonies against mistakes: each ends in a sentence, and nothing changes."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from builds.keys import DIRECTOR, IMAGE
from builds.models import MetadataFile
from builds.services import signing
from builds.services.signing import keys_generate, repositories_init
from tests.factories.ceremonies import (
    bin_keyids,
    holders,
    keyid,
    keyids_of,
    new_holder,
    new_online,
    prepare,
    publish,
    sign,
)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def installation(state_dir: Path) -> None:
    keys_generate()
    repositories_init()


def test_a_change_needs_something_to_change(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nothing would change"):
        prepare(tmp_path)


def test_the_first_ceremony_is_held_once(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="the first ceremony was held"):
        prepare(tmp_path, first=True)
    MetadataFile.objects.all().delete()
    with pytest.raises(CommandError, match="--first"):
        prepare(tmp_path, renew=["image-root"])
    with pytest.raises(CommandError, match="needs 3 different keys, there are 0"):
        prepare(tmp_path, first=True)


def test_two_keys_of_one_kind_never_sign_bins_alone(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="not by 3"):
        prepare(tmp_path, add=[new_online(tmp_path, IMAGE, "build")])
    with pytest.raises(CommandError, match="not by 1"):
        prepare(tmp_path, revoke=[bin_keyids()[0]])


def test_a_role_keeps_enough_keys(tmp_path: Path) -> None:
    first, second, _ = holders("image-root")
    with pytest.raises(CommandError, match="2 signatures of 1 keys"):
        prepare(tmp_path, revoke=[keyid(first), keyid(second)])
    with pytest.raises(CommandError, match="1 signatures of 0 keys"):
        prepare(tmp_path, revoke=keyids_of(IMAGE, "root", "timestamp"))
    with pytest.raises(CommandError, match="4 signatures of 3 keys"):
        prepare(tmp_path, threshold=["image-root=4"])


def test_a_key_has_one_job(tmp_path: Path) -> None:
    document = json.loads((holders("image-root")[0] / "public.json").read_bytes())
    path = tmp_path / "public.json"
    path.write_text(json.dumps({**document, "role": "timestamp"}))
    with pytest.raises(CommandError, match="would be of image root and image timestamp"):
        prepare(tmp_path, add=[path])


@pytest.mark.parametrize("text", ["", "abc", "0" * 64])
def test_a_key_to_revoke_must_be_in_use(tmp_path: Path, text: str) -> None:
    with pytest.raises(CommandError, match=r"names .* keys in use"):
        prepare(tmp_path, revoke=[text])


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"schema": "sparsefleet.public-key/1"}', b"\xff"]
)
def test_a_public_key_must_be_one(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "public.json"
    path.write_bytes(data)
    with pytest.raises(CommandError, match="no public key of ours"):
        prepare(tmp_path, add=[path])


def test_a_holder_signs_only_what_is_theirs(tmp_path: Path) -> None:
    ceremony = prepare(tmp_path, renew=["image-root"])
    stranger = new_holder(tmp_path, IMAGE, "root")
    for key in (stranger, holders("image-targets")[0], holders("director-root")[0]):
        with pytest.raises(CommandError, match="may sign nothing here"):
            sign(ceremony, key)
    sign(ceremony, holders("image-root")[0], holders("image-root")[0])
    with pytest.raises(CommandError, match="1 of 2 keys"):
        publish(ceremony)


def test_a_holder_is_asked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = holders("image-root")[0], new_holder(tmp_path, IMAGE, "root")
    ceremony = prepare(tmp_path, add=[new / "public.json"], revoke=[keyid(old)])
    capsys.readouterr()
    with pytest.raises(CommandError, match="nobody is there to say yes"):
        call_command("keys_sign", ceremony, key=old)
    shown = capsys.readouterr().out
    assert f"+ {keyid(new)}" in shown
    assert f"- {keyid(old)}" in shown
    assert "image root version 2" in shown


def test_a_ceremony_takes_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(CommandError, match="not empty"):
        call_command("keys_prepare", tmp_path, renew=["image-root"])
    with pytest.raises(CommandError, match="no document of a ceremony"):
        publish(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("image-root.json", b"{}"),
        ("image-root.json", b"[" * 20_000),
        ("image-targets.json", None),
        ("other-root.json", b"{}"),
        ("image-root.json", b" " * (2 << 20)),
    ],
)
def test_a_document_must_be_one(tmp_path: Path, name: str, data: bytes | None) -> None:
    ceremony = prepare(tmp_path, renew=["image-root"])
    root = (ceremony / "image-root.json").read_bytes()
    (ceremony / name).write_bytes(root if data is None else data)
    with pytest.raises(CommandError, match=r"is no|belongs to no|larger than"):
        publish(ceremony)
    assert MetadataFile.objects.filter(name="2.root.json").count() == 0


def test_a_document_that_was_changed_after_signing_is_refused(tmp_path: Path) -> None:
    ceremony = sign(prepare(tmp_path, renew=["image-root"]), *holders("image-root")[:2])
    path = ceremony / "image-root.json"
    path.write_bytes(path.read_bytes().replace(b'"threshold":2', b'"threshold":1', 1))
    with pytest.raises(CommandError, match="signed by"):
        publish(ceremony)


def test_new_keys_of_targets_need_new_targets(tmp_path: Path) -> None:
    old, new = holders("image-targets")[0], new_holder(tmp_path, IMAGE, "targets")
    ceremony = prepare(tmp_path, add=[new / "public.json"], revoke=[keyid(old)])
    assert (ceremony / "image-targets.json").exists()
    (ceremony / "image-targets.json").unlink()
    sign(ceremony, *holders("image-root")[:2])
    with pytest.raises(CommandError, match="published targets are not signed"):
        publish(ceremony)


def test_the_new_keys_of_the_heads_must_be_here(tmp_path: Path, state_dir: Path) -> None:
    index = state_dir / "keys" / "keys.json"
    before = index.read_bytes()
    add = new_online(tmp_path, IMAGE, "timestamp")
    index.write_bytes(before)
    signing._ring.cache_clear()
    ceremony = prepare(tmp_path, add=[add], revoke=keyids_of(IMAGE, "root", "timestamp"))
    sign(ceremony, *holders("image-root")[:2])
    with pytest.raises(CommandError, match="devices would be left"):
        publish(ceremony)
    assert MetadataFile.objects.filter(name="2.root.json").count() == 0


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((IMAGE, "root"), {"ring": True}, "offline"),
        ((IMAGE, "captain"), {"ring": True}, "no role"),
        ((IMAGE, "root"), {}, "--out"),
        ((IMAGE, "build"), {"ring": True, "uri": "awskms:x"}, "only keys of tokens"),
        ((IMAGE, "build"), {"ring": True, "uri": "hsm:x?label=y"}, "names no key"),
        ((IMAGE, "build"), {"ring": True, "uri": "hsm:3"}, "names no key"),
        ((IMAGE, "build"), {"ring": True, "uri": "hsm:900?label=y"}, "1 to 255"),
    ],
)
def test_a_key_is_made_where_it_belongs(
    arguments: tuple[str, str], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(CommandError, match=said):
        call_command("keys_make", *arguments, **options)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    key = new_holder(tmp_path, DIRECTOR, "root")
    before = (key / "key.pem").read_bytes()
    with pytest.raises(CommandError, match="never overwritten"):
        call_command("keys_make", DIRECTOR, "root", out=key)
    assert (key / "key.pem").read_bytes() == before
    assert (key / "key.pem").stat().st_mode & 0o777 == 0o600


def test_online_keys_are_no_files_in_production(settings: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(settings.SPARSEFLEET, "debug", False)
    with pytest.raises(CommandError, match="plain files"):
        call_command("keys_make", IMAGE, "build", ring=True)
