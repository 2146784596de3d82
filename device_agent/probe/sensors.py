"""What the sensors of a Linux machine say now: clock, heat, battery, accelerators.

Read by `hardware` and by whoever watches heat while a model runs. Files of `/sys` that are missing,
unreadable or nonsense give None, never zero: a phone without a sensor is not a cold phone.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_CPUS: Final = "sys/devices/system/cpu"
_THERMAL: Final = "sys/class/thermal"
_POWER: Final = "sys/class/power_supply"
_CPUINFO: Final = "proc/cpuinfo"
_MEMINFO: Final = "proc/meminfo"
_CLOCK: Final = re.compile(r"^cpu MHz\s*:\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*$", re.MULTILINE)
_MEMORY: Final = re.compile(r"^(MemTotal|MemAvailable):\s*([0-9]{1,15}) kB", re.MULTILINE)
_HOTTEST_C: Final = 150.0
_COLDEST_C: Final = -60.0
MICRO: Final = 1e-6
SECONDS_PER_HOUR: Final = 3600.0
ACCELERATORS: Final[tuple[tuple[str, str], ...]] = (
    ("adreno-gpu", "dev/kgsl-3d0"),
    ("mali-gpu", "dev/mali0"),
    ("hexagon-dsp", "dev/adsprpc-smd"),
    ("hexagon-cdsp", "dev/fastrpc-cdsp"),
    ("rockchip-npu", "dev/rknpu"),
    ("edge-tpu", "dev/apex_0"),
    ("linux-accel", "dev/accel/accel0"),
    ("nvidia-gpu", "dev/nvidia0"),
    ("drm-gpu", "dev/dri/renderD128"),
)
"""Name and device file of processors beside the CPU; presence says nothing of a usable driver."""


@dataclass(frozen=True, slots=True)
class Zone:
    """One thermal zone.

    Attributes:
        kind: For example `cpu-thermal`.
        celsius: Its temperature.
        critical: Where the kernel switches the machine off, degrees Celsius; None = it never says.
    """

    kind: str
    celsius: float
    critical: float | None = None


@dataclass(frozen=True, slots=True)
class Battery:
    """One battery.

    Attributes:
        percent: Charge, 0 to 100.
        is_discharging: Whether the machine runs on it.
        watts: Power that flows, never negative; None if it does not say.
        joules: What is left in it; None if it does not say.
    """

    percent: float | None
    is_discharging: bool | None
    watts: float | None
    joules: float | None


def clock_mhz(root: Path = ROOT) -> float | None:
    """Return the present clock of the fastest core, MHz."""
    paths = sorted((root / _CPUS).glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    told = [khz / 1e3 for path in paths if (khz := _number(path)) is not None]
    told = told or [float(found) for found in _CLOCK.findall(read_file(root / _CPUINFO))]
    return max((mhz for mhz in told if mhz > 0), default=None)


def top_clock_mhz(root: Path = ROOT) -> float | None:
    """Return the highest clock that any core may take, MHz; below it, the machine is throttled."""
    paths = sorted((root / _CPUS).glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq"))
    return max((khz / 1e3 for path in paths if (khz := _number(path))), default=None)


def governor(root: Path = ROOT) -> str | None:
    """Return the policy that sets the clock of the first core, e.g. `schedutil`."""
    return read_file(root / _CPUS / "cpu0/cpufreq/scaling_governor").strip() or None


def thermal_zones(root: Path = ROOT) -> tuple[Zone, ...]:
    """Return the zones that give a temperature a processor can have."""
    zones = []
    for folder in sorted((root / _THERMAL).glob("thermal_zone*")):
        millidegrees = _number(folder / "temp")
        if millidegrees is None:
            continue
        celsius = millidegrees / 1e3
        if _COLDEST_C < celsius < _HOTTEST_C:
            kind = read_file(folder / "type").strip() or folder.name
            zones.append(Zone(kind, celsius, _critical(folder)))
    return tuple(zones)


def _critical(zone: Path) -> float | None:
    """Return the trip point of a zone at which the machine is switched off, degrees Celsius."""
    for path in sorted(zone.glob("trip_point_*_type")):
        if read_file(path).strip() == "critical":
            trip = _scaled(path.with_name(path.name.removesuffix("_type") + "_temp"), 1e-3)
            if trip is not None and 0.0 < trip < _HOTTEST_C:
                return trip
    return None


def batteries(root: Path = ROOT) -> tuple[Battery, ...]:
    """Return the batteries of the machine; those of a mouse or a pen do not count."""
    found = []
    for folder in sorted((root / _POWER).glob("*")):
        is_battery = read_file(folder / "type").strip() == "Battery"
        if is_battery and read_file(folder / "scope").strip() != "Device":
            found.append(_battery(folder))
    return tuple(found)


def memory_pressure(root: Path = ROOT) -> float | None:
    """Return the share of memory that is not available, percent."""
    told = {name: int(kb) for name, kb in _MEMORY.findall(read_file(root / _MEMINFO))}
    total, available = told.get("MemTotal"), told.get("MemAvailable")
    if not total or available is None or available > total:
        return None
    return 100.0 * (1.0 - available / total)


def accelerators(root: Path = ROOT) -> tuple[str, ...]:
    """Return the names of the accelerators whose device file is there."""
    return tuple(name for name, path in ACCELERATORS if (root / path).exists())


def _battery(folder: Path) -> Battery:
    status = read_file(folder / "status").strip()
    volts = _scaled(folder / "voltage_now", MICRO)
    volts = volts if volts is not None and volts > 0 else None
    watts = _scaled(folder / "power_now", MICRO)
    joules = _scaled(folder / "energy_now", MICRO * SECONDS_PER_HOUR)
    if volts is not None:
        amperes = _scaled(folder / "current_now", MICRO)
        coulombs = _scaled(folder / "charge_now", MICRO * SECONDS_PER_HOUR)
        watts = amperes * volts if watts is None and amperes is not None else watts
        joules = coulombs * volts if joules is None and coulombs is not None else joules
    percent = _percent(folder)
    return Battery(
        percent=percent if percent is not None and 0 <= percent <= 100 else None,
        is_discharging=status == "Discharging" if status not in {"", "Unknown"} else None,
        watts=None if watts is None else abs(watts),
        joules=joules if joules is not None and joules >= 0 else None,
    )


def _percent(folder: Path) -> float | None:
    """Return the charge of a battery, percent: of its counter where it says what is full."""
    for kind in ("energy", "charge"):
        now, full = _number(folder / f"{kind}_now"), _number(folder / f"{kind}_full")
        if now is not None and full is not None and 0 <= now <= full and full > 0:
            return 100.0 * now / full
    return _number(folder / "capacity")


def _scaled(path: Path, factor: float) -> float | None:
    value = _number(path)
    return None if value is None else value * factor


def _number(path: Path) -> float | None:
    """Return the whole number in a file of `/sys`, or None."""
    words: Iterable[str] = read_file(path).split()[:1]
    for word in words:
        if re.fullmatch(r"-?[0-9]{1,18}", word):
            return float(word)
    return None


def read_file(path: Path) -> str:
    """Return what a file of `/proc` or `/sys` says, without control characters; empty if none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "".join(ch for ch in text if ch.isprintable() or ch in "\n\t")
