"""Which template implements which operation: one row per operation."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compiler.contract.operand_rules import RULES
from compiler.contract.operations import Op

W4_TEMPLATE: Final = "templates/w4.c.in"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel.

    Attributes:
        template: File under `compiler/kernels`.
        scratch: It has a `<function>_scratch` that tells its scratch bytes.
        tiled: It multiplies W4 weights through the tile layer.
        uses: Kernels that it calls.
    """

    op: Op
    template: str
    scratch: bool = False
    tiled: bool = False
    uses: tuple[Op, ...] = ()

    @property
    def function(self) -> str:
        """Name of the C function."""
        return f"sf_{self.op.name.lower()}"

    @property
    def fewest(self) -> tuple[int, int, int]:
        """Inputs, outputs and weights that a record must carry at least."""
        rule = RULES[self.op]
        return (
            sum(not port.endswith("?") for port in rule.inputs),
            sum(not port.endswith("?") for port in rule.outputs),
            sum(not kind.endswith("?") for kind in rule.weights),
        )


def _specs() -> tuple[KernelSpec, ...]:
    rows, elementwise = "templates/rows.c.in", "templates/elementwise.c.in"
    attention, route = "templates/attention.c.in", "templates/route.c.in"
    prune = "templates/prune.c.in"
    return (
        KernelSpec(Op.IMAGE_U8, elementwise),
        KernelSpec(Op.EMBED, rows),
        KernelSpec(Op.LINEAR, "templates/linear.c.in", scratch=True, tiled=True),
        KernelSpec(Op.LINEAR_F32, "templates/linear.c.in", scratch=True),
        KernelSpec(Op.NORM, "templates/norm.c.in"),
        KernelSpec(Op.ROPE, "templates/norm.c.in"),
        KernelSpec(Op.ATTENTION, attention, scratch=True),
        KernelSpec(Op.ATTENTION_ROW, attention, scratch=True),
        KernelSpec(Op.PRUNE, prune, scratch=True),
        KernelSpec(Op.CONV2D, "templates/conv2d.c.in", scratch=True),
        KernelSpec(Op.ROWS_CONCAT, rows),
        KernelSpec(Op.ROWS_SLICE, rows),
        KernelSpec(Op.ADD, elementwise),
        KernelSpec(Op.MUL, elementwise),
        KernelSpec(Op.SUB, elementwise),
        KernelSpec(Op.DIV, elementwise),
        KernelSpec(Op.UNARY, elementwise),
        KernelSpec(Op.SOFTMAX, elementwise),
        KernelSpec(Op.ROUTE, route, scratch=True),
        KernelSpec(Op.EXPERTS, "templates/experts.c.in", scratch=True, tiled=True),
        KernelSpec(Op.ARGMAX, route),
        KernelSpec(Op.GATHER_ROWS, rows),
        KernelSpec(Op.COLS_CONCAT, rows),
        KernelSpec(Op.COLS_SLICE, rows),
        KernelSpec(Op.ATTENTION_SCORE, prune, scratch=True),
        KernelSpec(Op.PRUNE_TOP_P, prune, scratch=True),
        KernelSpec(
            Op.MOE_LAYER,
            "templates/moe_layer.c.in",
            scratch=True,
            tiled=True,
            uses=(Op.ROUTE, Op.EXPERTS),
        ),
    )


KERNELS: Final[Mapping[Op, KernelSpec]] = MappingProxyType({spec.op: spec for spec in _specs()})
BINARY_SIGNS: Final[Mapping[str, str]] = MappingProxyType(
    {"ADD": "+", "MUL": "*", "SUB": "-", "DIV": "/"}
)
