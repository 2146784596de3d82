"""The `bands` section: which variant of `step` a device runs at which routing entropy.

    entropies of the last steps -(next_band)-> band -> program of the plan

A band is a range [low, high) of the mean routing entropy over a step's layers, thousandths of a
nat; bands adjoin from 0 and the last one has no end. Each names a program of the plan: `step`
itself, or a variant that takes fewer experts per token. A variant has the ports of `step` that it
keeps, shares its weights, its cache and its kernels, and only its tape differs. It is in the plan
only because its accuracy on the calibration set stayed within the stated loss; `reason` says what
it loses, or why a band has no variant.

Schema `sparsefleet.bands/1`, canonical JSON, unknown fields refused:

    {"schema", "window", "margin", "questions", "right", "max_loss", "worse", "better",
     "bands": [{"low", "program", "top_k", "share", "worse", "better", "reason"}]}

`right` counts the calibration questions that `step` alone answered as expected; `worse` and
`better` those that stop and start to be answered so with all variants at work, and per band with
that band's variant alone. `max_loss` is a share of the questions, in millionths. Bytes whose own
figures break it are refused: what counts is not the loss seen, but what it stays below with 95 %
confidence, `worse - better + 1.64 sqrt(worse + better)`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import ClassVar, Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fields import require_fields, require_integer, require_list, require_text
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.plan_format import Direction
from compiler.contract.session import Buffer, PlanRunner, RunnerBefore

SCHEMA: Final = "sparsefleet.bands/1"
STEP: Final = "step"
PREFIX: Final = "step.band"
ENTROPY: Final = "entropy"
MAX_BANDS_BYTES: Final = 64 * 1024
MAX_BANDS: Final = 5
LEAST_BANDS: Final = 3
MAX_WINDOW: Final = 64
MAX_ENTROPY: Final = 1 << 20
MAX_TOP_K: Final = 64
MAX_COUNT: Final = 1 << 32
MILLION: Final = 1_000_000
MILLI: Final = 1000.0
_MAX_NAME: Final = 31
_MAX_REASON: Final = 200
_FIELDS: Final = (
    *("schema", "window", "margin", "questions", "right", "max_loss", "worse", "better", "bands"),
)
_BAND_FIELDS: Final = ("low", "program", "top_k", "share", "worse", "better", "reason")
_CONFIDENCE: Final = 1.64
"""Standard deviations of a one-sided bound of 95 %; each changed answer is a fair coin's throw."""


class BandsError(ContractError):
    """Plan and bands of a bundle contradict each other: drop both."""

    code: ClassVar[str] = "contract.bands"


@dataclass(frozen=True, slots=True)
class Band:
    """A range of entropy and what runs in it.

    Attributes:
        low: Where it begins, thousandths of a nat; it ends where the next one begins.
        program: `step`, or the name of a variant.
        top_k: Experts per token.
        share: Share of the calibration steps, per mille.
        worse, better: Calibration questions that this band's variant alone loses and wins.
        reason: What its variant loses, or why it has none; for people.
    """

    low: int
    program: str
    top_k: int
    share: int
    worse: int
    better: int
    reason: str


@dataclass(frozen=True, slots=True)
class Bands:
    """All bands, and how a device moves between them.

    Attributes:
        window: Mean over the last so many steps, fewer at the start.
        margin: A band is left only when the mean is so far outside it, thousandths of a nat.
        questions: Calibration questions asked.
        right: Those that `step` alone answered as expected.
        max_loss: The most accuracy that may be lost, millionths.
        worse, better: Questions lost and won with all variants at work.
    """

    window: int
    margin: int
    questions: int
    right: int
    max_loss: int
    worse: int
    better: int
    bands: tuple[Band, ...]

    @property
    def programs(self) -> tuple[str, ...]:
        """Names of the variants, each once, in order of entropy."""
        return tuple(dict.fromkeys(band.program for band in self.bands if band.program != STEP))

    @property
    def fewest(self) -> str:
        """Name of the program that takes the fewest experts; `step` if none takes fewer."""
        return min(self.bands, key=lambda band: band.top_k).program

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        rows: list[Json] = [
            {name: getattr(band, name) for name in _BAND_FIELDS} for band in self.bands
        ]
        head: dict[str, Json] = {
            name: getattr(self, name) for name in _FIELDS if name not in ("schema", "bands")
        }
        return canonical_bytes({**head, "schema": SCHEMA, "bands": rows})


@dataclass(frozen=True, slots=True)
class BandState:
    """Where a device stands: its band, none before the first step, and the last entropies."""

    band: int | None = None
    recent: tuple[float, ...] = ()


def next_band(bands: Bands, state: BandState, entropy: float) -> BandState:
    """Return the state after a step, with hysteresis; pure.

    The band stays while the mean over the window lies within `margin` of it; else the band that
    holds the mean is taken.

    Args:
        bands: What `parse_bands` returned.
        state: The state before.
        entropy: Mean routing entropy over the layers of the step, nats. One that is no number at
            all counts as the greatest, where most experts are used.
    """
    value = entropy * MILLI if 0.0 <= entropy * MILLI <= MAX_ENTROPY else float(MAX_ENTROPY)
    recent = (*state.recent, value)[-bands.window :]
    mean = sum(recent) / len(recent)
    lows = [band.low for band in bands.bands]
    if state.band is not None:
        end = lows[state.band + 1] if state.band + 1 < len(lows) else float("inf")
        if lows[state.band] - bands.margin <= mean < end + bands.margin:
            return BandState(state.band, recent)
    return BandState(max(at for at, low in enumerate(lows) if low <= mean), recent)


def parse_bands(data: bytes) -> Bands:
    """Parse and check a `bands` section.

    Raises:
        LimitExceededError: Longer than `MAX_BANDS_BYTES`, or a list beyond its limit.
        ContractError: A field is missing, unknown, of the wrong type or out of range; bands do not
            ascend from 0; a band loses more than is allowed; or the bytes are not canonical.
    """
    fields = require_fields(
        parse_object(data, limit_bytes=MAX_BANDS_BYTES), frozenset(_FIELDS), "bands"
    )
    if fields["schema"] != SCHEMA:
        raise ContractError(f"bands schema {fields['schema']!r}, expected {SCHEMA!r}")
    questions = require_integer(fields["questions"], "questions", 1, MAX_COUNT)
    worse, better = _changes(fields, questions)
    bands = Bands(
        window=require_integer(fields["window"], "window", 1, MAX_WINDOW),
        margin=require_integer(fields["margin"], "margin", 0, MAX_ENTROPY),
        questions=questions,
        right=require_integer(fields["right"], "right", 0, questions),
        max_loss=require_integer(fields["max_loss"], "max_loss", 0, MILLION),
        worse=worse,
        better=better,
        bands=tuple(
            _band(item, questions) for item in require_list(fields["bands"], "bands", MAX_BANDS)
        ),
    )
    _check(bands)
    if bands.to_bytes() != data:
        raise ContractError("bands section is not in canonical form")
    return bands


def most_lost(worse: int, better: int) -> float:
    """Return what the questions lost stay below with 95 % confidence."""
    return worse - better + _CONFIDENCE * sqrt(worse + better)


def is_within(worse: int, better: int, questions: int, max_loss: int) -> bool:
    """Return whether at most `max_loss` millionths of the questions are lost, with confidence."""
    return most_lost(worse, better) * MILLION <= max_loss * questions


def verify_bands(plan: Plan, bands: Bands) -> None:
    """Check that every band's program is a variant of `step` in a plan that `parse_plan` accepted.

    Raises:
        BandsError: A program is missing, or takes or gives something else than `step`.
    """
    programs = {program.name: program for program in plan.programs}
    variants = {name for name in programs if name.startswith(PREFIX)}
    if set(bands.programs) != variants or STEP not in programs:
        raise BandsError(f"bands {sorted(bands.programs)}, the plan has {sorted(variants)}")
    step = _ports(plan, programs[STEP])
    for name in (STEP, *bands.programs):
        found = _ports(plan, programs[name])
        inputs = {key for key in step if key[0] is Direction.INPUT}
        if (Direction.OUTPUT, ENTROPY) not in found or (Direction.OUTPUT, "token") not in found:
            raise BandsError(f"program {name!r} gives no entropy or no token")
        if not inputs <= set(found) <= set(step) or any(found[key] != step[key] for key in found):
            raise BandsError(f"program {name!r} takes or gives other rows than {STEP!r}")


def _ports(plan: Plan, program: PlanProgram) -> dict[tuple[Direction, str], object]:
    return {
        (port.direction, port.role): (
            plan.buffers[port.buffer].rows,
            plan.buffers[port.buffer].cols,
            plan.buffers[port.buffer].dtype,
            plan.buffers[port.buffer].dynamic,
        )
        for port in program.ports
    }


def _check(bands: Bands) -> None:
    if not bands.bands or bands.bands[0].low != 0:
        raise ContractError("bands begin at 0, and there is one")
    if any(before.low >= after.low for before, after in pairwise(bands.bands)):
        raise ContractError("bands must ascend")
    for band in bands.bands:
        if band.program == STEP and (band.worse or band.better):
            raise ContractError(f"the band at {band.low} has no variant and other answers")
        if band.program != STEP and not band.program.startswith(PREFIX):
            raise ContractError(f"{band.program!r} is no variant of {STEP!r}")
        if not is_within(band.worse, band.better, bands.questions, bands.max_loss):
            raise ContractError(f"the band at {band.low} loses more than is allowed")
    if not is_within(bands.worse, bands.better, bands.questions, bands.max_loss):
        raise ContractError("the bands together lose more than is allowed")


def _changes(fields: Mapping[str, Json], questions: int) -> tuple[int, int]:
    worse = require_integer(fields["worse"], "worse", 0, questions)
    return worse, require_integer(fields["better"], "better", 0, questions - worse)


def _band(value: Json, questions: int) -> Band:
    fields = require_fields(value, frozenset(_BAND_FIELDS), "band")
    worse, better = _changes(fields, questions)
    return Band(
        low=require_integer(fields["low"], "low", 0, MAX_ENTROPY),
        program=require_text(fields["program"], "program", _MAX_NAME),
        top_k=require_integer(fields["top_k"], "top_k", 1, MAX_TOP_K),
        share=require_integer(fields["share"], "share", 0, 1000),
        worse=worse,
        better=better,
        reason=require_text(fields["reason"], "reason", _MAX_REASON),
    )


class BandedRunner(RunnerBefore):
    """A plan runner whose `step` is the variant of the band that the last steps are in.

    With `fewest`, each step is the variant with the fewest experts, whatever the entropy: for a
    device that must do less. It then may lose more answers than the bands were measured to lose.
    """

    def __init__(self, runner: PlanRunner, bands: Bands) -> None:
        """Start in no band: the first step is `step` itself."""
        super().__init__(runner)
        self._bands = bands
        self.state = BandState()
        self.ran: dict[str, int] = {}
        self.fewest = False

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run a program; see `PlanRunner.run`."""
        if program != STEP:
            return self._runner.run(program, inputs)
        band = self.state.band
        chosen = STEP if band is None else self._bands.bands[band].program
        chosen = self._bands.fewest if self.fewest else chosen
        outputs = self._runner.run(chosen, inputs)
        self.ran[chosen] = self.ran.get(chosen, 0) + 1
        self.state = next_band(self._bands, self.state, mean_entropy(outputs))
        return outputs


def mean_entropy(outputs: Mapping[str, memoryview]) -> float:
    """Return the mean over layers of the `entropy` output of a step, nats."""
    values: Sequence[float] = outputs[ENTROPY].cast("B").cast("f")
    return sum(values) / len(values)
