"""Confidential bundles: sections are sealed for the way and opened on the device.

Parties: the *platform* makes a content key per release and seals; *devices* of the fleet open.

    content key (one per release) -(HKDF)-> object key (one per section) -(STREAM)-> sealed section
    X25519 key of a device -(HPKE)-> wrapped content key, inside the director's assignment

STREAM (Hoang, Reyhanitabar, Rogaway, Vizar 2015) as in age: chunks of 64 KiB, each encrypted with
ChaCha20-Poly1305 under the nonce `counter (11 bytes, big endian) | last chunk (1 byte)`. A chunk
that is changed, moved, left out or missing at the end does not open. The counter starts anew in
each object, so each object has a key of its own, derived from its component and digest: under one
key the same nonces would come twice, and two texts under one nonce open each other. Sealing the
same section of the same release again gives the same bytes.

HPKE is RFC 9180 in base mode: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305; its
`info` binds a wrapped key to one device and one manifest.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from compiler.contract.canonical import require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.planes import SEAL_TAG_BYTES, SEALED_CHUNK_BYTES, require_component

KEY_BYTES: Final = 32
COUNTER_BYTES: Final = 11
WRAPPED_BYTES: Final = 32 + KEY_BYTES + SEAL_TAG_BYTES  # ephemeral public key, sealed content key
DELTA_COMPONENT: Final = "delta"  # a delta is sealed as if it were a section of this name
_SUITE: Final = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


class SealError(ContractError):
    """Sealed bytes or a wrapped key do not open: changed, cut off, or for somebody else."""

    code: ClassVar[str] = "contract.seal"


def seal(
    content_key: bytes, component: str, sha256: str, plain: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield the sealed chunks of one section.

    Args:
        content_key: Of the release, 32 bytes.
        component: Name of the section.
        sha256: Digest of the plain bytes; not checked here, the caller reads them once.
        plain: The plain bytes in pieces of any size.
    """
    cipher, data = _Chunks(content_key, component, sha256), b""
    for piece in plain:
        data += piece
        while len(data) > SEALED_CHUNK_BYTES:  # the last chunk is only known at the end
            yield cipher.encrypt(data[:SEALED_CHUNK_BYTES], is_last=False)
            data = data[SEALED_CHUNK_BYTES:]
    yield cipher.encrypt(data, is_last=True)


def unseal(
    content_key: bytes, component: str, sha256: str, sealed: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield the plain chunks of one section, each after it was authenticated.

    Whoever reads them must read to the end before using them: only then is it known that nothing
    is missing.

    Raises:
        SealError: A chunk was changed, moved or left out, or the end is missing.
    """
    cipher, data = _Chunks(content_key, component, sha256), b""
    whole = SEALED_CHUNK_BYTES + SEAL_TAG_BYTES
    for piece in sealed:
        data += piece
        while len(data) > whole:
            yield cipher.decrypt(data[:whole], is_last=False)
            data = data[whole:]
    yield cipher.decrypt(data, is_last=True)


def wrap_key(content_key: bytes, public_key: bytes, device_id: str, manifest_sha256: str) -> bytes:
    """Return a content key for one device and one bundle, `WRAPPED_BYTES` long.

    Raises:
        ContractError: `public_key` is no X25519 key, or `content_key` has another length.
    """
    _require_key(content_key)
    info = _info(device_id, manifest_sha256)
    try:
        return _SUITE.encrypt(content_key, X25519PublicKey.from_public_bytes(public_key), info)
    except ValueError as error:
        raise ContractError(f"no X25519 public key: {error}") from error


def unwrap_key(
    wrapped: bytes, private_key: X25519PrivateKey, device_id: str, manifest_sha256: str
) -> bytes:
    """Return the content key that was wrapped for this device and bundle.

    Raises:
        SealError: It was wrapped for somebody else, for another bundle, or it was changed.
    """
    if len(wrapped) != WRAPPED_BYTES:
        raise SealError(f"a wrapped content key has {WRAPPED_BYTES} bytes, not {len(wrapped)}")
    try:
        return _SUITE.decrypt(wrapped, private_key, _info(device_id, manifest_sha256))
    except (InvalidTag, ValueError) as error:
        raise SealError("the content key is not for this device and bundle") from error


class _Chunks:
    """The chunks of one object, in order."""

    def __init__(self, content_key: bytes, component: str, sha256: str) -> None:
        _require_key(content_key)
        if component != DELTA_COMPONENT:
            require_component(component)
        name = f"{component}|{require_sha256(sha256, 'sha256')}".encode("ascii")
        derived = HKDF(SHA256(), KEY_BYTES, salt=None, info=b"sparsefleet.object/1|" + name)
        self._cipher = ChaCha20Poly1305(derived.derive(content_key))
        self._aad = name
        self._counter = 0

    def encrypt(self, chunk: bytes, *, is_last: bool) -> bytes:
        return self._cipher.encrypt(self._nonce(is_last=is_last), chunk, self._aad)

    def decrypt(self, chunk: bytes, *, is_last: bool) -> bytes:
        try:
            return self._cipher.decrypt(self._nonce(is_last=is_last), chunk, self._aad)
        except InvalidTag as error:
            place = f"chunk {self._counter - 1}"
            raise SealError(f"{place} of the sealed section does not open") from error

    def _nonce(self, *, is_last: bool) -> bytes:
        counter = self._counter.to_bytes(COUNTER_BYTES, "big")
        self._counter += 1
        return counter + bytes([is_last])


def _info(device_id: str, manifest_sha256: str) -> bytes:
    return f"sparsefleet.content-key/1|{device_id}|{manifest_sha256}".encode()


def _require_key(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ContractError(f"a content key has {KEY_BYTES} bytes, not {len(key)}")
