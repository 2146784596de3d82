"""Reference kernels refuse a geometry that leaves their operands; simulator and OpenCL do too."""

from collections.abc import Callable

import numpy as np
import pytest

from compiler.contract.native_errors import NativeError
from compiler.contract.operations import Op
from compiler.contract.reference import MapKind, pack_geometry, unpack_geometry
from compiler.contract.session import PlanRunner
from compiler.kernels.program import Buffer, Call, Module, Program, Weight
from compiler.kernels.reference import MAPS as C_ROWS
from compiler.simulator.reference_maps import MAPS
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.opencl import load

MOVE = {"x": 0, "x_at": 0, "y_at": 0, "sizes": [3, 4], "x_steps": [4, 1], "y_steps": [4, 1]}
GATHER = {
    "x": 0,
    "index": -1,
    "limit": 3,
    "step": 4,
    "x_at": 0,
    "i_at": 0,
    "sizes": [3, 4],
    "x_steps": [0, 1],
    "i_steps": [1, 0],
}
WHOLE: dict[Op, dict[str, object]] = {Op.REF_MOVE: MOVE, Op.REF_GATHER: GATHER}


def case_of(op: Op, **changes: object) -> Case:
    """Return one call from (3, 4) to (3, 4) f32 whose geometry has some fields changed."""
    row = pack_geometry(op.name, {**WHOLE[op], **changes})  # type: ignore[dict-item]
    buffers = (Buffer(0, 3, False, 4, "f32"), Buffer(1, 3, False, 4, "f32"))
    weights = (
        Weight(0, "i32", np.array([row], np.int32), "weights.shared"),
        Weight(1, "i32", np.array([[2, 0, 1]], np.int32), "weights.shared"),
    )
    call = Call(op, (0,), (1,), (0, 1), {})
    program = Program("forward", (call,), {"tensor": 0}, {"tensor": 1})
    return Case.of(Module((program,), buffers, weights, None, 1))


RUNNERS: dict[str, Callable[[Case], PlanRunner]] = {
    "native": lambda case: case.native(native_targets()[0]),
    "simulator": Case.simulator,
    "opencl": load,
}
EVERY = [
    pytest.param(name, marks=pytest.mark.opencl) if name == "opencl" else name for name in RUNNERS
]


def run(case: Case, runner: str) -> dict[str, bytes]:
    plan = RUNNERS[runner](case)
    return raw(plan.run("forward", {"tensor": np.arange(12, dtype="<f4").tobytes()}))


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("runner", EVERY)
def test_it_computes_the_right_geometry(op: Op, runner: str) -> None:
    case = case_of(op)
    assert run(case, runner) == run(case, "simulator")


@pytest.mark.parametrize("runner", EVERY)
@pytest.mark.parametrize(
    ("op", "changes"),
    [
        (Op.REF_MOVE, {"x_at": 1}),
        (Op.REF_MOVE, {"x_at": -1}),
        (Op.REF_MOVE, {"y_at": 1}),
        (Op.REF_MOVE, {"sizes": [4, 4]}),
        (Op.REF_MOVE, {"sizes": [3, 0]}),
        (Op.REF_MOVE, {"sizes": [3, -4]}),
        (Op.REF_MOVE, {"x_steps": [-4, 1]}),
        (Op.REF_MOVE, {"y_steps": [4, 2**31 - 1]}),
        (Op.REF_MOVE, {"sizes": [2**31 - 1, 2**31 - 1], "x_steps": [0, 0]}),
        (Op.REF_GATHER, {"limit": 4}),
        (Op.REF_GATHER, {"step": 5}),
        (Op.REF_GATHER, {"x_at": 1}),
        (Op.REF_GATHER, {"i_at": 1}),
        (Op.REF_GATHER, {"i_steps": [2, 0]}),
        (Op.REF_GATHER, {"limit": 2}),
    ],
)
def test_it_touches_nothing_outside_its_operands(
    op: Op, changes: dict[str, object], runner: str
) -> None:
    with pytest.raises(NativeError):
        run(case_of(op, **changes), runner)


def test_it_knows_every_function_on_both_sides() -> None:
    assert set(C_ROWS) == set(MAPS) == set(MapKind)


def test_it_reads_back_the_geometry_it_packs() -> None:
    fields = unpack_geometry("REF_MOVE", pack_geometry("REF_MOVE", MOVE))
    assert fields["sizes"] == [1, 1, 1, 1, 1, 1, 3, 4]
    assert fields["x_steps"] == [0, 0, 0, 0, 0, 0, 4, 1]
