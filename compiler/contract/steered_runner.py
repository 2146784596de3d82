"""A plan runner that tells routers what the rows of a run are made of.

    rows of pictures and of text -> modality, smoothed -> the next run's record

`see` and `prefill` route rows of a picture, every other program rows of text. The modality moves by
the rows seen, so that it does not jump where a picture ends, and is told in steps of an eighth:
between them a record stays published. Used by the agent and by the compiler's trial alike.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from compiler.contract.native_steering import SteeringSeat
from compiler.contract.pipeline import PREFILL, SEE
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore
from compiler.contract.steering import Residency, Steering

TEXT: Final = 1.0
PICTURE: Final = -1.0
KEPT_PER_ROW: Final = 0.875
"""Share of the modality that a row of the other kind leaves."""
LEVELS: Final = 8
_PICTURES: Final = (SEE, PREFILL)
_TOKENS: Final = "token_ids"
_ID_BYTES: Final = 4


class SteeredPlan(PlanRunner, Protocol):
    """A plan that can be steered."""

    @property
    def steering(self) -> SteeringSeat:
        """Where its record is swapped."""


def next_modality(before: float, rows: int, *, picture: bool) -> float:
    """Return the modality after `rows` rows of one kind, -1 picture to 1 text; pure."""
    goal = PICTURE if picture else TEXT
    return goal + (before - goal) * KEPT_PER_ROW**rows


class SteeredRunner(RunnerBefore):
    """A runner whose runs follow one steering record, its modality kept up to date."""

    def __init__(self, runner: SteeredPlan, residency: Residency | None = None) -> None:
        """Stand before a plan that follows no record yet.

        Args:
            runner: The plan.
            residency: Which experts are in memory; None = as the plan's expert pool says.
        """
        super().__init__(runner)
        self._seat, self._residency = runner.steering, residency
        self._wanted: Steering | None = None
        self._published: Steering | None = None
        self._modality = TEXT

    @property
    def steering(self) -> Steering | None:
        """The record, but for its modality."""
        return self._wanted

    def follow(self, steering: Steering | None) -> None:
        """Have the next runs follow another record, None for none; between runs.

        Raises:
            SteeringError: It does not fit the plan.
            UnsupportedPlanError: The kernels steer nothing.
        """
        if steering is not None:
            steering.check(self._seat.weights)
        if steering is None and self._published is not None:
            self._seat.clear()
            self._published = None
        self._wanted = steering

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run a program; see `PlanRunner.run`."""
        is_picture = program.partition(".")[0] in _PICTURES
        rows = memoryview(inputs[_TOKENS]).nbytes // _ID_BYTES if _TOKENS in inputs else 1
        if is_picture:
            self._modality = PICTURE
        else:
            self._modality = next_modality(self._modality, rows, picture=False)
        self._publish()
        return self._runner.run(program, inputs)

    def _publish(self) -> None:
        if self._wanted is None:
            return
        modality = round(self._modality * LEVELS) / LEVELS if self._wanted.bias else 0.0
        record = replace(self._wanted, modality=modality)
        if record != self._published:
            self._seat.publish(record, self._residency)
            self._published = record
