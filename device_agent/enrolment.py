"""Enrolment: introduce this device once, and pin the roots of trust it is given.

    claim (once) + key + fingerprint -> device id; image root and director root, pinned from then on

The order of writes makes it safe to be killed: floors and roots first, the record that says
"enrolled" last. Doing it again with the same key gives the same device.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fingerprint import Fingerprint
from compiler.contract.protocol import text
from device_agent.api import DeviceApi, EnrolmentAnswer, EnrolmentRequest
from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError, NotEnrolledError, StateLostError, TrustError
from device_agent.storage.disk import Disk
from device_agent.storage.floors import Floors, FloorStore
from device_agent.update.director import latest_root
from device_agent.update.verify import TrustFolder

log = logging.getLogger("device_agent.enrolment")

RECORD: Final = "enrolment.json"
MAX_RECORD_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a device remembers of its enrolment."""

    device_id: str
    state: str
    server_url: str
    tuf_path: str

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {
            "device_id": self.device_id,
            "state": self.state,
            "server_url": self.server_url,
            "tuf_path": self.tuf_path,
        }


def load_enrolment(disk: Disk, folder: Path) -> Enrolment:
    """Return the enrolment of this device.

    Raises:
        NotEnrolledError: It never enrolled.
    """
    path = folder / RECORD
    if not path.exists():
        raise NotEnrolledError("this device is not enrolled", hint="run `enrol` with a claim token")
    try:
        return _enrolment(parse_object(disk.read_bytes(path, MAX_RECORD_BYTES)))
    except ContractError as error:
        raise NotEnrolledError(
            f"the enrolment record is damaged: {error}", hint="run `enrol` again"
        ) from error


def _enrolment(document: Mapping[str, Json]) -> Enrolment:
    return Enrolment(
        device_id=text(document, "device_id"),
        state=text(document, "state"),
        server_url=text(document, "server_url"),
        tuf_path=text(document, "tuf_path"),
    )


@dataclass(frozen=True, slots=True)
class Enroller:
    """Where enrolment writes to."""

    config: AgentConfig
    disk: Disk
    folder: Path
    trust: TrustFolder
    floors: FloorStore

    def enrol(
        self, api: DeviceApi, fingerprint: Fingerprint, *, accept_state_loss: bool = False
    ) -> Enrolment:
        """Enrol, or enrol again with the same key.

        Args:
            api: The server.
            fingerprint: Of this device.
            accept_state_loss: Begin with new floors although the old ones are damaged.

        Raises:
            RefusedError: The server does not want this device.
            StateLostError: Floors are damaged and this was not accepted.
            TrustError: The roots are not those that were pinned.
        """
        config = self.config
        if not config.serial:
            raise ConfigurationError("serial is empty", hint="every device needs its own")
        self._require_floors(accept_state_loss)
        answer = api.enrol(
            EnrolmentRequest(
                claim=config.claim_text(),
                serial=config.serial,
                name=config.display_name,
                model=config.model,
                fingerprint=fingerprint,
            )
        )
        self._pin(answer)
        enrolment = Enrolment(answer.device_id, answer.state, config.server_url, answer.tuf_path)
        self.disk.write_atomic(self.folder / RECORD, canonical_bytes(enrolment.to_json()))
        log.info("enrolled as %s, %s", enrolment.device_id, enrolment.state)
        return enrolment

    def _require_floors(self, accept_state_loss: bool) -> None:
        if not self.floors.exists and not (self.folder / RECORD).exists():
            self.floors.save(Floors())
            return
        try:
            self.floors.load()
        except StateLostError:
            if not accept_state_loss:
                raise
            log.warning("beginning with new floors")
            self.floors.save(Floors())

    def _pin(self, answer: EnrolmentAnswer) -> None:
        """Pin the roots at the first enrolment; later ones do not change them.

        A root that was pinned follows its own chain of signatures instead.
        """
        for root in (answer.image_root, answer.director_root):
            latest_root(root, lambda _version: None)
        for name, root in (
            ("image_root", answer.image_root),
            ("director_root", answer.director_root),
        ):
            wanted = getattr(self.config, name)
            if wanted and not _same_document(Path(wanted), root, self.disk):
                raise TrustError(f"{name}: the server hands out another root than is pinned here")
        if not self.trust.is_pinned:
            self.trust.pin(answer.image_root, answer.director_root)


def _same_document(path: Path, root: bytes, disk: Disk) -> bool:
    try:
        pinned = parse_object(disk.read_bytes(path, len(root) * 2 + MAX_RECORD_BYTES))
        return pinned == parse_object(root)
    except ContractError as error:
        raise ConfigurationError(f"{path.name} is no TUF root: {error}") from error
