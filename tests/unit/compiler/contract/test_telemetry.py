"""Telemetry documents: limits of the wire, and leniency with what was stored."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.contract.errors import ContractError
from compiler.contract.telemetry import (
    MAX_ANSWERS_PER_BATCH,
    MAX_INDEX,
    MAX_SUM,
    MIN_INDEX,
    Sketch,
    TelemetryBatch,
    parse_batch,
    saturating_sum,
    sketch_from_json,
    sketch_from_row,
)


def document(**changes: object) -> bytes:
    batch = TelemetryBatch("bootaaaa", 0, "a" * 64, None, None, "", 2, 0, 2, 1, 0, Sketch({3: 2}))
    return json.dumps({**json.loads(batch.to_bytes()), **changes}).encode()


def test_it_takes_the_largest_batch() -> None:
    most = MAX_ANSWERS_PER_BATCH
    batch = parse_batch(document(answers=most, latency_ms=[[0, most]], seq=2**31 - 1))
    assert (batch.answers, batch.latency_ms.count) == (most, most)


@pytest.mark.parametrize(
    "changes",
    [
        {"answers": MAX_ANSWERS_PER_BATCH + 1},
        {"answers": 2**63 - 1},
        {"answers": 2**53, "latency_ms": [[0, 2**53]]},
        {"latency_ms": [[0, MAX_ANSWERS_PER_BATCH + 1]]},
        {"latency_ms": [[0, 1], [1, 2]]},
        {"degraded": 3},
        {"gauges": [1]},
        {"gauges": {"threads": -1}},
        {"gauges": {"threads": 1.5}},
        {"gauges": {"weight_bytes": 2**53}},
        {"gauges": {"huge_weight_bytes": True}},
        {"degraded_by": ["oom"]},
        {"degraded_by": {"oom": 3}},
        {"degraded_by": {"oom": -1}},
        {"degraded_by": {"Oom": 1}},
        {"degraded_by": {"": 1}},
        {"degraded_by": {f"reason_{at}": 0 for at in range(33)}},
        {"seq": 2**31},
        {"boot_id": "bootäöüß"},
        {"boot_id": "boot\u0663\u0664\u0665\u0666"},
    ],
)
def test_it_refuses_more_than_a_batch_can_hold(changes) -> None:
    with pytest.raises(ContractError):
        parse_batch(document(**changes))


def test_it_keeps_the_gauges_that_it_knows_and_may_do_without() -> None:
    given = {"threads": 2, "huge_weight_bytes": 0, "battery_of_tomorrow": {"volts": 3.7}}
    assert parse_batch(document(gauges=given)).gauges == {"threads": 2, "huge_weight_bytes": 0}
    without = json.loads(document())
    del without["gauges"]
    assert parse_batch(json.dumps(without).encode()).gauges == {}


def test_it_counts_degraded_answers_by_reason_and_may_do_without() -> None:
    given = {"oom": 1, "reason_of_tomorrow": 2}
    assert parse_batch(document(degraded=2, degraded_by=given)).degraded_by == given
    without = json.loads(document())
    del without["degraded_by"]
    assert parse_batch(json.dumps(without).encode()).degraded_by == {}


def test_it_reads_stored_sums_that_no_batch_may_hold() -> None:
    row = [[MIN_INDEX, 1], [0, 2**53], [5, 2**80], [MAX_INDEX, 7]]
    with pytest.raises(ContractError):
        sketch_from_json(row)
    sketch = sketch_from_row(row)
    assert sketch.buckets == {MIN_INDEX: 1, 0: MAX_SUM, 5: MAX_SUM, MAX_INDEX: 7}
    sketch.merge(sketch)
    assert sketch.buckets == {MIN_INDEX: 2, 0: MAX_SUM, 5: MAX_SUM, MAX_INDEX: 14}
    assert sketch_from_row(sketch.to_json()) == sketch


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=12,
)


@given(_JSON)
def test_it_reads_any_stored_value(value) -> None:
    sketch = sketch_from_row(value)
    assert all(MIN_INDEX <= index <= MAX_INDEX for index in sketch.buckets)
    assert sketch.quantile(0.95) is None or sketch.count > 0


@given(*[st.integers(0, MAX_SUM)] * 3)
def test_it_adds_in_any_order(a, b, c) -> None:
    assert saturating_sum(saturating_sum(a, b), c) == saturating_sum(a, saturating_sum(c, b))
