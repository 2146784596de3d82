"""Keeps a running bundle on the right rung: looks at the machine between answers, moves by rule.

    sensors, answers, expert pool -> Observation -> `degrade_step` -> rung -> the plan's variant

The answering thread asks before each answer; the machine is looked at once a second at most. A
bundle has rungs below NORMAL if it carries variants of `step` with fewer experts (`bands`) or
without any (`substitutes`), and if its experts are paged in on this device.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from compiler.contract.bands import Bands
from compiler.contract.degrade import Rule, Rung, parse_rules, rules_bytes
from compiler.contract.rule_language import comparisons
from compiler.contract.substitutes import BY_RUNG, Substitutes
from device_agent.probe import sensors
from device_agent.runtime.degrade import Counter, DegradeState, Observation, degrade_step
from device_agent.runtime.rule_book import RuleBook
from device_agent.runtime.signals import LatencyWindow, PoolSignals, no_pool

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


def rungs_of(
    bands: Bands | None, substitutes: Substitutes | None = None, *, is_paged: bool = False
) -> tuple[Rung, ...]:
    """Return the rungs that a bundle has here.

    Args:
        bands: Of the bundle.
        substitutes: Of the bundle.
        is_paged: Whether its experts are fetched, ahead or when needed, rather than all in memory.
    """
    has = {
        Rung.NORMAL: True,
        Rung.NO_PREFETCH: is_paged,
        Rung.FEWER_EXPERTS: bands is not None and bool(bands.programs),
        **{
            rung: substitutes is not None and kind in substitutes.kinds
            for rung, kind in BY_RUNG.items()
        },
    }
    return tuple(rung for rung, there in has.items() if there)


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
        rules: Sequence[Rule] | RuleBook,
        rungs: Sequence[Rung],
        monotonic: Callable[[], float],
        gauges: Gauges = machine_gauges,
        pool: PoolSignals = no_pool,
    ) -> None:
        """Start at NORMAL.

        Args:
            rules: What to follow; a book may be rewritten at any time.
            rungs: Those of the bundle, see `rungs_of`.
            monotonic: Clock in seconds.
            gauges: Reads the sensors.
            pool: Says how the expert pool does.
        """
        self._book = rules if isinstance(rules, RuleBook) else RuleBook(rules)
        self._rungs = tuple(rungs)
        self._monotonic, self._gauges, self._pool = monotonic, gauges, pool
        self._latencies = LatencyWindow()
        self._state = DegradeState()
        self._looked_at: float | None = None
        self._faults = self._own_faults = self._moves = 0
        self._last_rule = ""

    @property
    def present(self) -> Rung:
        """The rung of the last answer; looks at nothing."""
        return self._state.rung

    @property
    def revision(self) -> int | None:
        """Revision of the server's rules; None if it never sent any."""
        return self._book.revision or None

    def rung(self) -> Rung:
        """Return the rung of the next answer; looks at the machine if it is time to."""
        now = self._monotonic()
        if len(self._rungs) < 2 or not self._is_due(now):
            return self._state.rung
        self._looked_at = now
        self._state, move = degrade_step(
            self._state, self._book.rules, self._rungs, self._observed(now), now
        )
        if move is not None:
            self._moves += 1
            self._last_rule = move.rule or self._last_rule
            why = f"rule {move.rule!r}" if move.rule else "its rules let go"
            log.warning("%s -> %s: %s", move.before.name, move.after.name, why)
        return self._state.rung

    def _observed(self, now: float) -> Observation:
        pool = self._pool()
        p99 = self._latencies.p99(now)
        faults = Counter(self._faults, self._own_faults)
        return Observation(
            {**self._gauges(), **pool.gauges, "answer_p99": p99},
            {**pool.counters, "faults": faults},
        )

    def answered(self, *, failed: bool, latency_ms: float | None = None) -> None:
        """Count an answer; a failure below NORMAL may be our own doing."""
        if latency_ms is not None:
            self._latencies.add(self._monotonic(), latency_ms)
        self._faults += failed
        self._own_faults += failed and self._state.rung is not Rung.NORMAL

    def reasons(self) -> tuple[str, ...]:
        """Return the signals of the rules in effect, or of the last one while recovering."""
        names = self._state.held or {self._last_rule}
        found = {
            one.name
            for rule in self._book.rules
            if rule.name in names
            for one in comparisons(rule.when)
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
            "rules_revision": self._book.revision,
        }

    def _is_due(self, now: float) -> bool:
        return self._looked_at is None or now - self._looked_at >= LOOK_S
