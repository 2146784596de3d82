"""Calls of reference kernels: tensors of fixed shape as strided views of flat matrices.

Movement costs nothing here: a transposed, sliced or expanded tensor is another view of the same
matrix. A view becomes a matrix of its own (`REF_MOVE`) only where a kernel needs its elements in
order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

import numpy as np
from xdsl.ir import SSAValue

from compiler.analysis.constants import Array
from compiler.contract.operations import MAX_DIM, Op
from compiler.contract.reference import (
    BATCH_RANK,
    MapKind,
    ReduceKind,
    geometry_length,
    pack_geometry,
)
from compiler.dialects.dims import Dim
from compiler.dialects.types import Tensor, dtype_of, shape_of, tensor_type
from compiler.kernels.reference import MAPS
from compiler.passes.selection import Selection

FLOATS: Final = frozenset({"float32", "float64", "float16"})
INT32: Final = np.iinfo(np.int32)
LARGEST: Final = float(np.finfo(np.float32).max)

Fields = dict[str, int | Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor: elements `at + sum(i * steps)` of a matrix or of a constant.

    Attributes:
        matrix: The run-time matrix; None for a constant.
        array: The constant, flat; None for a matrix.
        kind: `f` (f32) or `i` (i32).
    """

    shape: tuple[int, ...]
    kind: str
    matrix: SSAValue | None
    array: Array | None
    at: int
    steps: tuple[int, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the elements stand in row-major order and are all there are."""
        return self.at == 0 and self.steps == steps_of(self.shape) and self.size == self.held

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def held(self) -> int:
        """Number of elements of what is behind the view."""
        if self.array is not None:
            return int(self.array.size)
        assert self.matrix is not None
        rows, cols = shape_of(self.matrix)
        return rows.constant * cols.constant

    def permuted(self, perm: Sequence[int]) -> "View":
        """Return the view with its axes in another order."""
        shape, steps = (tuple(t[p] for p in perm) for t in (self.shape, self.steps))
        return replace(self, shape=shape, steps=steps)

    def expanded(self, shape: Sequence[int]) -> "View":
        """Return the view repeated along axes of size one, as numpy broadcasts."""
        lead = len(shape) - len(self.shape)
        steps = [0] * lead
        for own, step, size in zip(self.shape, self.steps, shape[lead:], strict=True):
            steps.append(step if own == size else 0)
        return replace(self, shape=tuple(shape), steps=tuple(steps))

    def sliced(self, axis: int, start: int, count: int, step: int = 1) -> "View":
        """Return elements `start, start + step, ...` of one axis."""
        shape, steps = list(self.shape), list(self.steps)
        at = self.at + start * steps[axis]
        shape[axis], steps[axis] = count, steps[axis] * step
        return replace(self, shape=tuple(shape), steps=tuple(steps), at=at)


def steps_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    return tuple(prod(shape[at + 1 :]) for at in range(len(shape)))


def merged(
    sizes: Sequence[int], steps: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """Return sizes and strides without axes of size one, neighbours merged where strides allow."""
    kept = [axis for axis, size in enumerate(sizes) if size != 1]
    new_sizes: list[int] = []
    new_steps: list[list[int]] = [[] for _ in steps]
    for axis in kept:
        fits = bool(new_sizes) and all(
            mine[-1] == given[axis] * sizes[axis]
            for mine, given in zip(new_steps, steps, strict=True)
        )
        if fits:
            new_sizes[-1] *= sizes[axis]
            for mine, given in zip(new_steps, steps, strict=True):
                mine[-1] = given[axis]
        else:
            new_sizes.append(sizes[axis])
            for mine, given in zip(new_steps, steps, strict=True):
                mine.append(given[axis])
    return new_sizes, new_steps


@dataclass(slots=True)
class _Sources:
    """Operands of one call and their numbers."""

    inputs: list[SSAValue] = field(default_factory=list)
    arrays: list[Array] = field(default_factory=list)

    def number(self, view: View) -> int:
        """Return the source number of what is behind a view."""
        if view.matrix is not None:
            if view.matrix not in self.inputs:
                self.inputs.append(view.matrix)
            return self.inputs.index(view.matrix)
        assert view.array is not None
        for at, array in enumerate(self.arrays):
            if array is view.array:
                return -at - 1
        self.arrays.append(view.array)
        return -len(self.arrays)


@dataclass(frozen=True, slots=True)
class ReferenceCalls:
    """Appends reference calls for the operation that a selection is mapping."""

    sel: Selection

    # ---- views ----

    def view(self, value: SSAValue) -> View:
        """Return the view of a tensor of fixed shape."""
        known = self.sel.views.get(value)
        if isinstance(known, View):
            return known
        shape = self.shape(value)
        constant = self.sel.array(value)
        if constant is not None:
            self.sel.views[value] = view = self.constant(constant)
            return view
        matrix = self.sel.matrices[value]
        return View(shape, self.kind(value), matrix, None, 0, steps_of(shape))

    def shape(self, value: SSAValue) -> tuple[int, ...]:
        """Return the sizes of a tensor, all of them fixed."""
        if not all(dim.is_static for dim in shape_of(value)):
            self.sel.refuse("its sizes are known only at run time")
        return tuple(dim.constant for dim in shape_of(value))

    def kind(self, value: SSAValue) -> str:
        """Return whether a tensor is held as f32 or as i32."""
        return "f" if dtype_of(value) in FLOATS else "i"

    def constant(self, array: Array) -> View:
        """Return a constant as a view; infinities become the largest numbers."""
        if array.dtype.kind == "f":
            stored, kind = array.astype(np.float32, copy=False), "f"
            if not np.isfinite(stored).all():
                stored = np.clip(array, -LARGEST, LARGEST).astype(np.float32)
        else:
            if array.size and not (INT32.min <= array.min() and array.max() <= INT32.max):
                self.sel.refuse("an integer constant does not fit into 32 bits")
            stored, kind = array.astype(np.int32), "i"
        return View(array.shape, kind, None, stored.reshape(-1), 0, steps_of(array.shape))

    def scalar(self, number: float, kind: str = "f") -> View:
        """Return a number without axes."""
        return self.constant(np.asarray(number, np.float32 if kind == "f" else np.int32))

    def reshaped(self, view: View, shape: Sequence[int]) -> View:
        """Return the elements of a view, in order, under another shape."""
        if not _can_reshape(view):
            view = self.ordered(view)
        if view.is_ordered:
            return replace(view, shape=tuple(shape), steps=steps_of(shape))
        sizes, (steps,) = merged(view.shape, [view.steps])
        base = steps[-1] if sizes else 1
        return replace(view, shape=tuple(shape), steps=tuple(base * s for s in steps_of(shape)))

    def ordered(self, view: View) -> View:
        """Return the view with its elements in row-major order in a matrix of their own."""
        return view if view.is_ordered else self.moved(view.shape, [(view, (0,) * len(view.shape))])

    def matrix(self, view: View) -> SSAValue:
        """Return a run-time matrix (rows, last axis) that holds a view."""
        kind = self.result_type(view.shape, view.kind)
        if view.matrix is not None and view.is_ordered and view.matrix.type == kind:
            return view.matrix
        made = self.moved(view.shape, [(view, (0,) * len(view.shape))])
        assert made.matrix is not None
        return made.matrix

    def result_type(self, shape: Sequence[int], kind: str) -> Tensor:
        """Return the matrix type of a result."""
        cols = shape[-1] if shape else 1
        rows = prod(shape[:-1]) if shape else 1
        if not (1 <= rows <= MAX_DIM and 1 <= cols <= MAX_DIM):
            self.sel.refuse(f"a result of shape {tuple(shape)} does not fit into a matrix")
        return tensor_type("float32" if kind == "f" else "int32", [Dim(rows), Dim(cols)])

    # ---- calls ----

    def call(
        self,
        op: Op,
        rows: Sequence[Fields],
        sources: _Sources,
        results: Sequence[tuple[tuple[int, ...], str]],
        params: Mapping[str, int | float] | None = None,
    ) -> list[View]:
        """Append a call with one geometry row per entry of `rows`."""
        packed = [pack_geometry(op.name, row) for row in rows]
        for row in packed:
            if len(row) != geometry_length(op.name):
                self.sel.refuse("it has too many axes")
            if any(not INT32.min <= item <= INT32.max for item in row):
                self.sel.refuse("a stride does not fit into 32 bits")
        geometry = np.asarray(packed, np.int32)
        weights = [self.sel.weight(array) for array in (geometry, *map(_stored, sources.arrays))]
        types = [self.result_type(shape, kind) for shape, kind in results]
        made = self.sel.call(op, list(sources.inputs), list(weights), dict(params or {}), types)
        return [
            View(shape, kind, matrix, None, 0, steps_of(shape))
            for (shape, kind), matrix in zip(results, made, strict=True)
        ]

    def moved(
        self,
        shape: Sequence[int],
        pieces: Sequence[tuple[View, Sequence[int]]],
        fill: float | None = None,
    ) -> View:
        """Return a new tensor: each view copied to its corner; `fill` where no view lies."""
        sources, kind, whole = _Sources(), pieces[0][0].kind, steps_of(shape)
        rows: list[Fields] = []
        for view, corner in pieces:
            sizes, (x_steps, y_steps) = merged(view.shape, [view.steps, whole])
            rows.append(
                {
                    "x": sources.number(view),
                    "x_at": view.at,
                    "y_at": sum(c * s for c, s in zip(corner, whole, strict=True)),
                    "sizes": sizes,
                    "x_steps": x_steps,
                    "y_steps": y_steps,
                }
            )
        params: dict[str, int | float] = {}
        if fill is not None:
            params = {"fill": 1, "value": _bits(fill, kind)}
        return self.call(Op.REF_MOVE, rows, sources, [(tuple(shape), kind)], params)[0]

    def map(self, kind: MapKind, *operands: View, alpha: float = 0.0, beta: float = 0.0) -> View:
        """Return an elementwise function of broadcast operands, cast to what the kind takes."""
        shape = tuple(int(n) for n in np.broadcast_shapes(*(view.shape for view in operands)))
        row, sources = MAPS[kind], _Sources()
        views = [view.expanded(shape) for view in operands]
        sizes, steps = merged(shape, [*(view.steps for view in views), steps_of(shape)])
        fields: Fields = {"sizes": sizes}
        for name, at in zip("abc", range(3), strict=True):
            present = at < len(views)
            fields[name] = sources.number(views[at]) if present else 0
            fields[f"{name}_at"] = views[at].at if present else 0
            fields[f"{name}_steps"] = steps[at] if present else []
        params = {"kind": int(kind), "alpha": float(alpha), "beta": float(beta)}
        return self.call(Op.REF_MAP, [fields], sources, [(shape, row.gives)], params)[0]

    def reduce(self, kind: ReduceKind, x: View, axes: Sequence[int], *, keep: bool = True) -> View:
        """Return a reduction over some axes."""
        kept = [axis for axis in range(len(x.shape)) if axis not in axes]
        sizes, (steps,) = merged([x.shape[a] for a in kept], [[x.steps[a] for a in kept]])
        inner, (inner_steps,) = merged([x.shape[a] for a in axes], [[x.steps[a] for a in axes]])
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
        if not keep:
            shape = tuple(x.shape[axis] for axis in kept)
        sources = _Sources()
        fields: Fields = {
            "x": sources.number(x),
            "x_at": x.at,
            "sizes": sizes,
            "x_steps": steps,
            "inner": inner,
            "inner_steps": inner_steps,
        }
        gives = "i" if kind >= ReduceKind.ARG_MAX else x.kind
        return self.call(Op.REF_REDUCE, [fields], sources, [(shape, gives)], {"kind": int(kind)})[0]

    def contract(self, a: View, b: View) -> View:
        """Return numpy.matmul of operands with at least two axes."""
        batch = tuple(int(n) for n in np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        left, right = a.expanded((*batch, m, k)), b.expanded((*batch, k, n))
        sizes, (a_steps, b_steps) = merged(batch, [left.steps[:-2], right.steps[:-2]])
        if len(sizes) > BATCH_RANK:
            self.sel.refuse("it has too many axes")
        sources = _Sources()
        fields: Fields = {
            "a": sources.number(a),
            "b": sources.number(b),
            "sizes": sizes,
            "m": m,
            "k": k,
            "n": n,
            "a_at": a.at,
            "b_at": b.at,
            "a_steps": a_steps,
            "a_m": left.steps[-2],
            "a_k": left.steps[-1],
            "b_steps": b_steps,
            "b_k": right.steps[-2],
            "b_n": right.steps[-1],
        }
        return self.call(Op.REF_CONTRACT, [fields], sources, [((*batch, m, n), a.kind)])[0]

    def flat(
        self,
        op: Op,
        named: Mapping[str, View],
        fields: Mapping[str, int],
        results: Sequence[tuple[tuple[int, ...], str]],
        params: Mapping[str, int | float] | None = None,
    ) -> list[View]:
        """Append a call whose sources are read in row-major order."""
        sources = _Sources()
        numbers = {name: sources.number(self.ordered(view)) for name, view in named.items()}
        return self.call(op, [{**fields, **numbers}], sources, results, params)

    def indexed(
        self,
        op: Op,
        fields: Fields,
        named: Mapping[str, View],
        result: tuple[tuple[int, ...], str],
        params: Mapping[str, int | float] | None = None,
    ) -> View:
        """Append a gather or scatter whose strides are complete in `fields`."""
        sources = _Sources()
        numbers = {name: sources.number(view) for name, view in named.items()}
        return self.call(op, [{**fields, **numbers}], sources, [result], params)[0]


def _can_reshape(view: View) -> bool:
    """Return whether one stride leads through all elements in order."""
    sizes, _ = merged(view.shape, [view.steps])
    return len(sizes) <= 1


def _stored(array: Array) -> Array:
    """Return a flat constant as a matrix whose sides are in range."""
    if array.size <= MAX_DIM:
        return array.reshape(1, -1)
    rows = next(n for n in range(-(-array.size // MAX_DIM), array.size) if array.size % n == 0)
    return array.reshape(rows, -1)


def _bits(value: float, kind: str) -> int:
    if kind == "i":
        return int(value)
    return int(np.asarray(np.clip(value, -LARGEST, LARGEST), np.float32).view(np.int32))
