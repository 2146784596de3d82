"""Telemetry batches: counters and mergeable sketches, idempotent on (device, boot, seq).

A sketch is a histogram on a fixed logarithmic grid with gamma = 2^(1/32) (OpenTelemetry
exponential histogram, scale 5;
Prometheus native histogram, schema 5): bucket i holds values in (gamma^i, gamma^(i+1)]. Merging is
the addition of integers,
so it is associative, order-free and exact; the relative error of a quantile is at most 1.1 %.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from compiler.contract.canonical import Json, canonical_bytes, parse_object, require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.protocol import MAX_SEQ, integer, optional_integer, text

SCHEMA: Final = "sparsefleet.telemetry/1"
MAX_BATCH_BYTES: Final = 64 * 1024
MAX_BUCKETS: Final = 2_048
BUCKETS_PER_OCTAVE: Final = 32
MIN_INDEX: Final = -1_024  # 2^-32
MAX_INDEX: Final = 1_024  # 2^32
MAX_ANSWERS_PER_BATCH: Final = 1_000_000
GAUGES: Final = (
    "threads",
    "weight_bytes",
    "huge_weight_bytes",
    "rung",
    "rules_revision",
    "energy_uj_per_answer",
    "energy_is_model",
    "battery_j_per_active_hour",
    "battery_millipercent_per_active_hour",
    "resident_bytes",
    "expert_hits",
    "expert_misses",
    "expert_late",
    "expert_hidden",
    "expert_cached",
    "expert_predicted",
    "expert_foreseen",
    "expert_read_bytes",
    "expert_stalls",
    "expert_damaged",
    "fragmentation_internal_per_mille",
    "fragmentation_external_per_mille",
    "experts_per_mille",
    "experts_substituted",
)
"""What a batch may say of the running code; `docs/formats/telemetry.md` says what each one is. What
a device does not know is left out."""
MAX_REASONS: Final = 32
REASON: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
MAX_SUM: Final = (1 << 53) - 1  # stored sums stop here: exact in JSON, far below 63 bits


@dataclass(slots=True)
class Sketch:
    """Log histogram: bucket index -> count. Zero and below go to the lowest bucket."""

    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, count: int = 1) -> None:
        """Count `value` (any unit, the same for the whole sketch)."""
        index = bucket_index(value)
        self.buckets[index] = saturating_sum(self.buckets.get(index, 0), count)

    def merge(self, other: "Sketch") -> None:
        """Add the counts of `other` to this sketch; a count stops at `MAX_SUM`."""
        for index, count in other.buckets.items():
            self.buckets[index] = saturating_sum(self.buckets.get(index, 0), count)

    @property
    def count(self) -> int:
        """Return how many values were counted."""
        return sum(self.buckets.values())

    def quantile(self, q: float) -> float | None:
        """Return the value at quantile `q` in [0, 1] to 1.1 %, or None when the sketch is empty."""
        total = self.count
        if total == 0:
            return None
        rank = q * (total - 1)
        seen = 0
        for index in sorted(self.buckets):
            seen += self.buckets[index]
            if seen > rank:
                return bucket_value(index)
        return bucket_value(max(self.buckets))

    def count_above(self, value: float) -> int:
        """Return how many counted values lie in buckets above the one of `value`."""
        limit = bucket_index(value)
        return sum(count for index, count in self.buckets.items() if index > limit)

    def to_json(self) -> Json:
        """Return [[index, count], ...] in ascending index order."""
        return [[index, count] for index, count in sorted(self.buckets.items())]


def saturating_sum(first: int, second: int) -> int:
    """Return the sum of two counts, at most `MAX_SUM`; associative and order-free."""
    return min(first + second, MAX_SUM)


def bucket_index(value: float) -> int:
    """Return the bucket of `value` on the fixed grid, clamped to its ends."""
    if not value > 0:
        return MIN_INDEX
    index = math.ceil(math.log2(value) * BUCKETS_PER_OCTAVE) - 1
    return max(MIN_INDEX, min(MAX_INDEX, index))


def bucket_value(index: int) -> float:
    """Return the geometric middle of bucket `index`."""
    return math.exp2((index + 0.5) / BUCKETS_PER_OCTAVE)


def sketch_from_json(value: Json) -> Sketch:
    """Parse a sketch that came over the wire; for stored ones see `sketch_from_row`.

    Raises:
        ContractError: Not a list of [index, count] pairs in ascending order and in range.
    """
    if not isinstance(value, list) or len(value) > MAX_BUCKETS:
        raise ContractError(f"a sketch is a list of at most {MAX_BUCKETS} buckets")
    buckets: dict[int, int] = {}
    previous = MIN_INDEX - 1
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise ContractError("a sketch bucket is [index, count]")
        index, count = item
        if not _is_integer(index, MIN_INDEX, MAX_INDEX) or not _is_integer(
            count, 1, MAX_ANSWERS_PER_BATCH
        ):
            raise ContractError("sketch bucket out of range")
        if index <= previous:
            raise ContractError("sketch buckets must be in ascending order")
        previous = index
        buckets[index] = count
    return Sketch(buckets)


def sketch_from_row(value: Json) -> Sketch:
    """Return a sketch that this platform stored itself; never raises.

    Sums are larger than what one batch may hold, so the limits of the wire do not apply: counts
    stop at `MAX_SUM`, and what is not a bucket of the grid is left out, so that one damaged row
    costs its own numbers and nothing else.
    """
    sketch = Sketch()
    for item in value if isinstance(value, list) else ():
        if not isinstance(item, list) or len(item) != 2:
            continue
        index, count = item
        if _is_integer(index, MIN_INDEX, MAX_INDEX) and _is_integer(count, 1, None):
            sketch.buckets[index] = saturating_sum(sketch.buckets.get(index, 0), count)
    return sketch


@dataclass(frozen=True, slots=True)
class TelemetryBatch:
    """What one device measured since its last batch while running one bundle.

    Attributes:
        boot_id: Random name of this run of the agent; `seq` counts its batches from 0.
        answers: Questions answered (whatever the outcome).
        failures: Answers that did not end: cut off at the answer limit, an error status, or a
            timeout.
        scored, correct: Answers with a known right answer, and how many of them were right.
        degraded: Answers given in a degraded mode.
        latency_ms: Sketch of whole-answer latency in milliseconds.
        rollout_id, stage, arm: As told by the last poll answer; null and empty outside a rollout.
        gauges: The present values of those of `GAUGES` that are known.
        degraded_by: Degraded answers by reason: kinds of faults, signals of rules. An answer may
            have several.
        drain: Sketch of what the battery lost per hour of answering, thousandths of a percent: one
            value per window of ten minutes of answering while it discharges, by its own counter. A
            device without one sends none, and no model's figure is ever in it.
    """

    boot_id: str
    seq: int
    manifest_sha256: str
    rollout_id: int | None
    stage: int | None
    arm: str
    answers: int
    failures: int
    scored: int
    correct: int
    degraded: int
    latency_ms: Sketch
    gauges: Mapping[str, int] = field(default_factory=dict)
    degraded_by: Mapping[str, int] = field(default_factory=dict)
    drain: Sketch = field(default_factory=Sketch)

    def to_bytes(self) -> bytes:
        """Return the canonical JSON body."""
        drain: dict[str, Json] = {"drain": self.drain.to_json()} if self.drain.count else {}
        return canonical_bytes(
            {
                **drain,
                "schema": SCHEMA,
                "boot_id": self.boot_id,
                "seq": self.seq,
                "manifest_sha256": self.manifest_sha256,
                "rollout_id": self.rollout_id,
                "stage": self.stage,
                "arm": self.arm,
                "answers": self.answers,
                "failures": self.failures,
                "scored": self.scored,
                "correct": self.correct,
                "degraded": self.degraded,
                "latency_ms": self.latency_ms.to_json(),
                "gauges": dict(self.gauges),
                "degraded_by": dict(self.degraded_by),
            }
        )


def parse_batch(data: bytes) -> TelemetryBatch:
    """Parse one telemetry batch.

    Raises:
        ContractError: Too long, a field is missing or of the wrong type, or counts that contradict
            each other.
    """
    document = parse_object(data, limit_bytes=MAX_BATCH_BYTES)
    if document.get("schema") != SCHEMA:
        raise ContractError(f"telemetry schema must be {SCHEMA!r}")
    boot_id = text(document, "boot_id")
    if not 8 <= len(boot_id) <= 64 or not (boot_id.isascii() and boot_id.isalnum()):
        raise ContractError("boot_id must be 8..64 ASCII letters and digits")
    counts = {name: integer(document, name, MAX_ANSWERS_PER_BATCH) for name in _COUNTS}
    batch = TelemetryBatch(
        boot_id=boot_id,
        seq=integer(document, "seq", MAX_SEQ),
        manifest_sha256=require_sha256(document.get("manifest_sha256"), "manifest_sha256"),
        rollout_id=optional_integer(document, "rollout_id"),
        stage=optional_integer(document, "stage"),
        arm=_arm(document),
        latency_ms=sketch_from_json(document.get("latency_ms")),
        gauges=_gauges(document.get("gauges", {})),
        degraded_by=_reasons(document.get("degraded_by", {})),
        drain=sketch_from_json(document.get("drain", [])),
        **counts,
    )
    _require_consistent(batch)
    return batch


_COUNTS: Final = ("answers", "failures", "scored", "correct", "degraded")
_ARMS: Final = ("", "treatment", "control")


def _arm(document: Mapping[str, Json]) -> str:
    arm = text(document, "arm")
    if arm not in _ARMS:
        raise ContractError(f"unknown arm {arm!r}")
    return arm


def known_gauges(facts: Mapping[str, object]) -> dict[str, int]:
    """Return those of `GAUGES` among `facts` that are whole numbers in range."""
    found = {name: facts.get(name) for name in GAUGES}
    return {name: value for name, value in found.items() if _is_gauge(value)}


def _gauges(value: Json) -> dict[str, int]:
    """Return the gauges of a batch; names that this version does not know are left out."""
    if not isinstance(value, dict):
        raise ContractError("gauges must be an object")
    for name in GAUGES:
        if name in value and not _is_gauge(value[name]):
            raise ContractError(f"gauge {name!r} must be a whole number of 0..{MAX_SUM}")
    return known_gauges(value)


def _reasons(value: Json) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_REASONS:
        raise ContractError(f"degraded_by must be an object of at most {MAX_REASONS} reasons")
    for name in value:
        if REASON.fullmatch(name) is None:
            raise ContractError(f"reason {name[:40]!r} must match {REASON.pattern}")
    return {name: integer(value, name, MAX_ANSWERS_PER_BATCH) for name in value}


def _is_gauge(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SUM


def _require_consistent(batch: TelemetryBatch) -> None:
    reasons = max(batch.degraded_by.values(), default=0)
    sketched = max(batch.latency_ms.count, batch.drain.count)
    parts = (batch.failures, batch.scored, batch.degraded, sketched, reasons)
    if max(parts) > batch.answers or batch.correct > batch.scored:
        raise ContractError("telemetry counts contradict each other")


def _is_integer(value: Json, low: int, high: int | None) -> TypeGuard[int]:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        return False
    return high is None or value <= high
