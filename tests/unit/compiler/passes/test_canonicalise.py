"""Classical rewrites: fewer operations, the same numbers."""

from pathlib import Path

from compiler.frontend import import_pipeline
from compiler.passes.canonicalise import Canonicalise
from compiler.passes.functions import operations
from tests.factories.onnx_blocks import GraphBuilder
from tests.factories.onnx_models import write_block
from tests.factories.onnx_runs import block_difference


def redundant(b: GraphBuilder, x: str) -> str:
    """Equal operations, a dead one, a view and its inverse, transposes that meet, constants."""
    there = b.op("Reshape", x, b.ints(-1, 8))
    back = b.op("Reshape", there, b.ints(1, -1, 8))
    turned = b.op("Transpose", b.op("Transpose", back, perm=[0, 2, 1]), perm=[0, 2, 1])
    first, second = b.op("Sigmoid", turned), b.op("Sigmoid", turned)
    b.op("Exp", turned)
    scale = b.op("Reshape", b.op("Transpose", b.weight(2, 4), perm=[1, 0]), b.ints(8))
    return b.op("Mul", b.op("Add", first, second), scale)


def names(directory: Path, *, canonical: bool) -> list[str]:
    imported = import_pipeline(directory)
    if canonical:
        assert Canonicalise().run(imported.module, imported.context()).changed > 0
        imported.module.verify()
    found = []
    for op in operations(imported.module):
        kind = op.properties.get("op")
        found.append(op.name if kind is None else str(kind).strip('"'))
    return found


def test_it_leaves_each_computation_once(tmp_path: Path) -> None:
    directory = write_block(tmp_path, redundant)
    before, after = names(directory, canonical=False), names(directory, canonical=True)
    assert (before.count("Sigmoid"), after.count("Sigmoid")) == (2, 1)
    assert "Exp" not in after
    assert not {"sp.transpose", "sp.reshape"} & set(after)
    assert after.count("sp.constant") == 1
    assert len(after) <= len(before) // 2


def test_it_keeps_the_numbers(tmp_path: Path) -> None:
    assert block_difference(write_block(tmp_path, redundant), tokens=5) < 1e-6
