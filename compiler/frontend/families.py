"""Directories of multimodal families as submissions: `write_family_submission`.

    directory --family_files--> parts --family_parts--> vision, embed, decoder --+--> pipeline.json

Vision's pixels are normalised by its own first convolution, the embedding model loses the splice
(which was first shown to be one), the decoder keeps its attention mask as an input that is known to
hide nothing. The splice itself is the order of programs: rows of text, rows of the picture, rows of
text go into the same cache, which is what replacing rows at the image token's places means; it is
`mm.splice` in the IR. What is missing or unknown is an error that names it.

No family brings pictures and questions: before it is compiled, a submission needs a calibration set
of its owner's (`driver.cards`), which the self-test and the grids of W4 are made from.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any, Final

import onnx

from compiler.dialects.types import shape_of
from compiler.errors import MalformedModelError
from compiler.frontend.family_files import FamilyFiles, find_family, read_json
from compiler.frontend.family_parts import (
    Normalisation,
    chain,
    image_sizes,
    lookup_only,
    normalise_pixels,
    take_branch,
    with_batch,
)
from compiler.frontend.importer import import_pipeline
from compiler.frontend.limits import DEFAULT_LIMITS, ImportLimits
from compiler.frontend.onnx_file import read_model
from compiler.frontend.pipeline_json import (
    FILE_NAME,
    MAX_CONTEXT,
    MAX_VOCABULARY,
    SCHEMA,
    read_pipeline,
)
from compiler.passes.functions import arguments, function, results
from compiler.passes.pipeline_spec import FAMILY_VISION, PipelineSpec

CACHE_BRANCH: Final = "use_cache_branch"
"""Merged decoders have a branch for calls with a cache; an empty cache makes the first call."""
POSITION_AXES: Final = 3
"""Positions (3, 1, T): time, height and width."""
INLINE_BYTES: Final = 1 << 30
"""A model with more bytes of weights is written with external data."""


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """What a family's files do not say.

    Attributes:
        precision: See `find_family`.
        max_context: Rows of the cache; what the configuration says if None, 4096 at most.
        max_step_tokens: The most token rows of one run.
        max_answer_tokens: Where an answer is cut off.
        prompts: Token texts by prompt, see `pipeline.json`.
        limits: What reading the files may cost.
    """

    precision: str | None = None
    max_context: int | None = None
    max_step_tokens: int = 64
    max_answer_tokens: int = 256
    prompts: Mapping[str, tuple[str, ...]] | None = None
    limits: ImportLimits = DEFAULT_LIMITS


def write_family_submission(
    source: Path, out: Path, options: FamilyOptions | None = None
) -> PipelineSpec:
    """Write a submission of family `vision-embed-decoder` for a model's directory.

    Args:
        source: Directory in the layout of a family; nothing outside it is read.
        out: Directory for `pipeline.json` and three ONNX files; made if it is not there.
        options: What the files do not say.

    Returns:
        What `pipeline.json` says; the submission has been imported once.

    Raises:
        MalformedModelError: The family is unknown, a file or a fact is missing, or the files
            contradict each other.
        UnsupportedOperatorError: A node's operator has no rule.
        LimitError: A file is larger than the limits.
    """
    options = options or FamilyOptions()
    files = find_family(source, options.precision)
    out.mkdir(parents=True, exist_ok=True)
    vision, normalisation = _vision(files, options)
    decoder = take_branch(read_model(files.decoder, options.limits), CACHE_BRANCH, value=True)
    parts = {"vision": vision, "embed": _embed(files, options), "decoder": decoder}
    ports = {
        "vision": _vision_ports(vision),
        "embed": _embed_ports(parts["embed"]),
        "decoder": _decoder_ports(decoder, files),
    }
    height, width = image_sizes(vision)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "family": FAMILY_VISION,
        "components": {name: {"file": f"{name}.onnx", **ports[name]} for name in parts},
        "image": {"height": height, "width": width, "channels": 3, **normalisation.as_json()},
        "tokens": _tokens(source, files, decoder, options),
        "max_context": options.max_context or _context(files.config),
        "max_step_tokens": options.max_step_tokens,
    }
    for name, model in parts.items():
        _save(model, out, f"{name}.onnx")
    return _settle(out, document, options)


def _settle(out: Path, document: dict[str, Any], options: FamilyOptions) -> PipelineSpec:
    """Write `pipeline.json`, import once, and let the text begin behind the picture's tokens."""
    path = out / FILE_NAME
    path.write_text(json.dumps(document), encoding="utf-8")
    imported = import_pipeline(out, options.limits)
    made = dict(results(function(imported.module, "vision")))
    given = dict(arguments(function(imported.module, "decoder")))
    count = shape_of(made["embeds"])[-2].constant
    if "positions" in given and len(shape_of(given["positions"])) == POSITION_AXES:
        size = document["image"]
        grid = token_grid(count, size["height"], size["width"])
        if grid[0] != grid[1]:
            size["grid"] = {"rows": grid[0], "columns": grid[1]}
        count = max(grid)
    document["tokens"]["position_base"] = count
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_pipeline(out)


def token_grid(count: int, height: int, width: int) -> tuple[int, int]:
    """Return rows and columns of a picture's tokens, each of which stands for a square of pixels.

    Args:
        count: Tokens of the picture.
        height: Rows of pixels.
        width: Columns of pixels.

    Raises:
        MalformedModelError: No such grid has that many tokens.
    """
    columns = isqrt(count * width // height)
    rows = count // max(columns, 1)
    if rows * columns != count or rows * width != columns * height:
        raise MalformedModelError(
            f"a picture of {height} x {width} pixels has {count} tokens, which make no grid of"
            " squares",
            hint="a model with positions of height and width needs one token per square of pixels",
        )
    return rows, columns


# --- parts ----------------------------------------------------------------------------------------


def _vision(files: FamilyFiles, options: FamilyOptions) -> tuple[onnx.ModelProto, Normalisation]:
    models = [read_model(path, options.limits) for path in files.vision]
    model = models[0]
    for following in models[1:]:
        model = chain(model, following)
    pixels = files.names.get("vision", {}).get("pixel_values", "pixel_values")
    features = files.names.get("vision", {}).get("image_features", model.graph.output[0].name)
    model = with_batch(model, pixels, features, files.config)
    return normalise_pixels(model, Normalisation.of(files.config))


def _embed(files: FamilyFiles, options: FamilyOptions) -> onnx.ModelProto:
    model = read_model(files.embed, options.limits)
    token = image_token(files.config)
    return lookup_only(model, files.names.get("embed", {}), token)


def image_token(config: Mapping[str, Any]) -> int | None:
    """Return the id of the token that stands for the picture, if the configuration says."""
    for key in ("image_token_id", "image_token_index"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def _vision_ports(model: onnx.ModelProto) -> dict[str, Any]:
    first, *rest = _inputs(model)
    inputs: dict[str, Any] = {first: {"role": "image"}}
    inputs |= {name: {"role": "constant", "value": 1.0} for name in rest}
    embeds, *others = (info.name for info in model.graph.output)
    outputs = {embeds: {"role": "embeds"}, **{name: {"role": "unused"} for name in others}}
    return {"inputs": inputs, "outputs": outputs}


def _embed_ports(model: onnx.ModelProto) -> dict[str, Any]:
    (ids,) = _inputs(model)
    return {
        "inputs": {ids: {"role": "token_ids"}},
        "outputs": {model.graph.output[0].name: {"role": "embeds"}},
    }


_INPUT_ROLES: Final = (
    (re.compile(r"inputs_embeds"), {"role": "embeds"}),
    (re.compile(r"attention_mask"), {"role": "attention_mask"}),
    (re.compile(r"position_ids"), {"role": "positions"}),
    (re.compile(r"past(_key_values)?\.\d+\.(decoder\.)?key"), {"role": "past_key"}),
    (re.compile(r"past(_key_values)?\.\d+\.(decoder\.)?value"), {"role": "past_value"}),
    (re.compile(r"num_logits_to_keep"), {"role": "constant", "value": 0.0}),
)
_OUTPUT_ROLES: Final = (
    (re.compile(r"logits"), {"role": "logits"}),
    (re.compile(r"present(_key_values)?\.\d+\.(decoder\.)?key"), {"role": "present_key"}),
    (re.compile(r"present(_key_values)?\.\d+\.(decoder\.)?value"), {"role": "present_value"}),
)
_GENAI_NAMES: Final = {
    "inputs_embeds": "embeds",
    "attention_mask": "attention_mask",
    "position_ids": "positions",
    "past_key_names": "past_key",
    "past_value_names": "past_value",
    "logits": "logits",
    "present_key_names": "present_key",
    "present_value_names": "present_value",
}


def _decoder_ports(model: onnx.ModelProto, files: FamilyFiles) -> dict[str, Any]:
    given = [
        (re.compile(re.escape(name).replace(re.escape("%d"), r"\d+")), {"role": _GENAI_NAMES[key]})
        for key, name in files.names.get("decoder", {}).items()
        if key in _GENAI_NAMES
    ]
    inputs = {name: _role(name, [*given, *_INPUT_ROLES]) for name in _inputs(model)}
    unknown = [name for name, role in inputs.items() if role is None]
    if unknown:
        raise MalformedModelError(
            f"decoder input {unknown[0]!r} has no meaning that is known",
            hint="known are inputs_embeds, attention_mask, position_ids, past_key_values.N.key and"
            " .value, use_cache_branch, num_logits_to_keep",
        )
    outputs = {
        info.name: _role(info.name, [*given, *_OUTPUT_ROLES]) or {"role": "unused"}
        for info in model.graph.output
    }
    return {"inputs": inputs, "outputs": outputs}


def _role(name: str, table: list[tuple[re.Pattern[str], dict[str, Any]]]) -> dict[str, Any] | None:
    return next((role for pattern, role in table if pattern.fullmatch(name)), None)


def _inputs(model: onnx.ModelProto) -> list[str]:
    stored = {tensor.name for tensor in model.graph.initializer}
    return [info.name for info in model.graph.input if info.name not in stored]


# --- facts ----------------------------------------------------------------------------------------


def _tokens(
    source: Path, files: FamilyFiles, decoder: onnx.ModelProto, options: FamilyOptions
) -> dict[str, Any]:
    eos = files.config.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise MalformedModelError(
            "no configuration file says eos_token_id", hint="add it to config.json"
        )
    logits = next(info for info in decoder.graph.output if _is_logits(info, files))
    least = logits.type.tensor_type.shape.dim[-1].dim_value
    return {
        "vocabulary": _vocabulary(source, least),
        "eos": eos,
        "position_base": 0,
        "prompts": {name: list(words) for name, words in (options.prompts or {}).items()},
        "max_answer_tokens": options.max_answer_tokens,
    }


def _is_logits(info: onnx.ValueInfoProto, files: FamilyFiles) -> bool:
    return info.name == files.names.get("decoder", {}).get("logits", "logits")


def _vocabulary(source: Path, least: int) -> list[str]:
    """Return token texts by id; ids without a text get one of their own."""
    path = source / "tokenizer.json"
    if not path.is_file():
        raise MalformedModelError("tokenizer.json is missing", hint="put it beside config.json")
    document = read_json(path)
    model = document.get("model")
    table = model.get("vocab") if isinstance(model, dict) else None
    entries = table.items() if isinstance(table, dict) else ()
    texts = {at: text for text, at in entries if isinstance(at, int) and at >= 0}
    added = document.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            texts[entry["id"]] = str(entry.get("content"))
    if not texts:
        raise MalformedModelError("tokenizer.json has no vocabulary of texts and ids")
    size = max(least, max(texts) + 1)
    if size > MAX_VOCABULARY:
        raise MalformedModelError(f"tokenizer.json has token {size - 1}, limit {MAX_VOCABULARY}")
    return [texts.get(at, f"<unused {at}>") for at in range(size)]


def _context(config: Mapping[str, Any]) -> int:
    said = [config.get(key) for key in ("context_length", "max_position_embeddings")]
    known = [value for value in said if isinstance(value, int) and value > 0]
    return min([4096, MAX_CONTEXT, *known])


def _save(model: onnx.ModelProto, out: Path, name: str) -> None:
    if sum(len(tensor.raw_data) for tensor in model.graph.initializer) < INLINE_BYTES:
        onnx.save(model, out / name)
        return
    location = f"{name}.data"
    (out / location).unlink(missing_ok=True)
    onnx.save(model, out / name, save_as_external_data=True, location=location)
