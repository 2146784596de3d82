"""Which tile layer a target gets: a function over rows, best row first."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class TileSpec:
    """One implementation of the W4 tile.

    Attributes:
        isa: Instruction set it needs; "portable" needs none.
        template: File under `compiler/kernels`.
        rows: Activation rows per block (its SF_TILE_ROWS), for names and reports.
        conv_pixels: Output pixels that CONV2D keeps in registers at once.
    """

    isa: str
    template: str
    rows: int
    conv_pixels: int


PORTABLE: Final = "portable"
TILES: Final[tuple[TileSpec, ...]] = (
    TileSpec("avx512vnni", "templates/tile_avx512vnni.c.in", rows=4, conv_pixels=4),
    TileSpec("avx2", "templates/tile_maddubs.c.in", rows=4, conv_pixels=4),
    TileSpec("sve2", "templates/tile_sve2.c.in", rows=4, conv_pixels=4),
    TileSpec("i8mm", "templates/tile_i8mm.c.in", rows=4, conv_pixels=4),
    TileSpec("dotprod", "templates/tile_dotprod.c.in", rows=4, conv_pixels=4),
    TileSpec("ssse3", "templates/tile_maddubs.c.in", rows=2, conv_pixels=2),
    TileSpec("vec128", "templates/tile_vec128.c.in", rows=2, conv_pixels=2),
    TileSpec(PORTABLE, "templates/tile_portable.c.in", rows=4, conv_pixels=2),
)


OPENCL_TILE: Final = TileSpec("opencl", "opencl/tile.cl.in", rows=1, conv_pixels=1)


def select_tile(isa: frozenset[str]) -> TileSpec:
    """Return the first tile whose instruction set is there; the portable one otherwise."""
    return next(tile for tile in (OPENCL_TILE, *TILES) if tile.isa in isa or tile.isa == PORTABLE)


@dataclass(frozen=True, slots=True)
class W8Part:
    """How W8 weights are multiplied beside a tile, whose quantised rows it reads.

    SVE2 has none of its own: its usdot and usmmla do on 128 bits what NEON's do, and NEON reads two
    vectors of codes with one instruction where SVE2 takes two.

    Attributes:
        template: File under `compiler/kernels`.
        rows: Activation rows per block (its SF_W8_ROWS), for names and reports.
        columns: Weight rows per block, 16 times its SF_W8_PANELS.
    """

    template: str
    rows: int
    columns: int = 16


_W8_PARTS: Final[Mapping[str, W8Part]] = MappingProxyType(
    {
        "avx512vnni": W8Part("templates/w8_avx512vnni.c.in", rows=12, columns=32),
        "avx2": W8Part("templates/w8_maddubs.c.in", rows=4),
        "ssse3": W8Part("templates/w8_maddubs.c.in", rows=2),
        "sve2": W8Part("templates/w8_i8mm.c.in", rows=4),
        "i8mm": W8Part("templates/w8_i8mm.c.in", rows=4),
        "dotprod": W8Part("templates/w8_dotprod.c.in", rows=4),
        "vec128": W8Part("templates/w8_vec128.c.in", rows=2),
        PORTABLE: W8Part("templates/w8_portable.c.in", rows=4),
        OPENCL_TILE.isa: W8Part("opencl/products.cl.in", rows=1, columns=1),
    }
)


def w8_part(tile: TileSpec) -> W8Part:
    """Return the part that reads the quantised rows of `tile`."""
    return _W8_PARTS[tile.isa]
