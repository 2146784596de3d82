"""The cheap look at a submission in the request itself: names, sizes, and `pipeline.json`.

The compiler looks at the ONNX files later, in a worker. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from builds.common.errors import InvalidInputError
from builds.errors import PipelineInvalidError
from compiler.contract.canonical import Json, canonical_bytes, parse_object, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.manifest import NAME_PATTERN

PIPELINE_FILE: Final = "pipeline.json"
PIPELINE_SCHEMA: Final = "sparsefleet.pipeline/1"
FAMILIES: Final = frozenset({"vision-embed-decoder", "graph"})
CALIBRATION: Final = "calibration"
CARD_SETS: Final = (CALIBRATION, "evaluation")
MAX_PIPELINE_BYTES: Final = 4 << 20
MAX_FILES: Final = 256
MAX_NOTES: Final = 20_000
MAX_CLAIM_BYTES: Final = 64 << 10
MAX_CLAIM_DEPTH: Final = 8
MAX_EPOCH: Final = 1 << 31
FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


@dataclass(frozen=True, slots=True)
class FileRef:
    """One file of a submission; its bytes were uploaded before."""

    name: str
    sha256: str
    size_bytes: int

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return {"name": self.name, "sha256": self.sha256, "size_bytes": self.size_bytes}


@dataclass(frozen=True, slots=True)
class Submission:
    """What CI says a version is.

    Attributes:
        constant_time: Whether no value may decide time or accesses; a model that cannot be compiled
            so is refused.
    """

    version: str
    files: tuple[FileRef, ...]
    base_version: str | None = None
    claim: Mapping[str, Json] | None = None
    notes: str = ""
    security_epoch: int = 0
    constant_time: bool = False

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, files in order of their names; its digest tells repeats apart."""
        changed: dict[str, Json] = {"constant_time": True} if self.constant_time else {}
        return {
            "version": self.version,
            "files": [item.to_json() for item in sorted(self.files, key=lambda item: item.name)],
            "base_version": self.base_version,
            "claim": dict(self.claim or {}),
            "notes": self.notes,
            "security_epoch": self.security_epoch,
            **changed,
        }


def require_name(value: str, what: str) -> str:
    """Return `value` if it may name a model or a version (it becomes part of a target path).

    Raises:
        InvalidInputError: It may not.
    """
    if NAME_PATTERN.fullmatch(value) is None:
        raise InvalidInputError(f"{what} must match {NAME_PATTERN.pattern}")
    return value


def require_text(value: str, what: str) -> None:
    """Refuse what no database keeps: NUL and lone surrogates.

    Raises:
        InvalidInputError: The text has such a character.
    """
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidInputError(f"{what} must be text without NUL and lone surrogates")


def require_texts(value: object, what: str) -> None:
    """Refuse a JSON value of any depth that holds a text, or a name, which no database keeps.

    Raises:
        InvalidInputError: As `require_text`.
    """
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            require_text(item, what)
        elif isinstance(item, dict):
            left += [*item, *item.values()]
        elif isinstance(item, list):
            left += item


def require_claim(claim: Mapping[str, Json]) -> None:
    """Check what CI says about quality: how deep, how large, and that it is text and numbers.

    Raises:
        InvalidInputError: It is deeper than `MAX_CLAIM_DEPTH` or larger than `MAX_CLAIM_BYTES`.
    """
    level: list[Json] = [dict(claim)]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_CLAIM_DEPTH:
            raise InvalidInputError(f"claim is nested deeper than {MAX_CLAIM_DEPTH}")
        level = [item for value in level for item in _containers_in(value)]
    try:
        size = len(canonical_bytes(dict(claim)))
    except ContractError as error:
        raise InvalidInputError(f"claim: {error}") from error
    if size > MAX_CLAIM_BYTES:
        raise InvalidInputError(f"claim is {size} bytes of JSON, limit {MAX_CLAIM_BYTES}")


def _containers_in(value: Json) -> list[Json]:
    """Return the objects and arrays directly in `value`; check the texts on the way."""
    children: list[Json] = []
    if isinstance(value, dict):
        for name in value:
            require_text(name, "a name in claim")
        children = list(value.values())
    elif isinstance(value, list):
        children = value
    for child in children:
        if isinstance(child, str):
            require_text(child, "claim")
    return [child for child in children if isinstance(child, dict | list)]


def require_submission(submission: Submission) -> FileRef:
    """Check names, digests and counts; return the reference of `pipeline.json`.

    Raises:
        InvalidInputError: Something is out of bounds; the message says what.
        PipelineInvalidError: There is no `pipeline.json`.
    """
    require_name(submission.version, "version")
    if len(submission.notes) > MAX_NOTES:
        raise InvalidInputError(f"notes are longer than {MAX_NOTES} characters")
    require_text(submission.notes, "notes")
    require_claim(submission.claim or {})
    if not 0 <= submission.security_epoch < MAX_EPOCH:
        raise InvalidInputError(f"security_epoch must be in 0..{MAX_EPOCH - 1}")
    if not 1 <= len(submission.files) <= MAX_FILES:
        raise InvalidInputError(f"a submission has 1 to {MAX_FILES} files")
    by_name = {item.name: _checked(item) for item in submission.files}
    if len(by_name) != len(submission.files):
        raise InvalidInputError("two files have the same name")
    try:
        pipeline = by_name[PIPELINE_FILE]
    except KeyError:
        raise PipelineInvalidError(
            f"the submission has no {PIPELINE_FILE}",
            hint="`python -m compiler import model.onnx --out DIR` writes one beside the model",
        ) from None
    if pipeline.size_bytes > MAX_PIPELINE_BYTES:
        raise PipelineInvalidError(f"{PIPELINE_FILE} is larger than {MAX_PIPELINE_BYTES} bytes")
    return pipeline


def require_pipeline(data: bytes, file_names: Sequence[str]) -> None:
    """Check that `pipeline.json` is one and that the files it names are there.

    Raises:
        PipelineInvalidError: It is not; the message says why.
    """
    try:
        document = parse_object(data, limit_bytes=MAX_PIPELINE_BYTES)
    except ContractError as error:
        raise PipelineInvalidError(f"{PIPELINE_FILE}: {error}") from error
    if document.get("schema") != PIPELINE_SCHEMA:
        raise PipelineInvalidError(f"{PIPELINE_FILE}: schema must be {PIPELINE_SCHEMA!r}")
    if document.get("family") not in FAMILIES:
        raise PipelineInvalidError(
            f"{PIPELINE_FILE}: unknown family {document.get('family')!r}",
            hint="supported: " + ", ".join(sorted(FAMILIES)),
        )
    components = document.get("components")
    if not isinstance(components, dict) or not components:
        raise PipelineInvalidError(f"{PIPELINE_FILE}: components must be a non-empty object")
    for name, component in components.items():
        file = component.get("file") if isinstance(component, dict) else None
        if file not in file_names:
            raise PipelineInvalidError(
                f"{PIPELINE_FILE}: component {name!r} names the file {file!r}",
                hint="files of this submission: " + ", ".join(sorted(file_names)),
            )
    _require_sets(document, frozenset(file_names))


def _require_sets(document: Mapping[str, Json], file_names: frozenset[str]) -> None:
    """Check that sets of cards are there whole; a model with pictures needs calibration."""
    for stem in CARD_SETS:
        wanted = {f"{stem}.json", f"{stem}.npz"}
        is_needed = stem == CALIBRATION and document.get("image") is not None
        missing = sorted(wanted - file_names)
        if missing and (is_needed or len(missing) < len(wanted)):
            raise PipelineInvalidError(
                f"the {stem} set is incomplete: {' and '.join(missing)} missing",
                hint=f"submit {stem}.json and {stem}.npz, format sparsefleet.cards/1",
            )


def _checked(item: FileRef) -> FileRef:
    if FILE_NAME.fullmatch(item.name) is None:
        raise InvalidInputError(f"file name {item.name!r} must match {FILE_NAME.pattern}")
    try:
        require_sha256(item.sha256, f"sha256 of {item.name}")
    except ContractError as error:
        raise InvalidInputError(str(error)) from error
    if item.size_bytes < 0:
        raise InvalidInputError(f"size of {item.name} is negative")
    return item
