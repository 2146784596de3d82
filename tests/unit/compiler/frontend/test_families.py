"""Every family compiles from its own directory and answers as ONNX Runtime does on its files."""

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compiler.errors import MalformedModelError
from compiler.frontend import families
from compiler.frontend.families import FamilyOptions, token_grid, write_family_submission
from compiler.frontend.family_files import find_family
from compiler.kernels.program import KvCache, Module
from compiler.simulator import Simulator
from tests.factories.families import (
    LLAVA_PHI,
    MINICPM_V,
    MOBILE_VLM,
    QWEN_VL,
    QWEN_VL_ROWS,
    Vlm,
    variant,
)
from tests.factories.family_directories import write_ort_genai, write_transformers_js
from tests.factories.family_runs import (
    Original,
    fused,
    merged,
    minicpm,
    ort_genai,
    picture_positions,
    text_positions,
    transformers_js,
)
from tests.factories.onnx_runs import lowered

Array = np.ndarray
Write = Callable[[Path], Path]
OPTIONS = FamilyOptions(max_context=32, max_step_tokens=8)


class Ours:
    """The programs of a submission: text, picture and text go into one cache, in that order."""

    def __init__(self, module: Module, shape: Vlm) -> None:
        self.runner = Simulator(module, mode="f64")
        self.inputs = {p.name: set(p.inputs) for p in module.programs}

    def see(self, pixels: Array, positions: Array) -> None:
        roles = ("positions", "positions_height", "positions_width")
        rows = {r: p[:, None] for r, p in zip(roles, positions, strict=True)}
        feeds = {"image": pixels.reshape(1, -1), **rows}
        self.runner.run_arrays("see", {r: x for r, x in feeds.items() if r in self.inputs["see"]})

    def step(self, ids: list[int], positions: Array) -> Array:
        feeds = {"token_ids": np.array(ids)[:, None], "positions": positions[0][:, None]}
        return self.runner.run_arrays("step", feeds)["logits"][0]


def compare(module: Module, original: Original, shape: Vlm, before: list[int]) -> float:
    """Show a picture between two texts, decode three tokens; return the greatest difference."""
    pixels = np.random.default_rng(3).integers(0, 256, (*shape.sides, 3)).astype(np.uint8)
    after = [4, 7, 2]
    picture = picture_positions(len(before), shape)
    tail = text_positions(int(picture.max()) + 1, len(after))
    ours = Ours(module, shape)
    if before:
        ours.step(before, text_positions(0, len(before)))
    ours.see(pixels, picture)
    ids = np.array([*before, *[shape.image_token] * shape.image_tokens, *after])
    embeds = original.embed(ids, original.see(pixels))
    whole = np.concatenate([text_positions(0, len(before)), picture, tail], axis=1)
    found, wanted = ours.step(after, tail), original.decode(embeds, whole)
    differences, scale = [], 0.0
    for number, token in enumerate((5, 9, 3)):
        differences.append(np.abs(found - wanted).max())
        scale = max(scale, np.abs(wanted).max())
        here = text_positions(int(tail.max()) + 1 + number, 1)
        found = ours.step([token], here)
        wanted = original.decode(original.embed(np.array([token]), np.zeros((1, 0, 1))), here)
    return float(max(differences) / scale)


FAMILIES = {
    "llava-phi": (ort_genai, LLAVA_PHI),
    "llava-phi-js": (transformers_js, LLAVA_PHI),
    "mobile-vlm": (transformers_js, MOBILE_VLM),
    "mobile-vlm-pooled": (transformers_js, variant(MOBILE_VLM, side=16, pooled=True)),
    "qwen-vl": (ort_genai, QWEN_VL_ROWS),
    "qwen-vl-wide": (ort_genai, variant(QWEN_VL_ROWS, wide=20)),
    "qwen-vl-high": (ort_genai, variant(QWEN_VL_ROWS, side=16, wide=8)),
    "minicpm-v": (minicpm, MINICPM_V),
    "merged": (merged, MOBILE_VLM),
    "fused": (fused(), variant(MOBILE_VLM, width=32)),
    "fused-packed": (fused(packed=True), variant(QWEN_VL, width=32)),
    "fused-packed-bits": (fused(packed=True, bits=4), variant(QWEN_VL, width=32)),
    "fused-packed-zeros": (fused(packed=True, bits=8, zeros=True), variant(MOBILE_VLM, width=32)),
    "fused-rotary": (fused(rotary="operator"), QWEN_VL),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_it_answers_as_onnx_runtime_does(tmp_path: Path, name: str) -> None:
    layout, shape = FAMILIES[name]
    files = layout(tmp_path / "source", shape)
    spec = write_family_submission(tmp_path / "source", tmp_path / "out", OPTIONS)
    assert spec.tokens is not None
    assert spec.tokens.position_base == int(picture_positions(0, shape).max()) + 1
    module = lowered(tmp_path / "out").module
    assert module.kv == KvCache(shape.layers, shape.kv_heads, shape.head_dim, 32)
    for before in ([], [6, 1]):
        assert compare(module, Original(files, shape), shape, before) <= 1e-3
    assert_shared(module, shape)


def assert_shared(module: Module, shape: Vlm) -> None:
    """Picture and text run through the very same weights of the language model."""
    see, step = (
        {at for call in program.calls for at in call.weights if at >= 0}
        for program in module.programs
    )
    shared = [module.weights[at] for at in see & step]
    wide = [w for w in shared if w.array.ndim == 2 and shape.width in w.array.shape]
    assert len(wide) >= 4 * (shape.layers - 1)
    large = [w for w in module.weights if w.array.ndim == 2]
    assert len({sha256(w.array.tobytes()).hexdigest() for w in large}) == len(large)


@pytest.mark.parametrize("splice", ["scatter", "where"])
def test_it_shows_that_the_embedding_model_splices(tmp_path: Path, splice: str) -> None:
    source = write_ort_genai(tmp_path / "source", LLAVA_PHI, splice)
    write_family_submission(source, tmp_path / "out", OPTIONS)
    embed = onnx.load(tmp_path / "out" / "embed.onnx")
    assert [node.op_type for node in embed.graph.node] == ["Gather"]


def test_it_refuses_a_splice_at_another_token(tmp_path: Path) -> None:
    source = write_ort_genai(tmp_path / "source", LLAVA_PHI)
    edit(source / "genai_config.json", lambda d: d["model"].update(image_token_id=3))
    with pytest.raises(MalformedModelError, match="where token 3 stands"):
        write_family_submission(source, tmp_path / "out", OPTIONS)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


Damage = Callable[[Path], None]


def preprocess(folder: Path, **changes: Any) -> None:
    edit(folder / "preprocessor_config.json", lambda config: config.update(changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "phi-v.onnx").unlink(), r"model\.vision is in 'phi-v\.onnx'"),
        (lambda d: (d / "phi-t.onnx.data").unlink(), "external data"),
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda d: (d / "genai_config.json").unlink(), "no multimodal family"),
        (lambda d: (d / "genai_config.json").write_text("{"), "cannot be read as JSON"),
        (lambda d: edit(d / "genai_config.json", lambda c: c["model"].pop("vision")), "vision"),
        (
            lambda d: edit(
                d / "genai_config.json", lambda c: c["model"]["vision"].update(filename="../x.onnx")
            ),
            "is no file name",
        ),
        (
            lambda d: (
                edit(d / "genai_config.json", lambda c: c["model"].pop("image_token_id"))
                or edit(d / "config.json", lambda c: c.pop("image_token_index"))
            ),
            "which token stands for the image",
        ),
        (
            lambda d: (
                edit(d / "genai_config.json", lambda c: c["model"].pop("eos_token_id"))
                or edit(d / "config.json", lambda c: c.pop("eos_token_id"))
            ),
            "eos_token_id",
        ),
        (
            lambda d: edit(d / "preprocessor_config.json", lambda c: c.update(image_std=[0, 1, 1])),
            "image_mean and image_std",
        ),
        *(
            (lambda d, bad=bad: preprocess(d, image_mean=bad), "image_mean and image_std")
            for bad in ([10**400, 0, 0], [float("nan"), 0, 0], ["0", 0, 0], {"r": 0}, [0, 0], None)
        ),
    ],
)
def test_it_says_what_is_missing(tmp_path: Path, damage: Damage, message: str) -> None:
    source = write_ort_genai(tmp_path / "source", LLAVA_PHI)
    damage(source)
    with pytest.raises(MalformedModelError, match=message):
        write_family_submission(source, tmp_path / "out", OPTIONS)


def test_it_takes_the_highest_precision_unless_told(tmp_path: Path) -> None:
    source = write_transformers_js(tmp_path / "source", MOBILE_VLM)
    folder = source / "onnx"
    for stem in ("vision_encoder", "embed_tokens", "decoder_model_merged"):
        (folder / f"{stem}_q4.onnx").write_bytes((folder / f"{stem}.onnx").read_bytes())
        (folder / f"{stem}.onnx").rename(folder / f"{stem}_fp16.onnx")
    assert find_family(source).decoder.name == "decoder_model_merged_fp16.onnx"
    assert find_family(source, "q4").decoder.name == "decoder_model_merged_q4.onnx"
    with pytest.raises(MalformedModelError, match="with suffix '_int8'"):
        find_family(source, "int8")


def test_it_refuses_an_input_without_a_meaning(tmp_path: Path) -> None:
    source = write_transformers_js(tmp_path / "source", MOBILE_VLM)
    path = source / "onnx" / "decoder_model_merged.onnx"
    model = onnx.load(path)
    model.graph.input.append(onnx.helper.make_tensor_value_info("beam", 1, [1]))
    onnx.save(model, path)
    with pytest.raises(MalformedModelError, match="'beam' has no meaning"):
        write_family_submission(source, tmp_path / "out", OPTIONS)


@pytest.mark.parametrize(
    ("count", "height", "width", "grid"),
    [(4, 8, 8, (2, 2)), (6, 8, 12, (2, 3)), (10, 20, 8, (5, 2)), (7, 28, 196, (1, 7))],
)
def test_it_finds_the_grid_of_a_pictures_tokens(
    count: int, height: int, width: int, grid: tuple[int, int]
) -> None:
    assert token_grid(count, height, width) == grid


@pytest.mark.parametrize(
    ("count", "height", "width"), [(6, 8, 8), (8, 8, 12), (1, 8, 12), (3, 9, 8)]
)
def test_it_refuses_tokens_that_make_no_grid(count: int, height: int, width: int) -> None:
    with pytest.raises(MalformedModelError, match=f"has {count} tokens, which make no grid"):
        token_grid(count, height, width)


@pytest.mark.parametrize("change", [{"added_tokens": True}, {"added_tokens": [{"id": 2**62}]}])
def test_it_survives_a_hostile_tokenizer(tmp_path: Path, change) -> None:
    source = tmp_path / "source"
    source.mkdir()
    document = {"model": {"vocab": {"a": 0}}, **change}
    (source / "tokenizer.json").write_text(json.dumps(document))
    if change["added_tokens"] is True:
        assert families._vocabulary(source, 2) == ["a", "<unused 1>"]
    else:
        with pytest.raises(MalformedModelError, match="limit"):
            families._vocabulary(source, 2)
