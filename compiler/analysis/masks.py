"""The lattice of masks: which elements of a tensor may be non-zero.

    bottom (all zero) < static masks < dynamic masks < dense

A mask is a set of *clauses* that all hold; a clause is a set of *atoms* of which one holds at every
element that is non-zero. An atom is a pattern (a static array, a band, or where a run-time source
is non-zero) and the path on which its elements moved. No clause is `dense`; the empty clause is
`bottom`. Meet (`x * y`) unites the clauses, join (`x + y`) pairs them, and dropping a clause is
always sound: it only says less. That is how the form stays small (`MAX_CLAUSES`, `MAX_ATOMS`).

A clause may *assume* values finite (0 * inf is NaN): it holds in every execution in which the
values with those numbers are; `compiler.analysis.finite` says which of them are proved to be.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import Final

import numpy as np

from compiler.analysis.mask_moves import (
    INDEXED,
    Bits,
    Environment,
    Expand,
    Path,
    Shape,
    Step,
    is_static,
    keeps_density,
    shortened,
)
from compiler.dialects.dims import Dim

MAX_CLAUSES: Final = 8
MAX_ATOMS: Final = 8
MAX_STATIC_ELEMENTS: Final = 1 << 20
MOVES_KEPT: Final = 256
"""Moved atoms that are remembered; one may hold a pattern of `MAX_STATIC_ELEMENTS` bits."""

GRANULARITIES: Final = ("element", "column", "row", "block")
"""From fine to coarse; a join is as coarse as its coarsest part."""

Density = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Fixed:
    """A pattern known at compile time, packed; axes along which it is constant have size one."""

    shape: tuple[int, ...]
    packed: bytes

    @classmethod
    def of(cls, bits: Bits) -> "Fixed":
        """Pack an array and collapse what repeats."""
        for axis, size in enumerate(bits.shape):
            head = bits.take([0], axis=axis) if size else bits
            if size > 1 and bool((bits == head).all()):
                bits = head
        return cls(bits.shape, np.packbits(bits).tobytes())

    def bits(self) -> Bits:
        """Return the array."""
        count = int(np.prod(self.shape, dtype=np.int64))
        flat = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=count)
        return flat.astype(np.bool_).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Band:
    """Row i of an attention may look at column j: `i + offset - window < j <= i + offset`.

    The first `sink` columns are always visible; `window` 0 means that the past is unlimited.
    """

    rows: Dim
    columns: Dim
    offset: Dim
    window: int = 0
    sink: int = 0

    def bits(self, env: Environment) -> Bits:
        """Return the array (rows, columns)."""
        row = np.arange(self.rows.at(env.binding))[:, None] + self.offset.at(env.binding)
        column = np.arange(self.columns.at(env.binding))[None, :]
        seen = column <= row
        if self.window:
            seen &= (column > row - self.window) | (column < self.sink)
        return np.asarray(seen)


@dataclass(frozen=True, slots=True)
class Produced:
    """Where the pattern of a run-time source is non-zero.

    Attributes:
        source: Number of the source within its function.
        granularity: How large the pieces are that are zero together.
        density: Bounds of the share of elements that are non-zero.
    """

    source: int
    granularity: str = "element"
    density: Density = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Full:
    """Every element of a shape; only interesting after padding."""

    shape: Shape


Pattern = Fixed | Band | Produced | Full


@dataclass(frozen=True, slots=True)
class Atom:
    """A pattern and the way its elements went."""

    pattern: Pattern
    path: Path = ()

    @property
    def is_dynamic(self) -> bool:
        """Whether it needs facts of one execution besides the lengths."""
        return isinstance(self.pattern, Produced) or not _without_gathers(self.path)

    def moved(self, step: Step) -> "Atom":
        """Return the atom after one more step; static ones are evaluated at once if small."""
        return _moved(self, step)

    def evaluate(self, env: Environment) -> Bits:
        """Return where the atom holds in one execution."""
        match self.pattern:
            case Fixed():
                bits = self.pattern.bits()
            case Band():
                bits = self.pattern.bits(env)
            case Produced():
                bits = env.patterns[self.pattern.source]
            case Full():
                bits = np.ones(env.sizes(self.pattern.shape), np.bool_)
        for step in self.path:
            bits = step.apply(bits, env)
        return bits

    @property
    def density(self) -> Density:
        """Bounds of the share of places where the atom holds."""
        low, high = 0.0, 1.0
        match self.pattern:
            case Fixed():
                share = float(self.pattern.bits().mean()) if self.pattern.packed else 0.0
                low, high = share, share
            case Produced():
                low, high = self.pattern.density
            case _:
                pass
        return (low, high) if keeps_density(self.path) else (0.0, 1.0)

    @property
    def granularity(self) -> str:
        """How large the pieces are that are zero together."""
        match self.pattern:
            case Produced():
                return self.pattern.granularity
            case Fixed() if len(self.pattern.shape) and self.pattern.shape[-1] == 1:
                return "row"
            case Fixed() if all(size == 1 for size in self.pattern.shape[:-1]):
                return "column"
            case _:
                return "element"

    def columns(self) -> Bits | None:
        """Return the pattern of the last axis if every row has the same static one."""
        fixed = self.pattern
        if not isinstance(fixed, Fixed) or not all(isinstance(s, Expand) for s in self.path):
            return None
        if any(size != 1 for size in fixed.shape[:-1]) or not fixed.shape:
            return None
        width = self.path[-1].dims[-1] if self.path else Dim(fixed.shape[-1])
        if not width.is_static:
            return None
        return np.broadcast_to(fixed.bits().reshape(-1), (width.constant,))


@lru_cache(maxsize=MOVES_KEPT)
def _text(atom: Atom) -> str:
    return repr(atom)


@lru_cache(maxsize=MOVES_KEPT)
def _moved(atom: Atom, step: Step) -> Atom:
    path = shortened((*atom.path, step))
    if isinstance(atom.pattern, Fixed) and is_static(path):
        bits = Atom(atom.pattern, path).evaluate(Environment())
        if bits.size <= MAX_STATIC_ELEMENTS:
            fixed = Fixed.of(bits)
            tail = (Expand(tuple(map(Dim, bits.shape))),) if fixed.shape != bits.shape else ()
            return Atom(fixed, tail)
    return Atom(atom.pattern, path)


@dataclass(frozen=True, slots=True)
class Clause:
    """At every non-zero element one of the atoms holds, if the assumed values are finite."""

    atoms: frozenset[Atom]
    assumes: frozenset[int] = frozenset()

    @property
    def is_dynamic(self) -> bool:
        """Whether one of the atoms is dynamic."""
        return any(atom.is_dynamic for atom in self.atoms)

    def covers(self, other: "Clause") -> bool:
        """Return whether `other` says nothing that this clause does not."""
        return self.atoms <= other.atoms and self.assumes <= other.assumes

    def rank(self) -> tuple[int, bool, int, str]:
        """Return the order in which clauses are kept: few atoms and assumptions, static first."""
        text = repr(sorted(map(_text, self.atoms)))
        return (len(self.assumes), self.is_dynamic, len(self.atoms), text)


@dataclass(frozen=True)
class Mask:
    """Which elements may be non-zero, in normal form (no clause covers another)."""

    clauses: frozenset[Clause] = frozenset()

    @property
    def is_dense(self) -> bool:
        """Whether nothing is known."""
        return not self.clauses

    @cached_property
    def is_bottom(self) -> bool:
        """Whether every element is zero, without assumptions."""
        return Clause(frozenset()) in self.clauses

    @property
    def is_dynamic(self) -> bool:
        """Whether some clause needs a run-time pattern."""
        return any(clause.is_dynamic for clause in self.clauses)

    @property
    def level(self) -> str:
        """Return the mask's place in the lattice."""
        if self.is_dense:
            return "dense"
        if self.is_bottom:
            return "bottom"
        return "dynamic" if self.is_dynamic else "static"

    def __and__(self, other: "Mask") -> "Mask":
        """Meet: non-zero only where both may be."""
        return normal(self.clauses | other.clauses)

    def __or__(self, other: "Mask") -> "Mask":
        """Join: non-zero where either may be."""
        return normal(
            Clause(a.atoms | b.atoms, a.assumes | b.assumes)
            for a in self.clauses
            for b in other.clauses
        )

    def implies(self, other: "Mask") -> bool:
        """Return whether this mask claims at least the zeros of `other` (normal forms only)."""
        return all(any(mine.covers(its) for mine in self.clauses) for its in other.clauses)

    def moved(self, step: Step) -> "Mask":
        """Return the mask after its elements moved (without padding)."""
        return normal(
            Clause(frozenset(atom.moved(step) for atom in clause.atoms), clause.assumes)
            for clause in self.clauses
        )

    def assuming(self, numbers: Iterable[int]) -> "Mask":
        """Return the mask whose clauses also need those values to be finite."""
        more = frozenset(numbers)
        if not more:
            return self
        return normal(Clause(c.atoms, c.assumes | more) for c in self.clauses)

    def renumbered(self, source: Callable[[int], int], gather: Callable[[int], int]) -> "Mask":
        """Return the mask over other numbers of sources and gathers."""
        return normal(
            Clause(frozenset(_renumbered(atom, source, gather) for atom in c.atoms), c.assumes)
            for c in self.clauses
        )

    def discharged(self, proved: Callable[[int], bool]) -> "Mask":
        """Return the mask without assumptions that are proved."""
        return normal(
            Clause(c.atoms, frozenset(n for n in c.assumes if not proved(n))) for c in self.clauses
        )

    def unconditional(self) -> "Mask":
        """Return what holds without any assumption."""
        if not any(c.assumes for c in self.clauses):
            return self
        return normal(c for c in self.clauses if not c.assumes)

    def evaluate(self, env: Environment, shape: tuple[int, ...]) -> Bits:
        """Return where elements may be non-zero in one execution; assumptions are not checked."""
        bits = np.ones(shape, np.bool_)
        for clause in self.clauses:
            some = np.zeros(shape, np.bool_)
            for atom in clause.atoms:
                some |= atom.evaluate(env)
            bits &= some
        return bits

    def sources(self) -> frozenset[int]:
        """Return the numbers of the run-time sources it depends on."""
        return frozenset(
            atom.pattern.source
            for clause in self.clauses
            for atom in clause.atoms
            if isinstance(atom.pattern, Produced)
        )

    @property
    def density(self) -> Density:
        """Bounds of the share of elements that may be non-zero (Frechet bounds of the parts)."""
        if self.is_dense:
            return (1.0, 1.0)
        low, high = 1.0, 1.0
        for clause in self.clauses:
            parts = [atom.density for atom in clause.atoms]
            low -= 1.0 - max((part[0] for part in parts), default=0.0)
            high = min(high, sum(part[1] for part in parts))
        return (max(0.0, low), high)

    @property
    def granularity(self) -> str:
        """The coarsest granularity of its atoms."""
        found = [atom.granularity for clause in self.clauses for atom in clause.atoms]
        return max(found, key=GRANULARITIES.index, default="element")

    def columns(self) -> Bits | None:
        """Return which columns may be non-zero if a static clause says so, else None."""
        found: Bits | None = None
        for clause in self.clauses:
            parts = [atom.columns() for atom in clause.atoms]
            known = [part for part in parts if part is not None]
            if clause.assumes or not parts or len(known) != len(parts):
                continue
            some = reduce(np.logical_or, known)
            found = some if found is None else found & some
        return found


DENSE: Final = Mask()
BOTTOM: Final = Mask(frozenset({Clause(frozenset())}))


def of_pattern(pattern: Pattern, path: Path = ()) -> Mask:
    """Return the mask of one pattern."""
    return normal([Clause(frozenset({Atom(pattern, path)}))])


def of_array(bits: Bits) -> Mask:
    """Return the static mask of an array that is known, dense if it is too large to keep."""
    if bits.size > MAX_STATIC_ELEMENTS:
        return DENSE
    fixed = Fixed.of(bits)
    tail = (Expand(tuple(map(Dim, bits.shape))),) if fixed.shape != bits.shape else ()
    return of_pattern(fixed, tail)


def padded(mask: Mask, step: Step, shape: Shape) -> Mask:
    """Return the mask after padding: places outside `shape` are zero whatever the mask says."""
    full = Mask(frozenset({Clause(frozenset({Atom(Full(shape))}))})).moved(step)
    return full & mask.moved(step)


def normal(clauses: Iterable[Clause]) -> Mask:
    """Return the normal form: true clauses dropped, false atoms dropped, covered ones absorbed."""
    simple = {c for c in map(_simplified, clauses) if c is not None}
    if not simple:
        return DENSE
    if len(simple) == 1:  # nothing to order or to absorb
        return Mask(frozenset(c for c in simple if len(c.atoms) <= MAX_ATOMS))
    kept: list[Clause] = []
    for clause in sorted(simple, key=Clause.rank):
        if len(clause.atoms) <= MAX_ATOMS and not any(k.covers(clause) for k in kept):
            kept = [k for k in kept if not clause.covers(k)] + [clause]
    return Mask(frozenset(kept[:MAX_CLAUSES]))


def _simplified(clause: Clause) -> Clause | None:
    atoms = set()
    for atom in clause.atoms:
        value = _constant(atom)
        if value is True:
            return None
        if value is None:
            atoms.add(atom)
    return Clause(frozenset(atoms), clause.assumes)


def _constant(atom: Atom) -> bool | None:
    """Return the value of an atom that is the same everywhere."""
    if not keeps_density(atom.path):
        return None
    match atom.pattern:
        case Full():
            return True
        case Fixed():
            bits = atom.pattern.bits()
            return True if bool(bits.all()) else (None if bool(bits.any()) else False)
        case _:
            return None


def _without_gathers(path: Path) -> bool:
    return not any(isinstance(step, INDEXED) for step in path)


def _renumbered(atom: Atom, source: Callable[[int], int], gather: Callable[[int], int]) -> Atom:
    pattern = atom.pattern
    if isinstance(pattern, Produced):
        pattern = replace(pattern, source=source(pattern.source))
    path = tuple(
        replace(step, index=gather(step.index)) if isinstance(step, INDEXED) else step
        for step in atom.path
    )
    return Atom(pattern, path)
