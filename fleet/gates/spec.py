"""What a gate promises: thresholds, margins and times, fixed when the rollout starts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from builds.common.errors import InvalidInputError

MAX_SECONDS: Final = 366 * 86_400.0
MAX_RATIO: Final = 64.0


class GateSpecError(InvalidInputError):
    """The gate specification has a missing, unknown or impossible field."""

    code = "fleet.gate_spec"


class Metric(StrEnum):
    """What is compared between treatment and control."""

    FAILURES = "failures"  # answers that did not end; exposure: answers
    SLOW = "slow"  # answers above the device's own slow threshold; exposure: timed answers
    SILENCE = "silence"  # devices that stopped talking to us; exposure: devices
    WRONG = "wrong"  # wrong answers, only with `min_accuracy_drop`; exposure: scored answers
    DRAIN = "drain"  # windows in which the battery lost more than usual; exposure: windows counted


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of the comparison.

    Attributes:
        harm_ratio: rho0. Harm is shown against the hypothesis "rate of treatment <= harm_ratio x
            rate of control".
        safe_ratio: Delta. Safety is shown against "rate of treatment >= safe_ratio x rate of
            control"; 0: safety need not be shown.
        safe_rate: Alternative way to safety: the rate of treatment is shown to be below this,
            whatever control does; 0: none.
        dispersion: How many times more than independent events the counts vary; evidence is divided
            by it.
        weight: Share of this metric in the e-value of the rollout.
    """

    harm_ratio: float
    safe_ratio: float
    safe_rate: float
    dispersion: float
    weight: float


@dataclass(frozen=True, slots=True)
class GateSpec:
    """Thresholds, margins (ratios) and times (seconds) of one rollout's gate.

    Attributes:
        profile: Name of the profile that the values come from.
        alpha: Bound on the probability that a good version is ever rolled back; fail at e-value >=
            1 / alpha.
        hold_evidence: At this e-value nothing is promoted; when it lasts `sustained_s`, the stage
            fails.
        safe_evidence: Every metric with a `safe_ratio` has to show safety with this e-value before
            a promotion.
        calm_evidence: The e-value of harm must be below this for a promotion.
        min_dwell_s: Shortest time from the opening of a stage to its promotion.
        min_answers: Fewest answers of the stage's own new devices, and of its control, for a
            promotion.
        min_heard_ratio: Share of the stage's new devices that must have been heard from.
        min_installed_ratio: Share of settled installations that must have succeeded.
        install_failure_rate: Installations may fail this often (probability) without being held
            against the version.
        install_weight: Share of failed installations in the e-value of the rollout.
        max_wait_s: After this time without a promotion the stage is held for a human.
        silence_s: A device that was heard in the stage and then not for this long is silent.
        step_timeout_s: An update without a report for this long has timed out.
        delta_wait_s: How long an offer waits for its delta before the full bundle is offered.
        warmup_answers: Latency of a device's first answers in the stage is left out, in both arms.
        look_every_s: Shortest time between two looks.
        slow_quantile: Quantile of the base version's latency above which an answer counts as slow.
        control_max: Most devices in the control slice.
        min_accuracy_drop: Drop of accuracy (0..1) that counts as harm, or None when accuracy is
            only shown.
        metrics: Metric name -> its margins.
    """

    profile: str
    alpha: float
    hold_evidence: float
    safe_evidence: float
    calm_evidence: float
    min_dwell_s: float
    min_answers: int
    min_heard_ratio: float
    min_installed_ratio: float
    install_failure_rate: float
    install_weight: float
    sustained_s: float
    max_wait_s: float
    silence_s: float
    step_timeout_s: float
    delta_wait_s: float
    warmup_answers: int
    look_every_s: float
    slow_quantile: float
    control_max: int
    min_accuracy_drop: float | None
    metrics: Mapping[Metric, MetricSpec]

    def to_json(self) -> dict[str, object]:
        """Return the JSON form; `spec_from_stored` reads it back unchanged."""
        document: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        document["metrics"] = {
            name.value: {item.name: getattr(metric, item.name) for item in fields(metric)}
            for name, metric in self.metrics.items()
        }
        return document


# field -> (lowest, highest) allowed value, both included
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "alpha": (1e-6, 0.2),
    "hold_evidence": (1.0, 1e6),
    "safe_evidence": (2.0, 1e6),
    "calm_evidence": (1.0, 1e6),
    "min_dwell_s": (0.0, MAX_SECONDS),
    "min_heard_ratio": (0.0, 1.0),
    "min_installed_ratio": (0.0, 1.0),
    "install_failure_rate": (1e-4, 0.5),
    "install_weight": (0.0, 1.0),
    "sustained_s": (0.0, MAX_SECONDS),
    "max_wait_s": (1.0, MAX_SECONDS),
    "silence_s": (1.0, MAX_SECONDS),
    "step_timeout_s": (1.0, MAX_SECONDS),
    "delta_wait_s": (0.0, MAX_SECONDS),
    "look_every_s": (0.0, 86_400.0),
    "slow_quantile": (0.5, 0.999),
}
_COUNTS: Final[Mapping[str, tuple[int, int]]] = {
    "min_answers": (1, 1 << 40),
    "warmup_answers": (0, 1 << 20),
    "control_max": (1, 1_000_000),
}
_METRIC_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "harm_ratio": (1.0, MAX_RATIO),
    "safe_ratio": (0.0, MAX_RATIO),
    "safe_rate": (0.0, 0.5),
    "dispersion": (1.0, 1_000.0),
    "weight": (0.0, 1.0),
}


def spec_from_json(document: Mapping[str, object], profiles: Mapping[str, GateSpec]) -> GateSpec:
    """Build a specification from a profile name and the fields that differ from it.

    Args:
        document: Fields of `GateSpec`, all optional; `metrics` may name some metrics and some of
            their fields.
        profiles: Known profiles; `profile` of the document names one, `default` when absent.

    Raises:
        GateSpecError: An unknown field or profile, a value out of range, or values that contradict
        each other.
    """
    return _spec(document, profiles, only_named=False)


def spec_from_stored(document: Mapping[str, object], profiles: Mapping[str, GateSpec]) -> GateSpec:
    """Read a specification that `GateSpec.to_json` wrote, be it before there were more metrics.

    What it does not name was not promised and is not compared: rollouts that run go on as they
    began, and looks that were stored are decided again as they were.

    Raises:
        GateSpecError: As `spec_from_json`.
    """
    return _spec(document, profiles, only_named=True)


def _spec(
    document: Mapping[str, object], profiles: Mapping[str, GateSpec], *, only_named: bool
) -> GateSpec:
    name = document.get("profile", "default")
    if not isinstance(name, str) or name not in profiles:
        raise GateSpecError(
            f"unknown gate profile {name!r}", hint="profiles: " + ", ".join(sorted(profiles))
        )
    values = profiles[name].to_json()
    unknown = sorted(document.keys() - values.keys())
    if unknown:
        raise GateSpecError(f"unknown gate fields {unknown}", hint="fields: " + ", ".join(values))
    for key, value in document.items():
        if key not in ("profile", "metrics"):
            values[key] = value
    metrics = _merged_metrics(profiles[name], document.get("metrics", {}), only_named=only_named)
    return _checked(name, values, metrics)


def _merged_metrics(
    profile: GateSpec, changes: object, *, only_named: bool = False
) -> dict[Metric, MetricSpec]:
    if not isinstance(changes, Mapping):
        raise GateSpecError("metrics must be an object")
    unknown = sorted(set(changes) - {metric.value for metric in Metric})
    if unknown:
        raise GateSpecError(f"unknown metrics {unknown}")
    result = {}
    for metric, base in profile.metrics.items():
        if only_named and metric.value not in changes:
            continue
        fields_now = {item.name: getattr(base, item.name) for item in fields(base)}
        change = changes.get(metric.value, {})
        if not isinstance(change, Mapping) or change.keys() - fields_now.keys():
            raise GateSpecError(
                f"metric {metric.value!r}: unknown fields", hint="fields: " + ", ".join(fields_now)
            )
        fields_now.update(change)
        result[metric] = MetricSpec(
            **{
                key: _number(value, f"{metric.value}.{key}", *_METRIC_RANGES[key])
                for key, value in fields_now.items()
            }
        )
    return result


def _checked(
    name: str, values: Mapping[str, object], metrics: Mapping[Metric, MetricSpec]
) -> GateSpec:
    drop = values["min_accuracy_drop"]
    numbers: dict[str, Any] = {
        key: _number(values[key], key, *limits) for key, limits in _RANGES.items()
    }
    counts = {key: _count(values[key], key, *limits) for key, limits in _COUNTS.items()}
    least_drop = None if drop is None else _number(drop, "min_accuracy_drop", 0.001, 1.0)
    spec = GateSpec(
        profile=name, min_accuracy_drop=least_drop, metrics=metrics, **numbers, **counts
    )
    for metric, row in metrics.items():
        if 0 < row.safe_ratio < 1.2 * row.harm_ratio:
            raise GateSpecError(
                f"metric {metric.value!r}: safe_ratio must be at least 1.2 x harm_ratio",
                hint="between the two nothing can be shown",
            )
    total = spec.install_weight + sum(row.weight for row in metrics.values())
    if not 0 < total <= 1 + 1e-9:
        raise GateSpecError("the weights of the metrics and of installations must sum to at most 1")
    return spec


def _number(value: object, what: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise GateSpecError(f"{what} must be a number")
    if not low <= value <= high:
        raise GateSpecError(f"{what} must be in {low:g}..{high:g}, not {value:g}")
    return float(value)


def _count(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise GateSpecError(f"{what} must be an integer in {low}..{high}")
    return value
