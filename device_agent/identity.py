"""The device's identity: an Ed25519 key made here and never sent, and RFC 9421 signatures with it.

device key -(signs)-> enrolment, token requests
key thumbprint = SHA-256 of the raw public key = `keyid`; device id = its first 32 digits
"""

import base64
import secrets
from datetime import timedelta
from pathlib import Path
from typing import Final

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
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

    def sign(self, request: httpx.Request, body: bytes, clock: Clock) -> None:
        """Sign a request in place: method, address, content type and body.

        Args:
            request: Carries `Content-Type`; gets `Content-Digest` and the signature headers.
            body: The bytes that are sent.
            clock: Time of the signature, which is good for `SIGNATURE_MAX_AGE_S`.
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
            nonce=secrets.token_hex(NONCE_BYTES),
            tag=SIGNATURE_TAG,
            covered_component_ids=SIGNATURE_COMPONENTS,
            body=body,
        )

    def _pem(self) -> bytes:
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @classmethod
    def load_or_make(cls, disk: Disk, folder: Path) -> "DeviceKey":
        """Return the key kept in `folder`, made at the first start (readable by the owner only).

        Raises:
            StateLostError: There is a file and it is no Ed25519 key.
        """
        path = folder / KEY_NAME
        if not path.exists():
            disk.make_dir(folder)
            made = cls(Ed25519PrivateKey.generate())
            disk.write_atomic(path, made._pem())
            return made
        try:
            key = load_pem_private_key(disk.read_bytes(path, MAX_KEY_BYTES), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise StateLostError(
                "the device key cannot be read", hint="remove it to enrol as a new device"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise StateLostError("the device key is no Ed25519 key")
        return cls(key)
