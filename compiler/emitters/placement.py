"""Place blocks with known lifetimes on a line so that blocks alive together never overlap.

`plan_memory` calls it. The peak of any placement is at least the most bytes alive at one moment
(`most_alive`); `place` tries a fixed list of orders, then moves the blocks that reach the peak to
the front of the order, and stops as soon as it meets that bound. Pure and deterministic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

MOST_REPAIRS: Final = 48
"""Orders tried after the fixed ones; each is quadratic in the number of blocks."""
MANY_BLOCKS: Final = 1500
"""From so many blocks on, only the fixed orders are tried."""


class Life(NamedTuple):
    """Moments `first` to `last`, both included, of one run of program number `program`."""

    program: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Block:
    """`size` bytes that hold a value during its lives."""

    size: int
    lives: tuple[Life, ...]


def meet(some: Block, other: Block) -> bool:
    """Return whether two blocks are alive at the same moment."""
    return any(
        a.program == b.program and a.first <= b.last and b.first <= a.last
        for a in some.lives
        for b in other.lives
    )


def most_alive(blocks: Sequence[Block]) -> int:
    """Return the most bytes alive at one moment: no placement needs fewer."""
    changes: dict[tuple[int, int], int] = {}
    for block in blocks:
        for life in block.lives:
            for moment, size in ((life.first, block.size), (life.last + 1, -block.size)):
                key = (life.program, moment)
                changes[key] = changes.get(key, 0) + size
    most = alive = 0
    for _, change in sorted(changes.items()):
        alive += change
        most = max(most, alive)
    return most


def peak_of(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    """Return the end of the highest block."""
    return max((at + b.size for at, b in zip(offsets, blocks, strict=True)), default=0)


def place(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Return an offset for each block; ties go to the lower number."""
    bound = most_alive(blocks)
    rivals = _rivals(blocks)
    best: tuple[int, ...] = ()
    lowest = -1
    for key in _ORDERS:
        order = sorted(range(len(blocks)), key=lambda at: (*key(blocks[at]), at))
        offsets = _first_fit(blocks, rivals, order)
        peak = peak_of(blocks, offsets)
        if lowest < 0 or peak < lowest:
            best, lowest, start = offsets, peak, order
        if lowest <= bound:
            return best
    return _repaired(blocks, rivals, start, best) if len(blocks) < MANY_BLOCKS else best


def _length(block: Block) -> int:
    return sum(life.last - life.first + 1 for life in block.lives)


_ORDERS: Final[tuple[Callable[[Block], tuple[int, ...]], ...]] = (
    lambda b: (-b.size,),
    lambda b: (-b.size * _length(b),),
    lambda b: (-_length(b), -b.size),
    lambda b: (min(b.lives, default=Life(0, 0, 0)).first, -b.size),
)


def _rivals(blocks: Sequence[Block]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in blocks]
    for a, block in enumerate(blocks):
        for b in range(a):
            if meet(block, blocks[b]):
                found[a].append(b)
                found[b].append(a)
    return found


def _first_fit(
    blocks: Sequence[Block], rivals: Sequence[Sequence[int]], order: Sequence[int]
) -> tuple[int, ...]:
    offsets = [-1] * len(blocks)
    for at in order:
        taken = sorted(
            (offsets[other], offsets[other] + blocks[other].size)
            for other in rivals[at]
            if offsets[other] >= 0
        )
        offsets[at] = _lowest_gap(taken, blocks[at].size)
    return tuple(offsets)


def _lowest_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at


def _repaired(
    blocks: Sequence[Block],
    rivals: Sequence[Sequence[int]],
    start: list[int],
    best: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the best of the placements made by placing earlier what reached the peak."""
    bound, order, offsets = most_alive(blocks), start, best
    seen = {tuple(order)}
    for _ in range(MOST_REPAIRS):
        peak = peak_of(blocks, offsets)
        highest = [at for at in order if offsets[at] + blocks[at].size == peak]
        order = [*highest, *(at for at in order if at not in highest)]
        if tuple(order) in seen:
            break
        seen.add(tuple(order))
        offsets = _first_fit(blocks, rivals, order)
        if peak_of(blocks, offsets) < peak_of(blocks, best):
            best = offsets
        if peak_of(blocks, best) <= bound:
            break
    return best
