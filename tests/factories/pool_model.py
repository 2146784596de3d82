"""What a pool of experts does, said a second time in Python: one thread, no reading ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, field

ONE = 1 << 16
GRACE = 2
ADMIT, GIVE = 700, 900
MOST_GIVEN = 128


@dataclass
class Expert:
    layer: int
    runs: int
    present: bool = False
    pinned: bool = False
    clock: int = 0
    used: int = 0
    needed: int = 0
    heat: int = 0
    heated: int = 0


@dataclass
class PoolModel:
    """Experts by number; the same decisions as residency.c.in makes."""

    experts: list[Expert]
    most: int
    lru: bool = False
    strict: bool = False
    pressure: int = 0
    step: int = 1
    layer: int = 0
    clock: int = 0
    committed: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    broken: set[int] = field(default_factory=set)

    @property
    def layers(self) -> int:
        return max(expert.layer for expert in self.experts) + 1

    @property
    def given(self) -> int:
        return sum(expert.runs for expert in self.experts if expert.present)

    def heat(self, expert: Expert) -> int:
        steps, heat, keep = self.step - expert.heated, expert.heat, ONE - ONE // 32
        if steps > 1024:
            return 0
        while steps and heat:
            if steps & 1:
                heat = heat * keep // ONE
            steps >>= 1
            keep = keep * keep // ONE
        return heat

    def rank(self, expert: Expert) -> int:
        if expert.needed == self.step:
            return 4
        over = expert.layer < self.layer
        if not expert.clock:
            return 0 if over else 1
        age = self.step - expert.used
        if age > GRACE:
            return 0
        return (1 if over else 2) if age else 3

    def keep(self, expert: Expert) -> int:
        if self.lru:
            return expert.clock
        ahead = (expert.layer - self.layer) % self.layers + 1
        return (self.rank(expert) << 48) + (self.heat(expert) + 1) * 4096 // ahead

    def victim(self, highest: int = 4) -> Expert | None:
        able = [
            expert
            for expert in self.experts
            if expert.present
            and not expert.pinned
            and ((self.lru and highest > 1) or self.rank(expert) <= highest)
        ]
        return min(able, key=self.keep, default=None)

    def evict(self, expert: Expert) -> None:
        expert.present = False
        self.evictions += 1

    def begin_pass(self) -> None:
        self.settle()
        self.step += 1
        self.layer = 0
        self.give()

    def give(self) -> None:
        given = 0
        while given < MOST_GIVEN and (self.pressure >= GIVE or self.committed > self.most):
            if self.committed == self.given:
                stale = self.victim(1)
                if stale is None or self.rank(stale) > 0:
                    stale = self.victim() if self.committed > self.most else None
                if stale is None:
                    return
                self.evict(stale)
            self.committed -= 1
            given += 1

    def choose(self, numbers: Sequence[int]) -> None:
        self.settle()
        for number in numbers:
            self.layer = self.experts[number].layer + 1
            self.experts[number].needed = self.step

    def touch(self, number: int) -> bool:
        expert = self.experts[number]
        if expert.present:
            self.hits += 1
        else:
            self.misses += 1
            if self.strict and self.pressure >= ADMIT:
                return False
            if not self._load(expert) or number in self.broken:
                return False
            expert.present = True
        expert.pinned = True
        if expert.used != self.step or not expert.clock:
            heat = self.heat(expert)
            expert.heat, expert.heated = heat + (ONE - heat) // 32, self.step
        self.clock += 1
        expert.clock, expert.used, expert.needed = self.clock, self.step, self.step - 1
        return True

    def _load(self, expert: Expert) -> bool:
        free = self.committed - self.given
        ready = free + max(0, self.most - self.committed)
        able = [e for e in self.experts if e.present and not e.pinned]
        if ready + sum(e.runs for e in able) < expert.runs:
            return False
        while self.committed - self.given + max(0, self.most - self.committed) < expert.runs:
            found = self.victim()
            assert found is not None
            self.evict(found)
        self.committed = max(self.committed, self.given + expert.runs)
        return True

    def settle(self) -> None:
        if not any(expert.pinned for expert in self.experts):
            return
        for expert in self.experts:
            expert.pinned = False
        self.committed = max(self.given, min(self.committed, self.most))
