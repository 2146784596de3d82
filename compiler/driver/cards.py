"""Calibration and evaluation sets of a submission, format `sparsefleet.cards/1`.

`<stem>.npz` holds `images`, u8 (n, height, width) or (n, height, width, channels). `<stem>.json`
holds cards, each a row of `images` and questions `{"kind", "prompt", "words", "answer"}`, words and
answer as tokens of the vocabulary.
"""

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from compiler.contract.canonical import Json, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fields import (
    require_fields,
    require_integer,
    require_list,
    require_text,
)
from compiler.contract.pipeline import ImageSpec, Pipeline, parse_pipeline
from compiler.driver.provenance import CALIBRATION
from compiler.errors import UNREADABLE, MalformedModelError
from compiler.frontend.pipeline_json import read_pipeline

SCHEMA: Final = "sparsefleet.cards/1"
EVALUATION: Final = "evaluation"
MAX_CARDS: Final = 100_000
MAX_QUESTIONS: Final = 1_000
MAX_WORDS: Final = 4_096
MAX_TEXT: Final = 1_024
MAX_JSON_BYTES: Final = 256 * 1024 * 1024
MAX_IMAGE_BYTES: Final = 1024 * 1024 * 1024
_MEMBER: Final = "images.npy"
_VERSION: Final = (1, 0)
"""Of the array format; the header of later ones may itself be gigabytes."""
_FIELDS: Final = frozenset(("schema", "images", "cards"))
_CARD_FIELDS: Final = frozenset(("image", "questions"))
_QUESTION_FIELDS: Final = frozenset(("kind", "prompt", "words", "answer"))


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one card.

    Attributes:
        kind: What is asked; scores are kept per kind.
        prompt: Name of the prompt that goes around the words.
        words: The question, as tokens.
        answer: The expected answer, as tokens, without the end token.
    """

    kind: str
    prompt: str
    words: tuple[str, ...]
    answer: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Card:
    """A picture and its questions. image: u8, rows of pixels."""

    image: bytes
    questions: tuple[Question, ...]


def read_calibration(bundle: Path, submission: Path) -> tuple[Pipeline, tuple[Card, ...]] | None:
    """Return what a trial in a process of its own asks: a pipeline, the calibration cards.

    Args:
        bundle: Directory of section files.
        submission: Where the cards are.

    Returns:
        None for a pipeline that sees no pictures, which no card asks.

    Raises:
        ContractError: The pipeline cannot be read.
        MalformedModelError: The cards cannot.
    """
    pipeline = parse_pipeline((bundle / "pipeline").read_bytes())
    if pipeline.image is None:
        return None
    return pipeline, read_cards(submission, CALIBRATION, pipeline.image)


def read_cards(directory: Path, stem: str, image: ImageSpec) -> tuple[Card, ...]:
    """Read the set `stem` of a submission.

    Raises:
        MalformedModelError: A file is missing, truncated or not in the format, or its pictures do
            not have the size that the pipeline states.
    """
    try:
        document = _document(_bytes(directory / f"{stem}.json"), stem)
        images = _images(directory / f"{stem}.npz", image)
        cards = require_list(document["cards"], "cards", MAX_CARDS)
        return tuple(_card(item, images) for item in cards)
    except (ContractError, OSError) as error:
        raise MalformedModelError(
            f"{stem} set: {_reason(error)}", hint=f"{stem}.json and {stem}.npz in format {SCHEMA}"
        ) from error


def require_sets(directory: Path) -> None:
    """Check the format of the calibration set, and of the evaluation set if there is one.

    A model that sees no pictures has no sets.

    Raises:
        MalformedModelError: As `read_cards` says, or `pipeline.json` cannot be read.
    """
    image = read_pipeline(directory).image
    if image is None:
        return
    read_cards(directory, CALIBRATION, image.size)
    if any((directory / f"{EVALUATION}{suffix}").exists() for suffix in (".json", ".npz")):
        read_cards(directory, EVALUATION, image.size)


def _reason(error: ContractError | OSError) -> str:
    """Return what happened, with the name of the file but not its folder on this machine."""
    if not isinstance(error, OSError) or error.filename is None:
        return str(error)
    return f"{Path(error.filename).name}: {error.strerror}"


def _bytes(path: Path) -> bytes:
    """Return the bytes of a document, or a few too many for its parser if it is too long."""
    with path.open("rb") as file:
        return file.read(MAX_JSON_BYTES + 1)


def _document(data: bytes, stem: str) -> Mapping[str, Json]:
    document = require_fields(parse_object(data, limit_bytes=MAX_JSON_BYTES), _FIELDS, stem)
    if document["schema"] != SCHEMA or document["images"] != f"{stem}.npz":
        raise ContractError(f"expected schema {SCHEMA!r} and images '{stem}.npz'")
    return document


def _images(path: Path, spec: ImageSpec) -> NDArray[np.uint8]:
    """Return the pictures of an archive: nothing is unpacked before its size is known to fit."""
    shape = (spec.height, spec.width, spec.channels)[: 2 if spec.channels == 1 else 3]
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_MEMBER) as stream:
            found, is_fortran, dtype = _header(stream)
            if dtype != np.uint8 or found[1:] != shape:
                raise ContractError(
                    f"images are {dtype} {found[1:]}, the pipeline says uint8 {shape}"
                )
            size = math.prod(found)
            if not 0 <= size <= MAX_IMAGE_BYTES:
                raise ContractError(f"{path.name} unpacks to {size} bytes, limit {MAX_IMAGE_BYTES}")
            data = stream.read(size + 1)
    except UNREADABLE as error:
        raise ContractError(f"{path.name} is not an archive with `images`: {error}") from error
    if len(data) != size:
        raise ContractError(f"{path.name} holds another number of bytes than its shape says")
    order: Literal["C", "F"] = "F" if is_fortran else "C"
    return np.frombuffer(data, np.uint8).reshape(found, order=order)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, order and type of the array that `stream` holds in format NPY."""
    version = npy.read_magic(stream)
    if version != _VERSION:
        raise ContractError(f"`images` has version {version} of its format, not {_VERSION}")
    return npy.read_array_header_1_0(stream)


def _card(value: Json, images: NDArray[np.uint8]) -> Card:
    fields = require_fields(value, _CARD_FIELDS, "card")
    row = require_integer(fields["image"], "image", 0, len(images) - 1)
    questions = require_list(fields["questions"], "questions", MAX_QUESTIONS)
    return Card(images[row].tobytes(), tuple(_question(item) for item in questions))


def _question(value: Json) -> Question:
    fields: Mapping[str, Json] = require_fields(value, _QUESTION_FIELDS, "question")
    return Question(
        kind=require_text(fields["kind"], "kind", MAX_TEXT),
        prompt=require_text(fields["prompt"], "prompt", MAX_TEXT),
        words=_words(fields["words"]),
        answer=_words(fields["answer"]),
    )


def _words(value: Json) -> tuple[str, ...]:
    return tuple(
        require_text(item, "word", MAX_TEXT) for item in require_list(value, "words", MAX_WORDS)
    )
