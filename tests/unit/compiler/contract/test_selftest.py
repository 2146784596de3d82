"""Self-test vectors: the format, and the comparison that a device makes before it activates."""

import hashlib
import json
from collections.abc import Mapping

import pytest

from compiler.contract.errors import ContractError
from compiler.contract.selftest import (
    MAX_REPORTED,
    SelfTest,
    SelfTestRun,
    SelfTestVector,
    parse_selftest,
    run_selftest,
)


class AddingPlan:
    """Every output byte is an input byte plus the cache length; `error` is added after run one."""

    def __init__(self, error: int = 0) -> None:
        self.kv_length = 0
        self.error = error
        self.made = 0

    def run(self, program: str, inputs: Mapping[str, bytes]) -> Mapping[str, memoryview]:
        wrong = self.error if self.made else 0
        self.made += 1
        total = self.kv_length + wrong
        self.kv_length += 1
        return {"y": memoryview(bytes((item + total) & 255 for item in inputs["x"]))}


def _run(data: bytes, kv_length: int = 0) -> SelfTestRun:
    expected = hashlib.sha256(bytes((item + kv_length) & 255 for item in data)).hexdigest()
    return SelfTestRun("p", kv_length, {"x": data}, {"y": expected})


SELFTEST = SelfTest(
    (
        SelfTestVector("first", (_run(b"abc"), _run(b"de", 1))),
        SelfTestVector("second", (_run(b"abc"),)),
    ),
    {0: (0, 1), 1: (3,)},
)


def test_it_round_trips_and_stores_equal_inputs_once() -> None:
    data = SELFTEST.to_bytes()
    assert parse_selftest(data) == SELFTEST
    assert json.loads(data)["blobs"] == ["YWJj", "ZGU="]


def test_it_passes_a_plan_that_gives_the_same_bits() -> None:
    plan = AddingPlan()
    report = run_selftest(plan, SELFTEST.to_bytes())
    assert (report.passed, report.vectors, report.runs, report.mismatches) == (True, 2, 3, ())
    assert plan.kv_length == 0


def test_it_names_every_wrong_output() -> None:
    report = run_selftest(AddingPlan(error=1), SELFTEST.to_bytes())
    assert not report.passed
    assert report.failed_vectors == 2
    assert [(item.vector, item.run, item.role) for item in report.mismatches] == [
        ("first", 1, "y"),
        ("second", 0, "y"),
    ]
    assert report.mismatches[0].actual != report.mismatches[0].expected
    assert json.loads(json.dumps(report.to_json()))["failed_vectors"] == 2


def test_it_counts_a_missing_output_as_wrong() -> None:
    run = SelfTestRun("p", 0, {"x": b"a"}, {"z": "0" * 64})
    report = run_selftest(AddingPlan(), SelfTest((SelfTestVector("v", (run,)),), {}).to_bytes())
    assert report.mismatches[0].actual == ""


def test_it_reports_a_bounded_number_of_mismatches() -> None:
    vector = SelfTestVector("v", tuple(_run(b"a") for _ in range(MAX_REPORTED + 9)))
    report = run_selftest(AddingPlan(error=1), SelfTest((vector,), {}).to_bytes())
    assert len(report.mismatches) == MAX_REPORTED


def test_it_does_not_pass_an_empty_selftest() -> None:
    assert not run_selftest(AddingPlan(), SelfTest((), {}).to_bytes()).passed


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "sparsefleet.selftest/2"},
        {"blobs": ["not base64!"]},
        {"blobs": [1]},
        {"blobs": [None]},
        {"blobs": ["YWJj"]},
        {"vectors": {}},
        {"vectors": [{"name": "a"}]},
        {"vectors": [{"name": "", "runs": []}]},
        {"experts": {"L01": [1]}},
        {"experts": {"E1": [1]}},
        {"experts": {"": [1]}},
        {"experts": {"L٣": [1]}},
        {"experts": {"L1": [-1]}},
        {"experts": []},
        {"more": 1},
    ],
)
def test_it_refuses_a_broken_section(change) -> None:
    document = json.loads(SELFTEST.to_bytes()) | change
    with pytest.raises(ContractError):
        parse_selftest(json.dumps(document).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"outputs": {}},
        {"outputs": {"y": "abc"}},
        {"inputs": {"x": 2}},
        {"inputs": {"x": -1}},
        {"inputs": {"x": True}},
        {"kv_length": -1},
        {"program": ""},
        {"extra": 1},
    ],
)
def test_it_refuses_a_broken_run(change) -> None:
    document = json.loads(SELFTEST.to_bytes())
    document["vectors"][0]["runs"][0] |= change
    with pytest.raises(ContractError):
        parse_selftest(json.dumps(document).encode())
