"""Random sequences on a pool of experts against its model, in a process of their own.

python -m tests.factories.pool_fuzz FIRST LAST [sanitised]

`sanitised` builds the kernels under the address and undefined behaviour sanitisers of gcc; the
child needs their environment. Every expert that is in memory has the bytes of its file throughout.
"""

import os
import random
import sys

from compiler.contract.expert_pool import ExpertFile, ExpertPool
from compiler.contract.native_library import KernelLibrary
from compiler.contract.operations import Op
from compiler.contract.pool_abi import Eviction, ExpertState, PoolKnob
from tests.factories.checked_kernels import SANITISE, gcc
from tests.factories.kernels import PORTABLE, library
from tests.factories.pool_model import Expert, PoolModel
from tests.factories.pools import RUN, memory_file

STEPS = 300


class Trial:
    """One pool and one model, and the same things done to both."""

    def __init__(self, kernels: KernelLibrary, seed: int) -> None:
        self.random = random.Random(seed)
        layers = self.random.randint(1, 4)
        sizes = [
            (layer, self.random.randint(1, 3 * RUN))
            for layer in range(layers)
            for _ in range(self.random.randint(2, 6))
        ]
        self.bytes = [self.random.randbytes(size) for _, size in sizes]
        runs = [-(-size // RUN) for _, size in sizes]
        most = self.random.randint(max(runs), sum(runs))
        self.fds = [memory_file(data) for data in self.bytes]
        files = [
            ExpertFile(fd, size, "", layer)
            for fd, (layer, size) in zip(self.fds, sizes, strict=True)
        ]
        self.pool = ExpertPool(kernels, files, run_bytes=RUN, runs=most)
        self.model = PoolModel(
            [Expert(layer, count) for count, (layer, _) in zip(runs, sizes, strict=True)], most
        )
        self.runs = runs
        self.pool.fill()
        for expert in sorted(self.model.experts, key=lambda expert: -expert.layer):  # as `fill`
            assert self.model._load(expert)
            expert.present = True

    def step(self) -> None:
        numbers = range(len(self.bytes))
        layer = self.random.randrange(self.model.layers)
        mates = [n for n in numbers if self.model.experts[n].layer == layer]
        match self.random.choices(
            ("touch", "pass", "choose", "settle", "knob", "break", "state"),
            (12, 3, 4, 4, 1, 0.3, 0.3),
        )[0]:
            case "touch":
                number = self.random.randrange(len(self.bytes))
                assert self.pool.touch(number) == self.model.touch(number)
            case "pass":
                self.pool.begin_pass()
                self.model.begin_pass()
            case "choose":
                chosen = self.random.sample(mates, self.random.randint(1, len(mates)))
                self.pool.choose(chosen)
                self.model.choose(chosen)
            case "settle":
                self.pool.settle()
                self.model.settle()
            case "knob":
                self._knob()
            case "break":
                self._break(self.random.randrange(len(self.bytes)))
            case "state":
                self._restore()

    def _knob(self) -> None:
        knob = self.random.choice(
            (PoolKnob.PRESSURE, PoolKnob.RUNS, PoolKnob.STRICT, PoolKnob.EVICTION)
        )
        value = {
            PoolKnob.PRESSURE: self.random.choice((0, 699, 700, 899, 900, 1000)),
            PoolKnob.RUNS: self.random.randint(max(self.runs), sum(self.runs)),
        }.get(knob, self.random.randrange(2))
        self.pool.set(knob, value)
        if knob is PoolKnob.PRESSURE:
            self.model.pressure = value
        elif knob is PoolKnob.STRICT:
            self.model.strict = bool(value)
        elif knob is PoolKnob.EVICTION:
            self.model.lru = Eviction(value) is Eviction.LRU
        else:
            self.model.most = value
            self.model.give()

    def _break(self, number: int) -> None:
        """Change a byte of a file, or mend it."""
        changed = bytearray(self.bytes[number])
        if number in self.model.broken:
            self.model.broken.remove(number)
        else:
            self.model.broken.add(number)
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        os.pwrite(self.fds[number], changed, 0)

    def _restore(self) -> None:
        """Go through bytes and back: nothing of what follows is different."""
        self.pool.settle()
        self.model.settle()
        fits = self.model.committed <= self.model.most
        if not fits or any(self.model.experts[n].present for n in self.model.broken):
            return
        before = self.pool.dump()
        self.pool.restore(before)
        assert self.pool.dump() == before
        self.model.evictions = self.pool.counts()["evictions"]

    def compare(self) -> None:
        states = self.pool.states()
        present = [expert.present for expert in self.model.experts]
        assert [state is ExpertState.PRESENT for state in states] == present
        counts = self.pool.counts()
        for name in ("hits", "misses", "evictions"):
            assert counts[name] == getattr(self.model, name), name
        assert counts["committed_bytes"] == self.model.committed * RUN
        assert counts["given_bytes"] == self.model.given * RUN
        held = [data for data, here in zip(self.bytes, present, strict=True) if here]
        assert counts["asked_bytes"] == sum(map(len, held))
        assert self.pool.heats() == [self.model.heat(expert) for expert in self.model.experts]

    def compare_bytes(self) -> None:
        for number, expert in enumerate(self.model.experts):
            if expert.present:
                assert self.pool.view(number) == self.bytes[number]

    def close(self) -> None:
        self.pool.close()
        for fd in self.fds:
            os.close(fd)


def main(first: int, last: int, sanitised: bool = False) -> None:
    kernels = gcc(PORTABLE, SANITISE, [Op.ADD]) if sanitised else library(PORTABLE)
    loaded = KernelLibrary(kernels)
    steps = 0
    for seed in range(first, last):
        trial = Trial(loaded, seed)
        for _ in range(STEPS):
            trial.step()
            trial.compare()
            steps += 1
        trial.compare_bytes()
        trial.close()
    print("compared", steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "sanitised" in sys.argv[3:])
