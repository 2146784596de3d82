"""A soak: very many answers of a small routed model while everything around it is disturbed.

    python -m tests.simulators.soak FOLDER STEPS SEED [FIRST]

Prints what happened as one JSON object. Each answer draws its question and its disturbances from
seed and number, so a failure is met again by a campaign that begins some hundred answers before it:
FIRST. Budget, steering and threads that earlier answers left are all that it lacks.

Of every answer: nothing is raised; every step has the bits of a device without faults, or the
answer is marked as degraded with reasons that are counted, and what it says is then what a device
without faults says with the fewest experts; what it met is what its disturbances may lead to. A
share is compared with the simulator. Afterwards: no thread, no descriptor and no memory is lost.
"""

import json
import logging
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from compiler.contract import pooled_weights
from device_agent.runtime.answers import AnswerRecord, Outcome, Question
from device_agent.runtime.faults import FaultKind
from tests.factories.plan_swapping import resources
from tests.factories.soaked import (
    Installed,
    Reference,
    Said,
    installed,
    random_question,
    random_steered,
)
from tests.simulators.disturbances import DISTURBANCES, Scene
from tests.simulators.soaked_agent import BETWEEN_S, Meets, SoakedAgent

SHARE = 0.5
"""Of the experts that fit into memory."""
DISTURBED = 0.4
"""Of the answers that are disturbed, and of those that are disturbed once more."""
SIMULATED = 0.013
LEAST_SIMULATED = 25
"""Answers that are simulated at least, however few there are."""
STEPS_OF_ANSWER = 8.0
SIGNALS = frozenset(("temperature", "memory_pressure"))
STEERED = 3
"""Records to steer by."""
LATEST = 8
"""Answers whose disturbances a failure names."""
LOOKS = 20
"""Looks at memory and descriptors in a campaign."""


@dataclass
class Tally:
    """What a campaign counted."""

    answers: int = 0
    steps: int = 0
    same: int = 0
    degraded: int = 0
    simulated: int = 0
    faults: Counter[FaultKind] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    drawn: Counter[str] = field(default_factory=Counter)


class Soak:
    """One campaign."""

    def __init__(self, at: Installed, steps: int, seed: int) -> None:
        self.seed, self.wanted = seed, steps
        self.agent = SoakedAgent(at, SHARE)
        self.reference = Reference(at)
        self.tally = Tally()
        self.looks: list[dict[str, int]] = []
        weights = len(at.case.module.weights)
        self.steered = tuple(random_steered(weights, seed + each) for each in range(STEERED))
        self.simulated = max(SIMULATED, LEAST_SIMULATED * STEPS_OF_ANSWER / steps)
        self.latest: deque[list[str]] = deque(maxlen=LATEST)
        self._view = b""
        self._before: frozenset[FaultKind] = frozenset()

    def run(self, first: int = 0) -> None:
        """Answer until there are as many steps as wanted.

        Raises:
            AssertionError: An answer is not as it must be; names seed and number.
        """
        for number in count(first):
            if self.tally.steps >= self.wanted:
                break
            try:
                self.answer(number)
            except BaseException as error:
                where = (
                    f"seed {self.seed}, answer {number}, step {self.tally.steps}, after "
                    + " | ".join(", ".join(names) for names in self.latest)
                )
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            if self.tally.steps >= len(self.looks) * self.wanted / LOOKS:
                self.look()

    def answer(self, number: int) -> None:
        """Disturb, ask, compare, and undo what ends with the answer."""
        agent = self.agent
        source = random.Random(f"{self.seed}/{number}")
        scene = Scene(agent, source, self.steered, random_question(source))
        may = self._disturb(scene)
        follows, self._before = may | self._before, may
        if agent.host.understands(scene.question):
            self._view = scene.question.image or self._view
        before = agent.counts
        agent.machine.now += BETWEEN_S
        agent.steps = []
        try:
            record = agent.host.answer(scene.question)
        finally:
            agent.meets = Meets()
            for undo in reversed(scene.undo):
                undo()
        self._judge(scene, record, follows, source)
        self._compare_counts(record, before)

    def _disturb(self, scene: Scene) -> frozenset[FaultKind]:
        if self.agent.guard._opened is None:
            return frozenset()
        weights = [row.weight for row in DISTURBANCES.values()]
        names: list[str] = []
        while scene.random.random() < DISTURBED:
            (name,) = scene.random.choices(list(DISTURBANCES), weights)
            names.append(name)
        self.latest.append(names)
        for name in names:
            DISTURBANCES[name].act(scene)
        self.tally.drawn.update(names)
        return frozenset().union(*(DISTURBANCES[name].follows for name in names))

    def _judge(
        self,
        scene: Scene,
        record: AnswerRecord,
        follows: frozenset[FaultKind],
        source: random.Random,
    ) -> None:
        tally, found = self.tally, tuple(self.agent.steps)
        tally.answers += 1
        assert set(record.faults) <= follows, f"met {record.faults}, may meet {sorted(follows)}"
        assert record.degraded is bool(record.reasons)
        assert set(record.reasons) <= {kind.value for kind in follows} | SIGNALS, record.reasons
        if scene.is_bad:
            assert not record.words
            assert record.outcome is not Outcome.ENDED
            return
        steered = self.agent.steered
        said = self.reference.native(self._view, scene.question, steered)
        tally.steps += len(found)
        if source.random() < self.simulated:
            assert self.reference.simulated(self._view, scene.question, steered) == said
            tally.simulated += len(said.steps)
        is_same = _is(record, found, said)
        tally.same += len(found) if is_same else 0
        tally.degraded += record.degraded
        if not is_same:
            assert record.degraded, f"other bits, not marked: {record}"
            self._require_fewest(scene.question, record, found)
        for act in scene.after:
            act(self._view, said.words)

    def _require_fewest(
        self, question: Question, record: AnswerRecord, found: tuple[bytes, ...]
    ) -> None:
        """Require that a degraded answer is none, or that of the fewest experts."""
        if record.outcome in (Outcome.ERROR, Outcome.TIMEOUT) and not record.words:
            return
        fewest = self.reference.native(self._view, question, self.agent.steered, fewest=True)
        assert _is(record, found, fewest), f"neither all nor the fewest experts: {record}"

    def _compare_counts(
        self, record: AnswerRecord, before: tuple[Counter[Any], Counter[str]]
    ) -> None:
        faults, reasons = self.agent.counts
        assert faults - before[0] == Counter(record.faults)
        assert reasons - before[1] == Counter(record.reasons)
        self.tally.faults.update(record.faults)
        self.tally.reasons.update(record.reasons)

    def look(self) -> None:
        """Take down what a leak would show in."""
        if self.agent.guard._opened is not None:
            self.agent.threads = self.agent.plan.threads = 1
        self.looks.append({**resources(), "steps": self.tally.steps})
        print(self.looks[-1], file=sys.stderr, flush=True)

    def close(self) -> dict[str, int]:
        """End; return what is left."""
        self.agent.close()
        self.reference.close()
        return resources()


def _is(record: AnswerRecord, found: tuple[bytes, ...], said: Said) -> bool:
    """Return whether it is what was said; one that came too late may be."""
    outcome = Outcome.ENDED if said.stopped else Outcome.CUT_OFF
    is_so = (found, record.words) == (said.steps, said.words)
    return is_so and record.outcome in (outcome, Outcome.TIMEOUT)


def main(folder: Path, steps: int, seed: int, first: int = 0) -> dict[str, object]:
    logging.disable(logging.CRITICAL)  # what goes wrong here is meant to
    empty = resources()
    start = time.perf_counter()
    soak = Soak(installed(folder), steps, seed)
    soak.run(first)
    closed, tally = soak.close(), soak.tally
    seen = soak.agent.seen
    return {
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 1),
        "steps": tally.steps,
        "answers": tally.answers,
        "same": tally.same,
        "degraded": tally.degraded,
        "simulated": tally.simulated,
        "faults": dict(sorted(tally.faults.items())),
        "reasons": dict(sorted(tally.reasons.items())),
        "drawn": dict(sorted(tally.drawn.items())),
        "runs": soak.agent.runs,
        "plans": soak.agent.plans,
        "swaps": soak.agent.swaps,
        "recovered": seen.recovered,
        "stuck": seen.stuck,
        "given_up": len(pooled_weights._GIVEN_UP),
        "looks": soak.looks,
        "empty": empty,
        "closed": closed,
    }


if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[2:]]
    print(json.dumps(main(Path(sys.argv[1]), *numbers)))
