"""Energy counters of a machine: RAPL of x86, else the battery; None where there is neither.

RAPL counts microjoules per package and wraps at a range of its own
(Documentation/power/powercap/powercap.rst of Linux). Many systems let only root read it: what
cannot be read is not there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from device_agent.probe import sensors

_POWERCAP: Final = "sys/class/powercap"
_PACKAGE: Final = "intel-rapl:[0-9]*"
_SUBZONE: Final = ":"


@dataclass(frozen=True, slots=True)
class RaplReading:
    """Microjoules of each package by name of its zone, and where each wraps."""

    microjoules: dict[str, int]
    wraps_at: dict[str, int]


def rapl(root: Path = sensors.ROOT) -> RaplReading | None:
    """Return what the packages have used so far; None where no counter can be read."""
    counters, wraps = {}, {}
    for folder in sorted((root / _POWERCAP).glob(_PACKAGE)):
        if folder.name.count(_SUBZONE) > 1:  # a part of a package that counts already
            continue
        used = _whole(folder / "energy_uj")
        most = _whole(folder / "max_energy_range_uj")
        if used is not None and most:
            counters[folder.name], wraps[folder.name] = used, most
    return RaplReading(counters, wraps) if counters else None


def joules_between(before: RaplReading, after: RaplReading) -> float | None:
    """Return the joules between two readings, one wrap allowed; None if the zones changed."""
    if before.microjoules.keys() != after.microjoules.keys():
        return None
    total = 0
    for zone, used in after.microjoules.items():
        delta = used - before.microjoules[zone]
        total += delta if delta >= 0 else delta + after.wraps_at[zone]
    return total * sensors.MICRO if total >= 0 else None


def battery_watts(root: Path = sensors.ROOT) -> float | None:
    """Return the power drawn from the battery now; None on mains or where it does not say."""
    battery = next(iter(sensors.batteries(root)), None)
    return battery.watts if battery is not None and battery.is_discharging else None


def _whole(path: Path) -> int | None:
    text = sensors.read_file(path).strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
