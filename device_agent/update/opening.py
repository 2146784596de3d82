"""Open what travelled sealed: fetched objects become plain ones, under their own digests.

The plain object is written to the private store (0600, ADR 0017) and gets its name only when every
chunk was authentic and its digest is the signed one; the sealed one is dropped then. A device that
is killed in between opens it again.
"""

import base64
import binascii
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.manifest import Section
from compiler.contract.protocol import DeltaOffer
from compiler.contract.sealing import DELTA_COMPONENT, SealError, unseal, unwrap_key
from device_agent.errors import ContentKeyError
from device_agent.identity import SealKey
from device_agent.storage.disk import disk_errors
from device_agent.storage.objects import ObjectStore
from device_agent.update.context import UpdateContext

READ_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens sealed objects with the key of this device."""

    store: ObjectStore
    key: SealKey
    device_id: Callable[[], str]

    def content_key(self, context: UpdateContext) -> bytes:
        """Return the content key of the bundle of an update.

        Raises:
            ContentKeyError: The assignment brought none, or one that is for somebody else.
        """
        if not context.content_key:
            raise ContentKeyError(
                "the bundle is confidential and the assignment brought no key for this device",
                hint="the device tells its key with its next token request; the offer comes again",
            )
        try:
            wrapped = base64.b64decode(context.content_key, validate=True)
            return unwrap_key(wrapped, self.key.private, self.device_id(), context.manifest_sha256)
        except (binascii.Error, ContractError) as error:
            raise ContentKeyError(f"the content key cannot be used: {error}") from error

    def open_section(self, content_key: bytes, section: Section) -> None:
        """Make the plain section of a sealed one that is in the store, and drop that.

        Raises:
            ContentKeyError: It does not open with this key.
            ContentError: It opens to something else than was signed for.
        """
        travels = section.travels
        self._open(
            content_key,
            section.component,
            (travels.sha256, travels.size_bytes),
            (section.sha256, section.size_bytes),
        )
        self.store.forget(travels.sha256)

    def open_delta(self, content_key: bytes, offer: DeltaOffer) -> None:
        """Make the plain delta of a sealed one that is in the store.

        Raises:
            ContentKeyError: It does not open with this key.
            ContentError: It opens to something else than was signed for.
        """
        plain = offer.opened
        self._open(
            content_key,
            DELTA_COMPONENT,
            (offer.sha256, offer.size_bytes),
            (plain.sha256, plain.size_bytes),
        )

    def _open(
        self, content_key: bytes, component: str, sealed: tuple[str, int], plain: tuple[str, int]
    ) -> None:
        if self.store.has(*plain):
            return
        partial = self.store.begin(*plain, resume=False)
        try:
            for chunk in unseal(content_key, component, plain[0], self._pieces(*sealed)):
                partial.append(chunk)
        except SealError as error:
            partial.discard()
            self.store.forget(sealed[0])
            raise ContentKeyError(f"{component}: {error}") from error
        except BaseException:
            partial.close()
            raise
        partial.finish()

    def _pieces(self, sha256: str, size_bytes: int) -> Iterator[bytes]:
        fd = self.store.open(sha256, size_bytes)
        try:
            while True:
                with disk_errors(f"read {sha256[:16]}"):
                    piece = os.read(fd, READ_BYTES)
                if not piece:
                    return
                yield piece
        finally:
            os.close(fd)
