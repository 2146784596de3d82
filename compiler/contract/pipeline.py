"""The `pipeline` section: what the words, pictures and limits of a bundle are.

The plan says how to compute; this section says what a caller may feed it and what comes out: the
vocabulary, the prompts, the size of a picture, the limits, and the programs with their ports.
Schema `sparsefleet.pipeline-section/1`, canonical JSON, unknown fields refused. The device parses
it after its digest was verified.

A program `prefill` means that the picture decides how many of its tokens go on: the fixed rows that
`see` gives are the most there can be, `count` says how many of them `prefill` gets.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fields import (
    require_fields,
    require_integer,
    require_list,
    require_object,
    require_text,
)

SCHEMA: Final = "sparsefleet.pipeline-section/1"
FAMILY_VISION: Final = "vision-embed-decoder"
FAMILY_GRAPH: Final = "graph"
FAMILIES: Final = (FAMILY_VISION, FAMILY_GRAPH)
DTYPE_BYTES: Final[Mapping[str, int]] = {"f32": 4, "i32": 4, "u8": 1}
MAX_PIPELINE_BYTES: Final = 8 * 1024 * 1024
MAX_VOCABULARY: Final = 1 << 20
MAX_TOKEN: Final = 1024
MAX_PROMPTS: Final = 64
MAX_SHOWN: Final = 64
MAX_PORTS: Final = 16
MAX_PROGRAMS: Final = 16
MAX_SIDE: Final = 1 << 14
MAX_COUNT: Final = 1 << 20
SEE: Final = "see"
PREFILL: Final = "prefill"
COUNT: Final = "count"
PREFIX: Final = "_prefix"
SUFFIX: Final = "_suffix"
_FIELDS: Final = frozenset(("schema", "family", "image", "tokens", "limits", "programs"))
_IMAGE_FIELDS: Final = frozenset(("height", "width", "channels"))
_TOKEN_FIELDS: Final = frozenset(
    ("vocabulary", "eos", "position_base", "prompts", "max_answer_tokens")
)
_LIMIT_FIELDS: Final = frozenset(("max_context", "max_step_tokens"))
_PROGRAM_FIELDS: Final = frozenset(("inputs", "outputs"))


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """Size of the picture that `see` takes: u8, rows of pixels, channels last.

    Attributes:
        grid: Rows and columns of its tokens, None if they are a square or stand in one line. Only
            models that tell height from width need it; an agent that does not know the field
            refuses the section.
    """

    height: int
    width: int
    channels: int
    grid: tuple[int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of one picture."""
        return self.height * self.width * self.channels


def shown(text: str) -> str:
    """Return `text` as errors repeat it: cut off where it is longer than `MAX_SHOWN`."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """Words of the model.

    Attributes:
        vocabulary: Token text by id.
        eos: Id that ends an answer.
        position_base: Position of the first text token.
        prompts: Token texts by name. `caption` stands alone; `question_prefix` and
            `question_suffix` go around the words of a `question`.
        max_answer_tokens: An answer is cut off after so many tokens.
    """

    vocabulary: tuple[str, ...]
    eos: int
    position_base: int
    prompts: Mapping[str, tuple[str, ...]]
    max_answer_tokens: int
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {token: at for at, token in enumerate(self.vocabulary)}
        object.__setattr__(self, "_index", index)

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return the ids of `words`.

        Raises:
            ContractError: A word is not in the vocabulary; the message names it.
        """
        try:
            return [self._index[word] for word in words]
        except KeyError as error:
            raise ContractError(
                f"unknown word {shown(error.args[0])!r}", hint="the model knows only its vocabulary"
            ) from error

    def words(self, ids: Iterable[int]) -> list[str]:
        """Return the token texts of `ids`."""
        return [self.vocabulary[token] for token in ids]

    def prompt(self, name: str, words: Sequence[str] = ()) -> list[int]:
        """Return the ids of the prompt `name` around `words`.

        Raises:
            ContractError: No such prompt, a fixed prompt was given words, or a word is unknown.
        """
        if name in self.prompts:
            if words:
                raise ContractError(f"prompt {name!r} takes no words")
            return self.ids(self.prompts[name])
        if name + PREFIX not in self.prompts or name + SUFFIX not in self.prompts:
            raise ContractError(
                f"no prompt {shown(name)!r}", hint="prompts: " + ", ".join(sorted(self.prompts))
            )
        return self.ids([*self.prompts[name + PREFIX], *words, *self.prompts[name + SUFFIX]])


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a program: a row-major matrix.

    Attributes:
        rows: Rows, or the most rows if `dynamic` (then the number of tokens of a run).
    """

    rows: int
    cols: int
    dtype: str
    dynamic: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.cols * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """Ports of one program by role."""

    inputs: Mapping[str, Port]
    outputs: Mapping[str, Port]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What one bundle takes and gives.

    Attributes:
        image: Present if the model sees pictures.
        tokens: Present if the model answers in words.
        max_context: The most rows of a context; 0 without a cache. A windowed cache holds fewer.
        max_step_tokens: The most tokens of one run.
    """

    family: str
    image: ImageSpec | None
    tokens: TokenSpec | None
    max_context: int
    max_step_tokens: int
    programs: Mapping[str, ProgramSpec]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        return canonical_bytes(
            {
                "schema": SCHEMA,
                "family": self.family,
                "image": _image_json(self.image),
                "tokens": _tokens_json(self.tokens),
                "limits": {
                    "max_context": self.max_context,
                    "max_step_tokens": self.max_step_tokens,
                },
                "programs": {
                    name: {
                        "inputs": _ports_json(program.inputs),
                        "outputs": _ports_json(program.outputs),
                    }
                    for name, program in self.programs.items()
                },
            }
        )


def parse_pipeline(data: bytes) -> Pipeline:
    """Parse and check a `pipeline` section.

    Raises:
        LimitExceededError: Longer than `MAX_PIPELINE_BYTES`, or a list beyond its limit.
        ContractError: Any field is missing, unknown, of the wrong type or out of range, or the
            bytes are not canonical.
    """
    document = require_fields(
        parse_object(data, limit_bytes=MAX_PIPELINE_BYTES), _FIELDS, "pipeline"
    )
    if document["schema"] != SCHEMA:
        raise ContractError(f"pipeline schema {document['schema']!r}, expected {SCHEMA!r}")
    if document["family"] not in FAMILIES:
        raise ContractError(f"unknown family {document['family']!r}")
    limits = require_fields(document["limits"], _LIMIT_FIELDS, "limits")
    pipeline = Pipeline(
        family=str(document["family"]),
        image=_image(document["image"]),
        tokens=_tokens(document["tokens"]),
        max_context=require_integer(limits["max_context"], "max_context", 0, MAX_COUNT),
        max_step_tokens=require_integer(limits["max_step_tokens"], "max_step_tokens", 1, MAX_COUNT),
        programs=_programs(document["programs"]),
    )
    _check_prefill(pipeline.programs)
    if pipeline.to_bytes() != data:
        raise ContractError("pipeline section is not in canonical form")
    return pipeline


def _image_json(image: ImageSpec | None) -> Json:
    if image is None:
        return None
    size: dict[str, Json] = {
        "height": image.height,
        "width": image.width,
        "channels": image.channels,
    }
    return size if image.grid is None else size | {"grid": list(image.grid)}


def _tokens_json(tokens: TokenSpec | None) -> Json:
    if tokens is None:
        return None
    return {
        "vocabulary": list(tokens.vocabulary),
        "eos": tokens.eos,
        "position_base": tokens.position_base,
        "prompts": {name: list(words) for name, words in tokens.prompts.items()},
        "max_answer_tokens": tokens.max_answer_tokens,
    }


def _ports_json(ports: Mapping[str, Port]) -> Json:
    return {role: [port.rows, port.cols, port.dtype, port.dynamic] for role, port in ports.items()}


def _image(value: Json) -> ImageSpec | None:
    if value is None:
        return None
    has_grid = isinstance(value, dict) and "grid" in value
    wanted = _IMAGE_FIELDS | {"grid"} if has_grid else _IMAGE_FIELDS
    fields = require_fields(value, wanted, "image")
    grid = None
    if has_grid:
        sides = [
            require_integer(side, "grid", 1, MAX_SIDE)
            for side in require_list(fields["grid"], "grid", 2)
        ]
        if len(sides) != 2 or sides[0] == sides[1]:
            raise ContractError("grid must be two different numbers: rows and columns of tokens")
        grid = (sides[0], sides[1])
    return ImageSpec(
        height=require_integer(fields["height"], "height", 1, MAX_SIDE),
        width=require_integer(fields["width"], "width", 1, MAX_SIDE),
        channels=require_integer(fields["channels"], "channels", 1, 4),
        grid=grid,
    )


def _tokens(value: Json) -> TokenSpec | None:
    if value is None:
        return None
    fields = require_fields(value, _TOKEN_FIELDS, "tokens")
    vocabulary = _texts(fields["vocabulary"], "vocabulary", MAX_VOCABULARY)
    if len(set(vocabulary)) != len(vocabulary) or not vocabulary:
        raise ContractError("vocabulary must hold every token once, and at least one")
    prompts = require_object(fields["prompts"], "prompts", MAX_PROMPTS)
    tokens = TokenSpec(
        vocabulary=vocabulary,
        eos=require_integer(fields["eos"], "eos", 0, len(vocabulary) - 1),
        position_base=require_integer(fields["position_base"], "position_base", 0, MAX_COUNT),
        prompts={name: _texts(words, "prompt", MAX_COUNT) for name, words in prompts.items()},
        max_answer_tokens=require_integer(
            fields["max_answer_tokens"], "max_answer_tokens", 1, MAX_COUNT
        ),
    )
    for words in tokens.prompts.values():
        tokens.ids(words)
    return tokens


def _programs(value: Json) -> dict[str, ProgramSpec]:
    programs = {}
    for name, item in require_object(value, "programs", MAX_PROGRAMS).items():
        fields = require_fields(item, _PROGRAM_FIELDS, "program")
        programs[name] = ProgramSpec(_ports(fields["inputs"]), _ports(fields["outputs"]))
    if not programs:
        raise ContractError("a pipeline needs at least one program")
    return programs


def _check_prefill(programs: Mapping[str, ProgramSpec]) -> None:
    """Check that `prefill`, if there is one, takes rows that `see` gives and counts."""
    if PREFILL not in programs:
        return
    given = programs[SEE].outputs if SEE in programs else {}
    if COUNT not in given or given[COUNT] != Port(1, 1, "i32", dynamic=False):
        raise ContractError(f"program {PREFILL!r} needs the {COUNT!r} of {SEE!r}")
    for role, port in programs[PREFILL].inputs.items():
        source = given.get(role)
        if source is None or not port.dynamic or source.dynamic:
            raise ContractError(f"program {PREFILL!r} takes no rows {role!r} of {SEE!r}")
        if (source.cols, source.dtype) != (port.cols, port.dtype):
            raise ContractError(f"rows {role!r} of {SEE!r} do not fit {PREFILL!r}")


def _ports(value: Json) -> dict[str, Port]:
    return {role: _port(item) for role, item in require_object(value, "ports", MAX_PORTS).items()}


def _port(value: Json) -> Port:
    if not isinstance(value, list) or len(value) != 4:
        raise ContractError("a port is [rows, cols, dtype, dynamic]")
    rows, cols, dtype, dynamic = value
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES or not isinstance(dynamic, bool):
        raise ContractError("a port is [rows, cols, dtype, dynamic]")
    return Port(
        require_integer(rows, "rows", 1, MAX_COUNT),
        require_integer(cols, "cols", 1, MAX_COUNT),
        dtype,
        dynamic,
    )


def _texts(value: Json, what: str, most: int) -> tuple[str, ...]:
    return tuple(require_text(item, what, MAX_TOKEN) for item in require_list(value, what, most))
