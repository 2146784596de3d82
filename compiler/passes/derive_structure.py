"""Round zeros up to what hardware skips, exactly; prune further only within a stated budget.

Before:
    %w = "sp.constant"() ... : tensor<64x64xf32>            (tile (0, 1) of 32x32 is all zero)
    %y = "sp.linear"(%x, %w) ...
After:
    %w = "sp.constant"() ... : tensor<64x64xf32, #sp.enc<dims [], levels ["dense", "blocked"],
         block [32, 32], pos 32, crd 16, masks []>>
    %y = "sp.linear"(%x, %w) ...

A weight's mask is widened to whole tiles: a superset of what may be non-zero, so nothing changes
but the type. The first tile of `tiles` with dead tiles is taken. With `budget` > 0 a weight whose
share of zeros is at least `least_zeros` may be rounded the other way, to a subset of its pattern:
it loses its weakest `lossy` groups (`structured[2,4]` or tiles) if that leaves less than the
superset. The loss is the relative Frobenius norm of what is removed, measured on the weight, and
must not exceed the budget; what it does to answers is measured by who sets the budget.
Run-time activations get no n:m structure: nothing can be derived for values that do not exist yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation
from xdsl.rewriter import Rewriter

from compiler.analysis.constants import Array
from compiler.analysis.mask_moves import Bits
from compiler.dialects.dims import Dim
from compiler.dialects.encoding import EncodingAttr, coordinate_bits
from compiler.dialects.sp import ConstantOp, LinearOp
from compiler.dialects.types import dtype_of, encoding_of, shape_of, tensor_type
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import operations
from compiler.passes.rewriting import swap

Tile = tuple[int, int]
HARDWARE_TILES: Final[tuple[Tile, ...]] = ((32, 32), (16, 32), (16, 16), (1, 32))


@dataclass(frozen=True, slots=True)
class Structured:
    """A weight with structure: what is left, how it is written, and what it cost.

    Attributes:
        superset: What the same tiles keep without any loss, as a share.
    """

    weight: Array
    encoding: EncodingAttr
    loss: float
    density: float
    superset: float = 1.0


@dataclass(frozen=True)
class DeriveStructure(Pass):
    """Give weights of products blocked or n:m encodings.

    Attributes:
        tiles: Rows and columns that hardware skips together, coarse ones first.
        budget: The greatest relative loss of a weight; 0 changes no number.
        lossy: What may be pruned within the budget: `2:4`, or `RxC` for tiles.
        least_zeros: The share of zeros from which on a weight may be pruned; 0 takes any weight.
    """

    name: ClassVar[str] = "derive-structure"
    tiles: tuple[Tile, ...] = HARDWARE_TILES
    budget: float = 0.0
    lossy: tuple[str, ...] = ("2:4",)
    least_zeros: float = 0.0

    @property
    def changes_values(self) -> bool:
        """Whether the program computes something else afterwards, within the budget."""
        return self.budget > 0

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Annotate the weights of every product."""
        notes = []
        for op in operations(module):
            if not isinstance(op, ConstantOp) or not _is_weight(op):
                continue
            found = self.structured(ctx.constants.of(op))
            if found is None:
                continue
            new = ctx.constants.add(found.weight) if found.loss else op.clone()
            typed = tensor_type(dtype_of(op.result), shape_of(op.result), found.encoding)
            swap(op, new, ctx.origins)
            Rewriter.replace_value_with_new_type(new.result, typed)
            notes.append(
                f"{ctx.origins.near(new)}: {found.encoding.level_names[-1]}"
                f" {[size.data for size in found.encoding.block.data]}, density"
                f" {found.density:.3f}, loss {found.loss:.3g} of {self.budget:g}"
                + (f", without loss {found.superset:.3f}" if found.loss else "")
            )
        return PassResult(len(notes), tuple(notes))

    def structured(self, weight: Array) -> Structured | None:
        """Return the structure that pays: lossy within the budget if it keeps less, else exact."""
        exact = self._exact(weight)
        has_pattern = float(np.mean(weight == 0)) >= self.least_zeros
        for kind in self.lossy if self.budget > 0 and has_pattern else ():
            found = _pruned(weight, kind, self.budget)
            if found is not None and (exact is None or found.density < exact.density):
                return found
        return exact

    def _exact(self, weight: Array) -> Structured | None:
        for tile in self.tiles:
            live = live_tiles(weight, tile)
            if live is not None and not live.all():
                kept = float(live.mean())
                return Structured(weight, _blocked(weight, tile), 0.0, kept, kept)
        return None


def has_pattern(module: ModuleOp, ctx: PassContext, least_zeros: float) -> bool:
    """Return whether a weight of a product has so large a share of zeros, and not only zeros."""
    weights = (op for op in operations(module) if isinstance(op, ConstantOp) and _is_weight(op))
    return any(least_zeros <= np.mean(ctx.constants.of(op) == 0) < 1 for op in weights)


def live_tiles(weight: Array, tile: Tile) -> Bits | None:
    """Return which tiles (rows/R, columns/C) hold a non-zero, or None if they do not fit."""
    tiled = _tiled(weight, tile)
    return None if tiled is None else np.asarray((tiled != 0).any(axis=(1, 3)))


def two_of_four(weight: Array) -> Array:
    """Return the weight with the two smallest of every four neighbours in a row set to zero."""
    groups = weight.reshape(-1, 4)
    order = np.argsort(-np.abs(groups), axis=1, kind="stable")[:, :2]
    kept = np.zeros(groups.shape, np.bool_)
    np.put_along_axis(kept, order, True, axis=1)
    return np.where(kept, groups, np.zeros_like(groups)).reshape(weight.shape)


def relative_loss(before: Array, after: Array) -> float:
    """Return |before - after| / |before| (Frobenius norms), 0 for a weight of zeros."""
    norm = float(np.linalg.norm(before.astype(np.float64)))
    lost = float(np.linalg.norm(before.astype(np.float64) - after.astype(np.float64)))
    return lost / norm if norm else 0.0


def _pruned(weight: Array, kind: str, budget: float) -> Structured | None:
    if kind == "2:4":
        if weight.shape[-1] % 4:
            return None
        after = two_of_four(weight)
        encoding = EncodingAttr.make(
            levels=["dense", "structured[2,4]"], crd=coordinate_bits(_dims(weight))
        )
        density, superset = 0.5, 1.0
    else:
        rows, columns = (int(size) for size in kind.split("x"))
        pruned = _without_weak_tiles(weight, (rows, columns), budget)
        if pruned is None:
            return None
        after, density = pruned
        encoding, live = _blocked(weight, (rows, columns)), live_tiles(weight, (rows, columns))
        superset = 1.0 if live is None else float(live.mean())
    loss = relative_loss(weight, after)
    return Structured(after, encoding, loss, density, superset) if 0 < loss <= budget else None


def _without_weak_tiles(weight: Array, tile: Tile, budget: float) -> tuple[Array, float] | None:
    """Remove the weakest tiles as long as their joint norm stays within the budget."""
    tiled = _tiled(weight, tile)
    if tiled is None:
        return None
    energy = (tiled.astype(np.float64) ** 2).sum(axis=(1, 3))
    order = np.argsort(energy, axis=None, kind="stable")
    spent = np.cumsum(energy.reshape(-1)[order])
    gone = int(np.searchsorted(spent, budget**2 * energy.sum(), side="right"))
    if not gone:
        return None
    kept = np.ones(energy.size, np.bool_)
    kept[order[:gone]] = False
    mask = kept.reshape(energy.shape)[:, None, :, None]
    return (tiled * mask).astype(weight.dtype).reshape(weight.shape), float(kept.mean())


def _tiled(weight: Array, tile: Tile) -> Array | None:
    rows, columns = tile
    if weight.ndim != 2 or weight.shape[0] % rows or weight.shape[1] % columns:
        return None
    return weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)


def _blocked(weight: Array, tile: Tile) -> EncodingAttr:
    return EncodingAttr.make(
        levels=["dense", "blocked"], block=tile, crd=coordinate_bits(_dims(weight))
    )


def _dims(weight: Array) -> Sequence[Dim]:
    return [Dim(size) for size in weight.shape]


def _is_weight(op: Operation) -> bool:
    value = op.results[0]
    known = encoding_of(value)
    users = [(use.operation, use.index) for use in value.uses]
    plain = known is None or not known.is_sparse
    return plain and bool(users) and all(isinstance(u, LinearOp) and at == 1 for u, at in users)
