"""Which linear layers look for zeros at run time, by what calibration saw.

    CalibrationRecord -> `check` of LINEAR calls, rows of the report

Called by the driver between recording and quantisation. The pass `check-zeros` gave a check to
every product over a masked operand; here it goes where it hardly ever held, and comes where
calibration saw zeros that no mask explains. A check never changes a bit, so a wrong guess costs
time only. The live groups of a call are those of all its rows together, which single rows do not
tell.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.analysis.checks import checked_groups
from compiler.contract.operations import Op
from compiler.contract.tiles import GROUP
from compiler.kernels.program import DENSE, Call, Module, Program, call_params
from compiler.quant.record import CalibrationRecord

LIKELY_RATIO: Final = 0.25
"""Share of calibration rows for which a claim must hold to be looked at in every run."""


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A LINEAR call that checks, or that no longer does.

    Attributes:
        most: Live groups of the claim, of `groups`; 0 if the check was dropped.
        held_ratio: Share of the calibration rows for which it holds; None without calibration.
        why: On what grounds the claim is likely, or not.
    """

    program: str
    call: int
    most: int
    groups: int
    held_ratio: float | None
    why: str


def learn_checks(
    module: Module, record: CalibrationRecord | None
) -> tuple[Module, tuple[CheckedCall, ...]]:
    """Return the module with the checks that are worth it, and a row for each considered."""
    rows: list[CheckedCall] = []
    programs = []
    for program in module.programs:
        calls = tuple(
            _learnt(module, program, at, call, record, rows)
            for at, call in enumerate(program.calls)
        )
        programs.append(replace(program, calls=calls))
    return replace(module, programs=tuple(programs)), tuple(rows)


def _learnt(
    module: Module,
    program: Program,
    at: int,
    call: Call,
    record: CalibrationRecord | None,
    rows: list[CheckedCall],
) -> Call:
    if call.op is not Op.LINEAR or module.weights[call.weights[0]].layout != DENSE:
        return call
    cols = module.weights[call.weights[0]].array.shape[1]
    most, has_mask = checked_groups(cols), bool(call_params(call)["check"])
    sample = record.sample(call.weights[0]) if record is not None else None
    if not most or not (has_mask or sample is not None):
        return call
    groups = -(-cols // GROUP)
    if sample is None:
        why = "a mask is proved for its operand, not how much it leaves"
        rows.append(CheckedCall(program.name, at, most, groups, None, why))
        return call
    held = float((_live_groups(sample.rows) <= most).mean())
    if held < LIKELY_RATIO:
        if has_mask:
            why = "dropped: calibration seldom saw so few live groups"
            rows.append(CheckedCall(program.name, at, 0, groups, round(held, 4), why))
        return replace(call, params={**call.params, "check": 0})
    why = "calibration" + (" and a proved mask" if has_mask else "")
    rows.append(CheckedCall(program.name, at, most, groups, round(held, 4), why))
    return replace(call, params={**call.params, "check": most})


def _live_groups(rows: NDArray[np.int8]) -> NDArray[Any]:
    """Return how many groups of 32 columns of each row (R, K) hold anything but zeros."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // GROUP) * GROUP), np.int8)
    padded[:, : rows.shape[1]] = rows
    found: NDArray[Any] = padded.reshape(len(rows), -1, GROUP).any(axis=2).sum(axis=1)
    return found
