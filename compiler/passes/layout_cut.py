"""Which operations on images work with channels last, so that the fewest elements are moved.

Convolutions are raised to channels last; what has no such kernel, inputs and outputs keep channels
first; between them stand operations that can work either way (`channel_last`). A value that is
made in one order and read in another is moved once, whatever the number of its readers, at the
price of its elements. Choosing the order of every operation at the least price is a minimum cut:

    channels last  --price-->  value  --never-->  operation  ...  -->  channels first

Of equally cheap choices the one with the most operations on channels last is taken, since their
kernels read matrices whose rows are pixels. Called by `sink_layouts`; changes nothing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Final

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue, Use

from compiler.dialects.movement import ReshapeOp, TransposeOp
from compiler.dialects.sp import Conv2dOp
from compiler.dialects.types import shape_of
from compiler.passes.base import PassContext
from compiler.passes.channel_last import (
    IMAGE_RANKS,
    can_turn,
    channel_first,
    channel_last,
    is_image,
    is_neutral,
    sizes_of,
)
from compiler.passes.functions import body

LAST: Final = 0
FIRST: Final = 1
_MOVES: Final = (ReshapeOp, TransposeOp)


def operations_to_turn(func: FuncOp, ctx: PassContext) -> list[Operation]:
    """Return the operations of a function that should work on channels last, in order."""
    free = [op for op in body(func).ops if can_turn(op, ctx)]
    numbers = {op: at + 2 for at, op in enumerate(free)}
    cut = _Cut(len(free) + 2)
    seen: dict[SSAValue, None] = {}
    for op in free:
        seen.update(dict.fromkeys(v for v in (*op.operands, *op.results) if is_image(v)))
    for value in seen:
        if ctx.constants.get(value) is None:
            _add_value(cut, value, numbers)
    last = cut.away_from(FIRST)
    return [op for op in free if numbers[op] in last]


def _add_value(cut: "_Cut", value: SSAValue, numbers: dict[Operation, int]) -> None:
    price = 1 if is_neutral(value) else prod(sizes_of(value))
    owner = value.owner
    maker = numbers.get(owner) if isinstance(owner, Operation) else None
    if maker is None:
        maker = LAST if _made_last(value) else FIRST
    readers = {_reader(use, numbers) for use in value.uses} - {maker}
    if readers:
        cut.add_net(maker, sorted(readers), price)


def _reader(use: Use, numbers: dict[Operation, int]) -> int:
    if use.operation in numbers:
        return numbers[use.operation]
    return LAST if _read_last(use) else FIRST


def _made_last(value: SSAValue) -> bool:
    """Return whether a value is a view with channels last of what a movement chain reads.

    Of a value that is one either way, only a transposition says which it is meant to be.
    """
    chain: list[Operation] = []
    leaf = value
    while isinstance(leaf.owner, _MOVES):
        chain.append(leaf.owner)
        leaf = leaf.owner.operands[0]
    if not _is_fixed(leaf) or not _speaks(chain, value, [leaf.owner]):
        return False
    if is_neutral(value):
        return _transposes(value.owner, channel_first)
    order = _moved(np.arange(prod(sizes_of(leaf))).reshape(sizes_of(leaf)), chain[::-1])
    return _is_flat(order.transpose(channel_last(order.ndim)))


def _read_last(use: Use) -> bool:
    """Return whether a movement chain makes of the value a view of it with channels last."""
    user, value = use.operation, use.operation.operands[use.index]
    chain: list[Operation] = []
    while isinstance(user, _MOVES) and _is_fixed(user.results[0]):
        chain.append(user)
        readers = [found.operation for found in user.results[0].uses]
        if len(readers) != 1:
            break
        user = readers[0]
    if not chain or not _speaks(chain, value, [r.operation for r in chain[-1].results[0].uses]):
        return False
    if is_neutral(value):
        return _transposes(use.operation, channel_last)
    sizes = sizes_of(value)
    numbers = np.arange(prod(sizes)).reshape([sizes[p] for p in channel_last(len(sizes))])
    return _is_flat(_moved(numbers.transpose(channel_first(len(sizes))), chain))


def _speaks(chain: Sequence[Operation], value: SSAValue, ends: Sequence[object]) -> bool:
    """Return whether a movement chain is one between layouts of images.

    It is if a convolution stands at its end, or it turns planes into rows or back. Other products
    transpose, too: keys before a product with queries look like lines or planes.
    """
    if any(isinstance(end, Conv2dOp) for end in ends):
        return True
    return len(chain) > 1 and len(shape_of(value)) > min(IMAGE_RANKS)


def _transposes(owner: object, perm: Callable[[int], tuple[int, ...]]) -> bool:
    if not isinstance(owner, TransposeOp):
        return False
    given = tuple(owner.perm.get_values())
    return given == perm(len(given))


def _is_fixed(value: SSAValue) -> bool:
    return all(dim.is_static for dim in shape_of(value))


def _moved(order: np.ndarray, chain: Sequence[Operation]) -> np.ndarray:
    for op in chain:
        if isinstance(op, TransposeOp):
            order = order.transpose([int(p) for p in op.perm.get_values()])
        else:
            order = order.reshape(sizes_of(op.results[0]))
    return order


def _is_flat(order: np.ndarray) -> bool:
    return np.array_equal(order.reshape(-1), np.arange(order.size))


class _Cut:
    """A flow network from node LAST to node FIRST; nets are added, then it is cut once."""

    def __init__(self, nodes: int) -> None:
        self.room: list[dict[int, int]] = [{} for _ in range(nodes)]
        self.endless = 1

    def add_net(self, maker: int, readers: Sequence[int], price: int) -> None:
        """Demand `price` once if any reader is on another side than the maker."""
        self.endless += 2 * price
        forth, back = len(self.room), len(self.room) + 1
        self.room += [{}, {}]
        self._add(maker, forth, price)
        self._add(back, maker, price)
        for reader in readers:
            self._add(forth, reader, -1)
            self._add(reader, back, -1)

    def away_from(self, sink: int) -> set[int]:
        """Return the greatest source side of a minimum cut: what cannot reach the sink."""
        for room in self.room:
            room.update({to: self.endless for to, left in room.items() if left < 0})
        while path := self._path():
            least = min(self.room[a][b] for a, b in path)
            for a, b in path:
                self.room[a][b] -= least
                self.room[b][a] = self.room[b].get(a, 0) + least
        incoming: list[list[int]] = [[] for _ in self.room]
        for node, room in enumerate(self.room):
            for to, left in room.items():
                if left > 0:
                    incoming[to].append(node)
        reaching, stack = {sink}, [sink]
        while stack:
            for node in incoming[stack.pop()]:
                if node not in reaching:
                    reaching.add(node)
                    stack.append(node)
        return set(range(len(self.room))) - reaching

    def _add(self, a: int, b: int, room: int) -> None:
        self.room[a][b] = room
        self.room[b].setdefault(a, 0)

    def _path(self) -> list[tuple[int, int]]:
        """Return the edges of a shortest path with room from LAST to FIRST, if there is one."""
        before = {LAST: LAST}
        queue = deque([LAST])
        while queue and FIRST not in before:
            node = queue.popleft()
            for to, left in self.room[node].items():
                if left > 0 and to not in before:
                    before[to] = node
                    queue.append(to)
        edges, at = [], FIRST
        while at in before and at != LAST:
            edges.append((before[at], at))
            at = before[at]
        return edges
