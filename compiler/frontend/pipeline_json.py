"""Strict reading of `pipeline.json`, schema `sparsefleet.pipeline/1`.

Every key is known, every role fits its component, every number is in range; anything else is a
`MalformedModelError` that says where.
"""

import errno
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from compiler.contract.canonical import Json, parse_object
from compiler.contract.errors import ContractError
from compiler.errors import MalformedModelError
from compiler.passes.pipeline_spec import (
    FAMILY_GRAPH,
    FAMILY_VISION,
    QUANTISE,
    ROLE_TENSOR,
    Component,
    ImageSpec,
    KvWindow,
    PipelineSpec,
    Port,
    PruneSpec,
    TokenSpec,
)

SCHEMA: Final = "sparsefleet.pipeline/1"
FILE_NAME: Final = "pipeline.json"
MAX_PIPELINE_BYTES: Final = 4 * 1024 * 1024
MAX_TOKENS: Final = 4096
MAX_CONTEXT: Final = 1 << 17
MAX_IMAGE_SIDE: Final = 4096
MAX_VOCABULARY: Final = 1 << 20
DEFAULT_STEP_TOKENS: Final = 64
MAX_VISUAL_TOKENS: Final = 1 << 16
LEAST_MASS: Final = 1e-6
MAX_AXES: Final = 8
MAX_ELEMENTS: Final = 1 << 26


class _Roles:
    """Roles of one component: allowed for inputs, allowed for outputs, and required ones."""

    def __init__(self, inputs: str, outputs: str, required: str) -> None:
        self.inputs = frozenset(inputs.split())
        self.outputs = frozenset(outputs.split())
        self.required = frozenset(required.split())


FAMILIES: Final[Mapping[str, Mapping[str, _Roles]]] = MappingProxyType(
    {
        FAMILY_VISION: MappingProxyType(
            {
                "vision": _Roles("image constant", "embeds positions unused", "image embeds"),
                "embed": _Roles("token_ids", "embeds unused", "token_ids embeds"),
                "decoder": _Roles(
                    "embeds positions causal_mask attention_mask past_key past_value constant",
                    "logits present_key present_value routing unused",
                    "embeds logits past_key past_value present_key present_value",
                ),
            }
        ),
        FAMILY_GRAPH: MappingProxyType(
            {"model": _Roles("tensor constant", "tensor unused", "tensor")}
        ),
    }
)
ADAPTERS_MERGE: Final = "merge"
ADAPTERS: Final = ("branch", ADAPTERS_MERGE)
"""What becomes of low-rank branches beside a weight."""
MAX_INTEGER: Final = 1 << 64
"""Of a number that may also have a fraction."""
_REPEATABLE: Final = frozenset(
    {"constant", "unused", "past_key", "past_value", "present_key", "present_value"}
)


def read_pipeline(directory: Path) -> PipelineSpec:
    """Read `pipeline.json` of a submission directory.

    Raises:
        MalformedModelError: The file is missing, is not strict JSON, or breaks the schema.
    """
    path = directory / FILE_NAME
    try:
        data = _read(path)
    except OSError as error:
        raise MalformedModelError(
            f"{FILE_NAME} cannot be read: {error.strerror}",
            hint=f"a submission is a directory with {FILE_NAME} and the ONNX files it names",
        ) from error
    return parse_pipeline(data)


def _read(path: Path) -> bytes:
    """Return a regular file, or a byte too many of it; no pipe or device is opened."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        return file.read(MAX_PIPELINE_BYTES + 1)


def parse_pipeline(data: bytes) -> PipelineSpec:
    """Parse the bytes of a `pipeline.json`.

    Raises:
        MalformedModelError: Not strict JSON, or it breaks the schema.
    """
    try:
        document = parse_object(data, limit_bytes=MAX_PIPELINE_BYTES)
    except ContractError as error:
        raise MalformedModelError(f"{FILE_NAME}: {error}") from error
    top = _Reader(document, FILE_NAME)
    schema = top.text("schema")
    if schema != SCHEMA:
        raise MalformedModelError(f"{FILE_NAME} has schema {schema!r}", hint=f"write {SCHEMA!r}")
    family = top.text("family")
    if family not in FAMILIES:
        raise MalformedModelError(
            f"unknown family {family!r}", hint=f"families are {', '.join(sorted(FAMILIES))}"
        )
    is_vision = family == FAMILY_VISION
    spec = PipelineSpec(
        family=family,
        components=_components(top.table("components"), FAMILIES[family]),
        max_context=top.integer("max_context", 1, MAX_CONTEXT, None if is_vision else 1),
        max_step_tokens=top.integer("max_step_tokens", 1, MAX_TOKENS, DEFAULT_STEP_TOKENS),
        image=_image(top.table("image")) if is_vision else None,
        tokens=_tokens(top.table("tokens")) if is_vision else None,
        prune=_prune(top.table("prune")) if is_vision and "prune" in document else None,
        kv=_kv(top.table("kv")) if is_vision and "kv" in document else None,
        quantise=top.choice("quantise", QUANTISE),
        merge_adapters=top.choice("adapters", ADAPTERS) == ADAPTERS_MERGE,
    )
    top.finish()
    return spec


class _Reader:
    """One JSON object: typed access, and a check that nothing else stands in it."""

    def __init__(self, value: Json, where: str) -> None:
        if not isinstance(value, Mapping):
            raise MalformedModelError(f"{where} must be an object")
        self.value = value
        self.where = where
        self.seen: set[str] = set()

    def get(self, key: str) -> Json:
        if key not in self.value:
            raise MalformedModelError(f"{self.where} has no {key!r}")
        self.seen.add(key)
        return self.value[key]

    def table(self, key: str) -> "_Reader":
        return _Reader(self.get(key), f"{self.where}: {key}")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise MalformedModelError(f"{self.where}: {key!r} must be a non-empty string")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        if key not in self.value and default is not None:
            return default
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise MalformedModelError(
                f"{self.where}: {key!r} must be an integer from {low} to {high}"
            )
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Return one of `choices`; the first if the key is absent."""
        if key not in self.value:
            return choices[0]
        value = self.text(key)
        if value not in choices:
            raise MalformedModelError(
                f"{self.where}: {key!r} is {value!r}", hint=f"choose one of {', '.join(choices)}"
            )
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise MalformedModelError(f"{self.where}: {key!r} must be a number")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise MalformedModelError(f"{self.where}: {key!r} is beyond {MAX_INTEGER}")
        return float(value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise MalformedModelError(f"{self.where}: {key!r} must be a list of strings")
        return tuple(value)

    def sizes(self, key: str, most: int, product: int) -> tuple[int, ...]:
        value = self.get(key)
        good = isinstance(value, list) and len(value) <= most
        sizes = (
            [v for v in value if isinstance(v, int) and not isinstance(v, bool) and v >= 1]
            if (isinstance(value, list))
            else []
        )
        if not good or len(sizes) != len(value) or prod(sizes) > product:  # type: ignore[arg-type]
            raise MalformedModelError(
                f"{self.where}: {key!r} must be up to {most} positive sizes,"
                f" together at most {product} elements"
            )
        return tuple(sizes)

    def finish(self) -> None:
        unknown = sorted(set(self.value) - self.seen)
        if unknown:
            raise MalformedModelError(f"{self.where} has unknown key {unknown[0]!r}")


def _components(reader: _Reader, roles: Mapping[str, _Roles]) -> tuple[Component, ...]:
    components = tuple(_component(name, reader.table(name), roles[name]) for name in roles)
    reader.finish()
    return components


def _component(name: str, reader: _Reader, roles: _Roles) -> Component:
    file = reader.text("file")
    if PurePosixPath(file).name != file or file in {".", ".."} or "\\" in file or "\0" in file:
        raise MalformedModelError(
            f"{reader.where}: file {file!r} is not a plain file name",
            hint="put all files of a submission into one directory",
        )
    inputs = _ports(reader.table("inputs"), roles.inputs)
    outputs = _ports(reader.table("outputs"), roles.outputs)
    reader.finish()
    given = {port.role.partition(":")[0] for port in (*inputs, *outputs)}
    missing = sorted(roles.required - given)
    if missing:
        raise MalformedModelError(f"{reader.where} has no input or output of role {missing[0]!r}")
    return Component(name, file, inputs, outputs)


TENSOR_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,24}")
"""In family `graph` a role `tensor:<name>` tells several tensors apart."""


def _is_role(role: str, allowed: frozenset[str]) -> bool:
    base, colon, name = role.partition(":")
    if colon:
        return base == ROLE_TENSOR in allowed and TENSOR_NAME.fullmatch(name) is not None
    return role in allowed


def _ports(reader: _Reader, allowed: frozenset[str]) -> tuple[Port, ...]:
    ports = []
    for name in reader.value:
        entry = reader.table(name)
        role = entry.text("role")
        if not _is_role(role, allowed):
            raise MalformedModelError(
                f"{entry.where} has role {role!r}", hint=f"roles here: {', '.join(sorted(allowed))}"
            )
        value = entry.number("value") if role == "constant" else None
        shape = None
        if role.partition(":")[0] == ROLE_TENSOR and "shape" in entry.value:
            shape = entry.sizes("shape", MAX_AXES, MAX_ELEMENTS)
        entry.finish()
        ports.append(Port(name, role, value, shape))
    single = [port.role for port in ports if port.role not in _REPEATABLE]
    twice = sorted(role for role in set(single) if single.count(role) > 1)
    if twice:
        raise MalformedModelError(f"{reader.where}: role {twice[0]!r} is given twice")
    return tuple(ports)


def _image(reader: _Reader) -> ImageSpec:
    image = ImageSpec(
        height=reader.integer("height", 1, MAX_IMAGE_SIDE),
        width=reader.integer("width", 1, MAX_IMAGE_SIDE),
        channels=reader.integer("channels", 1, 4),
        divide=reader.number("divide"),
        subtract=reader.number("subtract"),
        grid=_grid(reader),
    )
    reader.finish()
    if not image.divide > 0.0:
        raise MalformedModelError(f"{reader.where}: 'divide' must be positive")
    return image


def _grid(reader: _Reader) -> tuple[int, int] | None:
    if "grid" not in reader.value:
        return None
    grid = reader.table("grid")
    sides = grid.integer("rows", 1, MAX_IMAGE_SIDE), grid.integer("columns", 1, MAX_IMAGE_SIDE)
    grid.finish()
    if sides[0] == sides[1]:
        raise MalformedModelError(f"{grid.where}: a square grid is not written down")
    return sides


def _prune(reader: _Reader) -> PruneSpec | None:
    mode = _choice(reader, "mode", ("model", "top_p"), "model")
    if mode == "model":
        reader.finish()
        return None
    prune = PruneSpec(
        p=reader.number("p"),
        min_keep=reader.integer("min_keep", 1, MAX_VISUAL_TOKENS, 1),
        max_keep=reader.integer("max_keep", 1, MAX_VISUAL_TOKENS, MAX_VISUAL_TOKENS),
        merge=reader.integer("merge", 0, MAX_VISUAL_TOKENS, 0),
        score=_choice(reader, "score", ("row", "mean"), "row"),
    )
    reader.finish()
    if not LEAST_MASS <= prune.p <= 1.0:
        raise MalformedModelError(
            f"{reader.where}: 'p' must be in ({LEAST_MASS}, 1]",
            hint="p is the share of attention that kept tokens hold; 0.8 is a good start",
        )
    if prune.min_keep > prune.max_keep:
        raise MalformedModelError(
            f"{reader.where}: 'min_keep' {prune.min_keep} exceeds 'max_keep' {prune.max_keep}",
            hint="leave 'max_keep' out to keep every token that is needed",
        )
    return prune


def _choice(reader: _Reader, key: str, choices: tuple[str, ...], default: str) -> str:
    found = reader.text(key) if key in reader.value else default
    if found not in choices:
        raise MalformedModelError(
            f"{reader.where}: {key!r} is {found!r}", hint=f"one of {', '.join(choices)}"
        )
    return found


def _kv(reader: _Reader) -> KvWindow:
    window = KvWindow(
        sink=reader.integer("sink", 0, MAX_CONTEXT, 0),
        window=reader.integer("window", 1, MAX_CONTEXT),
    )
    reader.finish()
    return window


def _tokens(reader: _Reader) -> TokenSpec:
    vocabulary = reader.texts("vocabulary")
    if not 1 <= len(vocabulary) <= MAX_VOCABULARY or len(set(vocabulary)) != len(vocabulary):
        raise MalformedModelError(f"{reader.where}: 'vocabulary' must be distinct tokens")
    prompts = reader.table("prompts")
    tokens = TokenSpec(
        vocabulary=vocabulary,
        eos=reader.integer("eos", 0, len(vocabulary) - 1),
        position_base=reader.integer("position_base", 0, MAX_CONTEXT),
        prompts=MappingProxyType({name: prompts.texts(name) for name in sorted(prompts.value)}),
        max_answer_tokens=reader.integer("max_answer_tokens", 1, MAX_CONTEXT),
    )
    reader.finish()
    known = set(vocabulary)
    for name, prompt in tokens.prompts.items():
        unknown = [token for token in prompt if token not in known]
        if unknown:
            raise MalformedModelError(f"{prompts.where}: {name!r} has unknown token {unknown[0]!r}")
    return tokens
