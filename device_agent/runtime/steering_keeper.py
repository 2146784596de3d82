"""Keeps the routers of a running bundle steered: looks at the machine between answers.

    sensors, rung -(next_steering)-> record -(SteeredRunner)-> the runs of the next answer
    what the plan counted -> facts for `status` and telemetry, and whether an answer was degraded

The answering thread asks before each answer; the machine is looked at once a second at most, and a
record is swapped only when it changed. A bundle without a `steering` section, kernels that steer
nothing and a FIXED policy (what is computed must not tell what lies in memory) have no keeper.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from compiler.contract.steered_runner import SteeredRunner
from compiler.contract.steering import Counts, Residency
from compiler.contract.steering_points import MILLI, SteeringPoints
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.degrade_keeper import Gauges, machine_gauges
from device_agent.runtime.steering import Machine, SteerState, next_steering

LOOK_S: Final = 1.0
PERCENT: Final = 100.0


class SteeringKeeper:
    """The steering of one running bundle; used by the thread that answers."""

    def __init__(
        self,
        bundle: LoadedBundle,
        points: SteeringPoints,
        monotonic: Callable[[], float],
        gauges: Gauges = machine_gauges,
        residency: Residency | None = None,
        *,
        is_paged: bool = False,
    ) -> None:
        """Follow the record of a machine that nothing is known of.

        Args:
            bundle: Its plan follows no record yet.
            points: Its coefficients.
            monotonic: Clock in seconds.
            gauges: Reads the sensors.
            residency: Which experts are in memory; None = as the plan's expert pool says.
            is_paged: Whether they come as they are needed.

        Raises:
            ContractError: The coefficients do not fit the plan.
        """
        self.runner: Final = SteeredRunner(bundle.runner, residency)
        self._seat, self._points = bundle.runner.steering, points
        self._monotonic, self._gauges = monotonic, gauges
        self._bias = bundle.bias
        self._state = SteerState()
        self._seen = Machine(paged=is_paged)
        self._looked_at: float | None = None
        self._before = self._seat.counts()
        self._degraded = 0
        self._turn(fewer=False)

    def answers(self, *, fewer: bool, rests: bool = False) -> None:
        """Steer the next answer.

        Args:
            fewer: Whether a rung asks for the fewest experts.
            rests: Whether routers are such that nothing may be steered; nothing is looked at.
        """
        if rests:
            self.runner.follow(None)
            self._looked_at, self._before = None, self._seat.counts()
            return
        now = self._monotonic()
        if self._looked_at is None or now - self._looked_at >= LOOK_S:
            self._looked_at = now
            told = self._gauges()
            pressure = told.get("memory_pressure")
            self._seen = replace(
                self._seen,
                pressure=None if pressure is None else pressure / PERCENT,
                temperature=told.get("temperature"),
                battery=told.get("battery"),
            )
            self._turn(fewer=fewer)
        elif fewer is not self._seen.fewer:
            self._turn(fewer=fewer)
        self._before = self._seat.counts()

    def answered(self) -> bool:
        """Return whether the last answer did without an expert that it wanted; count it."""
        is_degraded = self._seat.counts().since(self._before).substituted > 0
        self._degraded += is_degraded
        return is_degraded

    def facts(self) -> Mapping[str, object]:
        """Return what `status` shows: the record in use, and what was counted."""
        counts, record = self._seat.counts(), self.runner.steering
        return {
            "pull": None if record is None else round(record.pull, 3),
            "margin": None if record is None else round(record.margin, 3),
            "may_load": record is None or record.may_load,
            "level": self._state.level,
            "hot": self._state.is_hot,
            "battery_low": self._state.is_low,
            "degraded_answers": self._degraded,
            "substituted": counts.substituted,
            "missing": counts.missing,
            "narrowed": counts.narrowed,
            "mean_experts": None if counts.mean_k is None else round(counts.mean_k, 3),
        }

    def gauges(self) -> dict[str, int]:
        """Return the gauges of telemetry."""
        return counted_gauges(self._seat.counts())

    def _turn(self, *, fewer: bool) -> None:
        self._seen = replace(self._seen, fewer=fewer)
        self._state, record = next_steering(self._points, self._state, self._seen)
        pulled = record.pull > 0
        self.runner.follow(replace(record, bias=self._bias if pulled else ()))


def counted_gauges(counts: Counts) -> dict[str, int]:
    """Return what telemetry carries of a plan's counts."""
    mean = counts.mean_k
    found = {"experts_substituted": counts.substituted}
    return found if mean is None else {**found, "experts_per_mille": round(mean * MILLI)}


def steering_keeper(
    bundle: LoadedBundle, monotonic: Callable[[], float], *, is_paged: bool = False
) -> SteeringKeeper | None:
    """Return the keeper of a bundle, or None where nothing may be steered.

    Args:
        bundle: Loaded.
        monotonic: Clock in seconds.
        is_paged: Whether its experts come as they are needed.

    Raises:
        ContractError: The coefficients do not fit the plan.
    """
    points = bundle.steering
    if points is None or bundle.policy.is_fixed:
        return None
    if not bundle.runner.steering.is_supported:
        return None
    return SteeringKeeper(bundle, points, monotonic, is_paged=is_paged)
