"""Random sequences on a buddy pool against a model of ranges, in a process of their own.

python -m tests.factories.buddy_fuzz FIRST LAST [sanitised]

The pool manages real memory: every allocation holds bytes of its own, which are compared after each
step, so a move that changes any is found.
"""

import ctypes
import itertools
import random
import sys

from compiler.contract.buddy_pool import BuddyPool, HiddenError, NoRoomError, ScatteredError
from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.operations import Op
from tests.factories.checked_kernels import SANITISE, gcc
from tests.factories.kernels import PORTABLE, library

BLOCK = 64
STEPS = 250


class BuddyTrial:
    """One pool over memory of its own, and what should be in it."""

    def __init__(self, kernels: KernelLibrary, seed: int) -> None:
        self.random = random.Random(seed)
        self.blocks = self.random.choice((1, 7, 16, 63, 64, 65, 200, 1000))
        self.handles = self.random.choice((3, 40, 2000))
        self.memory = ctypes.create_string_buffer(self.blocks * BLOCK)
        self.kernels = kernels
        self.pool = self._open()
        self.held: dict[int, bytes] = {}
        self.pins: dict[int, int] = {}
        self.refused = self.scattered = 0

    def _open(self) -> BuddyPool:
        return BuddyPool(
            self.kernels,
            block_bytes=BLOCK,
            blocks=self.blocks,
            handles=self.handles,
            base=ctypes.addressof(self.memory),
            keeps=self.memory,
        )

    def step(self) -> None:
        kind = self.random.choices(
            ("put", "drop", "pin", "unpin", "compact", "state"), (6, 4, 1, 1.5, 3, 0.3)
        )[0]
        getattr(self, f"_{kind}")()

    def _put(self) -> None:
        size = min(int(self.random.paretovariate(0.7) * 40), 2 * self.blocks * BLOCK)
        free = self.pool.counts()["free_bytes"]
        try:
            handle = self.pool.put(size)
        except NoRoomError:
            assert size > free or len(self.held) == self.handles
            self.refused += 1
        except ScatteredError:
            assert size <= free
            assert self.pool.counts()["largest_bytes"] < size
            self.scattered += 1
        else:
            assert handle not in self.held
            self.held[handle] = self.random.randbytes(size)
            offset, found = self.pool.place(handle)
            assert found == size
            self.memory[offset : offset + size] = self.held[handle]

    def _drop(self) -> None:
        able = [handle for handle in self.held if not self.pins.get(handle)]
        if able:
            handle = self.random.choice(able)
            self.pool.drop(handle)
            del self.held[handle]

    def _pin(self) -> None:
        if self.held:
            handle = self.random.choice(list(self.held))
            try:
                self.pool.pin(handle)
            except HiddenError:
                return
            self.pins[handle] = self.pins.get(handle, 0) + 1

    def _unpin(self) -> None:
        for handle in [handle for handle, count in self.pins.items() if count]:
            self.pool.pin(handle, pinned=False)
            self.pins[handle] -= 1

    def _compact(self) -> None:
        budget = self.random.choice((0, BLOCK, 5 * BLOCK, 1 << 20))
        moved = self.pool.step(budget, hide=self.random.random() < 0.7)
        assert moved is None or moved <= max(BLOCK, budget)

    def _state(self) -> None:
        """Into another pool and back: it does what this one does."""
        try:
            dump = self.pool.dump()
        except HiddenError:
            return
        other = self._open()
        other.restore(dump)
        assert other.dump() == dump
        if not any(self.pins.values()):
            self.pool = other

    def compare(self) -> None:
        taken: list[tuple[int, int]] = []
        for handle, data in self.held.items():
            try:
                offset, size = self.pool.place(handle)
            except HiddenError:
                continue
            assert size == len(data)
            assert offset % BLOCK == 0
            assert self.memory[offset : offset + size] == data
            taken.append((offset, offset + -(-size // BLOCK) * BLOCK))
        taken.sort()
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
        assert not taken or taken[-1][1] <= self.blocks * BLOCK
        counts = self.pool.counts()
        assert counts["asked_bytes"] == sum(map(len, self.held.values()))
        assert counts["free_bytes"] + counts["given_bytes"] == self.blocks * BLOCK
        assert counts["largest_bytes"] <= counts["free_bytes"]

    def finish(self) -> None:
        """Compact, fill the rest in one piece, free everything: one free piece is left."""
        while any(self.pins.values()):
            self._unpin()
        while self.pool.step(1 << 20) is not None:
            pass
        self.compare()
        counts = self.pool.counts()
        assert counts["largest_bytes"] == counts["free_bytes"]
        if counts["free_bytes"] and len(self.held) < self.handles:
            handle = self.pool.put(counts["free_bytes"])
            assert self.pool.counts()["free_bytes"] == 0
            self.pool.drop(handle)
        for handle in list(self.held):
            self.pool.drop(handle)
        assert self.pool.counts()["largest_bytes"] == self.blocks * BLOCK
        assert self.pool.dump() == self._open().dump()
        for handle in (0, self.handles, 1 << 31):
            for call in (self.pool.drop, self.pool.pin, self.pool.place):
                try:
                    call(handle)
                except NativeError:
                    continue
                raise AssertionError(f"{call} took handle {handle}")


def main(first: int, last: int, sanitised: bool = False) -> None:
    kernels = KernelLibrary(gcc(PORTABLE, SANITISE, [Op.ADD]) if sanitised else library(PORTABLE))
    steps = 0
    for seed in range(first, last):
        trial = BuddyTrial(kernels, seed)
        for _ in range(STEPS):
            trial.step()
            trial.compare()
            steps += 1
        trial.finish()
    print("compared", steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "sanitised" in sys.argv[3:])
