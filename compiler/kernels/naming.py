"""The naming grammar of kernels: `sf_<op>_<layout>_<dtype>_<MR>x<NR>__<isa>`.

Reference kernels are `ref_<op>_flat_any_1x1__portable`: the same C for every target, without tiles.
MR activation rows times NR weight rows are computed at once. `rm` = row-major, `p16` = panel 16;
`csr`, `coo` and `ell` store elements or blocks, `nm` half of the columns of a panel, `uprows` and
`columns` single neurons.
The name describes a rendered instance in reports and in the header of the rendered file; inside a
library every kernel is `sf_<op>`, because a library holds one instance of each.
"""

from collections.abc import Iterable
from typing import Final

from compiler.contract.operations import Op
from compiler.contract.plan_format import Kind
from compiler.kernels.registry import KERNELS
from compiler.kernels.select import TileSpec, w8_part

_SMALL: Final = {
    Kind.W4_CSR: ("csr", "8x1"),
    Kind.W4_COO: ("coo", "8x1"),
    Kind.W4_ELL: ("ell", "2x32"),
    Kind.W4_UP_ROWS: ("uprows", "1x1"),
    Kind.W4_COLUMNS: ("columns", "1x128"),
}


def kernel_name(op: Op, tile: TileSpec, kinds: Iterable[Kind] = ()) -> str:
    """Return the full name of the instance of `op` on `tile`, for weights of these kinds."""
    if KERNELS[op].is_reference:
        return f"{op.name.lower()}_flat_any_1x1__portable"
    op_name = op.name.lower().replace("_", "")
    small = next((kind for kind in _SMALL if kind in set(kinds)), None)
    if small is not None:
        layout, sizes = _SMALL[small]
        return f"sf_{op_name}_{layout}_w4_{sizes}__{tile.isa}"
    if Kind.W4_NM in kinds:
        return f"sf_{op_name}_nm_w4_{tile.rows}x16__{tile.isa}"
    if op is Op.LINEAR_W8 or Kind.W8 in kinds:
        part = w8_part(tile)
        return f"sf_{op_name.removesuffix('w8')}_p16_w8_{part.rows}x{part.columns}__{tile.isa}"
    if KERNELS[op].tiled:
        return f"sf_{op_name}_p16_w4_{tile.rows}x16__{tile.isa}"
    return f"sf_{op_name}_rm_f32_1x8__{tile.isa}"


def kernel_names(ops: Iterable[Op], tile: TileSpec) -> tuple[str, ...]:
    """Return the names of several instances, in operation order."""
    return tuple(kernel_name(op, tile) for op in sorted(ops))
