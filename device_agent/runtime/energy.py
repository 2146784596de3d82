"""What answers cost in energy: counted where there is a counter, else estimated, and said which.

    RAPL or battery -> joules of an answer                          source `rapl` or `battery`
    else  E = idle t + per byte of weights + per operation          source `model`
    battery -> percent it lost per hour of answering, one figure per window of ten minutes

The model's default coefficients were never fitted to a device: `UNVERIFIED` says where they come
from. `fit` fits them to a machine with a counter. Power that is not known is not zero.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from device_agent.probe import power, sensors

LEAST_SAMPLES: Final = 12
MAX_CONDITION: Final = 1e3
"""Of the scaled samples: beyond, they do not tell time, bytes and operations apart."""
MAX_SAMPLES: Final = 512
FIT_EVERY: Final = 64
"""Answers by a counter between two fits; one takes less than a millisecond."""
LEAST_ACTIVE_S: Final = 600.0
"""Of answering, in a window; drain per active hour is not told of less."""
HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Work:
    """What an answer did.

    Attributes:
        seconds: Time it took.
        weight_bytes: Bytes of weights that its runs needed.
        operations: Multiplications and additions.
    """

    seconds: float
    weight_bytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class EnergyModel:
    """E = idle_watts * t + joules_per_byte * bytes + joules_per_operation * operations.

    Attributes:
        verified_on: `host` where `fit` made it, else `unverified`.
        error: Root mean square of the relative errors on the samples; None if never fitted.
        origin: Where the figures come from.
    """

    idle_watts: float
    joules_per_byte: float
    joules_per_operation: float
    verified_on: str
    error: float | None
    origin: str

    def joules(self, work: Work) -> float:
        """Return the energy of some work."""
        return (
            self.idle_watts * work.seconds
            + self.joules_per_byte * work.weight_bytes
            + self.joules_per_operation * work.operations
        )


UNVERIFIED: Final = EnergyModel(
    idle_watts=0.5,
    joules_per_byte=160e-12,
    joules_per_operation=1.2e-12,
    verified_on="unverified",
    error=None,
    origin=(
        "M. Horowitz, ISSCC 2014, 45 nm: 640 pJ for a 32-bit DRAM read; 70 pJ for an instruction, "
        "shared by 64 operations, and 0.2 pJ for an 8-bit product; 0.5 W idle is assumed"
    ),
)


def configured(text: str) -> EnergyModel:
    """Return the model that a setting names: watts, joules per byte, joules per operation.

    Raises:
        ValueError: These are not three numbers, none negative; the message says so.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or not all(0.0 <= value < float("inf") for value in found):
        raise ValueError(f"{text!r} is not three numbers with commas between, none negative")
    return EnergyModel(found[0], found[1], found[2], "unverified", None, "configured")


class EnergyFitError(ValueError):
    """The samples do not determine the model: measure programs that differ more."""


def fit(samples: Sequence[tuple[Work, float]]) -> EnergyModel:
    """Fit the model to measured joules by least squares of the relative errors.

    Args:
        samples: Work and the joules that a counter says it took.

    Raises:
        EnergyFitError: Too few samples, samples that are alike, or a coefficient below zero.
    """
    if len(samples) < LEAST_SAMPLES or any(joules <= 0 for _, joules in samples):
        raise EnergyFitError(f"{LEAST_SAMPLES} samples above 0 J are needed")
    rows = np.array([[one.seconds, one.weight_bytes, one.operations] for one, _ in samples])
    rows = rows / np.array([joules for _, joules in samples])[:, None]
    scale = np.sqrt((rows**2).mean(axis=0))
    if not scale.all() or np.linalg.cond(rows / scale) > MAX_CONDITION:
        raise EnergyFitError("the samples do not tell time, bytes and operations apart")
    found, *_ = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)
    if (found < 0).any():
        raise EnergyFitError("the samples give a coefficient below zero")
    error = float(np.sqrt(((rows / scale @ found - 1) ** 2).mean()))
    idle, per_byte, per_operation = (float(value) for value in found / scale)
    return EnergyModel(idle, per_byte, per_operation, "host", error, "fitted on this machine")


@dataclass(frozen=True, slots=True)
class Energy:
    """What one answer took.

    Attributes:
        joules: Estimated where `source` says so.
        source: Who says so: `rapl`, `battery` or `model`.
        drain: Percent that the battery lost per hour of answering, over the window that this answer
            ended, by the battery's own counter; None if it ended none. No model ever says this.
    """

    joules: float
    source: str
    drain: float | None = None


class EnergyMeter:
    """Energy of the answers of one bundle; used by the thread that answers."""

    def __init__(
        self,
        model: EnergyModel = UNVERIFIED,
        root: Path = sensors.ROOT,
        tdp_watts: float | None = None,
    ) -> None:
        """Begin with nothing counted.

        Args:
            model: What estimates where no counter is.
            root: Where `sys` is, for tests.
            tdp_watts: Power budget of the device; None = it was not told.
        """
        self._model, self._root, self._tdp = model, root, tdp_watts
        self._before = power.rapl(root)
        self._joules = self._seconds = 0.0
        self._answers = 0
        self._source = ""
        self._drain = Drain()
        self._samples: deque[tuple[Work, float]] = deque(maxlen=MAX_SAMPLES)
        self._fitted: EnergyModel | str = "too few answers by a counter"

    def begin(self) -> None:
        """Read the counter before an answer."""
        self._before = power.rapl(self._root)

    def answered(self, work: Work) -> Energy:
        """Count an answer; return what it took."""
        found = self._counted(work) or Energy(self._model.joules(work), "model")
        if found.source != self._source:  # sums of two kinds are neither
            self._source, self._joules, self._seconds, self._answers = found.source, 0.0, 0.0, 0
        self._joules += found.joules
        self._seconds += work.seconds
        self._answers += 1
        if found.source == "rapl":
            self._calibrate(work, found.joules)
        battery = next(iter(sensors.batteries(self._root)), None)
        return replace(found, drain=self._drain.answered(work.seconds, battery))

    def watts(self) -> float | None:
        """Return the mean power while answering as counted; None where only the model speaks."""
        if self._source in ("", "model") or not self._seconds:
            return None
        return self._joules / self._seconds

    def facts(self) -> dict[str, object]:
        """Return what `status` shows; what is unknown is None."""
        mean = self._joules / self._answers if self._answers else None
        return {
            "source": self._source or None,
            "joules_per_answer": mean,
            "watts_while_answering": self._joules / self._seconds if self._seconds else None,
            "tdp_watts": self._tdp,
            "model": asdict(self._model) if self._source == "model" else None,
            "fitted": self._fitted if isinstance(self._fitted, str) else asdict(self._fitted),
            **self._drain.facts(),
        }

    def gauges(self) -> dict[str, int]:
        """Return those of `telemetry.GAUGES` that are known."""
        drain = self._drain.facts()
        found: dict[str, float | None] = {
            "energy_uj_per_answer": _times(self._joules, 1e6 / self._answers)
            if self._answers
            else None,
            "energy_is_model": float(self._source == "model") if self._source else None,
            "battery_j_per_active_hour": drain["battery_joules_per_active_hour"],
            "battery_millipercent_per_active_hour": _times(
                drain["battery_percent_per_active_hour"], 1e3
            ),
        }
        return {name: round(value) for name, value in found.items() if value is not None}

    def _calibrate(self, work: Work, joules: float) -> None:
        """Keep what a counter says, and fit the model to it now and then."""
        self._samples.append((work, joules))
        if self._answers % FIT_EVERY == 0:
            try:
                self._fitted = fit(tuple(self._samples))
            except EnergyFitError as error:
                self._fitted = str(error)

    def _counted(self, work: Work) -> Energy | None:
        before, after = self._before, power.rapl(self._root)
        if before is not None and after is not None:
            joules = power.joules_between(before, after)
            return None if joules is None else Energy(joules, "rapl")
        watts = power.battery_watts(self._root)
        return None if watts is None else Energy(watts * work.seconds, "battery")


class Drain:
    """What the battery lost per hour of answering, since it began to discharge and by window."""

    def __init__(self) -> None:
        self._first: sensors.Battery | None = None
        self._last: sensors.Battery | None = None
        self._active_s = 0.0
        self._window: tuple[sensors.Battery, float] | None = None
        """The battery when the window began, and seconds of answering since."""

    def answered(self, seconds: float, battery: sensors.Battery | None) -> float | None:
        """Count an answer; a battery that is charged begins anew.

        Returns:
            Percent lost per active hour over the window that this answer ended; None if none.
        """
        if battery is None or not battery.is_discharging:
            self._first = self._last = self._window = None
            self._active_s = 0.0
            return None
        self._first = self._first or battery
        self._last = battery
        self._active_s += seconds
        if self._window is None:  # what it lost during this answer is not known
            self._window = battery, 0.0
            return None
        began, active_s = self._window[0], self._window[1] + seconds
        if active_s < LEAST_ACTIVE_S:
            self._window = began, active_s
            return None
        self._window = battery, 0.0
        return _lost(began.percent, battery.percent, active_s / HOUR_S)

    def facts(self) -> dict[str, float | None]:
        """Return joules and percent of charge lost per active hour; None where unknown."""
        first, last, hours = self._first, self._last, self._active_s / HOUR_S
        if first is None or last is None or self._active_s < LEAST_ACTIVE_S:
            return {"battery_joules_per_active_hour": None, "battery_percent_per_active_hour": None}
        return {
            "battery_joules_per_active_hour": _lost(first.joules, last.joules, hours),
            "battery_percent_per_active_hour": _lost(first.percent, last.percent, hours),
        }


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _lost(first: float | None, last: float | None, hours: float) -> float | None:
    return None if first is None or last is None or last > first else (first - last) / hours
