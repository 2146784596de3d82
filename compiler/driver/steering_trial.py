"""Judge steering coefficients on calibration cards: answers, and experts to be loaded.

    every question, unsteered, a cache of experts beside it     -> answers as expected, misses
    per candidate, every question with its record and the cache -> the same

The cache is a `Residency` table that follows the plan's own uses: the pager is told of every expert
that a run uses, and what would not be in memory is away from the next run's routers. Nothing is
really unloaded, so the native code runs as fast as ever. Bands of the bundle are at work, as they
are on a device. The driver runs it in a process of its own:

    python -m compiler.driver.steering_trial BUNDLE_DIRECTORY SUBMISSION_DIRECTORY CANDIDATES
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from compiler.analysis.expert_cache import ExpertCache, LeastStale
from compiler.contract.bands import BandedRunner, Bands, parse_bands
from compiler.contract.native import NativePlan
from compiler.contract.operations import ExpertEvent
from compiler.contract.pipeline import Pipeline
from compiler.contract.plan import Plan
from compiler.contract.router_stats import PER_MILLE, RouterStats, parse_router_stats
from compiler.contract.selftest_process import load_plan
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore
from compiler.contract.steered_runner import SteeredRunner
from compiler.contract.steering import Residency, Steering, steered_experts
from compiler.contract.steering_points import MILLI, Point, modality_bias
from compiler.driver.cards import Card, read_calibration
from compiler.driver.evaluate import answer_cards
from compiler.driver.forks import map_forked

NOTHING: Final = Steering()


@dataclass(frozen=True, slots=True)
class Judged:
    """How often a plan answered as expected, and what it loaded.

    Attributes:
        marks: Per question, whether it was answered as expected.
        uses, misses: Experts used by layers of runs, and those that were not in memory.
        mean_k: Experts per routed row, thousandths.
    """

    marks: tuple[bool, ...]
    uses: int
    misses: int
    mean_k: int


def plan_experts(plan: Plan) -> dict[int, int]:
    """Return the layer of every expert that a steered router chooses, by its first weight.

    Layers are numbered in the order in which a program comes to them.
    """
    rows = [weight.rows for weight in plan.weights]
    found: dict[int, int] = {}
    for program in plan.programs:
        for number, firsts in enumerate(steered_experts(program.calls, rows).values()):
            for first in firsts:
                found[first] = max(found.get(first, 0), number)
    return found


class CachedRunner(RunnerBefore):
    """A plan beside a cache of experts, which decides what its routers see in memory."""

    def __init__(self, plan: NativePlan, cache: ExpertCache) -> None:
        """Begin with an empty cache; the plan's pager is taken."""
        super().__init__(plan)
        self._cache, self._layers = cache, plan_experts(plan.plan)
        self._step = 0
        self.steering: Final = plan.steering
        self.residency: Final = Residency(len(plan.plan.weights))
        for first in self._layers:
            self.residency[first] = False
        plan.set_pager(self._page)

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run a program; see `PlanRunner.run`."""
        self._step += 1
        return self._runner.run(program, inputs)

    def _page(self, event: ExpertEvent, first: int) -> bool:
        if event is ExpertEvent.USE and first in self._layers:
            self._cache.use(first, self._layers[first], self._step)
            if self._cache.evicted is not None:
                self.residency[self._cache.evicted] = False
            self.residency[first] = True
        return True


@dataclass(frozen=True, slots=True)
class Trial:
    """What answers are judged by.

    Attributes:
        plan: Native, loaded.
        bands: The variants of its step that are at work; None without any.
        stats: For the bias of candidates that lean.
        resident: Share of the experts in memory, per mille.
    """

    plan: NativePlan
    pipeline: Pipeline
    cards: Sequence[Card]
    bands: Bands | None
    stats: RouterStats
    resident: int

    def judge(self, point: Point | None, kind: type[ExpertCache] = LeastStale) -> Judged:
        """Answer every question with a point's coefficients, or with none and no bands."""
        layers = plan_experts(self.plan.plan)
        capacity = max(1, len(layers) * self.resident // PER_MILLE)
        cache = kind(capacity, 1 + max(layers.values()))
        before = self.plan.steering.counts()
        cached = CachedRunner(self.plan, cache)
        steered = SteeredRunner(cached, cached.residency)
        steered.follow(NOTHING if point is None else self._record(point))
        runner: PlanRunner = steered
        if point is not None and self.bands is not None:
            runner = BandedRunner(steered, self.bands)
        outcomes = answer_cards(runner, self.pipeline, self.cards)
        steered.follow(None)
        mean_k = self.plan.steering.counts().since(before).mean_k or 0.0
        marks = tuple(outcome.is_right for outcome in outcomes)
        return Judged(marks, cache.uses, cache.misses, round(mean_k * MILLI))

    def _record(self, point: Point) -> Steering:
        plan, lean = self.plan.plan, point.lean / MILLI
        bias = modality_bias(self.stats, plan.sections, plan.weights, lean) if lean else ()
        return replace(point.steering(), bias=bias)


def judge_all(trial: Trial, points: Sequence[Point | None]) -> list[str]:
    """Return what `Judged` says of each, as JSON; several at once."""
    return map_forked(lambda point: json.dumps(asdict(trial.judge(point))), points)


def main(bundle: Path, submission: Path, candidates: Path) -> int:
    """Print what candidates did, as JSON."""
    calibration = read_calibration(bundle, submission)
    if calibration is None:
        return 1
    pipeline, cards = calibration
    asked = json.loads(candidates.read_bytes())
    bands = bundle / "bands"
    with load_plan(bundle) as plan:
        trial = Trial(
            plan,
            pipeline,
            cards,
            parse_bands(bands.read_bytes()) if bands.exists() else None,
            parse_router_stats((bundle / "router_stats").read_bytes()),
            asked["resident"],
        )
        found = judge_all(trial, [row and Point(**row) for row in asked["points"]])
    sys.stdout.write(f"[{','.join(found)}]")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:4])))
