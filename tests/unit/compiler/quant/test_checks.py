"""Checks by calibration: kept where claims held, dropped where not, added where none was."""

import numpy as np
import pytest

from compiler.kernels.program import Module, Op, call_params
from compiler.quant.checks import learn_checks
from compiler.quant.record import CalibrationRecord, InputSample
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


def test_without_calibration_a_mask_is_reason_enough() -> None:
    for check in (0, MOST):
        found, rows = learn_checks(module(check), None)
        assert call_params(found.programs[0].calls[0])["check"] == check
        assert [(row.most, row.held_ratio) for row in rows] == [(MOST, None)] * bool(check)
