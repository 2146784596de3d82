"""Which template implements which operation: one row per operation."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compiler.contract.operand_rules import RULES
from compiler.contract.operations import Op

W4_TEMPLATE: Final = "templates/w4.c.in"
GELU_TEMPLATE: Final = "templates/gelu.c.in"
GELU_USERS: Final = frozenset({Op.EXPERTS, Op.UNARY})
WINDOW_TEMPLATE: Final = "templates/conv_window.c.in"
WINDOW_USERS: Final = frozenset({Op.CONV2D, Op.CONV_DEPTHWISE, Op.SPARSE_CONV})
KV_TEMPLATE: Final = "templates/kv_codes.c.in"
ROUTE_TEMPLATE: Final = "templates/route_choice.c.in"
PRUNE_TEMPLATE: Final = "templates/prune_choice.c.in"
PRUNE_USERS: Final = frozenset({Op.ATTENTION_SCORE, Op.PRUNE_TOP_P})
RECURRENT_TEMPLATE: Final = "templates/recurrent_rows.c.in"
RECURRENT_USERS: Final = frozenset({Op.RECURRENT, Op.RECURRENT_F32})
STEER_TEMPLATE: Final = "templates/steer.c.in"
W8_TEMPLATE: Final = "templates/w8.c.in"
W8_USERS: Final = frozenset({Op.LINEAR_W8, Op.EXPERTS})
STORED_TEMPLATE: Final = "templates/stored.c.in"
SKIP_TEMPLATE: Final = "templates/skip.c.in"
SKIP_USERS: Final = frozenset({Op.LINEAR, Op.EXPERTS})
NM_TEMPLATE: Final = "templates/nm.c.in"
SHARED_REFERENCE: Final = ("templates/ref_shared.c.in", "templates/ref_functions.c.in")
REFERENCE_TEMPLATES: Final = (*SHARED_REFERENCE, "templates/ref_common.c.in")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel.

    Attributes:
        template: File under `compiler/kernels`.
        scratch: It has a `<function>_scratch` that tells its scratch bytes.
        tiled: It quantises rows and multiplies W4 or W8 weights through the tile layer.
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
    def is_reference(self) -> bool:
        """Whether it is a plain kernel over flat operands, chosen where no fast one exists."""
        return self.op.name.startswith("REF_")

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
        KernelSpec(Op.LINEAR_W8, "templates/linear.c.in", scratch=True, tiled=True),
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
        KernelSpec(Op.RECURRENT, "templates/recurrent.c.in", scratch=True, tiled=True),
        KernelSpec(Op.RECURRENT_F32, "templates/recurrent.c.in", scratch=True),
        KernelSpec(Op.EXPERT_PREFETCH, "templates/pages.c.in"),
        KernelSpec(Op.EXPERT_LOAD, "templates/pages.c.in"),
        KernelSpec(Op.CONV_DEPTHWISE, "templates/depthwise.c.in"),
        KernelSpec(Op.PACK, "templates/packed.c.in"),
        KernelSpec(Op.PACKED, "templates/packed.c.in"),
        KernelSpec(Op.SPARSE_CONV, "templates/sparse_conv.c.in", scratch=True),
        KernelSpec(Op.EXPERT_FORESEE, "templates/foresee.c.in", scratch=True, uses=(Op.ROUTE,)),
    )


_REFERENCE: Final = (
    KernelSpec(Op.REF_MOVE, "templates/ref_map.c.in"),
    KernelSpec(Op.REF_MAP, "templates/ref_map.c.in"),
    KernelSpec(Op.REF_REDUCE, "templates/ref_reduce.c.in"),
    KernelSpec(Op.REF_CONTRACT, "templates/ref_contract.c.in"),
    KernelSpec(Op.REF_CONV, "templates/ref_conv.c.in"),
    KernelSpec(Op.REF_CONV_TRANSPOSE, "templates/ref_conv.c.in"),
    KernelSpec(Op.REF_POOL, "templates/ref_reduce.c.in"),
    KernelSpec(Op.REF_RESAMPLE, "templates/ref_reduce.c.in"),
    KernelSpec(Op.REF_GATHER, "templates/ref_index.c.in"),
    KernelSpec(Op.REF_SCATTER, "templates/ref_index.c.in"),
    KernelSpec(Op.REF_TOPK, "templates/ref_index.c.in"),
    KernelSpec(Op.REF_SCAN, "templates/ref_reduce.c.in"),
)
KERNELS: Final[Mapping[Op, KernelSpec]] = MappingProxyType(
    {spec.op: spec for spec in (*_specs(), *_REFERENCE)}
)
BINARY_SIGNS: Final[Mapping[str, str]] = MappingProxyType(
    {"ADD": "+", "MUL": "*", "SUB": "-", "DIV": "/"}
)
