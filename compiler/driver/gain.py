"""Whether what an update gained in f32 survives quantisation: the gate of a release. Pure.

    per question i, of version v:  f_v[i], q_v[i] = ln P(right answer), unquantised and quantised
    f = mean(f_new - f_base)       the gain that training claims
    q = mean(q_new - q_base)       the gain that devices get

| what is known | rule |
|---|---|
| no base, or it was judged with other questions | nothing is refused; the report says so |
| f is above its noise | refused if q < 0.9 f |
| f is not above its noise, or negative | refused if q falls below f by more than 0.005 nats |

0.005 nats are the 0.5 % of the answers that every choice of the compiler may cost
(`band_trial.MAX_LOSS`). "Above" and "below" are meant with 95 % confidence, one-sided, over the
questions, which are the same on both sides: `mean > 1.645 standard errors`. So an update that
rounding to the base's grid, or merging an adapter into dequantised codes, has lost is refused, and
a sound one is not refused for the noise of few questions.

The device's figure q may be as noisy as it likes: what is tested is the shortfall `0.9 f - q`, or
`f - q`, question by question. Called by `compiler.driver.gain_stage`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Final

from compiler.contract.canonical import Json, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.fields import require_integer, require_list
from compiler.errors import UserModelError

ANSWERS: Final = "answers"
"""The fact of a report with the scores of a version."""
GAIN: Final = "gain"
"""The fact of a report with the verdict."""
LEAST_RATIO: Final = 0.9
MAX_LOSS: Final = 0.005
"""Nats: 0.5 % of the probability of an answer."""
CONFIDENCE: Final = 1.645
MICRO: Final = 1_000_000
LEAST: Final = -30 * MICRO
"""What an answer counts at least, millionths of a nat: one impossible answer is not everything."""
MAX_ANSWERS: Final = 100_000
_HINT: Final = (
    "quantise from the trained f32 weights: what was merged into dequantised weights, or rounded "
    "away because it was smaller than a rounding step, is gone. If the weights are right, compile "
    "without the base bundle: its scales no longer fit, and the update will be large"
)


class GainLostError(UserModelError):
    """What the version gained over its base in f32 does not survive quantisation."""

    code = "build.user.gain_lost"


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """How probable a version finds the right answers, millionths of a nat.

    Attributes:
        questions_sha256: Which questions, in which order.
        f32: One per question, unquantised weights in f64 arithmetic.
        int4: The same with the quantised plan; empty if nothing could run it.
    """

    questions_sha256: str
    f32: tuple[int, ...]
    int4: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, with the means in nats for people."""
        return {
            "questions_sha256": self.questions_sha256,
            "f32": list(self.f32),
            "int4": list(self.int4),
            "f32_mean": mean_nats(self.f32),
            "int4_mean": mean_nats(self.int4),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Json]) -> "AnswerScores":
        """Return what `to_json` wrote.

        Raises:
            ContractError: A field is missing or wrong.
        """
        f32, int4 = (_scores(document.get(name), name) for name in ("f32", "int4"))
        if int4 and len(int4) != len(f32):
            raise ContractError(f"{len(f32)} scores in f32, {len(int4)} in int4")
        digest = require_sha256(document.get("questions_sha256"), "questions_sha256")
        return cls(digest, f32, int4)


@dataclass(frozen=True, slots=True)
class Gain:
    """The verdict and its figures.

    Attributes:
        rule: `gain`, `no_gain`, or why there is no comparison: `no_base`, `no_scores`,
            `other_questions`.
        passed: Whether the release may go on.
        questions: Compared.
        f32, int4: Mean gains, nats per question; None without a comparison.
        f32_error: Standard error of `f32`.
        shortfall, shortfall_error: What is tested against 0, or `MAX_LOSS`, nats.
    """

    rule: str
    passed: bool = True
    questions: int = 0
    f32: float | None = None
    int4: float | None = None
    f32_error: float | None = None
    shortfall: float | None = None
    shortfall_error: float | None = None

    @property
    def says(self) -> str:
        """Return the verdict in one sentence, with its numbers."""
        if self.f32 is None or self.int4 is None:
            return _UNCOMPARED[self.rule]
        gains = (
            f"over the base, {self.questions} right answers gain {self.f32:+.4f} nats in f32 "
            f"(standard error {self.f32_error:.4f}) and {self.int4:+.4f} in int4"
        )
        if self.rule == "gain":
            return f"{gains}: {self.int4 / self.f32:.0%} of the gain, {LEAST_RATIO:.0%} are needed"
        lost = self.f32 - self.int4
        return f"{gains}: no gain to keep, and {lost:+.4f} nats lost, {MAX_LOSS} are allowed"

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form, nats rounded to six digits."""
        figures: dict[str, Json] = {
            name: None if (value := getattr(self, name)) is None else round(value, 6)
            for name in ("f32", "int4", "f32_error", "shortfall", "shortfall_error")
        }
        has_ratio = self.rule == "gain" and self.f32 and self.int4 is not None
        return {
            "rule": self.rule,
            "passed": self.passed,
            "says": self.says,
            "questions": self.questions,
            "kept_ratio": round(self.int4 / self.f32, 4) if has_ratio else None,  # type: ignore[operator]
            **figures,
        }


def judge_gain(base: AnswerScores | None, new: AnswerScores) -> Gain:
    """Return whether the gain of `new` over `base` survives quantisation; see the head."""
    if base is None:
        return Gain("no_base")
    if base.questions_sha256 != new.questions_sha256 or len(base.f32) != len(new.f32):
        return Gain("other_questions")
    if not base.int4 or not new.int4 or len(base.int4) != len(new.int4):
        return Gain("no_scores")
    f32, int4 = _gains(base.f32, new.f32), _gains(base.int4, new.int4)
    gain, error = fmean(f32), _error(f32)
    has_gain = gain > CONFIDENCE * error and gain > 0
    needed = LEAST_RATIO if has_gain else 1.0
    allowed = 0.0 if has_gain else MAX_LOSS
    short = [needed * f - q for f, q in zip(f32, int4, strict=True)]
    shortfall, shortfall_error = fmean(short), _error(short)
    return Gain(
        rule="gain" if has_gain else "no_gain",
        passed=shortfall - CONFIDENCE * shortfall_error <= allowed,
        questions=len(f32),
        f32=gain,
        int4=fmean(int4),
        f32_error=error,
        shortfall=shortfall,
        shortfall_error=shortfall_error,
    )


def require_gain(gain: Gain) -> Gain:
    """Return a verdict that lets the release go on.

    Raises:
        GainLostError: It does not; the message has the numbers.
    """
    if not gain.passed:
        raise GainLostError(f"the update is lost in quantisation: {gain.says}", hint=_HINT)
    return gain


def mean_nats(scores: Sequence[int]) -> float | None:
    """Return the mean of scores in nats, six digits; None for none."""
    return round(fmean(scores) / MICRO, 6) if scores else None


def _gains(base: Sequence[int], new: Sequence[int]) -> list[float]:
    return [(y - x) / MICRO for x, y in zip(base, new, strict=True)]


def _error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; with one value nothing is known of it."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")


def _scores(value: Json, name: str) -> tuple[int, ...]:
    rows = require_list(value, name, MAX_ANSWERS)
    return tuple(require_integer(row, name, LEAST, 0) for row in rows)


_UNCOMPARED: Final[Mapping[str, str]] = {
    "no_base": "there is no base, so there is no gain to compare",
    "no_scores": "the gain was not compared: there are no scores of the base or of this version",
    "other_questions": "the gain was not compared: the base was judged with other questions",
}
