"""A bundle in a directory, for people and tests: what `python -m compiler compile --out` writes.

manifest.json  sections/<component> ...  report.json  ir.mlir  kernels.c  replays.bin
"""

import contextlib
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from compiler.contract.canonical import sha256_hex
from compiler.contract.errors import ContractError, DigestMismatchError
from compiler.contract.manifest import (
    MAX_MANIFEST_BYTES,
    ReleaseManifest,
    Section,
    parse_manifest,
)
from compiler.driver.cache import write_atomic
from compiler.driver.options import CompiledBundle

if TYPE_CHECKING:
    from compiler.delta.records import Replays
    from compiler.delta.sections import SectionFile

MANIFEST: Final = "manifest.json"
SECTIONS: Final = "sections"
REPORT: Final = "report.json"
IR: Final = "ir.mlir"
SOURCE: Final = "kernels.c"
REPLAYS: Final = "replays.bin"
MAX_REPLAYS_BYTES: Final = 256 * 1024 * 1024
MAX_REPORT_BYTES: Final = 256 * 1024 * 1024


def write_bundle(bundle: CompiledBundle, directory: Path) -> None:
    """Write a bundle; the manifest comes last, so that a directory with one is whole.

    Only the manifest waits for the disk: its digests tell a section that a power cut left torn.
    What a bundle that was here before had beyond this one goes; other files stay.

    Raises:
        OSError: The directory cannot be written.
    """
    _remove_older(directory, keep=frozenset(bundle.sections))
    for component, data in bundle.sections.items():
        write_atomic(directory / SECTIONS / component, data, is_durable=False)
    report = json.dumps(bundle.report, indent=1) + "\n"
    for name, text in ((IR, bundle.ir_text), (SOURCE, bundle.c_source)):
        write_atomic(directory / name, text.encode(), is_durable=False)
    if bundle.replays:
        write_atomic(directory / REPLAYS, bundle.replays, is_durable=False)
    write_atomic(directory / REPORT, report.encode(), is_durable=False)
    write_atomic(directory / MANIFEST, bundle.manifest.to_bytes())


def _remove_older(directory: Path, *, keep: frozenset[str]) -> None:
    """Remove the manifest of a bundle that was here before, its factors, its sections that go."""
    path = directory / MANIFEST
    try:
        older = {section.component for section in parse_manifest(path.read_bytes()).sections}
    except (OSError, ContractError):
        older = set()
    path.unlink(missing_ok=True)
    (directory / REPLAYS).unlink(missing_ok=True)
    for component in older - keep:
        (directory / SECTIONS / component).unlink(missing_ok=True)


def read_bundle(directory: Path) -> tuple[ReleaseManifest, dict[str, bytes]]:
    """Read manifest and sections back, digests checked.

    Raises:
        ContractError: There is no whole bundle in the directory.
        DigestMismatchError: A section is not the one the manifest names.
    """
    with _no_bundle(directory):
        manifest = parse_manifest(_read(directory / MANIFEST, MAX_MANIFEST_BYTES))
        sections = {
            section.component: _read(directory / SECTIONS / section.component, section.size_bytes)
            for section in manifest.sections
        }
    for section in manifest.sections:
        _require_digest(section, sha256_hex(sections[section.component]))
    return manifest, sections


@contextlib.contextmanager
def open_bundle(directory: Path) -> Iterator[dict[str, "SectionFile"]]:
    """Yield the sections of a bundle as open files, digests checked; for bundles of any size.

    Raises:
        ContractError: There is no whole bundle in the directory.
        DigestMismatchError: A section is not the one the manifest names.
    """
    from compiler.delta.sections import SectionFile  # loads numpy

    with contextlib.ExitStack() as files:
        with _no_bundle(directory):
            manifest = parse_manifest(_read(directory / MANIFEST, MAX_MANIFEST_BYTES))
            sections: dict[str, SectionFile] = {}
            for section in manifest.sections:
                path = directory / SECTIONS / section.component
                if path.stat().st_size != section.size_bytes or not path.is_file():
                    raise DigestMismatchError(f"section {section.component} has another length")
                opened = SectionFile(path, section.planes)
                files.callback(opened.close)
                _require_digest(section, opened.sha256)
                sections[section.component] = opened
        yield sections


@contextlib.contextmanager
def _no_bundle(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ContractError(
            f"no bundle in {directory}: {error.strerror}",
            hint="a bundle is what `python -m compiler compile --out DIR` writes",
        ) from error


def _require_digest(section: Section, sha256: str) -> None:
    if sha256 != section.sha256:
        raise DigestMismatchError(f"section {section.component} does not match the manifest")


def _read(path: Path, most: int) -> bytes:
    """Return at most one byte more than `most` of a regular file; no pipe or device is opened."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        return file.read(most + 1)


def read_report(directory: Path) -> dict[str, Any]:
    """Read the report of a bundle directory.

    Raises:
        ContractError: It is missing or no JSON object.
    """
    try:
        report = json.loads(_read(directory / REPORT, MAX_REPORT_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"no report in {directory}: {error}") from error
    if not isinstance(report, dict):
        raise ContractError(f"the report in {directory} is not an object")
    return report


def bundle_replays(directory: Path) -> "Replays":
    """Return the factors that the bundle was merged with; none if there is no file of them.

    Raises:
        ContractError: The file is no such file.
    """
    path = directory / REPLAYS
    if not path.exists():
        return {}
    from compiler.delta.replay_file import read_replays  # loads numpy

    try:
        return read_replays(_read(path, MAX_REPLAYS_BYTES))
    except OSError as error:
        raise ContractError(f"no {REPLAYS} in {directory}: {error}") from error


def read_text(directory: Path, name: str) -> str:
    """Read a text that lies beside the sections: `IR` or `SOURCE`.

    Raises:
        ContractError: It is missing or no text.
    """
    try:
        return (directory / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ContractError(f"no {name} in {directory}: {error}") from error
