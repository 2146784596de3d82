"""Search the coefficients of steered routers, and say them in a section.

    routing trace of the record -> replays over a grid -> candidates -> trial on calibration cards
    margins, nothing pulled -> `always`: the fewest experts within the loss of entropy bands
    pulls at its margin     -> `pressed`: the fewest misses within twice that loss

Replays are cheap and say what is saved; only running the plan says what answers are lost. A version
that changes a few experts of a base and nothing else keeps the base's coefficients, as it keeps the
grids of its weights: the section stays the same bytes, and the report says so. Called
after the plan was emitted. Where there are no cards, where routers do not choose by their logits,
or where this machine cannot run the plan natively, there is no section and the report says why.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from compiler.analysis.expert_cache import LeastStale
from compiler.analysis.routing_replay import LayerTrace, replay
from compiler.contract.bands import is_within, most_lost
from compiler.contract.canonical import Json, canonical_bytes
from compiler.contract.errors import ContractError
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.router_stats import PER_MILLE
from compiler.contract.steering_points import (
    SECTION,
    Point,
    SteeringPoints,
    parse_steering_points,
)
from compiler.driver import steering_trial
from compiler.driver.band_trial import MAX_LOSS
from compiler.driver.base_grids import changed_experts
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.kernel_stage import kernels_for
from compiler.driver.native_check import host_target, run_child, write_sections
from compiler.driver.provenance import calibration_digests, compiler_digest, section_digests
from compiler.driver.steering_trial import Judged
from compiler.errors import SelfTestError
from compiler.kernels.program import Module
from compiler.quant.record import CalibrationRecord
from compiler.quant.routing_trace import routing_trace

TRIAL: Final = "steering_trial"
TIMEOUT_S: Final = 600.0
RESIDENT: Final = 500
"""Share of the experts in memory that pulls are judged with, per mille."""
MAX_LOSS_PRESSED: Final = 2 * MAX_LOSS
"""Millionths: 1 %, with the confidence of `compiler.contract.bands.most_lost`."""
MARGINS: Final = (900, 800, 700)
PULLS: Final = (50, 100, 150, 200, 300, 500, 1000)
MOST_PROTECTED: Final = 2
LEANS: Final = (500,)
MOST_JUDGED: Final = 3
"""Pulls that are judged, of those that the replays leave."""


@dataclass(frozen=True, slots=True)
class Searched:
    """What the search found.

    Attributes:
        sections: `steering`, if there is anything to choose.
        facts: Rows of the report.
    """

    sections: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Json] = field(default_factory=lambda: {SECTION: None})


def search_steering(
    directory: Path,
    sections: Mapping[str, bytes],
    module: Module,
    record: CalibrationRecord | None,
    cache: StageCache,
    progress: Callable[[float], None] = lambda _share: None,
) -> Searched:
    """Return the coefficients that calibration allows.

    Args:
        directory: The submission, for its calibration cards.
        sections: Plan, weights, pipeline, statistics and bands.
        module: What was recorded, its routers rounded.
        record: What calibration saw.
        cache: Where trials and kernels are.
        progress: Called with the share of the candidates judged.

    Raises:
        SelfTestError: Native code crashed in the trial, or took too long.
    """
    layers = () if record is None else routing_trace(module, record)
    plan = parse_plan(sections["plan"])
    if not layers or min(layer.k for layer in layers) < 2 or not steering_trial.plan_experts(plan):
        return Searched()
    if host_target() is None:
        return Searched(facts={SECTION: {"reason": "this machine runs no target natively"}})
    trial = _Trial(directory, sections, plan, cache)
    tried = [Point(), *(Point(margin=margin) for margin in MARGINS)]
    plain, *judged = trial.judge([None, *tried])
    margins = judged_points(tried, judged, plain)
    always = best_margin(margins, len(plain.marks))
    progress(0.5)
    tried = candidate_pulls(layers, always.margin)
    pulls = judged_points(tried, trial.judge(tried), plain)
    found = chosen_points(plain, margins, always, pulls)
    return Searched({SECTION: found.to_bytes()}, {SECTION: asdict(found)})


def kept_points(sections: Mapping[str, bytes], base: Mapping[str, bytes]) -> Searched | None:
    """Return the base's coefficients, if all weights but a few experts are those of the base.

    Args:
        sections: The new plan and its weights.
        base: Sections of an older bundle; empty without one.

    Returns:
        The section as it is, or None if it must be searched for.
    """
    if SECTION not in base:
        return None
    names = {section.name for section in parse_plan(sections["plan"]).sections}
    changed = changed_experts({name: sections[name] for name in names}, base)
    if changed is None:
        return None
    try:
        found = parse_steering_points(base[SECTION])
    except ContractError:
        return None
    facts = {**asdict(found), "kept_from_base": changed}
    return Searched({SECTION: base[SECTION]}, {SECTION: facts})


def judged_points(points: Sequence[Point], judged: Sequence[Judged], plain: Judged) -> list[Point]:
    """Return points with what they did, against the plain answers."""
    pairs = [list(zip(plain.marks, found.marks, strict=True)) for found in judged]
    return [
        replace(
            point,
            mean_k=found.mean_k,
            misses=found.misses,
            worse=changes.count((True, False)),
            better=changes.count((False, True)),
        )
        for point, found, changes in zip(points, judged, pairs, strict=True)
    ]


def best_margin(points: Sequence[Point], questions: int) -> Point:
    """Return the judged point with the fewest experts that stays within `MAX_LOSS`.

    The first one steers nothing and serves if no other does.
    """
    serving = [p for p in points if is_within(p.worse, p.better, questions, MAX_LOSS)]
    return min([*serving, points[0]], key=lambda point: point.mean_k)


def candidate_pulls(layers: Sequence[LayerTrace], margin: int) -> list[Point]:
    """Return pulls worth judging: those that no other beats in misses and in moved gates, replayed.

    Args:
        layers: The trace.
        margin: That of `always`.
    """
    experts = sum(layer.experts for layer in layers)
    most = min(MOST_PROTECTED, min(layer.k for layer in layers) - 1)
    costs: dict[Point, tuple[float, ...]] = {}
    for pull in PULLS:
        for protect in range(1, most + 1):
            point = Point(pull=pull, protect=protect, margin=margin)
            cache = LeastStale(max(1, experts * RESIDENT // PER_MILLE), len(layers))
            found = replay(layers, point.steering(), cache)
            costs[point] = (found.misses, found.moved)
    kept = sorted(undominated(costs), key=lambda point: costs[point])[:MOST_JUDGED]
    middle = kept[len(kept) // 2]
    return [*kept, *(replace(middle, lean=lean) for lean in LEANS)]


def undominated(costs: Mapping[Point, tuple[float, ...]]) -> list[Point]:
    """Return the points that no other is at least as good as in every cost, and better in one."""
    return [
        point
        for point, own in costs.items()
        if not any(
            other != own and all(x <= y for x, y in zip(other, own, strict=True))
            for other in costs.values()
        )
    ]


def chosen_points(
    plain: Judged, margins: Sequence[Point], always: Point, pulls: Sequence[Point]
) -> SteeringPoints:
    """Return the section of what was judged: `always`, and the best of the pulls.

    Args:
        plain: The unsteered plan.
        margins: Judged points that pull nothing, the first of them steering nothing.
        always: The one of them in use without pressure.
        pulls: Judged points at its margin.
    """
    asked = len(plain.marks)
    within = [
        point for point in pulls if is_within(point.worse, point.better, asked, MAX_LOSS_PRESSED)
    ]
    pressed = min([always, *within], key=lambda point: point.misses)
    judged = [*margins, *pulls]
    costs = {p: (most_lost(p.worse, p.better), p.misses) for p in judged}
    points = list(dict.fromkeys([margins[0], always, pressed, *undominated(costs)]))
    return SteeringPoints(
        questions=asked,
        right=sum(plain.marks),
        resident=RESIDENT,
        misses=plain.misses,
        max_loss=MAX_LOSS,
        max_loss_pressed=MAX_LOSS_PRESSED,
        always=points.index(always),
        pressed=points.index(pressed),
        points=tuple(points),
    )


@dataclass(frozen=True, slots=True)
class _Trial:
    """Judges candidates in a child process, or finds what it said before."""

    directory: Path
    sections: Mapping[str, bytes]
    plan: Plan
    cache: StageCache

    def judge(self, points: Sequence[Point | None]) -> list[Judged]:
        """Return how the plan answers under each point; None = unsteered and without bands."""
        rows: list[Json] = [None if point is None else asdict(point) for point in points]
        asked = canonical_bytes({"resident": RESIDENT, "points": rows})
        key = cache_key(
            TRIAL,
            {
                "sections": dict(section_digests(self.sections)),
                "calibration": dict(calibration_digests(self.directory)),
                "asked": asked.decode(),
                "compiler": compiler_digest(),
            },
        )
        stored = self.cache.get(TRIAL, key)
        data = self._run(asked) if stored is None else stored[TRIAL]
        if stored is None:
            self.cache.put(TRIAL, key, {TRIAL: data})
        found: list[dict[str, Any]] = json.loads(data)
        return [Judged(**{**row, "marks": tuple(row["marks"])}) for row in found]

    def _run(self, asked: bytes) -> bytes:
        host = host_target()
        assert host is not None
        kernels = kernels_for(host, self.plan.ops, self.cache)
        with scratch_directory() as folder:
            bundle, candidates = folder / "bundle", folder / "candidates.json"
            bundle.mkdir()
            write_sections(bundle, {**self.sections, "kernels": kernels})
            candidates.write_bytes(asked)
            paths = [bundle, self.directory, candidates]
            done = run_child(steering_trial.__name__, paths, TIMEOUT_S)
        if done.status:
            raise SelfTestError(f"steering could not be judged: {done.error_text(400)}")
        return done.output
