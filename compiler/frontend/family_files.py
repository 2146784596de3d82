"""Which files of a directory are the parts of a multimodal model, by family.

`families.write_family_submission` calls `find_family`. A family is recognised by the presence of
its files alone; what a file holds is read later. Directories of transformers.js carry every file in
several precisions: the highest one present is taken unless another is asked for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from compiler.errors import MalformedModelError

GENAI_CONFIG: Final = "genai_config.json"
MAX_CONFIG_BYTES: Final = 64 * 1024 * 1024
SUFFIXES: Final = ("", "_fp16", "_int8", "_uint8", "_quantized", "_q8", "_q4", "_q4f16", "_bnb4")
"""Precisions as transformers.js writes them into file names, highest first."""


@dataclass(frozen=True, slots=True)
class FamilyFiles:
    """The parts of a model.

    Attributes:
        family: `ort-genai`, `transformers.js` or `minicpm-v`.
        vision: Files that are run one after the other on the image.
        embed: From token ids to rows.
        decoder: From rows to logits.
        config: What the configuration files of the family say, merged.
        names: Names of inputs and outputs per part, where a configuration gives them: meaning to
            name.
    """

    family: str
    vision: tuple[Path, ...]
    embed: Path
    decoder: Path
    config: Mapping[str, Any]
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def find_family(source: Path, precision: str | None = None) -> FamilyFiles:
    """Recognise the family of a directory.

    Args:
        source: The directory as downloaded; ONNX files may be in its folder `onnx`.
        precision: Suffix of the file names, such as `q4` or `fp16`; empty for none. The highest one
            present if None.

    Raises:
        MalformedModelError: No family fits; or one fits and a file of it is missing.
    """
    if (source / GENAI_CONFIG).is_file():
        return _ort_genai(source)
    folder = source / "onnx" if (source / "onnx").is_dir() else source
    if any(folder.glob("vpm*.onnx")):
        return _by_stems(source, folder, "minicpm-v", _MINICPM, precision)
    if any(folder.glob("vision_encoder*.onnx")):
        return _by_stems(source, folder, "transformers.js", _TRANSFORMERS_JS, precision)
    raise MalformedModelError(
        "the directory is of no multimodal family that is known",
        hint="known are: genai_config.json with vision, embedding and decoder; vision_encoder,"
        " embed_tokens and decoder_model_merged; vpm, resampler, embed_tokens and llm",
    )


_TRANSFORMERS_JS: Final = (
    ("vision_encoder",),
    ("embed_tokens",),
    ("decoder_model_merged", "decoder_with_past_model", "decoder_model"),
)
_MINICPM: Final = (("vpm",), ("resampler",), ("embed_tokens", "embed"), ("llm", "decoder_model"))


def _by_stems(
    source: Path,
    folder: Path,
    family: str,
    parts: tuple[tuple[str, ...], ...],
    precision: str | None,
) -> FamilyFiles:
    wanted = SUFFIXES if precision is None else (f"_{precision}" if precision else "",)
    *vision, embed, decoder = (_pick(folder, stems, wanted, family) for stems in parts)
    return FamilyFiles(family, tuple(vision), embed, decoder, _configs(source))


def _pick(folder: Path, stems: tuple[str, ...], suffixes: tuple[str, ...], family: str) -> Path:
    for suffix in suffixes:
        for stem in stems:
            path = folder / f"{stem}{suffix}.onnx"
            if path.is_file():
                return path
    present = sorted(path.name for path in folder.glob(f"{stems[0]}*.onnx"))
    raise MalformedModelError(
        f"a directory of family {family} needs {' or '.join(f'{s}.onnx' for s in stems)}"
        + (f" with suffix {suffixes[0]!r}" if len(suffixes) == 1 else ""),
        hint=f"present are {', '.join(present)}" if present else "the download may be incomplete",
    )


def _configs(source: Path) -> dict[str, Any]:
    """Merge the configuration files; what the later ones say wins."""
    merged: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json", "preprocessor_config.json"):
        if (source / name).is_file():
            merged |= read_json(source / name)
    return merged


def read_json(path: Path) -> dict[str, Any]:
    """Read a configuration file: one JSON object.

    Raises:
        MalformedModelError: Too long, no JSON, or no object.
    """
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise MalformedModelError(f"{path.name} is longer than {MAX_CONFIG_BYTES} bytes")
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise MalformedModelError(f"{path.name} cannot be read as JSON") from error
    if not isinstance(document, dict):
        raise MalformedModelError(f"{path.name} holds no JSON object")
    return document


def _ort_genai(source: Path) -> FamilyFiles:
    document = read_json(source / GENAI_CONFIG)
    model = document.get("model")
    if not isinstance(model, dict):
        raise MalformedModelError(f"{GENAI_CONFIG} has no object 'model'")
    files: dict[str, Path] = {}
    names: dict[str, dict[str, str]] = {}
    for part, ours in (("vision", "vision"), ("embedding", "embed"), ("decoder", "decoder")):
        section = model.get(part)
        if not isinstance(section, dict) or not isinstance(section.get("filename"), str):
            raise MalformedModelError(
                f"{GENAI_CONFIG}: model.{part}.filename is missing",
                hint="a multimodal model has vision, embedding and decoder",
            )
        files[ours] = _named(source, section["filename"], part)
        names[ours] = _texts(section.get("inputs")) | _texts(section.get("outputs"))
    config = {**_configs(source), **{k: v for k, v in model.items() if not isinstance(v, dict)}}
    return FamilyFiles(
        "ort-genai", (files["vision"],), files["embed"], files["decoder"], config, names
    )


def _named(source: Path, name: str, part: str) -> Path:
    if PurePosixPath(name).name != name or name in {"", ".", ".."} or "\\" in name or "\0" in name:
        raise MalformedModelError(f"{GENAI_CONFIG}: model.{part}.filename {name!r} is no file name")
    if not (source / name).is_file():
        raise MalformedModelError(
            f"{GENAI_CONFIG}: model.{part} is in {name!r}, which is missing",
            hint="the download may be incomplete",
        )
    return source / name


def _texts(value: object) -> dict[str, str]:
    table = value if isinstance(value, dict) else {}
    return {key: text for key, text in table.items() if isinstance(text, str)}
