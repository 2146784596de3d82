"""`HardwareProbe`: everything this machine can say of itself, within 200 ms.

Asked by `python -m device_agent probe` and by the agent when it starts. What a sensor does not say
is `unknown`, with the reason, never zero. Facts that are the same on every boot make the
fingerprint (`linux`); what is measured here goes to `status` and telemetry, never into it.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.fingerprint import Fingerprint
from device_agent.probe import power, sensors, speed

BUDGET_S: Final = 0.2
STORAGE_SHARE: Final = 0.75
"""Of the budget may be used up when storage begins; memory, which varies least, comes first."""
NO_SENSOR: Final = "no sensor"
NO_COUNTER: Final = "no counter: a model estimates energy, unverified"
NOT_MEASURED: Final = "not measured in time, or nothing to measure on"
GIGA: Final = 1e9
MEGA: Final = 1e6
Value = float | str


@dataclass(frozen=True, slots=True)
class Reading:
    """One thing that was asked for.

    Attributes:
        value: What was found; None = unknown.
        unit: Of a number; empty for words.
        reason: Why it is unknown; empty if it is known.
    """

    value: Value | None
    unit: str = ""
    reason: str = ""

    @property
    def text(self) -> str:
        """Return it for people."""
        if self.value is None:
            return f"unknown ({self.reason})"
        shown = f"{self.value:.4g}" if isinstance(self.value, float) else self.value
        return f"{shown} {self.unit}".strip()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one probe found.

    Attributes:
        fingerprint: The facts that never change.
        readings: The rest by name, in the order of asking.
        seconds: How long it took.
    """

    fingerprint: Fingerprint
    readings: Mapping[str, Reading]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return it for machines; an unknown reading is null."""
        return {
            "fingerprint": self.fingerprint.to_json(),
            "readings": {name: reading.value for name, reading in self.readings.items()},
            "units": {name: one.unit for name, one in self.readings.items() if one.unit},
            "unknown": {
                name: one.reason for name, one in self.readings.items() if one.value is None
            },
            "milliseconds": round(self.seconds * 1e3, 1),
        }

    def to_text(self) -> str:
        """Return it for people, one fact a line."""
        facts = self.fingerprint.to_json()
        lines = [f"{name}: {_shown(name, value)}" for name, value in facts.items()][1:]
        lines += [f"{name}: {reading.text}" for name, reading in self.readings.items()]
        return "\n".join([*lines, f"took: {self.seconds * 1e3:.0f} ms"])


class HardwareProbe:
    """Probes one machine."""

    def __init__(
        self,
        fingerprint: Callable[[], Fingerprint],
        storage: Path,
        root: Path = sensors.ROOT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take where to look.

        Args:
            fingerprint: Returns the facts that never change.
            storage: A folder on the storage that models lie on.
            root: Where `proc`, `sys` and `dev` are, for tests.
            clock: Monotonic seconds.
        """
        self._fingerprint = fingerprint
        self._storage = storage
        self._root = root
        self._clock = clock

    def run(self) -> Hardware:
        """Probe; measuring stops after `BUDGET_S`, and what is left is unknown."""
        start = self._clock()
        fingerprint = self._fingerprint()
        readings = {**self._sensed(), **self._measured(start)}
        return Hardware(fingerprint, readings, self._clock() - start)

    def _sensed(self) -> dict[str, Reading]:
        root = self._root
        zones = sensors.thermal_zones(root)
        hottest = max(zones, key=lambda zone: zone.celsius, default=None)
        battery = next(iter(sensors.batteries(root)), None)
        watts = battery.watts if battery and battery.is_discharging else None
        return {
            "clock": _known(sensors.clock_mhz(root), "MHz"),
            "top_clock": _known(sensors.top_clock_mhz(root), "MHz"),
            "governor": _known(sensors.governor(root)),
            "hottest_zone": _known(hottest.kind if hottest else None),
            "temperature": _known(hottest.celsius if hottest else None, "°C"),
            "battery": _known(battery.percent if battery else None, "%"),
            "battery_left": _known(battery.joules if battery else None, "J"),
            "battery_drain": _known(watts, "W"),
            "energy_counter": _known(_energy_counter(root), reason=NO_COUNTER),
            "accelerators": _known(", ".join(sensors.accelerators(root)) or "none"),
        }

    def _measured(self, start: float) -> dict[str, Reading]:
        clock, early = self._clock, start + BUDGET_S * STORAGE_SHARE
        memory = speed.memory_bytes_per_s(early, clock)
        storage = speed.storage_bytes_per_s(self._storage, start + BUDGET_S, clock)
        return {
            "memory_bandwidth": _known(_per(memory, GIGA), "GB/s", NOT_MEASURED),
            "storage_read": _known(_per(storage, MEGA), "MB/s", NOT_MEASURED),
        }


def _energy_counter(root: Path) -> str | None:
    """Return what says how much energy answers take."""
    if power.rapl(root) is not None:
        return "rapl"
    return None if power.battery_watts(root) is None else "battery"


def _known(value: Value | None, unit: str = "", reason: str = NO_SENSOR) -> Reading:
    return Reading(value, unit, reason if value is None else "")


def _per(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _shown(name: str, value: object) -> str:
    """Return a fact of a fingerprint, where an unknown cache is 0 and an unknown word is empty."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value) if value != "" and (value != 0 or not name.endswith("_kb")) else "unknown"
