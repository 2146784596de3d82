"""Published ONNX files compile as they are, and the plan computes what ONNX Runtime computes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.operations import Op
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import Kind
from compiler.driver.plan_facts import explain_rows
from compiler.hardware.targets import find_target
from tests.factories.graph_runs import Array, GraphCase, relative_error
from tests.factories.model_files import model_file

Inputs = Mapping[str, Array]
RANDOM = np.random.default_rng(11)


def page(height: int, width: int) -> Array:
    """Return dark strokes on light paper, normalised as the recognisers want it: (1, 3, H, W)."""
    paper = np.full((height, width), 0.9, np.float32)
    for left in range(6, width - 8, 14):
        for top in range(8, height - 20, 40):
            paper[top : top + 18, left : left + 8] = 0.1
            paper[top + 4 : top + 14, left + 3 : left + 6] = 0.9
    return np.repeat(((paper - 0.5) / 0.5)[None, None], 3, axis=1)


def tokens() -> Inputs:
    ids = np.array([[101, 7592, 2088, 2003, 2307, 1012, 102] + [0] * 5], np.int64)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).astype(np.int64),
        "token_type_ids": np.zeros_like(ids),
    }


def sound(samples: int) -> Array:
    at = np.arange(samples) / 16000
    return (0.3 * np.sin(2 * np.pi * 220 * at) + 0.05 * RANDOM.standard_normal(samples))[
        None
    ].astype(np.float32)


def first_bytes() -> Inputs:
    text = b"#!/usr/bin/env python3\nimport sys\nprint(sys.argv)\n"
    data = np.full((1, 2048), 256, np.int32)
    data[0, : len(text)] = list(text)
    return {"bytes": data}


@dataclass(frozen=True)
class Published:
    """A file, how it is pinned, what it is fed, and how far it may be off."""

    file: str
    inputs: Callable[[], Inputs]
    dims: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 1e-4


def image(height: int, width: int) -> dict[str, int]:
    return {"x:0": 1, "x:2": height, "x:3": width}


CASES = (
    Published("ppocr-det", lambda: {"x": page(96, 96)}, image(96, 96)),
    Published("ppocr-rec", lambda: {"x": page(48, 96)}, image(48, 96)),
    Published("ppocr-cls", lambda: {"x": page(48, 192)}, image(48, 192)),
    Published("minilm", tokens, {"batch": 1, "sequence": 12}),
    Published("magika", first_bytes, {"bytes:0": 1}),
    Published(
        "silero",
        lambda: {"input": sound(576), "state": np.zeros((2, 1, 128), np.float32)},
        {"input:0": 1, "input:1": 576, "state:1": 1},
        {"sr": 16000},
    ),
    Published(
        "silero-sequence",
        lambda: {
            "input": np.concatenate([sound(576)] * 3),
            "h": np.zeros((1, 1, 128), np.float32),
            "c": np.zeros((1, 1, 128), np.float32),
        },
        {"sequence_length": 3},
    ),
)


@pytest.mark.parametrize("published", CASES, ids=lambda item: item.file)
def test_it_runs_a_published_file_as_onnx_runtime_does(
    published: Published, tmp_path: Path
) -> None:
    source = model_file(published.file)
    case = GraphCase.of(source, tmp_path, published.dims, published.constants)
    arrays = published.inputs()
    feeds, wanted = case.feeds(arrays), case.wanted(arrays)
    native = case.native(feeds)
    assert native == case.simulated(feeds)
    for role, value in wanted.items():
        found = case.array(role, native[role], value)
        assert relative_error(found, value) < published.tolerance, role


def test_matrices_of_an_int8_file_take_the_bytes_they_have_there(tmp_path: Path) -> None:
    case = GraphCase.of(model_file("minilm"), tmp_path, {"batch": 1, "sequence": 12})
    products = [call for call in case.pipeline.module.programs[0].calls if call.op is Op.LINEAR_F32]
    plan = parse_plan(case.case.emitted.plan_bytes)
    stored = [plan.weights[call.weights[0]] for call in products]
    assert {weight.kind for weight in stored} == {Kind.I8_ROWS}
    elements = sum(weight.rows * weight.cols for weight in stored)
    assert sum(weight.length for weight in stored) < 1.02 * elements


def test_it_shows_reference_kernels_by_name(tmp_path: Path) -> None:
    case = GraphCase.of(model_file("ppocr-cls"), tmp_path, image(48, 192))
    plan = parse_plan(case.case.emitted.plan_bytes)
    rows = explain_rows(plan, find_target("x86-64-v3"))
    kernels = [str(row["kernel"]) for row in rows if isinstance(row, dict)]
    plain = [name for name in kernels if name.startswith("ref_")]
    assert "ref_move_flat_any_1x1__portable" in plain
    assert "ref_conv_flat_any_1x1__portable" not in plain
    assert any(name.startswith("sf_conv2d") for name in kernels)
    assert any(name.startswith("sf_convdepthwise") for name in kernels)
    calls = [call.op for call in plan.programs[0].calls]
    assert (calls.count(Op.CONV2D), calls.count(Op.CONV_DEPTHWISE)) == (42, 11)


FOLDED_ERROR = 5e-5
"""Of the greatest output, with and without folding: f32 rounds in another order in 62 layers."""


@pytest.mark.parametrize(("name", "fewer"), [("ppocr-det", 60), ("ppocr-cls", 100)])
def test_it_folds_every_batch_norm_behind_a_convolution(
    name: str, fewer: int, tmp_path: Path
) -> None:
    published = next(case for case in CASES if case.file == name)
    keep = ("sink-layouts",)  # which writes batch norms out
    folded, plain = (
        GraphCase.of(model_file(name), tmp_path / kind, published.dims, leave_out=left_out)
        for kind, left_out in (("folded", keep), ("plain", (*keep, "fold-affine")))
    )
    assert "BatchNormalization" in plain.pipeline.ir_text["raised"]
    assert "BatchNormalization" not in folded.pipeline.ir_text["raised"]
    calls = [len(case.pipeline.module.programs[0].calls) for case in (folded, plain)]
    assert calls[0] <= calls[1] - fewer
    arrays = published.inputs()
    wanted = folded.wanted(arrays)
    errors = []
    for case in (folded, plain):
        made = case.native(case.feeds(arrays))
        errors.append(max(relative_error(case.array(r, made[r], v), v) for r, v in wanted.items()))
    assert max(errors) < FOLDED_ERROR


@pytest.mark.parametrize(
    ("name", "moves", "before"), [("ppocr-det", 2, 75), ("ppocr-cls", 3, 60), ("ppocr-rec", 11, 60)]
)
def test_images_keep_one_layout_between_convolutions(
    name: str, moves: int, before: int, tmp_path: Path
) -> None:
    published = next(case for case in CASES if case.file == name)
    sunk, plain = (
        GraphCase.of(model_file(name), tmp_path / kind, published.dims, leave_out=left_out)
        for kind, left_out in (("sunk", ()), ("plain", ("sink-layouts",)))
    )
    counts = [
        sum(call.op is Op.REF_MOVE for call in case.pipeline.module.programs[0].calls)
        for case in (sunk, plain)
    ]
    assert counts[0] <= moves
    assert counts[1] >= before
    feeds = sunk.feeds(published.inputs())
    assert sunk.native(feeds) == plain.native(feeds)
