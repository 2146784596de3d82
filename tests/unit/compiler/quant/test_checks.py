"""Checks by calibration: kept where claims held, dropped where not, added where none was."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.kernels.program import Module, Op, call_params
from compiler.quant.checks import learn_checks
from compiler.quant.live_groups import LiveGroups
from compiler.quant.record import CalibrationRecord, InputSample, Recorder
from tests.factories.modules import ModuleBuilder

COLS = 320
GROUPS, MOST = 10, 8


def module(check: int) -> Module:
    b = ModuleBuilder(1, 4)
    weight = b.weight(b.normal(40, COLS), "w4")
    x, y = b.buffer(None, COLS), b.buffer(None, 40)
    b.call(Op.LINEAR, [x], [y], [weight], check=check)
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def record(live: list[int]) -> CalibrationRecord:
    """Return a record of rows with so many live groups each."""
    rows = np.zeros((len(live), COLS), np.int8)
    for at, count in enumerate(live):
        rows[at, : 32 * count : 32] = 5
    scales = np.ones(len(live), np.float32)
    zeros = (rows == 0).sum(axis=0)
    sample = InputSample(rows, scales, len(live), zeros, np.ones(COLS))
    return CalibrationRecord({0: 0}, (sample,), ())


@pytest.mark.parametrize(
    ("check", "live", "expected", "held"),
    [
        (MOST, [1, 2, 8, 9], MOST, 0.75),
        (MOST, [9, 10, 10, 10, 10], 0, 0.0),
        (0, [3, 3, 9, 3], MOST, 0.75),
        (0, [10, 10, 10], 0, None),
    ],
)
def test_a_check_goes_where_calibration_saw_zeros(
    check: int, live: list[int], expected: int, held: float | None
) -> None:
    found, rows = learn_checks(module(check), record(live))
    assert call_params(found.programs[0].calls[0])["check"] == expected
    if held is None:
        assert rows == ()
    else:
        assert [(row.most, row.groups, row.held_ratio) for row in rows] == [
            (expected, GROUPS, held)
        ]
        assert rows[0].why.startswith("calibration" if expected else "dropped")


@pytest.mark.parametrize(("apart", "expected"), [(True, 0), (False, MOST)])
def test_a_run_of_many_rows_is_judged_by_all_of_them_together(apart: bool, expected: int) -> None:
    """Six groups live in each row, in other places or in the same: 10 of 10 in a run, or 6."""
    b = ModuleBuilder(1, 4)
    weight = b.weight(b.normal(40, COLS), "w4")
    x, y = b.buffer(2, COLS), b.buffer(2, 40)
    b.call(Op.LINEAR, [x], [y], [weight], check=MOST)
    b.program("run", {"x": x}, {"y": y})
    recorder = Recorder(b.module())
    (call,) = b.module().programs[0].calls
    rows = np.zeros((4, COLS))
    rows[0::2, : 6 * 32] = 1.0
    rows[1::2, 4 * 32 if apart else 0 : COLS if apart else 6 * 32] = 1.0
    for runs in (None, np.array([7, 7, 3, 3])):  # one run, or two runs held together
        shown = rows[:2] if runs is None else rows
        recorder.product(weight, shown)
        recorder.call("run", call, [shown], [np.zeros((len(shown), 40))], runs)
    found = CalibrationRecord.from_bytes(recorder.finish().to_bytes())
    (live,) = found.live
    assert (live.weight, live.rows) == (weight, 2)
    assert live.runs.tolist() == [3 * (count == (10 if apart else 6)) for count in range(11)]
    checked, (row,) = learn_checks(b.module(), found)
    assert (row.most, row.held_ratio) == (expected, 0.0 if apart else 1.0)
    assert call_params(checked.programs[0].calls[0])["check"] == expected


def test_rows_of_another_kind_of_run_are_not_its_runs() -> None:
    many = LiveGroups(0, 2, np.eye(GROUPS + 1, dtype=np.int64)[10])
    found = replace(record([3, 3]), live=(many,))
    _, (row,) = learn_checks(module(MOST), found)  # its rows are free, nothing counted those
    assert (row.most, row.held_ratio) == (MOST, 1.0)


def test_without_calibration_a_mask_is_reason_enough() -> None:
    for check in (0, MOST):
        found, rows = learn_checks(module(check), None)
        assert call_params(found.programs[0].calls[0])["check"] == check
        assert [(row.most, row.held_ratio) for row in rows] == [(MOST, None)] * bool(check)
