"""Steered routers of EdgeCard: experts loaded and answers lost while few fit in memory.

    python -m benchmarks.routing [--check]

The coefficients are those of the bundle's `steering` section, found on the calibration cards. Rows
answer the whole evaluation set in native code beside a simulated cache of experts: the baseline
chooses as the model says and evicts what was used longest ago (LRU); the others are Least-Stale,
then with the coefficients in use as memory gets short, and with their halves. A row that loses more
than 1 % of the answers counts as no better at all. Last, sure tokens take one expert while
everything is in memory. Counts do not depend on the machine.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.answer import build
from benchmarks.runner import Claim, main
from compiler.analysis.expert_cache import ExpertCache, LeastStale, Lru
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import parse_pipeline
from compiler.contract.router_stats import parse_router_stats
from compiler.contract.steering_points import MILLI, Point, parse_steering_points
from compiler.driver.cards import EVALUATION, Card, read_cards
from compiler.driver.steering_trial import Judged, Trial
from examples.edgecard.materialise import materialise

RESIDENT: Final = (250, 500, 750)
MOST_LOST: Final = 0.01
FEWER_MISSES: Final = 2.0
SPARING: Final = (900, 800, 700, 600, 500, 400)
HOST: Final = "host"
PEER: Final = "EdgeCard as the model chooses"


def measure() -> list[Claim]:
    """Judge every row on the evaluation cards; return the claims."""
    with tempfile.TemporaryDirectory() as folder:
        submission = materialise("v1", Path(folder))
        sections = build(submission).sections
        pipeline = parse_pipeline(sections["pipeline"])
        assert pipeline.image is not None
        cards = read_cards(submission, EVALUATION, pipeline.image)
    points = parse_steering_points(sections["steering"])
    pressed, always = points.points[points.pressed], points.points[points.always]
    claims: list[Claim] = []
    with NativePlan(sections["kernels"], sections["plan"], sections) as plan:
        for resident in RESIDENT:
            trial = _trial(plan, sections, cards, resident)
            claims += _pressed_claims(trial, pressed, always)
        claims += _sparing_claims(_trial(plan, sections, cards, MILLI))
    return claims


def _trial(
    plan: NativePlan, sections: Mapping[str, bytes], cards: Sequence[Card], resident: int
) -> Trial:
    stats = parse_router_stats(sections["router_stats"])
    return Trial(plan, parse_pipeline(sections["pipeline"]), cards, None, stats, resident)


def _pressed_claims(trial: Trial, pressed: Point, always: Point) -> list[Claim]:
    plain = trial.judge(None, Lru)
    share = f"{trial.resident // 10} %"
    rows: list[tuple[str, Point | None, type[ExpertCache]]] = [
        ("Least-Stale", None, LeastStale),
        ("margin", always, LeastStale),
        ("pull", replace(pressed, margin=MILLI), LeastStale),
        ("pull and margin", pressed, LeastStale),
    ]
    claims = []
    for name, point, kind in rows:
        found = trial.judge(point, kind)
        is_last = name == rows[-1][0]
        claims.append(_claim(f"misses, {share} in memory: {name}", found, plain, judged=is_last))
    return claims


def _claim(name: str, found: Judged, plain: Judged, *, judged: bool) -> Claim:
    is_judged = judged and _lost(found, plain) <= MOST_LOST
    return Claim(
        id=name,
        value=found.misses,
        unit="experts loaded",
        peer=PEER,
        peer_version=f"LRU, {plain.uses} uses",
        peer_value=plain.misses,
        ratio=plain.misses / max(1, found.misses) if is_judged or not judged else 0.0,
        bar=FEWER_MISSES if judged else None,
        label=HOST,
        note=f"{_changes(found, plain)}, {found.mean_k / MILLI:.2f} experts a token",
    )


def _lost(found: Judged, plain: Judged) -> float:
    return (sum(plain.marks) - sum(found.marks)) / len(plain.marks)


def _changes(found: Judged, plain: Judged) -> str:
    pairs = list(zip(plain.marks, found.marks, strict=True))
    lost, won = pairs.count((True, False)), pairs.count((False, True))
    return f"{lost} of {len(pairs)} answers lost and {won} won: {_lost(found, plain):+.2%}"


def _sparing_claims(trial: Trial) -> list[Claim]:
    """Return how many experts sure tokens save by margin, everything in memory, no bands."""
    plain = trial.judge(None)
    claims = []
    for margin in SPARING:
        found = trial.judge(Point(margin=margin))
        claims.append(
            Claim(
                id=f"experts a token, margin {margin / MILLI:g}",
                value=found.mean_k / MILLI,
                unit="experts",
                peer=PEER,
                peer_version="",
                peer_value=plain.mean_k / MILLI,
                ratio=plain.mean_k / found.mean_k,
                bar=None,
                label=HOST,
                note=_changes(found, plain),
            )
        )
    return claims


if __name__ == "__main__":
    main("routing", measure, sys.argv[1:])
