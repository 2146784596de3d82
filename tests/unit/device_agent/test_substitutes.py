"""What a device takes where routers cannot be used: by rung, and as the last remedy."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from compiler.contract.degrade import Rung
from compiler.contract.session import Buffer
from compiler.contract.substitutes import Substitute, SubstituteRunner, Substitutes, Trial
from device_agent.runtime.degrade_keeper import rungs_of
from device_agent.runtime.faults import REMEDIES, FaultKind, Way
from device_agent.runtime.rungs import Standing, fallback_of, take_rung
from tests.factories.substitutes import FOUND
from tests.unit.device_agent.test_guard import QUESTION, Fake, guard_of

SHARED, NARROW, FULL = Substitute
SIZES = {SHARED: 100, NARROW: 200, FULL: 900}


def of(**worse: int) -> Substitutes:
    rows = tuple(Trial(kind, worse[kind.suffix], 0) for kind in Substitute if kind.suffix in worse)
    return replace(FOUND, rows=rows)


@pytest.mark.parametrize(
    ("found", "most", "expected"),
    [
        (of(narrow=9, full=4), 0, FULL),
        (of(narrow=9, full=4), 900, FULL),
        (of(narrow=9, full=4), 899, NARROW),
        (of(narrow=4, full=4), 0, FULL),
        (of(narrow=3, full=4), 0, NARROW),
        (of(shared=1), 150, SHARED),
        (of(full=0), 300, None),
    ],
)
def test_the_fallback_answers_best_of_all_that_fits(
    found: Substitutes, most: int, expected: Substitute | None
) -> None:
    assert fallback_of(found, SIZES, most) is expected


def test_a_bundle_has_the_rungs_of_its_substitutes() -> None:
    assert rungs_of(None, of(narrow=1, full=1)) == (Rung.NORMAL, Rung.NARROW_DENSE)
    assert rungs_of(None, of(shared=1), is_paged=True) == (
        Rung.NORMAL, Rung.NO_PREFETCH, Rung.SHARED_ONLY,
    )  # fmt: skip
    assert rungs_of(None, of(full=1)) == rungs_of(None, None) == (Rung.NORMAL,)


class Plan:
    """Does nothing."""

    kv_length = 0

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        return {}


class Steering:
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bool, bool]] = []

    def answers(self, *, fewer: bool, rests: bool) -> None:
        self.asked.append((fewer, rests))


def test_a_rung_or_a_way_takes_a_substitute() -> None:
    runner = SubstituteRunner(Plan(), (NARROW, FULL), ("see", "step"))
    standing, steering = Standing(runner, of(narrow=3, full=2), SIZES, 0), Steering()
    taken = []
    for rung, way in (
        (Rung.NORMAL, Way()), (Rung.FEWER_EXPERTS, Way()), (Rung.SHARED_ONLY, Way()),
        (Rung.NARROW_DENSE, Way()), (Rung.NORMAL, Way(dense=True)),
        (Rung.NARROW_DENSE, Way(dense=True)), (Rung.NORMAL, Way()),
    ):  # fmt: skip
        take_rung(rung, None, None, steering, way, standing)  # type: ignore[arg-type]
        taken.append((runner.taken, runner.is_stale))
    assert taken == [
        (None, False), (None, False), (None, False), (NARROW, True), (FULL, True), (FULL, True),
        (None, False),
    ]  # fmt: skip
    assert [rests for _, rests in steering.asked] == [False] * 4 + [True] * 2 + [False]
    facts = standing.facts()
    assert facts["fallback"] == "full_dense"


def test_doing_without_routers_is_tried_last_and_only_where_it_can_be() -> None:
    """The second remedy of this fault asks for fewer experts, which this bundle lacks."""
    fails = [FaultKind.NOT_FINITE] * 9
    for has_fallback, ways in ((False, [Way()]), (True, [Way(), Way(dense=True)])):
        fake = Fake(fails[:], has_fallback=has_fallback)
        record = guard_of(fake).answer(QUESTION)
        assert record.failed
        assert fake.ways == ways


def test_an_answer_without_routers_is_degraded_and_says_why() -> None:
    subject = guard_of(Fake([FaultKind.NOT_FINITE], has_fallback=True))
    record = subject.answer(QUESTION)
    assert (record.words, record.degraded, record.reasons) == (("yes",), True, ("not_finite",))
    guard = subject.facts["guard"]
    assert isinstance(guard, dict)
    assert (guard["recovered"], guard["degraded"]) == (1, {"not_finite": 1})


def test_every_remedy_that_changes_answers_is_marked() -> None:
    ways = [remedy.way for remedies in REMEDIES.values() for remedy in remedies]
    assert {way.changes_answers for way in ways if way.fewest or way.dense} == {True}
    assert not any(way.changes_answers for way in ways if not (way.fewest or way.dense))
    for kind, remedies in REMEDIES.items():
        dense = [at for at, remedy in enumerate(remedies) if remedy.way.dense]
        assert dense in ([], [len(remedies) - 1]), f"{kind}: it is tried last"
