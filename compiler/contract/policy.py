"""The `policy` section: how each class of calls runs on a device, a table that C indexes directly.

    compiler -(predicts)-> defaults, doubts -> device -(measures the doubtful)-> table -> plan VM

A **variant** says how a call runs and never what it computes: any table gives the same bits. A
**cell** is a class of calls (kind, bytes of weights read), a bucket of activation rows and a bucket
of density; it holds one byte, the variant. **Doubts** are the variants of a cell that the
compiler's cost model cannot tell apart; a device chooses among them by measuring. The VM looks a
call up before it runs it; `variant_of` is the same function in Python.

Bytes, little endian, nothing between the parts:

    "SFPOLC01" | u32 header bytes = 32 | u32 flags | u16 kinds, sizes, rows, densities
    | u32 residual, per mille | u32 0 | u8 variant[cells] | u8 doubts[cells]

`doubts` has bit v for variant v: none, or two and more of them, the default among them. `residual`
is the relative error of the model on products that it was not fitted to. Flags: 1 FIXED, the device
neither measures nor adapts (constant-time plans); 2 MEASURED, the model was fitted to this target,
otherwise the defaults are priors. Everything else is refused.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import MappingProxyType
from typing import ClassVar, Final

from compiler.contract.errors import ContractError

MAGIC: Final = b"SFPOLC01"
_HEADER: Final = struct.Struct("<8sII4HII")
SIZE_BYTES: Final = (32 << 10, 128 << 10, 512 << 10, 2 << 20)
"""Bounds of the size buckets: bytes of weights that one run of the call reads."""
ROW_BOUNDS: Final = (1, 8, 32, 128)
DENSITY_BOUNDS: Final = (100, 250, 400, 600, 800, 900)
"""Bounds of the density buckets, per mille."""
SIZES: Final = len(SIZE_BYTES) + 1
ROWS: Final = len(ROW_BOUNDS) + 1
DENSITIES: Final = len(DENSITY_BOUNDS) + 1
FULL: Final = 1000
"""Density of what has no zeros, per mille."""
LOOK_AGAIN: Final = 16
"""A call whose zero check is left out looks all the same once in so many runs."""


class PolicyError(ContractError):
    """The bytes are no policy: drop them and run every call as SHARED."""

    code: ClassVar[str] = "contract.policy"


class Variant(IntEnum):
    """How a call runs. A number, once used, never changes its meaning."""

    SHARED = 0
    """Two pieces for every lent thread, zeros looked for where the plan says so."""
    ALONE = 1
    """On the caller's thread."""
    UNCHECKED = 2
    """Shared; without looking for zeros."""
    UNCHECKED_ALONE = 3
    COARSE = 4
    """Shared, one piece a thread instead of two: fewer streams to begin, no help for a late one."""


class CallKind(IntEnum):
    """Kinds of calls that differ in how they run."""

    OTHER = 0
    LINEAR = 1
    CHECKED = 2
    """LINEAR with a run-time check; its density is that of the activations it saw last."""
    TILES = 3
    ELEMENTS = 4
    LINEAR_F32 = 5
    EXPERTS = 6
    ATTENTION = 7
    CONV = 8


class Flags(IntFlag):
    """What the table is."""

    FIXED = 1
    MEASURED = 2


NO_FLAGS: Final = Flags(0)
KINDS: Final = len(CallKind)
CELLS: Final = KINDS * SIZES * ROWS * DENSITIES
_SHARING: Final = (Variant.SHARED, Variant.ALONE, Variant.COARSE)
LEGAL: Final[Mapping[CallKind, tuple[Variant, ...]]] = MappingProxyType(
    {
        CallKind.OTHER: (Variant.SHARED,),
        CallKind.LINEAR: _SHARING,
        CallKind.CHECKED: tuple(variant for variant in Variant if variant is not Variant.COARSE),
        CallKind.TILES: _SHARING,
        CallKind.ELEMENTS: _SHARING,
        CallKind.LINEAR_F32: _SHARING,
        CallKind.EXPERTS: _SHARING,
        CallKind.ATTENTION: _SHARING,
        CallKind.CONV: _SHARING,
    }
)
"""Which variants a kind of call knows; the first is what runs without a table."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One entry of the table: a class of calls and the buckets of its run.

    Attributes:
        kind: What runs.
        size: Bucket of the bytes of weights that a run reads.
        rows: Bucket of activation rows.
        density: Bucket of what is stored, or live, per mille of all.
    """

    kind: CallKind
    size: int
    rows: int
    density: int

    @property
    def index(self) -> int:
        """Its place in the table."""
        return ((self.kind * SIZES + self.size) * ROWS + self.rows) * DENSITIES + self.density

    @classmethod
    def at(cls, index: int) -> "Cell":
        """Return the cell of that index."""
        rest, density = divmod(index, DENSITIES)
        rest, rows = divmod(rest, ROWS)
        kind, size = divmod(rest, SIZES)
        return cls(CallKind(kind), size, rows, density)

    @property
    def name(self) -> str:
        """How reports call it: `LINEAR <=512K, <=8 rows, <=0.4`; `>` for a last bucket."""
        return f"{self.kind.name} {self.size_name}, {self.rows_name} rows, {self.density_name}"

    @property
    def size_name(self) -> str:
        """Its bucket of bytes, as `<=512K`."""
        return _bucket_name(self.size, [bound >> 10 for bound in SIZE_BYTES], "K")

    @property
    def rows_name(self) -> str:
        """Its bucket of activation rows, as `<=8`."""
        return _bucket_name(self.rows, ROW_BOUNDS, "")

    @property
    def density_name(self) -> str:
        """Its bucket of density, as `<=0.4`."""
        return _bucket_name(self.density, [bound / FULL for bound in DENSITY_BOUNDS], "")


def _bucket_name(bucket: int, bounds: Iterable[float], unit: str) -> str:
    values = tuple(bounds)
    if bucket < len(values):
        return f"<={values[bucket]:g}{unit}"
    return f">{values[-1]:g}{unit}"


def cell_of(kind: CallKind, size_bytes: int, rows: int, density: int) -> Cell:
    """Return the cell of a call.

    Args:
        kind: What runs.
        size_bytes: Bytes of weights that it reads.
        rows: Activation rows of the run.
        density: Per mille.
    """
    size, row = bisect_left(SIZE_BYTES, size_bytes), bisect_left(ROW_BOUNDS, rows)
    return Cell(kind, size, row, bisect_left(DENSITY_BOUNDS, density))


@dataclass(frozen=True, slots=True)
class Policy:
    """A table and what a device may do about it.

    Attributes:
        variants: One byte per cell.
        doubts: One byte per cell: bit v for each variant v that is worth measuring; 0 for none.
        flags: See `Flags`.
        residual: Relative error of the model that made it, per mille.
    """

    variants: bytes
    doubts: bytes
    flags: Flags = NO_FLAGS
    residual: int = 0

    @property
    def is_fixed(self) -> bool:
        """Whether the device must leave it as it is."""
        return bool(self.flags & Flags.FIXED)

    def variant(self, cell: Cell) -> Variant:
        """Return how calls of a cell run."""
        return Variant(self.variants[cell.index])

    def candidates(self, cell: Cell) -> tuple[Variant, ...]:
        """Return the variants of a cell that are worth measuring, none or at least two."""
        return tuple(v for v in Variant if self.doubts[cell.index] >> v & 1)

    def to_bytes(self) -> bytes:
        """Return the section."""
        dimensions = (KINDS, SIZES, ROWS, DENSITIES)
        head = _HEADER.pack(MAGIC, _HEADER.size, self.flags, *dimensions, self.residual, 0)
        return head + self.variants + self.doubts


POLICY_BYTES: Final = _HEADER.size + 2 * CELLS


def parse_policy(data: bytes) -> Policy:
    """Return the policy in `data` after checking all of it.

    Raises:
        PolicyError: Anything is wrong; the message says what.
    """
    if len(data) != POLICY_BYTES:
        raise PolicyError(f"a policy has {POLICY_BYTES} bytes, not {len(data)}")
    magic, size, flags, *dimensions, residual, reserved = _HEADER.unpack_from(data)
    if magic != MAGIC or size != _HEADER.size or reserved:
        raise PolicyError("these bytes are no policy, or a newer one")
    if tuple(dimensions) != (KINDS, SIZES, ROWS, DENSITIES):
        raise PolicyError(f"a table of {dimensions} cells")
    if flags > int(Flags.FIXED | Flags.MEASURED) or residual > FULL:
        raise PolicyError(f"flags {flags:#x} or residual {residual} are out of range")
    variants, doubts = data[_HEADER.size : -CELLS], data[-CELLS:]
    require_variants(variants)
    _require_doubts(variants, doubts, Flags(flags))
    return Policy(variants, doubts, Flags(flags), residual)


def require_variants(variants: bytes) -> None:
    """Check a table.

    Raises:
        PolicyError: It has another size, or a variant that its cell does not know.
    """
    if len(variants) != CELLS:
        raise PolicyError(f"a table of {len(variants)} cells, not {CELLS}")
    for index, variant in enumerate(variants):
        if not _LEGAL_MASK[index] >> variant & 1:
            raise PolicyError(f"cell {Cell.at(index).name} knows no variant {variant}")


def _require_doubts(variants: bytes, doubts: bytes, flags: Flags) -> None:
    if flags & Flags.FIXED and any(doubts):
        raise PolicyError("a fixed policy leaves nothing to measure")
    for index, mask in enumerate(doubts):
        if not mask:
            continue
        is_known = not mask & ~_LEGAL_MASK[index]
        if not is_known or mask.bit_count() < 2 or not mask >> variants[index] & 1:
            raise PolicyError(f"cell {Cell.at(index).name} cannot doubt among {mask:#04x}")


def _legal_masks() -> bytes:
    cells = (Cell.at(index) for index in range(CELLS))
    return bytes(sum(1 << v for v in LEGAL[cell.kind]) for cell in cells)


_LEGAL_MASK: Final = _legal_masks()
PLAIN: Final = Policy(bytes(CELLS), bytes(CELLS), Flags.FIXED)
"""What runs without a table."""
