"""The OpenCL back end: OpenCL C 1.2 source for the operations of a plan.

The source is the artefact: a device's driver compiles it. Its mathematics (exp, norms, routing) are
the very templates that the C back ends render; only loads, stores and the W4 tile are its own.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from compiler.contract.operations import Op
from compiler.emitters.interface import Part, SparseKernelEmitter
from compiler.emitters.templates import SHARED, render
from compiler.hardware.targets import Target
from compiler.kernels import naming, registry

_BASE: Final = ("opencl/prelude.cl.in", "runtime/math.c.in", "runtime/rows.c.in")
_TILED: Final = ("opencl/tile.cl.in", "opencl/products.cl.in")
_ROUTED: Final = (registry.ROUTE_TEMPLATE, "opencl/route.cl.in")
_STEPS: Final = (registry.RECURRENT_TEMPLATE, "opencl/recurrent.cl.in")
_CHOICES: Final = (registry.PRUNE_TEMPLATE, "opencl/prune.cl.in")
_REFERENCE: Final = ("opencl/doubles.cl.in", *registry.SHARED_REFERENCE)
_NORMS: Final = ("opencl/norms.cl.in",)
_ELEMENTWISE: Final = ("opencl/elementwise.cl.in",)
_MOVES: Final = ("opencl/moves.cl.in",)
TEMPLATES: Final[Mapping[Op, tuple[str, ...]]] = MappingProxyType(
    {
        **dict.fromkeys((Op.LINEAR, Op.LINEAR_F32, Op.LINEAR_W8), (*_TILED, *_NORMS)),
        **dict.fromkeys((Op.RECURRENT, Op.RECURRENT_F32), (*_TILED, *_STEPS, *_MOVES)),
        Op.EXPERTS: (*_TILED, registry.GELU_TEMPLATE, "opencl/experts.cl.in"),
        Op.MOE_LAYER: (
            *(*_TILED, *_NORMS, *_ROUTED),
            *(registry.GELU_TEMPLATE, "opencl/experts.cl.in"),
        ),
        Op.ROUTE: _ROUTED,
        Op.ARGMAX: ("opencl/route.cl.in",),
        Op.NORM: _NORMS,
        Op.ROPE: _NORMS,
        Op.ATTENTION: ("opencl/attention.cl.in",),
        **dict.fromkeys((Op.PRUNE, Op.ATTENTION_ROW), (*_MOVES, "opencl/prune.cl.in")),
        **dict.fromkeys((Op.PRUNE_TOP_P, Op.ATTENTION_SCORE), _CHOICES),
        Op.CONV_DEPTHWISE: ("opencl/depthwise.cl.in",),
        Op.CONV2D: ("opencl/conv2d.cl.in",),
        Op.SPARSE_CONV: ("opencl/sparse_conv.cl.in",),
        **dict.fromkeys((Op.ADD, Op.MUL, Op.SUB, Op.DIV), _ELEMENTWISE),
        **dict.fromkeys((Op.SOFTMAX, Op.IMAGE_U8), _ELEMENTWISE),
        Op.UNARY: (registry.GELU_TEMPLATE, *_ELEMENTWISE),
        **dict.fromkeys((Op.EMBED, Op.GATHER_ROWS, Op.ROWS_CONCAT, Op.ROWS_SLICE), _MOVES),
        **dict.fromkeys((Op.COLS_CONCAT, Op.COLS_SLICE), _MOVES),
        **dict.fromkeys((Op.EXPERT_PREFETCH, Op.EXPERT_LOAD, Op.EXPERT_FORESEE), ()),
        **{
            op: (*_REFERENCE, "opencl/reference.cl.in")
            for op, spec in registry.KERNELS.items()
            if spec.is_reference
        },
    }
)
"""Templates of each operation, besides the base; what is not here is refused by name."""


class OpenClEmitter(SparseKernelEmitter):
    """OpenCL C 1.2."""

    name = "opencl"
    parts = MappingProxyType(
        {
            Part.INDEX: ("sf_live_tile", "sf_partial"),
            Part.LOAD: ("sf_cell_load",),
            Part.MMA: ("sf_group_init", "sf_group_mac", "sf_acc_scale"),
            Part.STORE: ("sf_acc_float", "sf_panel_store"),
        }
    )

    def capabilities(self) -> frozenset[Op]:
        """Return the operations that have a kernel."""
        return frozenset(TEMPLATES)

    def emit(self, ops: Iterable[Op], target: Target) -> str:
        """Return the OpenCL C that offers `ops`.

        Raises:
            UnsupportedOperatorError: An operation has no kernel here.
        """
        self.require(ops := sorted(set(ops)))
        used = sorted({used for op in ops for used in (op, *registry.KERNELS[op].uses)})
        context = {**SHARED, "language": "opencl", "ops": [op.name for op in used]}
        wanted = [*_BASE, *(name for op in ops for name in TEMPLATES[op])]
        parts = [render(name, context) for name in _ordered(wanted)]
        names = "\n".join(f" *   {name}" for name in naming.kernel_names(ops, self.tile(target)))
        return f"/* Kernels for {target.id}:\n{names}\n */\n" + "\n".join(parts)

    def build(self, source: str, target: Target, cache_dir: Path) -> bytes:  # noqa: ARG002
        """Return the source itself: the driver of a device compiles it."""
        return source.encode()


def _ordered(names: Iterable[str]) -> list[str]:
    """Return each template once: what others build on first, then by name."""
    shared = (registry.GELU_TEMPLATE, registry.PRUNE_TEMPLATE, registry.RECURRENT_TEMPLATE)
    rank = (*_BASE, *shared, *_REFERENCE, *_TILED, *_ROUTED)
    found = dict.fromkeys(names)
    return [*(name for name in rank if name in found), *sorted(found.keys() - set(rank))]
