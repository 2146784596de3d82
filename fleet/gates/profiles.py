"""Named gate specifications. A rollout names one and may change single fields."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fleet.gates.spec import GateSpec, Metric, MetricSpec

HOUR_S: Final = 3_600.0

_METRICS: Final[Mapping[Metric, MetricSpec]] = MappingProxyType(
    {
        Metric.FAILURES: MetricSpec(
            harm_ratio=1.2, safe_ratio=3.0, safe_rate=0.01, dispersion=2.0, weight=0.35
        ),
        Metric.SLOW: MetricSpec(
            harm_ratio=1.3, safe_ratio=2.0, safe_rate=0.0, dispersion=4.0, weight=0.3
        ),
        Metric.SILENCE: MetricSpec(
            harm_ratio=1.3, safe_ratio=0.0, safe_rate=0.0, dispersion=1.0, weight=0.15
        ),
        Metric.WRONG: MetricSpec(
            harm_ratio=1.0, safe_ratio=0.0, safe_rate=0.0, dispersion=2.0, weight=0.0
        ),
        # One window in ten is thirsty by definition of the quantile. Most fleets have devices that
        # count nothing, so that safety need not be shown; where it must be, set `safe_ratio`: a
        # stage then waits until enough windows were counted.
        Metric.DRAIN: MetricSpec(
            harm_ratio=1.3, safe_ratio=0.0, safe_rate=0.0, dispersion=4.0, weight=0.05
        ),
    }
)

DEFAULT: Final = GateSpec(
    profile="default",
    alpha=0.01,
    hold_evidence=20.0,
    safe_evidence=10.0,
    calm_evidence=5.0,
    min_dwell_s=3 * HOUR_S,
    min_answers=1_000,
    min_heard_ratio=0.5,
    min_installed_ratio=0.9,
    install_failure_rate=0.05,
    install_weight=0.15,
    sustained_s=6 * HOUR_S,
    max_wait_s=24 * HOUR_S,
    silence_s=6 * HOUR_S,
    step_timeout_s=24 * HOUR_S,
    delta_wait_s=HOUR_S / 2,
    warmup_answers=100,
    look_every_s=60.0,
    slow_quantile=0.95,
    control_max=10_000,
    min_accuracy_drop=None,
    metrics=_METRICS,
)
# Few devices on one noisy machine, questions every second: minutes instead of hours, and wide
# latency margins, because the devices share cores and disturb each other.
LAB: Final = replace(
    DEFAULT,
    profile="lab",
    min_dwell_s=5.0,
    min_answers=60,
    min_installed_ratio=0.8,
    sustained_s=20.0,
    max_wait_s=180.0,
    silence_s=20.0,
    step_timeout_s=120.0,
    delta_wait_s=45.0,
    warmup_answers=10,
    look_every_s=1.0,
    slow_quantile=0.9,
    metrics=MappingProxyType(
        {
            **_METRICS,
            Metric.FAILURES: MetricSpec(
                harm_ratio=1.5, safe_ratio=4.0, safe_rate=0.03, dispersion=1.0, weight=0.35
            ),
            # One answer in ten is slow by definition of the quantile. Fewer than one in five is as
            # good as the base version was; on a loaded machine both arms are slow, and then the
            # comparison shows it.
            Metric.SLOW: MetricSpec(
                harm_ratio=2.0, safe_ratio=4.0, safe_rate=0.2, dispersion=2.5, weight=0.3
            ),
        }
    ),
)
FIRST_INSTALL_PROFILE: Final = "none-first-install"

PROFILES: Final[Mapping[str, GateSpec]] = MappingProxyType(
    {
        "default": DEFAULT,
        "cautious": replace(DEFAULT, profile="cautious", alpha=0.001, hold_evidence=100.0),
        "fast": replace(
            DEFAULT, profile="fast", alpha=0.05, hold_evidence=10.0, min_dwell_s=HOUR_S
        ),
        "lab": LAB,
        # The first version of a model: nothing runs anywhere, so nothing can be compared.
        FIRST_INSTALL_PROFILE: replace(
            LAB, profile=FIRST_INSTALL_PROFILE, min_dwell_s=2.0, min_answers=20, max_wait_s=600.0
        ),
    }
)
