"""The ring of signing keys: which key signs for which role, and where its private half is.

    image:    root 2-of-3, targets 2-of-2 (offline)   build + approve 2-of-2, snapshot, timestamp
    director: root 2-of-2 (offline)                   targets: one online key for assignments

`keys.json` lists public halves and signer addresses (`file2:`, `hsm:`, `awskms:` ...); private
halves are loaded only when a role signs, through securesystemslib, so production differs from the
embedded form by addresses alone. A process that never signs for a role never needs its key.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from securesystemslib.exceptions import Error as SecureSystemsError
from securesystemslib.signer import CryptoSigner, Key, Signer

from builds.errors import SigningKeysError

SCHEMA: Final = "sparsefleet.keys/1"
INDEX_NAME: Final = "keys.json"
IMAGE: Final = "image"
DIRECTOR: Final = "director"
FILE_SCHEME: Final = "file2:"
INIT_HINT: Final = "run `manage.py keys_init`"

# repository -> role -> number of keys
LAYOUT: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(
    {
        IMAGE: {"root": 3, "targets": 2, "build": 1, "approve": 1, "snapshot": 1, "timestamp": 1},
        DIRECTOR: {"root": 2, "targets": 1},
    }
)
OFFLINE: Final = frozenset({(IMAGE, "root"), (IMAGE, "targets"), (DIRECTOR, "root")})


@dataclass(frozen=True, slots=True)
class KeySlot:
    """One key: its public half and the address of its signer."""

    public: Key
    uri: str


class KeyRing:
    """The keys of both repositories, read from a folder."""

    def __init__(self, folder: Path, slots: Mapping[tuple[str, str], Sequence[KeySlot]]) -> None:
        self._folder = folder
        self._slots = slots
        self._signers: dict[tuple[str, str], tuple[Signer, ...]] = {}

    def public(self, repository: str, role: str) -> tuple[Key, ...]:
        """Return the public keys of a role."""
        return tuple(slot.public for slot in self._slots[repository, role])

    def signers(self, repository: str, role: str) -> tuple[Signer, ...]:
        """Return the signers of a role, loaded once.

        Raises:
            SigningKeysError: A private half is missing, unreadable, or of another public half.
        """
        if (repository, role) not in self._signers:
            self._signers[repository, role] = tuple(
                self._load(slot) for slot in self._slots[repository, role]
            )
        return self._signers[repository, role]

    def uses_files(self) -> bool:
        """Return whether any online role signs with a file."""
        return any(
            slot.uri.startswith(FILE_SCHEME)
            for role, slots in self._slots.items()
            if role not in OFFLINE
            for slot in slots
        )

    def _load(self, slot: KeySlot) -> Signer:
        uri = slot.uri
        if uri.startswith(FILE_SCHEME):
            uri = f"{FILE_SCHEME}{self._folder / uri.removeprefix(FILE_SCHEME)}"
        try:
            return Signer.from_priv_key_uri(uri, slot.public)
        except (OSError, ValueError, SecureSystemsError) as error:
            raise SigningKeysError(f"cannot load the key {slot.uri}: {error}") from error


def load_ring(folder: Path) -> KeyRing:
    """Read the ring of a folder.

    Raises:
        SigningKeysError: There is none, or it is malformed.
    """
    try:
        document = json.loads((folder / INDEX_NAME).read_bytes())
    except FileNotFoundError:
        raise SigningKeysError("there are no signing keys", hint=INIT_HINT) from None
    except (OSError, ValueError) as error:
        raise SigningKeysError(f"{INDEX_NAME} cannot be read: {error}") from error
    try:
        slots = {
            (repository, role): tuple(_slot(item) for item in document[repository][role])
            for repository, roles in LAYOUT.items()
            for role in roles
        }
    except (KeyError, TypeError, ValueError) as error:
        raise SigningKeysError(f"{INDEX_NAME} is malformed: {error!r}") from error
    short = [key for key, found in slots.items() if len(found) != LAYOUT[key[0]][key[1]]]
    if short or document.get("schema") != SCHEMA:
        raise SigningKeysError(f"{INDEX_NAME} does not hold the keys of {short}")
    return KeyRing(folder, slots)


def generate_ring(folder: Path) -> KeyRing:
    """Make a new ring of files, readable by their owner only.

    Raises:
        SigningKeysError: The folder has keys already; they are never overwritten.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SigningKeysError(f"{folder.name} is not empty: keys are never overwritten")
    document: dict[str, Any] = {"schema": SCHEMA}
    for repository, roles in LAYOUT.items():
        document[repository] = {
            role: [_generate(folder, f"{repository}-{role}-{n}.pem") for n in range(1, count + 1)]
            for role, count in roles.items()
        }
    # Last, so that a folder without an index is known to be half made.
    _write_private(folder / INDEX_NAME, json.dumps(document, indent=1, sort_keys=True).encode())
    return load_ring(folder)


def _generate(folder: Path, name: str) -> dict[str, Any]:
    signer = CryptoSigner.generate_ed25519()
    _write_private(folder / name, signer.private_bytes)
    public = {"keyid": signer.public_key.keyid, **signer.public_key.to_dict()}
    return {"uri": f"{FILE_SCHEME}{name}", "public": public}


def _write_private(path: Path, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _slot(item: Mapping[str, Any]) -> KeySlot:
    public = dict(item["public"])
    return KeySlot(public=Key.from_dict(public.pop("keyid"), public), uri=str(item["uri"]))
