"""Every state that a page shows: its word, its glyph and its tone. Colour never stands alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

IDLE: Final = "idle"
LIVE: Final = "live"
GOOD: Final = "good"
WARN: Final = "warn"
BAD: Final = "bad"
GLYPHS: Final[Mapping[str, str]] = MappingProxyType(
    {IDLE: "○", LIVE: "●", GOOD: "✓", WARN: "▲", BAD: "✕"}
)


@dataclass(frozen=True, slots=True)
class Badge:
    """One state as people see it."""

    word: str
    tone: str
    title: str = ""

    @property
    def glyph(self) -> str:
        """Return the sign that says the tone without colour."""
        return GLYPHS[self.tone]


def _rows(tone: str, *words: str) -> dict[str, str]:
    return dict.fromkeys(words, tone)


TONES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **_rows(
            IDLE,
            *("queued", "pending", "draft", "submitted", "skipped", "superseded", "removed"),
            *("retired", "cancelled", "no_data", "inactive", "control", "none", "never"),
            "deferred",
            "unverified",
        ),
        **_rows(
            LIVE,
            *("leased", "compiling", "verifying", "signing", "building", "running", "soaking"),
            *("offered", "downloading", "downloaded", "applying", "staged", "activating"),
            *("probation", "awaiting_consent", "treatment", "inconclusive"),
        ),
        **_rows(
            GOOD,
            *("ready", "validated", "passed", "succeeded", "accepted", "active", "pass"),
            *("online", "device", "host", "intact", "confidential"),
        ),
        **_rows(
            WARN,
            *("paused", "held", "too_large", "awaiting_approval", "stopped", "timed_out"),
            *(
                "expiring",
                "rolling_back",
                "qemu",
                "simulator",
                "assembled",
                "structural",
                "silent",
                "hold",
            ),
        ),
        **_rows(
            BAD,
            *("failed", "failed_user", "failed_app", "invalid", "rejected", "rolled_back"),
            *("fail", "error", "broken", "offline", "quarantined", "second_key", "clone"),
        ),
    }
)

WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "failed_user": "Failed: submission",
        "failed_app": "Failed: platform",
        "too_large": "Too large",
        "no_data": "No data",
        "leased": "Taken by a worker",
        "pass": "Pass",
        "fail": "Fail",
    }
)

# What a badge says instead: a person watches one compilation, not who holds it.
BADGE_WORDS: Final[Mapping[str, str]] = MappingProxyType({"leased": "Compiling"})
VERIFIED_WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "device": "Verified on device",
        "host": "Verified on host",
        "qemu": "Verified in QEMU",
        "simulator": "Verified in a simulator",
        "assembled": "Assembled, not run",
        "structural": "Structure checked, not run",
        "unverified": "Not verified",
    }
)

TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "failed_user": "The submission is at fault; see the hint.",
        "failed_app": "The platform is at fault; the submission may be fine.",
        "too_large": "The delta would save too little: devices download the sections whole.",
        "deferred": "The queue of deltas is full: it is built as soon as there is room.",
        "inconclusive": "The evidence does not yet speak for or against the version.",
        "quarantined": "Gets no answer: somebody has to release or retire it.",
        "confidential": "Bundles of new versions travel sealed; each device gets its own key.",
        "second_key": "Another key asked to join under a known serial number.",
        "clone": "Two machines use one identity.",
        "no_data": "No telemetry has arrived: the stage is held, never promoted.",
        "unmeasured": "No cost model was fitted to this target: its bundles carry priors.",
        "probation": "Running the new bundle, armed to return by itself.",
    }
)


def badge_of(state: object, word: str = "") -> Badge:
    """Return the badge of a state value; an unknown one is shown as it is, without a claim."""
    value = str(state or "none")
    shown = word or WORDS.get(value) or value.replace("_", " ").capitalize()
    return Badge(shown, TONES.get(value, IDLE), TITLES.get(value, ""))
