"""The device's identity: an Ed25519 key made here and never sent, and RFC 9421 signatures with it.

device key -(signs)-> enrolment, token requests
key thumbprint = SHA-256 of the raw public key = `keyid`
device id = first 32 digits of the thumbprint of the first key; it stays when the key is replaced

A key is replaced in three steps, and the power may go between any two: the next key is durable, the
server takes it, it becomes the key. Until the last one both files are there, and the server knows
one of them.
"""

import base64
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Final

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from http_message_signatures import HTTPMessageSigner, MappingKeyResolver, algorithms

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import (
    NONCE_BYTES,
    SIGNATURE_COMPONENTS,
    SIGNATURE_MAX_AGE_S,
    SIGNATURE_TAG,
)
from device_agent.clock import Clock
from device_agent.errors import StateLostError
from device_agent.storage.disk import Disk

KEY_NAME: Final = "device.key"
NEXT_KEY_NAME: Final = "device.key.next"
SEAL_KEY_NAME: Final = "seal.key"
MAX_KEY_BYTES: Final = 4_096
DEVICE_ID_DIGITS: Final = 32


class DeviceKey:
    """The private key of this device."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def thumbprint(self) -> str:
        """Return the SHA-256 of the raw public key."""
        return sha256_hex(self.public_bytes)

    @property
    def device_id(self) -> str:
        """Return the id that the server derives from the key."""
        return self.thumbprint[:DEVICE_ID_DIGITS]

    @property
    def public_base64(self) -> str:
        """Return the raw public key, 32 bytes, in base64."""
        return base64.b64encode(self.public_bytes).decode("ascii")

    def sign(
        self,
        request: httpx.Request,
        body: bytes,
        clock: Clock,
        *,
        nonce: str = "",
        tag: str = SIGNATURE_TAG,
    ) -> None:
        """Sign a request in place: method, address, content type and body.

        Args:
            request: Carries `Content-Type`; gets `Content-Digest` and the signature headers, beside
                those of another tag.
            body: The bytes that are sent.
            clock: Time of the signature, which is good for `SIGNATURE_MAX_AGE_S`.
            nonce: Of the server, for a clock that it does not believe; a random one when empty.
            tag: What the signature is for, and its label.
        """
        now = clock.now()
        signer = HTTPMessageSigner(
            signature_algorithm=algorithms.ED25519,
            key_resolver=MappingKeyResolver(
                public_keys={}, private_keys={self.thumbprint: self._key}
            ),
        )
        signer.sign(
            request,
            key_id=self.thumbprint,
            created=now,
            expires=now + timedelta(seconds=SIGNATURE_MAX_AGE_S),
            nonce=nonce or secrets.token_hex(NONCE_BYTES),
            label=tag,
            tag=tag,
            covered_component_ids=SIGNATURE_COMPONENTS,
            body=body,
            append_if_signature_exists=True,
            use_existing_digest="Content-Digest" in request.headers,
        )

    def _pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @classmethod
    def make(cls, disk: Disk, path: Path) -> "DeviceKey":
        """Return a new key, durable in `path` and readable by the owner only."""
        made = cls(Ed25519PrivateKey.generate())
        made.save(disk, path)
        return made

    def save(self, disk: Disk, path: Path) -> None:
        """Write the key to `path`, durable and readable by the owner only."""
        disk.write_atomic(path, self._pem())

    @classmethod
    def load(cls, disk: Disk, path: Path) -> "DeviceKey":
        """Return the key kept in `path`.

        Raises:
            StateLostError: It is no Ed25519 key.
        """
        key = _load_pem(disk, path, "remove it to enrol as a new device")
        if not isinstance(key, Ed25519PrivateKey):
            raise StateLostError("the device key is no Ed25519 key")
        return cls(key)

    @classmethod
    def load_or_make(cls, disk: Disk, folder: Path) -> "DeviceKey":
        """Return the key kept in `folder`, made at the first start.

        Raises:
            StateLostError: There is a file and it is no Ed25519 key.
        """
        path = folder / KEY_NAME
        if path.exists():
            return cls.load(disk, path)
        disk.make_dir(folder)
        return cls.make(disk, path)


class SealKey:
    """The X25519 key with which this device opens confidential bundles; its public half is told."""

    def __init__(self, private: X25519PrivateKey) -> None:
        self.private = private

    @property
    def public_base64(self) -> str:
        """Return the raw public key, 32 bytes, in base64."""
        public = self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return base64.b64encode(public).decode("ascii")

    @classmethod
    def load_or_make(cls, disk: Disk, folder: Path) -> "SealKey":
        """Return the key kept in `folder`, made at the first start of an agent that knows it.

        Raises:
            StateLostError: There is a file and it is no X25519 key.
        """
        path = folder / SEAL_KEY_NAME
        if not path.exists():
            disk.make_dir(folder)
            made = X25519PrivateKey.generate()
            pem = made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            disk.write_atomic(path, pem)
            return cls(made)
        key = _load_pem(disk, path, "remove it; the device makes a new one and tells the server")
        if not isinstance(key, X25519PrivateKey):
            raise StateLostError(f"{SEAL_KEY_NAME} is no X25519 key")
        return cls(key)


class DeviceKeys:
    """The keys of this device: to sign, the next one while that is replaced, to open bundles."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        """Read the keys kept in `folder`; the first is made at the first start.

        Raises:
            StateLostError: There is a file and it is no Ed25519 key.
        """
        self._disk = disk
        self._folder = folder
        self.current = DeviceKey.load_or_make(disk, folder)
        self.seal = SealKey.load_or_make(disk, folder)
        path = folder / NEXT_KEY_NAME
        self.next = DeviceKey.load(disk, path) if path.exists() else None
        if self.next is not None and self.next.thumbprint == self.current.thumbprint:
            self.drop_next()

    def begin(self) -> DeviceKey:
        """Return the next key, made if there is none; it is durable before anybody hears of it."""
        if self.next is None:
            self.next = DeviceKey.make(self._disk, self._folder / NEXT_KEY_NAME)
        return self.next

    def promote(self) -> None:
        """Make the next key the key: the server has taken it. One durable copy is always there."""
        if self.next is None:
            raise StateLostError("there is no next key")
        self.next.save(self._disk, self._folder / KEY_NAME)
        self.current = self.next
        self.drop_next()

    def drop_next(self) -> None:
        """Forget the next key: it is the key, or the server has refused it."""
        self._disk.remove(self._folder / NEXT_KEY_NAME)
        self._disk.sync_dir(self._folder)
        self.next = None


def _load_pem(disk: Disk, path: Path, hint: str) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(disk.read_bytes(path, MAX_KEY_BYTES), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise StateLostError(f"{path.name} cannot be read", hint=hint) from error
