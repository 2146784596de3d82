"""On which cores lent threads run: the big ones, where a device has cores of several sizes.

    `cpus` of the configuration -> cpus_for() -> NativePlan.cpus

`auto` reads the capacity that the kernel knows of each core (Arm; a core of half the largest one's
capacity or less is little), and where it knows none the highest clock. Where all cores are alike,
or nothing is known, threads run anywhere. A list such as `4-7` is what the label of the device
says; `off` leaves threads where the system puts them. Bits do not depend on it.
"""

import re
from pathlib import Path
from typing import Final

from device_agent.errors import ConfigurationError

AUTO: Final = "auto"
OFF: Final = "off"
MAX_CPU: Final = 1023
_CORES: Final = Path("sys/devices/system/cpu")
_FIGURES: Final = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
_LIST: Final = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", re.ASCII)


def parse_cpus(text: str) -> frozenset[int]:
    """Return the cores of a list such as `0,4-7`.

    Raises:
        ConfigurationError: It is no list, or names a core beyond `MAX_CPU`.
    """
    if not _LIST.fullmatch(text):
        raise ConfigurationError(f"cpus {text!r}", hint="auto, off, or a list such as 0,4-7")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores = range(int(first), int(last or first) + 1)
        if not cores or cores[-1] > MAX_CPU:
            raise ConfigurationError(f"cpus {text!r}", hint=f"cores are 0 to {MAX_CPU}, in order")
        found.update(cores)
    return frozenset(found)


def require_cpus(setting: str) -> None:
    """Refuse a setting that is neither `auto` nor `off` nor a list.

    Raises:
        ConfigurationError: It is none of these.
    """
    if setting not in (AUTO, OFF):
        parse_cpus(setting)


def cpus_for(setting: str, allowed: frozenset[int], root: Path = Path("/")) -> frozenset[int]:
    """Return where lent threads run; empty for anywhere.

    Args:
        setting: `auto`, `off` or a list.
        allowed: Cores that this process may use.
        root: Where `sys` is, for tests.

    Raises:
        ConfigurationError: The setting is none of these.
    """
    if setting == OFF:
        return frozenset()
    if setting != AUTO:
        return parse_cpus(setting) & allowed
    return big_cores(allowed, root)


def big_cores(allowed: frozenset[int], root: Path = Path("/")) -> frozenset[int]:
    """Return the big cores among `allowed`; empty if they are alike or nobody says."""
    for figure in _FIGURES:
        found = {cpu: _number(root / _CORES / f"cpu{cpu}" / figure) for cpu in allowed}
        if not found or 0 in found.values():
            continue
        big = frozenset(cpu for cpu, size in found.items() if 2 * size > max(found.values()))
        return big if big < allowed else frozenset()
    return frozenset()


def _number(path: Path) -> int:
    """Return the number in a file; 0 if there is none."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
