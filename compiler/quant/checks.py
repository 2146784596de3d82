"""Which linear layers look for zeros at run time, by what calibration saw.

    CalibrationRecord -> `check` of LINEAR calls, rows of the report

Called by the driver between recording and quantisation. The pass `check-zeros` gave a check to
every product over a masked operand; here it goes where it hardly ever held, and comes where
calibration saw zeros that no mask explains. A check never changes a bit, so a wrong guess costs
time only. The live groups of a call are those of all its rows together, so calibration counts them
run by run (`compiler.quant.live_groups`); a kind of run that it never made is judged by the rows
that it saw.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from compiler.analysis.checks import checked_groups
from compiler.contract.tiles import GROUP
from compiler.kernels.program import DENSE, Call, Module, Program, call_params
from compiler.quant.live_groups import Key, LiveGroups, by_key, key_of, live_groups
from compiler.quant.record import CalibrationRecord

LIKELY_RATIO: Final = 0.25
"""Share of calibration runs for which a claim must hold to be looked at in every run."""


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A LINEAR call that checks, or that no longer does.

    Attributes:
        most: Live groups of the claim, of `groups`; 0 if the check was dropped.
        held_ratio: Share of the calibration runs for which it holds; None without calibration.
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
    counted = by_key(record.live) if record is not None else {}
    programs = []
    for program in module.programs:
        calls = tuple(
            _learnt(module, (program, at, call), record, counted, rows)
            for at, call in enumerate(program.calls)
        )
        programs.append(replace(program, calls=calls))
    return replace(module, programs=tuple(programs)), tuple(rows)


def _learnt(
    module: Module,
    place: tuple[Program, int, Call],
    record: CalibrationRecord | None,
    counted: Mapping[Key, LiveGroups],
    rows: list[CheckedCall],
) -> Call:
    program, at, call = place
    key = key_of(module, call)
    if key is None or module.weights[key[0]].layout != DENSE:
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
    if key in counted:
        held = counted[key].held_ratio(most)
    else:
        held = float((live_groups(sample.rows).sum(axis=1) <= most).mean())
    if held < LIKELY_RATIO:
        if has_mask:
            why = "dropped: calibration seldom saw so few live groups"
            rows.append(CheckedCall(program.name, at, 0, groups, round(held, 4), why))
        return replace(call, params={**call.params, "check": 0})
    why = "calibration" + (" and a proved mask" if has_mask else "")
    rows.append(CheckedCall(program.name, at, most, groups, round(held, 4), why))
    return replace(call, params={**call.params, "check": most})
