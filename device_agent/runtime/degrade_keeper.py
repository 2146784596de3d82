"""Keeps a running bundle on the right rung: looks at the machine between answers, moves by rule.

    sensors, counts of answers -> Observation -> `degrade_step` -> rung -> the plan's variant

The answering thread asks before each answer; the machine is looked at once a second at most. Today
a bundle has a rung below NORMAL only if it carries variants of `step` with fewer experts (`bands`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from compiler.contract.bands import Bands
from compiler.contract.degrade import Rule, Rung, parse_rules, rules_bytes
from compiler.contract.rule_language import comparisons
from device_agent.probe import sensors
from device_agent.runtime.degrade import Counter, DegradeState, Observation, degrade_step

log = logging.getLogger("device_agent.runtime")

LOOK_S: Final = 1.0
Gauges = Callable[[], Mapping[str, float | None]]
DEFAULT_RULES: Final[tuple[Rule, ...]] = parse_rules(
    rules_bytes(
        [
            {
                "name": "hot",
                "when": "temperature > 90 C for 10 s",
                "leave": "temperature < 80 C for 30 s",
                "rung": "fewer_experts",
                "priority": 50,
                "cooldown_s": 60,
            },
            {
                "name": "battery low",
                "when": "battery < 15 %",
                "leave": "battery > 20 %",
                "rung": "fewer_experts",
                "priority": 10,
                "cooldown_s": 60,
            },
        ]
    )
)
"""For a device without rules of its own. Temperature is that of the hottest zone, the die's."""


def rungs_of(bands: Bands | None) -> tuple[Rung, ...]:
    """Return the rungs that a bundle has."""
    fewer = bands is not None and bands.programs
    return (Rung.NORMAL, Rung.FEWER_EXPERTS) if fewer else (Rung.NORMAL,)


def machine_gauges(root: Path = sensors.ROOT) -> dict[str, float | None]:
    """Return the gauges of `SIGNALS` that the sensors know; None where they say nothing."""
    zones = sensors.thermal_zones(root)
    battery = next(iter(sensors.batteries(root)), None)
    return {
        "temperature": max((zone.celsius for zone in zones), default=None),
        "battery": battery.percent if battery else None,
        "memory_pressure": sensors.memory_pressure(root),
    }


class DegradeKeeper:
    """The rung of one running bundle; used by the thread that answers."""

    def __init__(
        self,
        rules: Sequence[Rule],
        rungs: Sequence[Rung],
        monotonic: Callable[[], float],
        gauges: Gauges = machine_gauges,
    ) -> None:
        """Start at NORMAL.

        Args:
            rules: What to follow.
            rungs: Those of the bundle, see `rungs_of`.
            monotonic: Clock in seconds.
            gauges: Reads the sensors.
        """
        self._rules, self._rungs = tuple(rules), tuple(rungs)
        self._monotonic, self._gauges = monotonic, gauges
        self._state = DegradeState()
        self._looked_at: float | None = None
        self._faults = self._own_faults = self._moves = 0
        self._last_rule = ""

    def rung(self) -> Rung:
        """Return the rung of the next answer; looks at the machine if it is time to."""
        now = self._monotonic()
        if len(self._rungs) < 2 or not self._is_due(now):
            return self._state.rung
        self._looked_at = now
        faults = Counter(self._faults, self._own_faults)
        seen = Observation(self._gauges(), {"faults": faults})
        self._state, move = degrade_step(self._state, self._rules, self._rungs, seen, now)
        if move is not None:
            self._moves += 1
            self._last_rule = move.rule or self._last_rule
            why = f"rule {move.rule!r}" if move.rule else "its rules let go"
            log.warning("%s -> %s: %s", move.before.name, move.after.name, why)
        return self._state.rung

    def answered(self, *, failed: bool) -> None:
        """Count an answer; a failure below NORMAL may be our own doing."""
        self._faults += failed
        self._own_faults += failed and self._state.rung is not Rung.NORMAL

    def reasons(self) -> tuple[str, ...]:
        """Return the signals of the rules in effect, or of the last one while recovering."""
        names = self._state.held or {self._last_rule}
        found = {
            one.name for rule in self._rules if rule.name in names for one in comparisons(rule.when)
        }
        return tuple(sorted(found))

    def facts(self) -> dict[str, object]:
        """Return what `status` shows."""
        return {
            "rung": self._state.rung.name.lower(),
            "rungs": [rung.name.lower() for rung in self._rungs],
            "held": sorted(self._state.held),
            "moves": self._moves,
            "last_rule": self._last_rule,
        }

    def _is_due(self, now: float) -> bool:
        return self._looked_at is None or now - self._looked_at >= LOOK_S
