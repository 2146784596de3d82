"""Directories of multimodal models as exporters lay them out, with tiny random models in them."""

import json
from pathlib import Path
from typing import Any

import onnx

from tests.factories.families import (
    Inputs,
    Vlm,
    decoder,
    embed,
    embed_with_splice,
    encoder,
    merged_decoder,
    pixels_of,
    resampler,
    vision,
)
from tests.factories.onnx_blocks import GraphBuilder

TEMPLATE = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


def _tokenizer(shape: Vlm) -> dict[str, Any]:
    vocab = {f"w{i}": i for i in range(shape.vocabulary - 1)}
    added = [{"id": shape.image_token, "content": "<image>"}]
    return {"model": {"vocab": vocab}, "added_tokens": added}


def _write_common(directory: Path, shape: Vlm) -> None:
    preprocessor = {
        **TEMPLATE,
        "do_normalize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "crop_size": {"height": shape.sides[0], "width": shape.sides[1]},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer(shape)))
    config = {"image_token_index": shape.image_token, "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(config))


def write_transformers_js(directory: Path, shape: Vlm, *, merged: bool = False) -> Path:
    """onnx/{vision_encoder,embed_tokens,decoder_model_merged}.onnx beside the configs."""
    (directory / "onnx").mkdir(parents=True)
    _write_common(directory, shape)
    body = merged_decoder(shape) if merged else decoder(shape)
    parts = {
        "vision_encoder": vision(shape),
        "embed_tokens": embed(shape),
        "decoder_model_merged": body,
    }
    for name, model in parts.items():
        onnx.save(model, directory / "onnx" / f"{name}.onnx")
    return directory


def write_ort_genai(
    directory: Path, shape: Vlm, splice: str = "scatter", body: onnx.ModelProto | None = None
) -> Path:
    """genai_config.json names vision, embedding and decoder."""
    directory.mkdir(parents=True)
    _write_common(directory, shape)
    onnx.save(vision(shape), directory / "phi-v.onnx")
    onnx.save(embed_with_splice(shape, splice), directory / "phi-e.onnx")
    data = {"save_as_external_data": True, "location": "phi-t.onnx.data", "size_threshold": 512}
    onnx.save(body or decoder(shape), directory / "phi-t.onnx", **data)
    caches = {
        f"{kind}_{part}_names": f"{name}.%d.{part}"
        for part in ("key", "value")
        for kind, name in (("past", "past_key_values"),)
    }
    inputs = {"inputs_embeds": "inputs_embeds", "attention_mask": "attention_mask", **caches}
    if shape.positions != "computed":
        inputs["position_ids"] = "position_ids"
    config = {
        "model": {
            "type": "phi3v",
            "context_length": 64,
            "eos_token_id": 1,
            "vocab_size": shape.vocabulary,
            "image_token_id": shape.image_token,
            "vision": {
                "filename": "phi-v.onnx",
                "inputs": {"pixel_values": "pixel_values"},
                "outputs": {"image_features": "image_features"},
            },
            "embedding": {
                "filename": "phi-e.onnx",
                "inputs": {"input_ids": "input_ids", "image_features": "image_features"},
                "outputs": {"inputs_embeds": "inputs_embeds"},
            },
            "decoder": {
                "filename": "phi-t.onnx",
                "num_hidden_layers": shape.layers,
                "inputs": inputs,
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        }
    }
    (directory / "genai_config.json").write_text(json.dumps(config))
    return directory


def write_minicpm(directory: Path, shape: Vlm) -> Path:
    """vpm.onnx, resampler.onnx, llm.onnx and the table."""
    directory.mkdir(parents=True)
    _write_common(directory, shape)
    b = GraphBuilder(21, scale=shape.scale)
    seen = b.model(pixels_of(shape), {"features": encoder(b, shape)})
    r = GraphBuilder(22, scale=shape.scale)
    features: Inputs = {"features": ("float32", ("batch", shape.patches, shape.vision_width))}
    sampled = r.model(features, {"queries": resampler(r, "features", shape)})
    parts = {"vpm": seen, "resampler": sampled, "embed_tokens": embed(shape), "llm": decoder(shape)}
    for name, model in parts.items():
        onnx.save(model, directory / f"{name}.onnx")
    return directory
