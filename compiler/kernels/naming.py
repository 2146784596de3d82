"""The naming grammar of kernels: `sf_<op>_<layout>_<dtype>_<MR>x<NR>__<isa>`.

Reference kernels are `ref_<op>_flat_any_1x1__portable`: the same C for every target, without tiles.
MR activation rows times NR weight rows are computed at once. `rm` = row-major, `p16` = panel 16.
The name describes a rendered instance in reports and in the header of the rendered file; inside a
library every kernel is `sf_<op>`, because a library holds one instance of each.
"""

from collections.abc import Iterable

from compiler.contract.operations import Op
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import TileSpec


def kernel_name(op: Op, tile: TileSpec) -> str:
    """Return the full name of the instance of `op` on `tile`."""
    if KERNELS[op].is_reference:
        return f"{op.name.lower()}_flat_any_1x1__portable"
    op_name = op.name.lower().replace("_", "")
    if KERNELS[op].tiled:
        return f"sf_{op_name}_p16_w4_{tile.rows}x16__{tile.isa}"
    return f"sf_{op_name}_rm_f32_1x8__{tile.isa}"


def kernel_names(ops: Iterable[Op], tile: TileSpec) -> tuple[str, ...]:
    """Return the names of several instances, in operation order."""
    return tuple(kernel_name(op, tile) for op in sorted(ops))
