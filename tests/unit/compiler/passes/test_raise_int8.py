"""Products of bytes: found however they are written, kept as stored, left where unclear."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.frontend import import_pipeline
from compiler.kernels.program import Module, Op
from compiler.passes.pipeline import raise_pipeline
from compiler.quant.w8 import find_w8
from compiler.simulator import Simulator
from tests.factories.int8_blocks import Bytes, Codes, int8_block, product, static_block
from tests.factories.onnx_blocks import GraphBuilder, block_model
from tests.factories.onnx_models import graph_document, write_block, write_submission
from tests.factories.onnx_runs import block_rows, lowered, reference_rows

SYMMETRIC = Bytes()
ROWS = 12
HOW = {
    "per column": SYMMETRIC,
    "per tensor": replace(SYMMETRIC, per_column=False),
    "without zero": replace(SYMMETRIC, zero=None),
    "unsigned": replace(SYMMETRIC, dtype="uint8", zero=131),
    "unsigned, zero at the end": replace(SYMMETRIC, dtype="uint8", zero=0, per_column=False),
    "rows first": replace(SYMMETRIC, order="rows"),
    "weights first": replace(SYMMETRIC, order="weights"),
}


def raised_text(directory: Path) -> str:
    return raise_pipeline(import_pipeline(directory)).ir_text["raised"]


def operations(module: Module) -> list[str]:
    return [call.op.name for call in module.programs[0].calls]


@pytest.mark.parametrize("name", HOW)
def test_weights_stay_as_they_are_stored(tmp_path: Path, name: str) -> None:
    how = HOW[name]
    model = int8_block(how)
    module = lowered(write_block(tmp_path, model, width=how.cols)).module
    assert operations(module) == ["LINEAR_W8"]
    codes = find_w8(module.weights[0].array).codes
    b = GraphBuilder()
    limits = np.iinfo(how.dtype)
    stored = b.rng.integers(limits.min, limits.max + 1, (how.cols, how.rows)) - (how.zero or 0)
    assert np.array_equal(codes, stored.T)


@pytest.mark.parametrize("name", HOW)
def test_it_is_as_near_as_onnx_runtime(tmp_path: Path, name: str) -> None:
    how = HOW[name]
    directory = write_block(tmp_path, int8_block(how), width=how.cols)
    module = lowered(directory).module
    x = block_rows(directory, 12)
    runs = [Simulator(module, {}, mode="bits"), Simulator(module, mode="f64")]
    found, exact = (run.run_arrays("forward", {"tensor": x})["tensor"] for run in runs)
    theirs = reference_rows(directory, x)
    size = np.abs(exact).max()
    assert np.abs(found - exact).max() / size < 0.02
    assert np.abs(found - exact).mean() < 1.5 * np.abs(theirs - exact).mean()


def test_steps_of_other_rows_are_no_such_product(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        quantised, _, zero = b.ops("DynamicQuantizeLinear", x, count=3)
        _, other, _ = b.ops("DynamicQuantizeLinear", b.op("Relu", x), count=3)
        codes = b.const(b.rng.integers(-9, 9, (32, 32)), "int8")
        sums = b.op("Cast", b.op("MatMulInteger", quantised, codes, zero), to=1)
        return b.op("Mul", sums, b.op("Mul", other, b.const(0.1)))

    model = write_block(tmp_path, block, width=32)
    text = raised_text(model)
    assert "MatMulInteger" in text
    assert "sp.linear" not in text


def test_small_products_stay_exact(tmp_path: Path) -> None:
    how = replace(SYMMETRIC, cols=32, rows=8)
    text = raised_text(write_block(tmp_path, int8_block(how), width=32))
    assert "MatMulInteger" in text


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 48)])
@pytest.mark.parametrize("order", ["together", "rows", "weights"])
def test_a_step_that_adds_an_axis_gives_the_same_product(
    tmp_path: Path, shape: tuple[int, ...], order: str
) -> None:
    how = replace(SYMMETRIC, order=order, step_shape=shape)

    def block(b: GraphBuilder, x: str) -> str:
        return b.op("Squeeze", product(b, x, how), b.ints(0))

    def plain(b: GraphBuilder, x: str) -> str:
        return product(b, x, replace(how, step_shape=shape[3:] if shape[3] > 1 else ()))

    directories = [
        write_block(tmp_path / each.__name__, each, width=how.cols) for each in (block, plain)
    ]
    x, results = block_rows(directories[0], 12), []
    for module in (lowered(directory).module for directory in directories):
        assert operations(module) == ["LINEAR_W8"]
        simulator = Simulator(module, {}, mode="bits")
        results.append(simulator.run_arrays("forward", {"tensor": x})["tensor"])
    assert np.array_equal(*results)
    theirs = reference_rows(directories[1], x)
    assert np.abs(results[0] - theirs).max() / np.abs(theirs).max() < 0.02


def test_two_products_share_their_rows(tmp_path: Path) -> None:
    def block(b: GraphBuilder, x: str) -> str:
        return b.op("Add", product(b, x, SYMMETRIC), product(b, x, SYMMETRIC))

    module = lowered(write_block(tmp_path, block, width=32)).module
    assert operations(module) == [Op.LINEAR_W8.name, Op.LINEAR_W8.name]


STATIC = {
    "around the middle": Codes(),
    "from zero": Codes(zero=0),
    "to zero": Codes(zero=255),
    "per column": Codes(zero=90, per_column=True),
    "signed": Codes(dtype="int8", zero=-5),
}


def write_static(folder: Path, how: Codes) -> Path:
    """Write a submission of the block for `ROWS` rows: plain kernels want them fixed."""
    model = block_model(static_block(how), width=how.cols)
    document = graph_document(model)
    document["components"]["model"]["inputs"]["x"]["shape"] = [1, ROWS, how.cols]
    return write_submission(folder, {"model": model}, document)


def static_codes(directory: Path, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes of the result as the plan and as ONNX Runtime have them."""
    simulator = Simulator(lowered(directory).module, {}, mode="bits")
    found = simulator.run_arrays("forward", {"tensor": x})["tensor"]
    both = (found.reshape(len(x), -1), reference_rows(directory, x).reshape(len(x), -1))
    ours, theirs = (np.rint(values / np.float32(0.05)) for values in both)
    return ours, theirs


@pytest.mark.parametrize("name", STATIC)
def test_products_between_bytes_keep_their_codes(tmp_path: Path, name: str) -> None:
    how = STATIC[name]
    directory = write_static(tmp_path, how)
    module = lowered(directory).module
    assert "LINEAR_W8" in operations(module)
    assert "REF_CONTRACT" not in operations(module)
    x = block_rows(directory, ROWS)
    ours, theirs = static_codes(directory, x)
    assert len(np.unique(theirs)) > 30
    assert np.abs(ours - theirs).max() <= 1
    assert (ours != theirs).mean() < 0.01


def test_the_farthest_code_is_taken_for_its_neighbour(tmp_path: Path) -> None:
    """128 below the middle: int8 ends at -127 in the kernels."""
    directory = write_static(tmp_path, Codes())
    x = np.full((ROWS, 40), -127 * 0.04, np.float32)
    near, theirs = static_codes(directory, x)
    assert np.array_equal(near, theirs)
    far, _ = static_codes(directory, np.full_like(x, -128 * 0.04))
    assert np.array_equal(far, near)


@pytest.mark.parametrize("changes", [{"rows": 8}, {"cols": 16}])
def test_small_products_between_bytes_stay_exact(tmp_path: Path, changes: dict[str, int]) -> None:
    directory = write_static(tmp_path, replace(Codes(), **changes))
    assert "REF_CONTRACT" in operations(lowered(directory).module)
    ours, theirs = static_codes(directory, block_rows(directory, ROWS))
    assert np.array_equal(ours, theirs)
