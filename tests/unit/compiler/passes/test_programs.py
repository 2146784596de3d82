"""The tiny vision-language model: programs, cache, and that broken ones are not taken for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from compiler.driver.onnx_backend import OnnxFiles
from compiler.errors import MalformedModelError, UnsupportedOperatorError
from compiler.kernels.program import KvCache, Module, Op, Program
from compiler.simulator import Simulator
from tests.factories.onnx_models import (
    TinyShape,
    disguise_submission,
    tiny_document,
    tiny_models,
    write_submission,
    write_tiny,
)
from tests.factories.onnx_runs import lowered


def program(module: Module, name: str) -> Program:
    return next(p for p in module.programs if p.name == name)


def count(module: Module, name: str, op: Op) -> int:
    return sum(call.op is op for call in program(module, name).calls)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def module(tiny: Path) -> Module:
    return lowered(tiny).module


def test_it_makes_the_programs_of_the_family(module: Module) -> None:
    assert [p.name for p in module.programs] == ["see", "step"]
    see, step = module.programs
    assert (set(see.inputs), set(see.outputs)) == ({"image"}, {"embeds", "positions"})
    assert set(step.inputs) == {"token_ids", "positions"}
    assert set(step.outputs) == {"logits", "token", "routing"}
    assert module.kv == KvCache(layers=2, heads=2, head_dim=8, capacity=32)
    assert module.max_tokens == 8


def test_it_leaves_dead_work_out_of_see(module: Module) -> None:
    assert count(module, "see", Op.ARGMAX) == 0
    assert count(module, "see", Op.MOE_LAYER) == 1
    assert count(module, "step", Op.MOE_LAYER) == 2
    layers = [c.params["kv_layer"] for c in program(module, "see").calls if c.op is Op.ATTENTION]
    assert layers == [-1, 0, 1]


def test_it_computes_the_last_block_for_the_last_row_only(module: Module) -> None:
    step = program(module, "step")
    last_layer = [c for c in step.calls if c.op is Op.MOE_LAYER][-1]
    assert not module.buffers[last_layer.outputs[0]].dynamic
    assert module.buffers[step.outputs["logits"]].rows == 1
    assert module.buffers[step.outputs["routing"]].cols == 4


def test_it_shares_weights_between_programs(module: Module) -> None:
    def used(name: str) -> set[int]:
        return {at for call in program(module, name).calls for at in call.weights}

    sections = {module.weights[at].section for at in used("see") & used("step")}
    assert "expert.L0.E3" in sections
    assert not any(section.startswith("expert.L1") for section in sections)


def check_answers(directory: Path, module: Module) -> None:
    """Compare an image and three steps with ONNX Runtime."""
    simulator, reference = Simulator(module, mode="f64"), OnnxFiles(directory)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8)).astype(np.uint8)
    seen = simulator.run_arrays("see", {"image": pixels.reshape(1, -1)})
    tokens, kept = reference.see(pixels)
    assert np.abs(seen["embeds"] - tokens).max() < 1e-5
    assert seen["positions"][:, 0].tolist() == kept.tolist()
    position = 16
    for ids in ([3, 4, 5], [7], [2, 9]):
        fed = np.array(ids)
        positions = np.arange(position, position + len(ids))
        found = simulator.run_arrays(
            "step", {"token_ids": fed[:, None], "positions": positions[:, None]}
        )
        logits, experts = reference.step(fed, positions)
        assert np.abs(found["logits"][0] - logits).max() < 1e-4
        assert found["token"][0, 0] == logits.argmax()
        assert found["routing"].reshape(experts.shape).tolist() == experts.tolist()
        position += len(ids)


def test_it_answers_as_onnx_runtime_does(tiny: Path, module: Module) -> None:
    check_answers(tiny, module)


@pytest.mark.parametrize("rope", ["turned", "matmul"])
def test_it_knows_other_spellings_of_the_rotation(tmp_path: Path, rope: str) -> None:
    directory = write_tiny(tmp_path, rope=rope)
    assert count(lowered(directory, fuse=False).module, "step", Op.ROPE) == 4
    check_answers(directory, lowered(directory).module)


def test_it_shares_key_heads_between_query_heads(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, heads=4, kv_heads=2)
    other = lowered(directory).module
    assert other.kv == KvCache(layers=2, heads=2, head_dim=4, capacity=32)
    check_answers(directory, other)


@pytest.mark.parametrize("seed", [11, 12])
def test_it_lowers_a_disguised_model_to_the_same_module(
    tmp_path: Path, module: Module, seed: int
) -> None:
    disguised = disguise_submission(tiny_models(), tiny_document(), seed)
    other = lowered(write_submission(tmp_path, *disguised)).module
    assert_same(other, module)


def assert_same(a: Module, b: Module) -> None:
    assert a.programs == b.programs
    assert a.buffers == b.buffers
    assert (a.kv, a.max_tokens) == (b.kv, b.max_tokens)
    assert [(w.id, w.kind, w.section) for w in a.weights] == [
        (w.id, w.kind, w.section) for w in b.weights
    ]
    assert all(
        x.array.tobytes() == y.array.tobytes() for x, y in zip(a.weights, b.weights, strict=True)
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"merge_perm": (0, 1, 2, 3)}, UnsupportedOperatorError, "number of columns"),
        ({"swap_present": True}, MalformedModelError, "present_key is not its past"),
        ({"swap_halves": True}, MalformedModelError, "attention over the cache"),
        (
            {"swap_halves": True, "rope": "turned"},
            MalformedModelError,
            "attention over the cache",
        ),
        ({"mask_scale": 2.0}, MalformedModelError, "attention over the cache"),
    ],
)
def test_it_does_not_match_a_mutated_model(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lowered(write_tiny(tmp_path, TinyShape(), **change))


def test_it_does_not_match_a_mask_of_another_role(tmp_path: Path) -> None:
    document = tiny_document()
    port = document["components"]["decoder"]["inputs"]
    port["mask"] = {"role": "constant", "value": 0.0}
    with pytest.raises((MalformedModelError, UnsupportedOperatorError)):
        lowered(write_submission(tmp_path, tiny_models(), document))


Edit = Callable[[dict[str, onnx.ModelProto], dict[str, Any]], None]


def swap_caches(_models: dict[str, onnx.ModelProto], document: dict[str, Any]) -> None:
    inputs = document["components"]["decoder"]["inputs"]
    inputs["past_k"], inputs["past_v"] = inputs["past_v"], inputs["past_k"]


def prune_by_mean(models: dict[str, onnx.ModelProto], _document: dict[str, Any]) -> None:
    for node in models["vision"].graph.node:
        if node.op_type == "Slice" and node.output[0] == _row_slice(models["vision"]):
            node.op_type = "Identity"
            del node.input[1:]


def _row_slice(model: onnx.ModelProto) -> str:
    return next(n.output[0] for n in model.graph.node if n.op_type == "Slice")


def narrow_embed(models: dict[str, onnx.ModelProto], _document: dict[str, Any]) -> None:
    table = models["embed"].graph.initializer[0]
    array = onnx.numpy_helper.to_array(table)[:, :8]
    table.CopyFrom(onnx.numpy_helper.from_array(array, table.name))
    models["embed"].graph.output[0].type.tensor_type.shape.dim[2].dim_value = 8


@pytest.mark.parametrize("edit", [swap_caches, prune_by_mean, narrow_embed])
def test_it_refuses_components_that_do_not_fit(tmp_path: Path, edit: Edit) -> None:
    models, document = tiny_models(), tiny_document()
    edit(models, document)
    with pytest.raises((MalformedModelError, UnsupportedOperatorError)):
        lowered(write_submission(tmp_path, models, document))


def test_it_leaves_the_imported_module_alone(tiny: Path) -> None:
    from compiler.dialects.text import print_module
    from compiler.frontend import import_pipeline
    from compiler.passes.pipeline import lower_pipeline

    imported = import_pipeline(tiny)
    before = print_module(imported.module)
    first, second = lower_pipeline(imported), lower_pipeline(imported)
    assert print_module(imported.module) == before
    assert first.ir_text == second.ir_text
