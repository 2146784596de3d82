"""Adaptive pruning of the tiny model: programs, answers, and what is refused with a way out."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compiler.driver.onnx_backend import OnnxFiles
from compiler.errors import MalformedModelError, UnsupportedOperatorError, UserModelError
from compiler.kernels.program import Module, Op
from compiler.simulator import Simulator
from tests.factories.onnx_models import (
    TinyShape,
    tiny_document,
    tiny_models,
    write_pruned,
    write_submission,
)
from tests.factories.onnx_runs import lowered, session

ROUTED = (Op.EXPERTS, Op.MOE_LAYER)
ALL = TinyShape(keep=16)
"""The tiny model with all its 16 tokens: what a picture holds before it is pruned."""


def pictures() -> np.ndarray:
    random = np.random.default_rng(4)
    noise = random.integers(0, 256, (4, 8, 8))
    shaded = np.add.outer(np.arange(8), np.arange(8)) * 18
    return np.stack([*noise, shaded, np.full((8, 8), 128)]).astype(np.uint8)


def seen(module: Module, pixels: np.ndarray) -> tuple[Simulator, dict[str, np.ndarray], int]:
    simulator = Simulator(module, mode="f64")
    found = simulator.run_arrays("see", {"image": pixels.reshape(1, -1)})
    return simulator, found, int(found["count"][0, 0])


def prefill(simulator: Simulator, found: dict[str, np.ndarray], count: int) -> np.ndarray:
    rows = {role: found[role][:count] for role in ("tokens", "positions")}
    return np.concatenate(
        [
            simulator.run_arrays(
                "prefill", {role: part[at : at + 8] for role, part in rows.items()}
            )["embeds"]
            for at in range(0, count, 8)
        ]
    )


def test_it_splits_seeing_from_filling_the_cache(tmp_path: Path) -> None:
    module = lowered(write_pruned(tmp_path, p=0.6, merge=2, max_keep=9)).module
    see, fill, _ = module.programs
    assert [p.name for p in module.programs] == ["see", "prefill", "step"]
    assert set(see.outputs) == {"tokens", "positions", "count"}
    assert (set(fill.inputs), set(fill.outputs)) == ({"tokens", "positions"}, {"embeds"})
    assert module.buffers[see.outputs["tokens"]].rows == 11
    assert all(module.buffers[at].dynamic for at in fill.inputs.values())
    ops = [call.op for call in see.calls]
    assert (ops.count(Op.PRUNE_TOP_P), ops.count(Op.PRUNE)) == (1, 0)
    assert [sum(call.op in ROUTED for call in p.calls) for p in module.programs] == [0, 1, 2]


def test_the_default_leaves_the_plan_as_it_was(tmp_path: Path) -> None:
    plain = write_submission(tmp_path / "a", tiny_models(), tiny_document())
    document = tiny_document() | {"prune": {"mode": "model"}}
    stated = write_submission(tmp_path / "b", tiny_models(), document)
    assert lowered(plain).ir_text == lowered(stated).ir_text


@pytest.mark.parametrize(("score", "fewest_counts"), [("row", 2), ("mean", 1)])
def test_kept_tokens_are_those_of_the_model(tmp_path: Path, score: str, fewest_counts: int) -> None:
    """Every kept row is the f32 model's row at that position; how many varies with the picture.

    Random weights look about evenly at all tokens on average, so `mean` need not vary here.
    """
    directory = write_pruned(tmp_path, ALL, p=0.6, min_keep=2, score=score)
    module, reference = lowered(directory).module, OnnxFiles(directory)
    counts = set()
    for pixels in pictures():
        simulator, found, count = seen(module, pixels)
        tokens, positions = reference.see(pixels)
        index = found["positions"][:count, 0]
        assert positions.tolist() == list(range(16))
        assert index.tolist() == sorted(set(index.tolist()))
        assert np.abs(prefill(simulator, found, count) - tokens[index]).max() < 1e-5
        assert not found["tokens"][count:].any()
        counts.add(count)
    assert len(counts) >= fewest_counts


def test_it_answers_as_the_unpruned_model_when_all_is_kept(tmp_path: Path) -> None:
    directory = write_pruned(tmp_path, ALL, p=1.0, min_keep=16)
    module, reference = lowered(directory).module, OnnxFiles(directory)
    simulator, found, count = seen(module, pictures()[0])
    reference.see(pictures()[0])
    prefill(simulator, found, count)
    assert (count, simulator.kv_length) == (16, 16)
    ids, positions = np.array([3, 4, 5]), np.arange(16, 19)
    answered = simulator.run_arrays(
        "step", {"token_ids": ids[:, None], "positions": positions[:, None]}
    )
    logits, _ = reference.step(ids, positions)
    assert np.abs(answered["logits"][0] - logits).max() < 1e-4


def test_filling_the_cache_in_chunks_changes_nothing(tmp_path: Path) -> None:
    module = lowered(write_pruned(tmp_path, ALL, p=0.9, min_keep=5)).module
    answers = []
    for most in (8, 3, 1):
        simulator, found, count = seen(module, pictures()[1])
        for at in range(0, count, most):
            rows = slice(at, min(count, at + most))
            simulator.run_arrays("prefill", {r: found[r][rows] for r in ("tokens", "positions")})
        step = {"token_ids": np.array([[3]]), "positions": np.array([[16]])}
        answers.append(simulator.run_arrays("step", step)["logits"])
    assert np.abs(np.diff(answers, axis=0)).max() < 1e-9


def rows_by_token(
    _simulator: Simulator, found: dict[str, np.ndarray], count: int
) -> dict[int, np.ndarray]:
    return dict(zip(found["positions"][:count, 0].tolist(), found["tokens"][:count], strict=True))


def test_merging_adds_context_tokens(tmp_path: Path) -> None:
    pixels = pictures()[2]
    alone, merged = (
        seen(lowered(write_pruned(tmp_path / str(n), ALL, p=0.4, merge=n)).module, pixels)
        for n in (0, 3)
    )
    assert merged[2] == alone[2] + 3
    kept = rows_by_token(*alone)
    changed = [
        token
        for token, row in rows_by_token(*merged).items()
        if token not in kept or not np.array_equal(row, kept[token])
    ]
    assert len(changed) == 3


@pytest.mark.parametrize(("class_token", "score"), [(True, "row"), (True, "mean"), (False, "mean")])
def test_a_model_that_prunes_nothing_can_be_pruned(
    tmp_path: Path, class_token: bool, score: str
) -> None:
    shape = TinyShape(prunes=False, class_token=class_token)
    directory = write_pruned(tmp_path, shape, p=0.5, merge=2, score=score)
    module, vision = lowered(directory).module, session(tmp_path / "vision.onnx")
    call = next(c for c in module.programs[0].calls if c.op is Op.ATTENTION_SCORE)
    wanted = (0 if score == "row" else -1, int(class_token))
    assert (call.params["row"], call.params["first"]) == wanted
    for pixels in pictures():
        simulator, found, count = seen(module, pixels)
        image = pixels[None, None].astype(np.float32) / 127.5 - 1
        (tokens,) = vision.run(None, {"image": image})
        index = found["positions"][:count, 0]
        exact = np.abs(prefill(simulator, found, count) - tokens[0][index]).max(axis=1) < 1e-5
        assert exact.sum() >= count - 2
        assert 3 <= count < 16
        assert simulator.kv_length == count


def test_a_model_without_class_token_needs_the_mean(tmp_path: Path) -> None:
    shape = TinyShape(prunes=False, class_token=False)
    with pytest.raises(UnsupportedOperatorError, match="there is none") as caught:
        lowered(write_pruned(tmp_path, shape, p=0.5))
    assert '"score": "mean"' in caught.value.hint


def test_it_refuses_tokens_that_are_not_the_rows_of_attention(tmp_path: Path) -> None:
    shape = TinyShape(prunes=False, class_token=False)
    models, document = tiny_models(shape), tiny_document(shape)
    graph = models["vision"].graph
    final = next(n for n in graph.node if n.output[0] == graph.output[0].name)
    made, final.output[0] = final.output[0], "before"
    order = onnx.numpy_helper.from_array(np.arange(16)[::-1].copy(), "order")
    graph.initializer.append(order)
    graph.node.append(onnx.helper.make_node("Gather", ["before", "order"], [made], axis=1))
    document["prune"] = {"mode": "top_p", "p": 0.5, "score": "mean"}
    with pytest.raises(UnsupportedOperatorError) as caught:
        lowered(write_submission(tmp_path, models, document))
    assert "rows of its last attention" in str(caught.value)


def _bias_per_row(models: dict[str, onnx.ModelProto]) -> None:
    """Give the projector a bias per kept token: row 3 is not the third token any more."""
    graph = models["vision"].graph
    final = next(n for n in graph.node if n.output[0] == graph.output[0].name)
    table = np.ones((1, 6, 16), np.float32)
    graph.initializer.append(onnx.numpy_helper.from_array(table, "per_row"))
    made = final.output[0]
    final.output[0] = "before"
    graph.node.append(onnx.helper.make_node("Add", ["before", "per_row"], [made]))


def _softmax_over_rows(models: dict[str, onnx.ModelProto]) -> None:
    graph = models["vision"].graph
    final = next(n for n in graph.node if n.output[0] == graph.output[0].name)
    made = final.output[0]
    final.output[0] = "before"
    graph.node.append(onnx.helper.make_node("Softmax", ["before"], [made], axis=1))


@pytest.mark.parametrize("edit", [_bias_per_row, _softmax_over_rows])
def test_it_refuses_what_is_not_row_wise_after_the_pruning(tmp_path: Path, edit: Any) -> None:
    models = tiny_models()
    edit(models)
    document = tiny_document() | {"prune": {"mode": "top_p", "p": 0.8}}
    with pytest.raises(UnsupportedOperatorError) as caught:
        lowered(write_submission(tmp_path, models, document))
    assert "is not row-wise" in str(caught.value)


def test_it_refuses_to_keep_more_than_there_is(tmp_path: Path) -> None:
    with pytest.raises(MalformedModelError, match="at least 17 of 16 tokens") as caught:
        lowered(write_pruned(tmp_path, p=0.8, min_keep=17))
    assert "at most 16" in caught.value.hint


def test_it_refuses_a_picture_that_fills_the_cache(tmp_path: Path) -> None:
    document = tiny_document() | {"prune": {"mode": "top_p", "p": 0.8}, "max_context": 16}
    with pytest.raises(UserModelError, match="no room for words") as caught:
        lowered(write_submission(tmp_path, tiny_models(), document))
    assert "max_context" in caught.value.hint
