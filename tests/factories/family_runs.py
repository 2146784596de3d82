"""Multimodal families in ONNX Runtime, file by file, and where their exporters put the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.factories.families import Vlm, genai_decoder, past_name
from tests.factories.family_directories import (
    TEMPLATE,
    write_minicpm,
    write_ort_genai,
    write_transformers_js,
)
from tests.factories.onnx_runs import session

Array = np.ndarray[Any, Any]
Files = dict[str, list[Path]]


class Original:
    """The family's own files in ONNX Runtime: splice by image token, one prefill, then decoding."""

    def __init__(self, files: Files, shape: Vlm) -> None:
        self.parts = {name: [session(path) for path in paths] for name, paths in files.items()}
        self.shape = shape
        self.cache: dict[str, Array] = {}

    def see(self, pixels: Array) -> Array:
        scaled = (pixels / 255.0 - TEMPLATE["image_mean"]) / TEMPLATE["image_std"]
        x = scaled.astype(np.float32).transpose(2, 0, 1)[None]
        for part in self.parts["vision"]:
            (x,) = part.run(None, {part.get_inputs()[0].name: x})
        return x

    def embed(self, ids: Array, features: Array) -> Array:
        (part,) = self.parts["embed"]
        feeds = {"input_ids": ids[None]}
        if len(part.get_inputs()) > 1:
            count = int((ids == self.shape.image_token).sum())
            shown = features[0][:count] if count else np.zeros((0, self.shape.width), np.float32)
            return part.run(None, {**feeds, "image_features": shown})[0]
        (rows,) = part.run(None, feeds)
        rows[0, ids == self.shape.image_token] = features[0][
            : (ids == self.shape.image_token).sum()
        ]
        return rows

    def decode(self, embeds: Array, positions: Array) -> Array:
        """Return the logits of the last row; positions are (3, rows)."""
        (part,) = self.parts["decoder"]
        shape = self.shape
        names = [past_name(layer, p) for layer in range(shape.layers) for p in ("key", "value")]
        empty = np.zeros((1, shape.kv_heads, 0, shape.head_dim), np.float32)
        past = self.cache[names[0]].shape[2] if self.cache else 0
        rows = embeds.shape[1]
        feeds = {
            "inputs_embeds": embeds,
            "attention_mask": np.ones((1, past + rows), np.int64),
            "position_ids": positions[:, None] if shape.positions == "rows" else positions[:1],
            "use_cache_branch": np.array([True]),
            **{name: self.cache.get(name, empty) for name in names},
        }
        wanted = {given.name for given in part.get_inputs()}
        made = part.run(None, {name: value for name, value in feeds.items() if name in wanted})
        found = dict(zip([output.name for output in part.get_outputs()], made, strict=True))
        self.cache = {name: found[name.replace("past_key_values", "present")] for name in names}
        return found["logits"][0, -1]


def text_positions(at: int, count: int) -> Array:
    return np.tile(np.arange(at, at + count), (3, 1))


def picture_positions(at: int, shape: Vlm) -> Array:
    if shape.positions != "rows":
        return text_positions(at, shape.image_tokens)
    number, columns = np.arange(shape.image_tokens), shape.sides[1] // shape.patch
    return at + np.stack([0 * number, number // columns, number % columns])


def transformers_js(folder: Path, shape: Vlm) -> Files:
    write_transformers_js(folder, shape)
    return _files(folder / "onnx", ["vision_encoder"], "embed_tokens", "decoder_model_merged")


def ort_genai(folder: Path, shape: Vlm) -> Files:
    write_ort_genai(folder, shape)
    return _files(folder, ["phi-v"], "phi-e", "phi-t")


def merged(folder: Path, shape: Vlm) -> Files:
    write_transformers_js(folder, shape, merged=True)
    return _files(folder / "onnx", ["vision_encoder"], "embed_tokens", "decoder_model_merged")


def minicpm(folder: Path, shape: Vlm) -> Files:
    write_minicpm(folder, shape)
    return _files(folder, ["vpm", "resampler"], "embed_tokens", "llm")


def fused(**how: Any) -> Callable[[Path, Vlm], Files]:
    """Return the layout of ORT-GenAI with a decoder of its own fused operators."""

    def write(folder: Path, shape: Vlm) -> Files:
        write_ort_genai(folder, shape, body=genai_decoder(shape, **how))
        return _files(folder, ["phi-v"], "phi-e", "phi-t")

    return write


def _files(folder: Path, vision: list[str], embed: str, decoder: str) -> Files:
    parts = {"vision": vision, "embed": [embed], "decoder": [decoder]}
    return {name: [folder / f"{stem}.onnx" for stem in stems] for name, stems in parts.items()}
