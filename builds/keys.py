"""The ring of signing keys of one machine: which it may use, and where the private halves are.

    image:    root 2-of-3, targets 2-of-2 (offline)   build + approve 2-of-2, snapshot, timestamp
    director: root 2-of-2 (offline)                   targets: one online key for assignments

`keys.json` lists public halves and signer addresses (`file2:`, `hsm:`, `awskms:` ...) of online
keys. A machine lists what it holds and nothing else: the one that builds need not have the key that
approves. Which of them count is what the published root and targets say, never this file, so a ring
may hold the key of tomorrow beside that of today. Offline keys live with their holders, one folder
each (`write_key`), and are used by `keys_sign` alone.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from securesystemslib.signer import CryptoSigner, Key, Signer

from builds.errors import SigningKeysError
from builds.signers import FILE_SCHEME, PinHandler, load_signer, no_pin

SCHEMA: Final = "sparsefleet.keys/1"
PUBLIC_SCHEMA: Final = "sparsefleet.public-key/1"
INDEX_NAME: Final = "keys.json"
PUBLIC_NAME: Final = "public.json"
PRIVATE_NAME: Final = "key.pem"
IMAGE: Final = "image"
DIRECTOR: Final = "director"
INIT_HINT: Final = "run `manage.py keys_init`; for production see docs/runbooks/signing.md"

# repository -> role -> number of keys in a new installation
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


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The public half of a key and what it is for, as its holder hands it out."""

    repository: str
    role: str
    key: Key


class KeyRing:
    """The keys that a machine holds, read from a folder."""

    def __init__(
        self,
        folder: Path,
        slots: Mapping[tuple[str, str], Sequence[KeySlot]],
        pin: PinHandler = no_pin,
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._pin = pin
        self._signers: dict[str, Signer] = {}

    def public(self, repository: str, role: str) -> tuple[Key, ...]:
        """Return the public keys that this ring has for a role."""
        return tuple(slot.public for slot in self._slots.get((repository, role), ()))

    def publics(self) -> tuple[PublicKey, ...]:
        """Return the public half of every key of this ring."""
        return tuple(
            PublicKey(repository, role, slot.public)
            for (repository, role), slots in self._slots.items()
            for slot in slots
        )

    def keyids(self) -> frozenset[str]:
        """Return the identities of every key of this ring."""
        return frozenset(slot.public.keyid for slots in self._slots.values() for slot in slots)

    def signers(self, repository: str, keyids: Collection[str]) -> tuple[Signer, ...]:
        """Return the signers of those of `keyids` that this ring holds; each is loaded once.

        Raises:
            SigningKeysError: A private half is unreadable or of another public half.
        """
        found = []
        for (name, _), slots in self._slots.items():
            for slot in slots:
                keyid = slot.public.keyid
                if name == repository and keyid in keyids:
                    if keyid not in self._signers:
                        self._signers[keyid] = load_signer(
                            slot.uri, slot.public, self._folder, self._pin
                        )
                    found.append(self._signers[keyid])
        return tuple(found)

    def file_roles(self) -> tuple[str, ...]:
        """Return the online roles that sign with a plain file, e.g. `image build`."""
        return tuple(
            f"{repository} {role}"
            for (repository, role), slots in self._slots.items()
            if (repository, role) not in OFFLINE
            and any(slot.uri.startswith(FILE_SCHEME) for slot in slots)
        )

    def offline_roles(self) -> tuple[str, ...]:
        """Return the offline roles whose private halves this ring says to hold."""
        return tuple(
            f"{repository} {role}"
            for (repository, role), slots in self._slots.items()
            if (repository, role) in OFFLINE and slots
        )


def load_ring(folder: Path, pin: PinHandler = no_pin) -> KeyRing:
    """Read the ring of a folder.

    Args:
        folder: Has `keys.json`, and the files that `file2:` addresses name.
        pin: Says the PIN of a token.

    Raises:
        SigningKeysError: There is none, or it is malformed.
    """
    document = _index(folder)
    if document is None:
        raise SigningKeysError("there are no signing keys", hint=INIT_HINT)
    try:
        _require_schema(document, SCHEMA)
        slots = {
            (repository, role): tuple(_slot(item) for item in document[repository].get(role, ()))
            for repository, roles in LAYOUT.items()
            if repository in document
            for role in roles
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SigningKeysError(f"{INDEX_NAME} is malformed: {error!r}") from error
    return KeyRing(folder, slots, pin)


def generate_ring(folder: Path, offline: Path) -> KeyRing:
    """Make every key of a new installation as files, readable by their owner only.

    Args:
        folder: For `keys.json` and the online keys.
        offline: For the offline ones, a folder for each holder.

    Raises:
        SigningKeysError: A folder has something already; keys are never overwritten.
    """
    for path in (folder, offline):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise SigningKeysError(f"{path.name} is not empty: keys are never overwritten")
    document: dict[str, Any] = {"schema": SCHEMA}
    for repository, roles in LAYOUT.items():
        document[repository] = {}
        for role, count in roles.items():
            names = [f"{repository}-{role}-{n}" for n in range(1, count + 1)]
            if (repository, role) in OFFLINE:
                for name in names:
                    make_key_folder(offline / name, repository, role)
            else:
                document[repository][role] = [_generate(folder, f"{name}.pem") for name in names]
    # Last, so that a folder without an index is known to be half made.
    _write_private(folder / INDEX_NAME, _text(document))
    return load_ring(folder)


def make_key_folder(folder: Path, repository: str, role: str) -> PublicKey:
    """Make a key as a file in a folder of its own, with its public half beside it.

    Raises:
        SigningKeysError: The folder has a key, or there is no such role.
    """
    require_role(repository, role)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    signer = CryptoSigner.generate_ed25519()
    _write_private(folder / PRIVATE_NAME, signer.private_bytes)
    public = PublicKey(repository, role, signer.public_key)
    write_public(folder / PUBLIC_NAME, public)
    return public


def load_key_folder(folder: Path) -> tuple[PublicKey, Signer]:
    """Return the key of a holder's folder.

    Raises:
        SigningKeysError: It is incomplete, unreadable, or the halves do not fit.
    """
    public = read_public(folder / PUBLIC_NAME)
    return public, load_signer(f"{FILE_SCHEME}{PRIVATE_NAME}", public.key, folder)


def write_public(path: Path, public: PublicKey) -> None:
    """Write the public half of a key for others to read.

    Raises:
        SigningKeysError: The file exists.
    """
    document = {
        "schema": PUBLIC_SCHEMA,
        "repository": public.repository,
        "role": public.role,
        "public": _public_json(public.key),
    }
    _write_private(path, _text(document))


def read_public(path: Path) -> PublicKey:
    """Read the public half of a key.

    Raises:
        SigningKeysError: It cannot be read, is malformed, or is for no role.
    """
    try:
        document = json.loads(path.read_bytes())
        _require_schema(document, PUBLIC_SCHEMA)
        public = PublicKey(
            str(document["repository"]), str(document["role"]), _key(document["public"])
        )
    except OSError as error:
        raise SigningKeysError(f"{path} cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SigningKeysError(f"{path} is no public key of ours: {error!r}") from error
    require_role(public.repository, public.role)
    return public


def require_role(repository: str, role: str) -> None:
    """Refuse a role that no repository has.

    Raises:
        SigningKeysError: There is none.
    """
    if role not in LAYOUT.get(repository, {}):
        known = ", ".join(f"{name} {role}" for name, roles in LAYOUT.items() for role in roles)
        raise SigningKeysError(f"there is no role {repository} {role}", hint=f"roles: {known}")


def add_file_slot(folder: Path, repository: str, role: str) -> PublicKey:
    """Make an online key as a file of a ring and list it there."""
    name = f"{repository}-{role}-{os.urandom(4).hex()}.pem"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    item = _generate(folder, name)
    _add(folder, repository, role, item)
    return PublicKey(repository, role, _key(item["public"]))


def add_slot(folder: Path, public: PublicKey, uri: str) -> None:
    """List an online key that lives elsewhere (`hsm:`, a KMS) in a ring.

    Raises:
        SigningKeysError: The ring lists this key already.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    item = {"uri": uri, "public": _public_json(public.key)}
    _add(folder, public.repository, public.role, item)


def _add(folder: Path, repository: str, role: str, item: dict[str, Any]) -> None:
    require_role(repository, role)
    document = _index(folder) or {"schema": SCHEMA}
    slots = document.setdefault(repository, {}).setdefault(role, [])
    if any(slot["public"]["keyid"] == item["public"]["keyid"] for slot in slots):
        raise SigningKeysError(f"{INDEX_NAME} lists this key of {repository} {role} already")
    slots.append(item)
    draft = folder / f"{INDEX_NAME}.{os.urandom(4).hex()}"
    _write_private(draft, _text(document))
    draft.replace(folder / INDEX_NAME)


def _require_schema(document: Mapping[str, Any], schema: str) -> None:
    if document["schema"] != schema:
        raise ValueError(f"schema is {document['schema']!r}, not {schema!r}")


def _index(folder: Path) -> dict[str, Any] | None:
    try:
        document = json.loads((folder / INDEX_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SigningKeysError(f"{INDEX_NAME} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise SigningKeysError(f"{INDEX_NAME} is malformed: no object")
    return document


def _generate(folder: Path, name: str) -> dict[str, Any]:
    signer = CryptoSigner.generate_ed25519()
    _write_private(folder / name, signer.private_bytes)
    return {"uri": f"{FILE_SCHEME}{name}", "public": _public_json(signer.public_key)}


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode()


def _write_private(path: Path, data: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise SigningKeysError(f"{path} exists: keys are never overwritten") from None
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _public_json(key: Key) -> dict[str, Any]:
    return {"keyid": key.keyid, **key.to_dict()}


def _key(document: Mapping[str, Any]) -> Key:
    fields = dict(document)
    return Key.from_dict(fields.pop("keyid"), fields)


def _slot(item: Mapping[str, Any]) -> KeySlot:
    return KeySlot(public=_key(item["public"]), uri=str(item["uri"]))
