"""Several sessions of one module side by side, in f64: their rows go through a product together.

    lane 0: rows  ─┐                       ┌─ rows
    lane 1: rows  ─┼─ one LINEAR, NORM ... ┼─ rows        other operations: lane by lane
    lane 2: rows  ─┘                       └─ rows

What one row of the result depends on is the same row of the operands for every operation in
`ROW_WISE`; the others (attention, convolution, slices of rows) see one lane at a time. Called by
the driver's calibration, which holds dozens of dialogues; the observer sees the products and the
calls that run together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import NativeError
from compiler.contract.operations import Op
from compiler.contract.session import Buffer as Bytes
from compiler.contract.session import Dialogue, Request
from compiler.contract.steering import Residency, Steering
from compiler.kernels.program import ABSENT, Module
from compiler.simulator.machine import Observer, Simulator
from compiler.simulator.step import Cache

Array = NDArray[Any]
Result = TypeVar("Result")

ROW_WISE: Final = frozenset(
    {
        *(Op.EMBED, Op.LINEAR, Op.LINEAR_W8, Op.LINEAR_F32, Op.NORM, Op.ROPE),
        *(
            Op.UNARY,
            Op.SOFTMAX,
            Op.MOE_LAYER,
            Op.ROUTE,
            Op.EXPERTS,
            Op.EXPERT_FORESEE,
            Op.ARGMAX,
            Op.COLS_CONCAT,
            Op.COLS_SLICE,
        ),
    }
)
"""Operations of whose results each row depends on the same row of every operand alone."""
RUNS_PER_LANE: Final = 1 << 20


@dataclass(slots=True)
class Lane:
    """One session.

    Attributes:
        number: Its place among the sessions: runs of a lane come before those of higher ones.
        cache: Its key/value cache, if the module has one.
        runs: How many programs it ran.
    """

    number: int
    cache: Cache | None
    runs: int = 0

    @property
    def kv_length(self) -> int:
        """Rows in the cache."""
        return 0 if self.cache is None else self.cache.length

    def branch(self, number: int) -> "Lane":
        """Return a lane that goes on from here with a cache of its own."""
        return Lane(number, None if self.cache is None else self.cache.copy())


class LaneSimulator(Simulator):
    """Runs a program for several lanes at once; the same mathematics as mode `f64`."""

    def __init__(self, module: Module, observer: Observer | None = None) -> None:
        """Prepare a module.

        Raises:
            ProgramError: The module is invalid.
        """
        super().__init__(module, mode="f64", observer=observer)

    def set_steering(
        self,
        steering: Steering | None,  # noqa: ARG002 - as every simulator takes it
        residency: Residency | None = None,  # noqa: ARG002
    ) -> None:
        """Refuse: rows of several lanes go through a router together.

        Raises:
            NativeError: Always.
        """
        raise NativeError("lanes are not steered")

    @property
    def lane_bytes(self) -> int:
        """Bytes of one lane's cache."""
        return 0 if self._cache is None else self._cache.keys.nbytes + self._cache.values.nbytes

    def new_lane(self, number: int) -> Lane:
        """Return a lane that has seen nothing."""
        return Lane(number, self._new_cache())

    def run_lanes(
        self, program: str, lanes: Sequence[Lane], inputs: Sequence[Mapping[str, Bytes]]
    ) -> list[dict[str, memoryview]]:
        """Run a program once for each lane, on raw rows by role; return its outputs by lane.

        Raises:
            NativeError: As `compiler.contract.native.NativePlan.run`.
        """
        chosen, appended = self._programs[program], []
        values: list[dict[int, Array]] = []
        for lane, given in zip(lanes, inputs, strict=True):
            self._cache = lane.cache
            found, rows = self._begin(self._program(program, given), self._arrays(chosen, given))
            values.append(found)
            appended.append(rows)
        with np.errstate(all="ignore"):
            for at, call in enumerate(chosen.calls):
                if call.op in ROW_WISE:
                    self._together(program, at, lanes, values)
                    continue
                for lane, own in zip(lanes, values, strict=True):
                    self._cache = lane.cache
                    self._execute((program, at), call, own)
        for lane, rows in zip(lanes, appended, strict=True):
            lane.runs += 1
            if lane.cache is not None:
                lane.cache.length += rows
        return [self._raw(chosen, own) for own in values]

    def _together(
        self,
        program: str,
        number: int,
        lanes: Sequence[Lane],
        values: Sequence[dict[int, Array]],
    ) -> None:
        call = self._programs[program].calls[number]
        joined = {
            at: np.concatenate([own[at] for own in values]) for at in call.inputs if at != ABSENT
        }
        counts = [len(own[call.inputs[0]]) for own in values]
        self._execute((program, number), call, joined)
        if self._observer is not None:
            numbers = [lane.number * RUNS_PER_LANE + lane.runs for lane in lanes]
            self._show(program, call, joined, np.repeat(np.array(numbers, np.int64), counts))
        ends = np.cumsum(counts)[:-1]
        for at in call.outputs:
            for own, part in zip(values, np.split(joined[at], ends), strict=True):
                own[at] = part


def hold_together(
    simulator: LaneSimulator, lanes: Sequence[Lane], dialogues: Sequence[Dialogue[Result]]
) -> list[Result]:
    """Hold one dialogue per lane, side by side; return their results in order."""
    results: dict[int, Result] = {}
    requests: dict[int, Request] = {}

    def go_on(at: int, outputs: Mapping[str, Bytes] | None) -> None:
        try:
            dialogue = dialogues[at]
            requests[at] = next(dialogue) if outputs is None else dialogue.send(outputs)
        except StopIteration as end:
            requests.pop(at, None)
            results[at] = end.value

    for at in range(len(dialogues)):
        go_on(at, None)
    while requests:
        program = next(iter(requests.values()))[0]
        places = [at for at, request in requests.items() if request[0] == program]
        chosen, inputs = [lanes[at] for at in places], [requests[at][1] for at in places]
        for at, outputs in zip(places, simulator.run_lanes(program, chosen, inputs), strict=True):
            go_on(at, outputs)
    return [results[at] for at in range(len(dialogues))]
