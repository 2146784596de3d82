"""Content keys of confidential releases, and what is sealed with them.

    key of keys (a setting, or a file in development) -(ChaCha20-Poly1305)-> content key, a row
    content key -(HKDF, STREAM)-> sealed sections and deltas, in the blob store
    content key -(HPKE)-> one device, in its assignment

A release is confidential when its model is at the moment of its first build; what was built before
stays as it is. The blob store keeps plain sections too, because deltas and later builds are made
from them; devices are only ever sent the sealed ones.
"""

import base64
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from django.conf import settings

from builds.errors import SigningKeysError
from builds.models import Bundle, ContentKey, ModelVersion
from builds.services.blobs import blob_keep
from compiler.contract.manifest import ReleaseManifest, Sealed, Section
from compiler.contract.sealing import DELTA_COMPONENT, KEY_BYTES, seal, wrap_key

KEK_NAME: Final = "content.kek"
NONCE_BYTES: Final = 12
READ_BYTES: Final = 1 << 20
AGENT_THAT_OPENS: Final = 2


def content_key_of(version: ModelVersion) -> bytes | None:
    """Return the content key of a release, or None when it is not confidential. One query.

    Raises:
        SigningKeysError: The key-encrypting key is missing or another one.
    """
    row = ContentKey.objects.filter(version=version).first()
    if row is None:
        return None
    data = bytes(row.wrapped)
    try:
        cipher = ChaCha20Poly1305(_kek(make=False))
        return cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], _aad(version))
    except InvalidTag as error:
        raise SigningKeysError(
            f"the content key of {version} does not open", hint=f"restore {KEK_NAME}"
        ) from error


def content_key_for_build(version: ModelVersion) -> bytes | None:
    """Return the content key of a release, made now if its model is confidential.

    Raises:
        SigningKeysError: The key-encrypting key is missing or another one.
    """
    if version.model.confidential and not ContentKey.objects.filter(version=version).exists():
        nonce = secrets.token_bytes(NONCE_BYTES)
        cipher = ChaCha20Poly1305(_kek(make=not ContentKey.objects.exists()))
        sealed = cipher.encrypt(nonce, secrets.token_bytes(KEY_BYTES), _aad(version))
        ContentKey.objects.get_or_create(version=version, defaults={"wrapped": nonce + sealed})
    return content_key_of(version)


def content_key_wrap(*, bundle: Bundle, device_id: str, seal_key: bytes) -> str:
    """Return the content key of a bundle for one device, base64; empty when there is none to give.

    Args:
        bundle: What is assigned.
        device_id: To whom.
        seal_key: X25519 public key of the device; empty: it has none yet.

    Raises:
        SigningKeysError: The key-encrypting key is missing or another one.
    """
    if not bundle.is_sealed or not seal_key:
        return ""
    key = content_key_of(bundle.version)
    if key is None:
        raise SigningKeysError(f"the content key of {bundle} is gone")
    wrapped = wrap_key(key, seal_key, device_id, bundle.manifest_sha256)
    return base64.b64encode(wrapped).decode("ascii")


def sections_seal(
    key: bytes, manifest: ReleaseManifest, paths: Mapping[str, Path]
) -> ReleaseManifest:
    """Keep the sealed form of every section; return the manifest that names them.

    Args:
        key: Content key of the release.
        manifest: As the compiler wrote it.
        paths: Component -> file; drafts are written beside them.
    """
    sections = tuple(
        replace(section, sealed=_section_seal(key, section, paths[section.component]))
        for section in manifest.sections
    )
    needs = replace(manifest.requires, agent_min=max(manifest.requires.agent_min, AGENT_THAT_OPENS))
    return replace(manifest, sections=sections, requires=needs)


def delta_seal(key: bytes, path: Path, sha256: str) -> Sealed:
    """Keep the sealed form of a delta, whose plain digest is `sha256`."""
    return _file_seal(key, DELTA_COMPONENT, sha256, path)


def _section_seal(key: bytes, section: Section, path: Path) -> Sealed:
    return _file_seal(key, section.component, section.sha256, path)


def _file_seal(key: bytes, component: str, sha256: str, path: Path) -> Sealed:
    draft = path.with_name(f"{path.name}.sealed")
    digest = hashlib.sha256()
    try:
        with draft.open("wb") as file:
            for chunk in seal(key, component, sha256, _pieces(path)):
                digest.update(chunk)
                file.write(chunk)
        sealed = Sealed(draft.stat().st_size, digest.hexdigest())
        blob_keep(path=draft, sha256=sealed.sha256)
    finally:
        draft.unlink(missing_ok=True)
    return sealed


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            yield piece


def _kek(*, make: bool) -> bytes:
    """Return the key-encrypting key: the setting, or a file made with the first content key."""
    chosen = settings.SPARSEFLEET
    if chosen.content_kek:
        return _kek_of(chosen.content_kek)
    path = chosen.key_path / KEK_NAME
    if make and not path.exists():
        if not chosen.allows_file_keys:
            raise SigningKeysError(
                "a confidential model needs a key-encrypting key",
                hint="set SPARSEFLEET_CONTENT_KEK",
            )
        _write_new(path, secrets.token_bytes(KEY_BYTES))
    try:
        key: bytes = path.read_bytes()
    except OSError as error:
        raise SigningKeysError(f"{KEK_NAME} cannot be read: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise SigningKeysError(f"{KEK_NAME} has {len(key)} bytes, not {KEY_BYTES}")
    return key


def _kek_of(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SigningKeysError(
            f"SPARSEFLEET_CONTENT_KEK must be {2 * KEY_BYTES} hexadecimal digits"
        )
    return key


def _write_new(path: Path, data: bytes) -> None:
    """Write a private file whole or not at all; whoever comes second keeps the first one's."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        return
    finally:
        draft.unlink()


def _aad(version: ModelVersion) -> bytes:
    return f"sparsefleet.content-key/1|{version.pk}".encode()
