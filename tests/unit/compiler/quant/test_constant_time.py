"""What has no constant-time kernel is refused by the names of the model's nodes."""

import pytest

from compiler.errors import UnsupportedOperatorError
from compiler.kernels.program import Module, Op
from compiler.quant.constant_time import MOST_NAMED, require_constant_time
from tests.factories.modules import ModuleBuilder


def module(op: Op, count: int = 1) -> Module:
    b = ModuleBuilder(1, 4)
    x, y = b.buffer(None, 8), b.buffer(None, 8)
    for _ in range(count):
        b.call(op, [x], [y], [])
    b.program("run", {"x": x}, {"y": y})
    return b.module()


@pytest.mark.parametrize(
    ("op", "hint"),
    [(Op.REF_SCATTER, "without these operators"), (Op.PRUNE, "without pruning of tokens")],
)
def test_nodes_are_named_and_the_hint_is_about_the_model(op: Op, hint: str) -> None:
    sources = {"run": ["ScatterND /a/b", "TopK /a/c", "ScatterND /a/b"]}
    with pytest.raises(UnsupportedOperatorError) as error:
        require_constant_time(module(op, 3), sources)
    assert str(error.value) == "no constant-time kernel for ScatterND /a/b, TopK /a/c"
    assert hint in error.value.hint
    assert "explain" not in error.value.hint


def test_operations_are_named_where_nobody_knows_the_nodes() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"kernel for REF_SCATTER$"):
        require_constant_time(module(Op.REF_SCATTER), {})


def test_of_many_nodes_the_first_are_named() -> None:
    nodes = [f"TopK {number}" for number in range(MOST_NAMED + 2)]
    with pytest.raises(UnsupportedOperatorError, match=r"TopK 0, .*TopK 4 and 2 more$"):
        require_constant_time(module(Op.REF_TOPK, len(nodes)), {"run": nodes})


def test_convolutions_by_live_taps_are_let_through() -> None:
    require_constant_time(module(Op.SPARSE_CONV), {"run": ["Conv /c"]})
