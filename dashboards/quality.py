"""What CI claims about a version, as pages show it next to what devices measured. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

METRIC_TITLES: Final[Mapping[str, str]] = {
    "teacher_forced.answer_accuracy": "answers right, expected words fed",
    "answer_accuracy": "answers right",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of quality as submitted; `value` is a ratio, None when nothing was claimed."""

    value: float | None
    metric: str
    questions: int | None
    runtime: str

    @property
    def title(self) -> str:
        """Return the metric in words."""
        return METRIC_TITLES.get(self.metric, self.metric.replace("_", " ").replace(".", ": "))


def claim_of(document: object) -> Claim:
    """Read the claim of a version; anything that is no proper claim is no claim."""
    if not isinstance(document, Mapping):
        return Claim(None, "", None, "")
    value = document.get("value")
    questions = document.get("questions")
    is_ratio = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
    return Claim(
        value=float(value) if is_ratio and value is not None else None,
        metric=str(document.get("metric", "")),
        questions=questions if isinstance(questions, int) else None,
        runtime=str(document.get("runtime", "")),
    )
