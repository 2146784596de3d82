"""Whether heat is about to switch the machine off, looked at once a second at most."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from device_agent.probe import sensors

LOOK_S: Final = 1.0
MARGIN_C: Final = 3.0
"""Below the zone's own critical trip point; at it the kernel powers the machine off."""


class CriticalHeat:
    """Asks the thermal zones that say where they become critical."""

    def __init__(self, monotonic: Callable[[], float], root: Path = sensors.ROOT) -> None:
        """Look for the first time when asked; `monotonic` gives seconds."""
        self._monotonic, self._root = monotonic, root
        self._looked_at = -float("inf")
        self._is_critical = False

    def is_critical(self) -> bool:
        """Return whether a zone is near its critical trip point; a silent sensor is not."""
        now = self._monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._is_critical = any(
                zone.critical is not None and zone.celsius >= zone.critical - MARGIN_C
                for zone in sensors.thermal_zones(self._root)
            )
        return self._is_critical
