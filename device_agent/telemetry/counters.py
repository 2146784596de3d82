"""Count answers by bundle and rollout arm, and cut what was counted into batches."""

import secrets
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from compiler.contract.protocol import PollAnswer
from compiler.contract.telemetry import Sketch, TelemetryBatch, known_gauges
from device_agent.runtime.answers import AnswerRecord

BOOT_ID_BYTES: Final = 8
MILLI: Final = 1e3
ARMS: Final = ("", "treatment", "control")


@dataclass(frozen=True, slots=True)
class Tags:
    """Which side of which rollout the device is on, as the last poll answer said."""

    rollout_id: int | None = None
    stage: int | None = None
    arm: str = ""


def tags_of(answer: PollAnswer) -> Tags:
    """Return the tags of a poll answer; an unknown arm counts as none."""
    arm = answer.arm if answer.arm in ARMS else ""
    return Tags(answer.rollout_id, answer.stage, arm)


@dataclass(slots=True)
class _Counts:
    answers: int = 0
    failures: int = 0
    scored: int = 0
    correct: int = 0
    degraded: int = 0
    degraded_by: Counter[str] = field(default_factory=Counter)
    latency_ms: Sketch = field(default_factory=Sketch)
    drain: Sketch = field(default_factory=Sketch)


class Counters:
    """Counts since the last cut; safe for any number of threads."""

    def __init__(self, boot_id: str | None = None) -> None:
        self.boot_id = boot_id or secrets.token_hex(BOOT_ID_BYTES)
        self._lock = threading.Lock()
        self._tags = Tags()
        self._counts: dict[tuple[str, Tags], _Counts] = {}
        self._seq = 0
        self._total = _Counts()

    def tag(self, tags: Tags) -> None:
        """Count under these tags from now on."""
        with self._lock:
            self._tags = tags

    def record(self, record: AnswerRecord) -> None:
        """Count one answer."""
        with self._lock:
            key = record.manifest_sha256, self._tags
            for counts in (self._counts.setdefault(key, _Counts()), self._total):
                counts.answers += 1
                counts.failures += record.failed
                counts.scored += record.correct is not None
                counts.correct += record.correct is True
                counts.degraded += record.degraded
                counts.degraded_by.update(record.reasons)
                counts.latency_ms.add(record.latency_ms)
                if record.drain is not None:
                    counts.drain.add(MILLI * record.drain)

    def cut(self, running: str, facts: Mapping[str, object]) -> list[TelemetryBatch]:
        """Return what was counted since the last cut, one batch per bundle and tags.

        Args:
            running: Manifest of the bundle that answers now.
            facts: What is known of its code; goes into its batches as gauges.
        """
        gauges = known_gauges(facts)
        with self._lock:
            counted, self._counts = self._counts, {}
            first, self._seq = self._seq, self._seq + len(counted)
        return [
            TelemetryBatch(
                boot_id=self.boot_id,
                seq=first + position,
                manifest_sha256=manifest_sha256,
                rollout_id=tags.rollout_id,
                stage=tags.stage,
                arm=tags.arm,
                answers=counts.answers,
                failures=counts.failures,
                scored=counts.scored,
                correct=counts.correct,
                degraded=counts.degraded,
                latency_ms=counts.latency_ms,
                gauges=gauges if manifest_sha256 == running else {},
                degraded_by=dict(counts.degraded_by),
                drain=counts.drain,
            )
            for position, ((manifest_sha256, tags), counts) in enumerate(counted.items())
        ]

    def summary(self) -> dict[str, int | float | None]:
        """Return counts since the start, for `status`."""
        with self._lock:
            total = self._total
            return {
                "answers": total.answers,
                "failures": total.failures,
                "scored": total.scored,
                "correct": total.correct,
                "degraded": total.degraded,
                "latency_p50_ms": total.latency_ms.quantile(0.5),
                "latency_p95_ms": total.latency_ms.quantile(0.95),
            }
