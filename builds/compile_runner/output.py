"""Check what the compiler wrote before anything of it is kept."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from builds.compile_runner.protocol import (
    IR_NAME,
    MANIFEST_NAME,
    REPLAYS,
    REPLAYS_NAME,
    REPORT_NAME,
    SECTIONS_NAME,
    SOURCE_NAME,
)
from builds.errors import BuildOutputError
from builds.models import BuildJob
from builds.services.bundles import BuildOutput
from compiler.contract.errors import ContractError
from compiler.contract.manifest import ReleaseManifest, Section, parse_manifest

ARTIFACTS: Final = {"ir": IR_NAME, "c_source": SOURCE_NAME, REPLAYS: REPLAYS_NAME}


def output_read(job: BuildJob, folder: Path) -> BuildOutput:
    """Return the output of a run: manifest of the right release, every section file as it says.

    Raises:
        BuildOutputError: A file is missing or differs, or the manifest is of another release.
    """
    try:
        manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
        report: dict[str, Any] = json.loads((folder / REPORT_NAME).read_bytes())
    except (OSError, ValueError, ContractError) as error:
        raise BuildOutputError(f"the output cannot be read: {error}") from error
    _require_identity(job, manifest)
    sections = {}
    for section in manifest.sections:
        path = folder / SECTIONS_NAME / section.component
        _require_section(path, section)
        sections[section.component] = path
    artifacts = {
        name: folder / file for name, file in ARTIFACTS.items() if (folder / file).is_file()
    }
    return BuildOutput(manifest, sections, artifacts, report)


def _require_identity(job: BuildJob, manifest: ReleaseManifest) -> None:
    version = job.version
    expected = (
        version.model.name,
        version.version,
        version.release_seq,
        version.security_epoch,
        job.target.name,
    )
    found = (
        manifest.model,
        manifest.version,
        manifest.release_seq,
        manifest.security_epoch,
        manifest.target,
    )
    if found != expected:
        raise BuildOutputError(f"the manifest is of {found}, not of {expected}")


def _require_section(path: Path, section: Section) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
    except OSError as error:
        raise BuildOutputError(f"section {section.component}: {error.strerror}") from error
    if (digest, size) != (section.sha256, section.size_bytes):
        raise BuildOutputError(f"section {section.component} differs from the manifest")
