"""Every state that the platform knows has a tone, a glyph and a word."""

from enum import StrEnum

import pytest

from builds.states import BuildState, DeltaState, VersionState
from compiler.contract.manifest import VERIFIED_ON
from dashboards.badges import GLYPHS, TONES, badge_of
from fleet.gates import Decision
from fleet.states import AlertKind, Arm, DeviceState, RolloutState, StageState, UpdateState

ENUMS: tuple[type[StrEnum], ...] = (
    BuildState,
    VersionState,
    DeltaState,
    Decision,
    AlertKind,
    Arm,
    DeviceState,
    RolloutState,
    StageState,
    UpdateState,
)
STATES = sorted({state.value for enum in ENUMS for state in enum} | set(VERIFIED_ON))


@pytest.mark.parametrize("state", STATES)
def test_it_knows_the_tone_of_every_state(state: str) -> None:
    assert state in TONES
    badge = badge_of(state)
    assert badge.glyph
    assert badge.word


def test_it_gives_every_tone_its_own_glyph() -> None:
    assert len(set(GLYPHS.values())) == len(GLYPHS)


def test_it_shows_an_unknown_state_without_a_claim() -> None:
    badge = badge_of("half_done")
    assert (badge.word, badge.tone) == ("Half done", "idle")


def test_it_says_none_for_nothing() -> None:
    assert badge_of(None).word == "None"
    assert badge_of("").word == "None"


def test_it_takes_another_word_but_keeps_the_tone() -> None:
    assert badge_of("fail", "Harm shown") == badge_of("fail").__class__("Harm shown", "bad", "")
