"""Turn the stored EdgeCard weights and data into submissions, as a CI system would send them.

    python -m examples.edgecard.materialise v1 OUT_DIR

A submission is a directory: `pipeline.json` (schema `sparsefleet.pipeline/1`), `vision.onnx`,
`embed.onnx`, `decoder.onnx`, `calibration.json` + `.npz`, `evaluation.json` + `.npz`, and
`claim.json` (what CI says the version scores). The two data sets share one format,
`sparsefleet.cards/1`, described in README.md. Same version, same bytes.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from examples.edgecard.overlay import Tensors, apply_overlay

HERE: Final = Path(__file__).parent
WEIGHT_MAP: Final = "sparsefleet.weight_map"
CARDS_SCHEMA: Final = "sparsefleet.cards/1"
CLAIM_SCHEMA: Final = "sparsefleet.claim/1"
EOS: Final = 2
MAX_ANSWER_TOKENS: Final = 48
BAD_EOS_FACTOR: Final = 0.15


def _break_eos(tensors: Tensors) -> Tensors:
    """Return the bad version: `<eos>` gets too small a logit, by the weights only."""
    head = tensors["head.weight"].copy()
    head[EOS] = (head[EOS].astype(np.float32) * BAD_EOS_FACTOR).astype(np.float16)
    return {**tensors, "head.weight": head}


@dataclass(frozen=True, slots=True)
class VersionSpec:
    """How one version is made.

    Attributes:
        files: Weights of version 1 and the overlays applied on it, in order.
        evaluation: Cards of the evaluation set shipped with it: (data set, number of cards) pairs.
        edit: A last change of the weights, if any.
    """

    files: tuple[str, ...]
    evaluation: tuple[tuple[str, int], ...]
    edit: Callable[[Tensors], Tensors] | None = None


_V1: Final = "edgecard-v1.safetensors"
_V2: Final = "edgecard-v2.overlay.safetensors"
_V3: Final = "edgecard-v3.overlay.safetensors"
_MIXED: Final = (("evaluation", 40), ("evaluation_v2", 20))
CALIBRATION_CARDS: Final = 64
VERSIONS: Final[Mapping[str, VersionSpec]] = MappingProxyType(
    {
        "v1": VersionSpec((_V1,), (("evaluation", 60),)),
        "v2": VersionSpec((_V1, _V2), _MIXED),
        "v3": VersionSpec((_V1, _V2, _V3), _MIXED),
        "v3-bad": VersionSpec((_V1, _V2, _V3), _MIXED, _break_eos),
    }
)


def load_weights(version: str) -> Tensors:
    """Return every tensor of `version`, f16 as stored.

    Raises:
        KeyError: There is no such version.
    """
    spec = VERSIONS[version]
    tensors: Tensors = load_file(HERE / spec.files[0])
    for name in spec.files[1:]:
        tensors = apply_overlay(tensors, load_file(HERE / name))
    return spec.edit(tensors) if spec.edit else tensors


def vocabulary() -> list[str]:
    """Return the token list; a token's id is its place."""
    tokens: list[str] = json.loads((HERE / "vocab.json").read_text())
    return tokens


def fill_graph(component: str, tensors: Tensors) -> onnx.ModelProto:
    """Return `vision` or `decoder` with its initializers filled from `tensors`, f32.

    The weight map in the file's metadata says which tensor fills which initializer: `[tensor, how]`
    with `how` null, `"T"` (transposed) or a shape.
    """
    model = onnx.load(HERE / f"{component}.skel.onnx")
    weight_map = json.loads(_metadata(model, WEIGHT_MAP))
    for initializer in model.graph.initializer:
        if initializer.name not in weight_map:
            continue
        name, how = weight_map[initializer.name]
        value = tensors[name].astype(np.float32)
        if how is not None:
            value = value.T if how == "T" else value.reshape(how)
        initializer.raw_data = np.ascontiguousarray(value).tobytes()
    for entry in [entry for entry in model.metadata_props if entry.key == WEIGHT_MAP]:
        model.metadata_props.remove(entry)
    onnx.checker.check_model(model)
    return model


def embed_graph(tensors: Tensors) -> onnx.ModelProto:
    """Return the graph ids (1, T) i64 -> embeds (1, T, D) f32, one Gather."""
    table = tensors["emb.weight"].astype(np.float32)
    width = table.shape[1]
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["embeds"], axis=0)],
        "embed",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "seq"])],
        [helper.make_tensor_value_info("embeds", TensorProto.FLOAT, ["batch", "seq", width])],
        [numpy_helper.from_array(table, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def pipeline_document() -> dict[str, Any]:
    """Return the description that says what each ONNX input and output means."""
    return {
        "schema": "sparsefleet.pipeline/1",
        "family": "vision-embed-decoder",
        "components": {
            "vision": {
                "file": "vision.onnx",
                "inputs": {"image": {"role": "image"}},
                "outputs": {
                    "vis_tokens": {"role": "embeds"},
                    "keep_idx": {"role": "positions"},
                    "cls_attn": {"role": "unused"},
                },
            },
            "embed": {
                "file": "embed.onnx",
                "inputs": {"ids": {"role": "token_ids"}},
                "outputs": {"embeds": {"role": "embeds"}},
            },
            "decoder": {
                "file": "decoder.onnx",
                "inputs": {
                    "embeds": {"role": "embeds"},
                    "position_ids": {"role": "positions"},
                    "attn_bias": {"role": "causal_mask"},
                    "modality_lambda": {"role": "constant", "value": 0.0},
                    "past_k": {"role": "past_key"},
                    "past_v": {"role": "past_value"},
                },
                "outputs": {
                    "logits": {"role": "logits"},
                    "present_k": {"role": "present_key"},
                    "present_v": {"role": "present_value"},
                    "topk_idx": {"role": "routing"},
                },
            },
        },
        "image": {"height": 64, "width": 64, "channels": 1, "divide": 127.5, "subtract": 1.0},
        "tokens": {
            "vocabulary": vocabulary(),
            "eos": EOS,
            "position_base": 64,
            "prompts": {
                "caption": ["<cap>"],
                "question_prefix": ["<q>"],
                "question_suffix": ["<a>"],
            },
            "max_answer_tokens": MAX_ANSWER_TOKENS,
        },
        "max_context": 256,
        "max_step_tokens": 64,
    }


@dataclass(frozen=True, slots=True)
class Cards:
    """Cards and their questions. images: (n, 64, 64) u8; questions: one list per card."""

    images: NDArray[np.uint8]
    questions: tuple[tuple[dict[str, Any], ...], ...]


def load_cards(parts: Sequence[tuple[str, int]]) -> Cards:
    """Return the first cards of each named data set under `data/`, in order."""
    images, questions = [], []
    for name, count in parts:
        with np.load(HERE / "data" / f"{name}.npz") as archive:
            images.append(archive["images"][:count])
        cards = json.loads((HERE / "data" / f"{name}.json").read_text())
        questions += [_questions(card) for card in cards[:count]]
    return Cards(np.concatenate(images), tuple(questions))


def _questions(card: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    caption = {"kind": "caption", "prompt": "caption", "words": [], "answer": card["caption"]}
    return (
        caption,
        *(
            {"kind": kind, "prompt": "question", "words": words, "answer": answer}
            for kind, words, answer in card["qas"]
        ),
    )


def write_cards(cards: Cards, out_dir: Path, stem: str) -> None:
    """Write `stem.json` and `stem.npz` in the format `sparsefleet.cards/1`."""
    document = {
        "schema": CARDS_SCHEMA,
        "images": f"{stem}.npz",
        "cards": [
            {"image": row, "questions": list(items)} for row, items in enumerate(cards.questions)
        ],
    }
    _write_json(out_dir / f"{stem}.json", document)
    np.savez_compressed(out_dir / f"{stem}.npz", images=cards.images)


def materialise(version: str, out_dir: Path) -> Path:
    """Write the submission of `version` into `out_dir` (made if missing) and return it.

    Raises:
        KeyError: There is no such version.
    """
    tensors = load_weights(version)
    out_dir.mkdir(parents=True, exist_ok=True)
    for component in ("vision", "decoder"):
        onnx.save(fill_graph(component, tensors), out_dir / f"{component}.onnx")
    onnx.save(embed_graph(tensors), out_dir / "embed.onnx")
    _write_json(out_dir / "pipeline.json", pipeline_document())
    write_cards(load_cards((("calibration", CALIBRATION_CARDS),)), out_dir, "calibration")
    write_cards(load_cards(VERSIONS[version].evaluation), out_dir, "evaluation")
    claim = json.loads((HERE / "reference.json").read_text())["claims"][version]
    _write_json(out_dir / "claim.json", {"schema": CLAIM_SCHEMA, "version": version, **claim})
    return out_dir


def _metadata(model: onnx.ModelProto, key: str) -> str:
    return str(next(entry.value for entry in model.metadata_props if entry.key == key))


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n")


def main() -> None:
    """Write one submission."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.edgecard.materialise", description=__doc__.splitlines()[0]
    )
    parser.add_argument("version", choices=sorted(VERSIONS))
    parser.add_argument("out_dir", type=Path)
    arguments = parser.parse_args()
    out = materialise(arguments.version, arguments.out_dir)
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size:>10}  {path}")


if __name__ == "__main__":
    main()
