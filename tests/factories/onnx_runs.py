"""Running submissions: ONNX Runtime on the files, the f64 interpreter on the lowered module."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from compiler.frontend import import_pipeline
from compiler.kernels.program import Module
from compiler.passes.pipeline import LOSSLESS, Loss, LoweredPipeline, lower_pipeline
from compiler.simulator import Simulator

Array = np.ndarray[Any, Any]


def lowered(directory: Path, *, fuse: bool = True, loss: Loss = LOSSLESS) -> LoweredPipeline:
    """Import and lower a submission, with the verifier after every pass."""
    return lower_pipeline(import_pipeline(directory), verify=True, fuse=fuse, loss=loss)


def session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def block_difference(directory: Path, tokens: int, seed: int = 0) -> float:
    """Return the greatest difference between a block's two runs over its greatest output."""
    return module_difference(directory, lowered(directory).module, tokens, seed)


def module_difference(directory: Path, module: Module, tokens: int, seed: int = 0) -> float:
    """Return the same for a block that is lowered already."""
    x = block_rows(directory, tokens, seed)
    wanted = reference_rows(directory, x)
    found = Simulator(module, mode="f64").run_arrays("forward", {"tensor": x})["tensor"]
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def block_rows(directory: Path, tokens: int, seed: int = 0) -> Array:
    """Return random rows for a block."""
    model = onnx.load(directory / "model.onnx")
    width = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


def reference_rows(directory: Path, x: Array) -> Array:
    """Return what ONNX Runtime makes of rows."""
    running = session(directory / "model.onnx")
    (wanted,) = running.run(None, {running.get_inputs()[0].name: x[None]})
    found: Array = wanted[0]
    return found


class OnnxAnswers:
    """A vision-language submission in ONNX Runtime, one image after the other."""

    def __init__(self, directory: Path, document: Mapping[str, Any]) -> None:
        self.parts = {
            name: session(directory / component["file"])
            for name, component in document["components"].items()
        }
        self.ports = {
            name: {
                **{port["role"]: key for key, port in component["inputs"].items()},
                **{port["role"]: key for key, port in component["outputs"].items()},
            }
            for name, component in document["components"].items()
        }
        self.constant = {
            key: port["value"]
            for key, port in document["components"]["decoder"]["inputs"].items()
            if port["role"] == "constant"
        }
        self.image = document["image"]
        self.cache: tuple[Array, Array] | None = None

    def see(self, pixels: Array) -> tuple[Array, Array]:
        """Show an image; the cache then holds its tokens. Returns kept tokens and positions."""
        ports = self.ports["vision"]
        scaled = pixels.astype(np.float32) / self.image["divide"] - self.image["subtract"]
        names = [ports["embeds"], ports["positions"]]
        tokens, kept = self.parts["vision"].run(names, {ports["image"]: scaled[None, None]})
        self.cache = None
        self._decode(tokens, kept)
        return tokens[0], kept[0]

    def step(self, ids: Array, positions: Array) -> tuple[Array, Array]:
        """Feed tokens; returns logits and experts (layers, k) of the last row."""
        ports = self.ports["embed"]
        (embeds,) = self.parts["embed"].run([ports["embeds"]], {ports["token_ids"]: ids[None]})
        logits, experts = self._decode(embeds, positions[None])
        return logits[0, -1], experts[:, -1]

    def _decode(self, embeds: Array, positions: Array) -> tuple[Array, Array]:
        ports, decoder = self.ports["decoder"], self.parts["decoder"]
        shape = next(i.shape for i in decoder.get_inputs() if i.name == ports["past_key"])
        empty = np.zeros((shape[0], 1, shape[2], 0, shape[4]), np.float32)
        keys, values = self.cache or (empty, empty)
        rows, past = embeds.shape[1], keys.shape[3]
        mask = np.triu(np.full((rows, past + rows), -1e9, np.float32), past + 1)[None, None]
        feeds = {
            ports["embeds"]: embeds,
            ports["positions"]: positions,
            ports["causal_mask"]: mask,
            ports["past_key"]: keys,
            ports["past_value"]: values,
            **{key: np.array(value, np.float32) for key, value in self.constant.items()},
        }
        names = [ports[r] for r in ("logits", "present_key", "present_value", "routing")]
        logits, keys, values, experts = decoder.run(names, feeds)
        self.cache = (keys, values)
        return logits, experts
