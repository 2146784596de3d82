from typing import Any

import pytest

from device_agent.config import AgentConfig
from device_agent.errors import UnfitError
from device_agent.runtime.answers import AnswerRecord, Outcome
from device_agent.update.probation import Probation

NEW = "2" * 64


class Rig:
    def __init__(self, **changes: Any) -> None:
        values = {"questions_per_s": 5.0, "answer_timeout_s": 2.0, "probation_deadline_s": 100.0}
        self.config = AgentConfig(**{**values, **changes})
        self.at = 0.0
        self.flight = 0.0
        self.probation = Probation(self.config, lambda: self.at, lambda: self.flight)
        self.probation.begin(NEW)

    def answers(self, count: int, outcome: Outcome = Outcome.ENDED, manifest: str = NEW) -> None:
        for _ in range(count):
            self.probation.record(AnswerRecord(manifest, (), outcome, None, 1.0))


def test_it_passes_after_its_time_with_enough_answers() -> None:
    rig = Rig()
    rig.at = 29.0
    rig.answers(3)
    assert not rig.probation.is_passed(30.0)
    rig.at = 30.0
    assert rig.probation.is_passed(30.0)


def test_it_waits_for_answers() -> None:
    rig = Rig()
    rig.at = 31.0
    rig.answers(2)
    rig.answers(9, manifest="1" * 64)
    assert not rig.probation.is_passed(30.0)
    rig.at = 101.0
    with pytest.raises(UnfitError, match="2 answers"):
        rig.probation.is_passed(30.0)


def test_it_needs_no_answers_when_nothing_is_asked() -> None:
    rig = Rig(questions_per_s=0.0)
    rig.at = 30.0
    assert rig.probation.is_passed(30.0)


@pytest.mark.parametrize("outcome", [Outcome.ERROR, Outcome.TIMEOUT])
def test_it_fails_on_errors_above_the_limit(outcome: Outcome) -> None:
    rig = Rig()
    rig.answers(16)
    rig.answers(4, outcome)
    assert not rig.probation.is_passed(30.0)
    rig.answers(1, outcome)
    with pytest.raises(UnfitError, match="5 of 21"):
        rig.probation.is_passed(30.0)


def test_it_judges_nobody_by_four_answers() -> None:
    rig = Rig()
    rig.answers(4, Outcome.ERROR)
    assert not rig.probation.is_passed(30.0)


def test_it_leaves_a_worse_model_to_the_fleet() -> None:
    """Many cut-off answers are the fleet's business; only nearly all of them are ours."""
    rig = Rig()
    rig.answers(20, Outcome.CUT_OFF)
    rig.answers(10)
    assert not rig.probation.is_passed(30.0)
    rig.answers(200, Outcome.CUT_OFF)
    with pytest.raises(UnfitError, match="cut off"):
        rig.probation.is_passed(30.0)


def test_it_fails_when_an_answer_never_ends() -> None:
    rig = Rig()
    rig.answers(2)
    rig.flight = 5.9
    assert not rig.probation.is_passed(30.0)
    rig.flight = 6.1
    with pytest.raises(UnfitError, match="does not end"):
        rig.probation.is_passed(30.0)


def test_it_does_not_begin_anew_for_the_same_bundle() -> None:
    rig = Rig()
    rig.answers(3)
    rig.at = 30.0
    rig.probation.begin(NEW)
    assert rig.probation.is_passed(30.0)
    rig.probation.begin("3" * 64)
    assert not rig.probation.is_passed(30.0)
