"""Rules of the reference operations: fixed operands and a geometry of the right length.

What a geometry may reach is not visible in the plan: its numbers lie in a weight section. The
kernels check them on every call (see `compiler.contract.reference`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from compiler.contract.operands import Operands, Rule, need
from compiler.contract.operations import Op
from compiler.contract.reference import MAX_PIECES, MAX_SOURCES, geometry_length

MANY: Final = frozenset({Op.REF_MOVE})
"""Operations whose geometry may have more than one row."""


def _rule(op: Op, outputs: tuple[str, ...] = ("any",)) -> Rule:
    length, most = geometry_length(op.name), MAX_PIECES if op in MANY else 1

    def shapes(c: Operands) -> None:
        geometry = c.weight(0)
        need(
            geometry.cols == length and geometry.rows <= most,
            f"{op.name} geometry is {geometry.rows} x {geometry.cols}, not up to {most} x {length}",
        )
        for port in (*c.inputs, *c.outputs):
            need(port is None or not port.dynamic, f"{op.name} works on fixed rows")

    return Rule(
        ("any?",),
        outputs,
        shapes,
        ("i32", "any?"),
        more_inputs=MAX_SOURCES - 1,
        more_weights=MAX_SOURCES - 1,
    )


REFERENCE_RULES: Final[Mapping[Op, Rule]] = MappingProxyType(
    {op: _rule(op) for op in Op if op.name.startswith("REF_") and op is not Op.REF_TOPK}
    | {Op.REF_TOPK: _rule(Op.REF_TOPK, ("any", "i32"))}
)
