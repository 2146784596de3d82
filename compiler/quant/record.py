"""What a calibration run saw: inputs of W4 products, zeros in them, and what routers chose.

The driver runs calibration cards through the simulator in f64 with a `Recorder` as its observer;
`Recorder.finish` gives a `CalibrationRecord`, which grid search, router search and statistics read.
The same cards give the same record, byte for byte. Memory is bounded by the named limits: rows
beyond a limit are thinned to every second, fourth, ... row, in order.

Weights that read the same buffers (query, key and value; a stack's gate and up) share one sample.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import NormKind, Op
from compiler.contract.pipeline import PREFILL, SEE
from compiler.errors import UNREADABLE
from compiler.kernels.program import ABSENT, Call, Module, Program, call_params
from compiler.quant.live_groups import LiveCounter, LiveGroups, quantised
from compiler.quant.w4 import QuantError

SAMPLE_BYTES: Final = 64 * 1024
"""Bytes of int8 rows kept per distinct input; its rows are also at most `MAX_ROWS`."""
MAX_ROWS: Final = 256
MIN_ROWS: Final = 32
MAX_ROUTER_ROWS: Final = 4096
MAX_ROUTER_BYTES: Final = 4 * 1024 * 1024
_PICTURES: Final = (SEE, PREFILL)
_EXPERT_OPS: Final = (Op.EXPERTS, Op.MOE_LAYER)

Floats = NDArray[np.float32]
Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class InputSample:
    """What one or more W4 weights were multiplied with.

    Attributes:
        rows: (R, K) i8 activations as the device quantises them.
        scales: (R,) f32, one per row.
        seen: Rows that passed, of which `rows` is a sample.
        zeros: (K,) i64, how many of the rows seen were exactly zero, per channel.
        energy: (K,) f64, mean square per channel over the rows seen.
    """

    rows: NDArray[np.int8]
    scales: Floats
    seen: int
    zeros: NDArray[np.int64]
    energy: NDArray[np.float64]

    @property
    def zero_ratio(self) -> NDArray[np.float64]:
        """(K,) share of zeros per channel; 0 if nothing was seen."""
        return self.zeros / max(1, self.seen)

    def values(self) -> NDArray[np.float64]:
        """Return the rows as (R, K) f64 real values."""
        return self.rows.astype(np.float64) * self.scales.astype(np.float64)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class RouterSample:
    """What one router saw and chose, row by row, in order.

    Attributes:
        layer: Number of the expert layer, as in `expert.L<layer>.E<expert>`.
        weight: Weight id of the router matrix (E, D).
        bias: Weight id of its bias, or `ABSENT`.
        inputs: (R, D) f32.
        index: (R, k) u16, experts chosen, best first.
        run: (R,) i32, number of the program run that a row belongs to.
        vision: (R,) bool, whether that program sees a picture.
        by_logits: Whether the k greatest logits are chosen, without corrections or groups.
    """

    layer: int
    weight: int
    bias: int
    inputs: Floats
    index: NDArray[np.uint16]
    run: NDArray[np.int32]
    vision: NDArray[np.bool_]
    by_logits: bool


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """Everything a calibration run left behind.

    Attributes:
        source_of: Number of the input sample, by id of the W4 weight that reads it.
        samples: Input samples by number; one without rows was never reached.
        routers: One per expert layer, by layer.
        live: What runs of checkable calls left alive, by weight and rows.
        answers: How probable the right answers were, millionths of a nat, in the order in which
            they were asked for; empty if the model gives no logits.
    """

    source_of: Mapping[int, int]
    samples: tuple[InputSample, ...]
    routers: tuple[RouterSample, ...]
    live: tuple[LiveGroups, ...] = ()
    answers: tuple[int, ...] = ()

    def sample(self, weight: int) -> InputSample | None:
        """Return what a weight was multiplied with, or None if nothing is known."""
        number = self.source_of.get(weight)
        if number is None or not self.samples[number].seen:
            return None
        return self.samples[number]

    def to_bytes(self) -> bytes:
        """Return the record as one archive; `from_bytes` reads it."""
        arrays: dict[str, Array] = {
            "source_of": np.array(sorted(self.source_of.items()), np.int64).reshape(-1, 2),
            "answers": np.array(self.answers, np.int64),
        }
        for at, sample in enumerate(self.samples):
            for name in _SAMPLE_FIELDS:
                arrays[f"sample.{at}.{name}"] = np.asarray(getattr(sample, name))
        for at, router in enumerate(self.routers):
            for name in _ROUTER_FIELDS:
                arrays[f"router.{at}.{name}"] = np.asarray(getattr(router, name))
        for at, live in enumerate(self.live):
            for name in _LIVE_FIELDS:
                arrays[f"live.{at}.{name}"] = np.asarray(getattr(live, name))
        data = io.BytesIO()
        np.savez(data, allow_pickle=False, **arrays)
        return data.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "CalibrationRecord":
        """Return what `to_bytes` wrote.

        Raises:
            QuantError: The bytes are no record.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            pairs = arrays["source_of"].tolist()
            return cls(
                source_of={int(weight): int(number) for weight, number in pairs},
                samples=tuple(_sample(fields) for fields in _numbered(arrays, "sample")),
                routers=tuple(_router(fields) for fields in _numbered(arrays, "router")),
                live=tuple(_live(fields) for fields in _numbered(arrays, "live")),
                answers=tuple(int(score) for score in arrays["answers"]),
            )
        except (OSError, *UNREADABLE) as error:
            raise QuantError(f"not a calibration record: {error}") from error


_SAMPLE_FIELDS: Final = ("rows", "scales", "seen", "zeros", "energy")
_LIVE_FIELDS: Final = ("weight", "rows", "runs")
_ROUTER_FIELDS: Final = ("layer", "weight", "bias", "inputs", "index", "run", "vision", "by_logits")


def _numbered(arrays: Mapping[str, Array], kind: str) -> list[dict[str, Array]]:
    found: dict[int, dict[str, Array]] = {}
    for name, array in arrays.items():
        parts = name.split(".")
        if parts[0] == kind:
            found.setdefault(int(parts[1]), {})[parts[2]] = array
    return [found[at] for at in sorted(found)]


def _sample(fields: Mapping[str, Array]) -> InputSample:
    values: dict[str, Any] = {**fields, "seen": int(fields["seen"])}
    return InputSample(**values)


def _live(fields: Mapping[str, Array]) -> LiveGroups:
    return LiveGroups(int(fields["weight"]), int(fields["rows"]), fields["runs"])


def _router(fields: Mapping[str, Array]) -> RouterSample:
    numbers = {name: int(fields[name]) for name in ("layer", "weight", "bias")}
    values: dict[str, Any] = {**fields, **numbers, "by_logits": bool(fields["by_logits"])}
    return RouterSample(**values)


class _Thinned:
    """Rows in order, at most `most`: every `stride`-th of those that passed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._stride = 1
        self._next = 0
        self._rows: list[tuple[Array, ...]] = []
        self._held = 0

    def add(self, *columns: Array) -> None:
        """Take rows, given as arrays of one length."""
        count = len(columns[0])
        chosen = slice(self._next, None, self._stride)
        taken = len(range(count)[chosen])
        self._next = self._next + taken * self._stride - count
        if taken:
            self._rows.append(tuple(np.array(column[chosen]) for column in columns))
            self._held += taken
        while self._held > self._most:
            self._halve()

    def columns(self) -> tuple[Array, ...]:
        """Return all rows kept, joined; empty if none passed."""
        return tuple(np.concatenate(parts) for parts in zip(*self._rows, strict=True))

    def _halve(self) -> None:
        joined = self.columns()
        self._rows = [tuple(column[::2].copy() for column in joined)]
        if self._held % 2:
            self._next += self._stride
        self._stride *= 2
        self._held = len(self._rows[0][0])


class _Inputs:
    """Collects one `InputSample`."""

    def __init__(self, width: int) -> None:
        self._kept = _Thinned(min(MAX_ROWS, max(MIN_ROWS, SAMPLE_BYTES // width)))
        self._seen = 0
        self._zeros = np.zeros(width, np.int64)
        self._squares = np.zeros(width)

    def add(self, x: Array) -> None:
        self._kept.add(x)
        self._seen += len(x)
        self._zeros += (x == 0).sum(axis=0)
        self._squares += np.square(x, dtype=np.float64).sum(axis=0)

    def finish(self) -> InputSample:
        columns = self._kept.columns()
        x = columns[0] if columns else np.zeros((0, len(self._zeros)))
        rows, scales = quantised(x)
        return InputSample(
            rows=rows,
            scales=scales,
            seen=self._seen,
            zeros=self._zeros,
            energy=self._squares / max(1, self._seen),
        )


@dataclass(frozen=True, slots=True)
class _Route:
    """How to read one router out of a call.

    Attributes:
        layer: Number of the expert layer.
        weights: Router matrix and bias (or `ABSENT`).
        output: Which result holds the experts chosen.
        norm: What is normalised in front of the router, if the call does that.
    """

    layer: int
    weights: tuple[int, int]
    output: int
    by_logits: bool
    norm: "_Norm | None" = None


@dataclass(frozen=True, slots=True)
class _Norm:
    kind: int
    eps: float
    gamma: Array
    beta: Array | None

    def of(self, x: Array) -> Array:
        """Return the norm of rows (R, D)."""
        if self.kind == NormKind.LAYER:
            x = x - x.mean(axis=1, keepdims=True)
        y = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + self.eps) * self.gamma
        return np.asarray(y if self.beta is None else y + self.beta)


class Recorder:
    """An observer of the simulator: feed it runs, then `finish`."""

    def __init__(self, module: Module) -> None:
        """Prepare for the W4 products and routers of a module."""
        self._source_of = _sources(module)
        widths = {
            number: module.weights[weight].array.shape[1]
            for weight, number in self._source_of.items()
        }
        self._inputs = [_Inputs(widths[number]) for number in sorted(widths)]
        self._first = {number: weight for weight, number in reversed(self._source_of.items())}
        self._places = {
            id(call): route
            for program in module.programs
            for call, route in _routes(module, program)
        }
        self._routes: dict[int, tuple[_Route, _Thinned]] = {}
        self._live = LiveCounter(module)
        self._multiplied: tuple[int, Array] | None = None
        self._run = 0
        self._is_paused = False

    def product(self, weight: int, x: Array) -> None:
        """Note the real-valued rows (R, K) that W4 weight number `weight` is multiplied with."""
        if self._is_paused:
            return
        self._multiplied = weight, x
        number = self._source_of.get(weight)
        if number is not None and self._first[number] == weight:
            self._inputs[number].add(x)

    def call(
        self,
        program: str,
        call: Call,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array],
        runs: Array | None = None,
    ) -> None:
        """Note a finished call; its product, if it is one, was noted just before."""
        if self._is_paused:
            return
        if self._multiplied is not None and self._multiplied[0] in call.weights[:1]:
            self._live.add(call, self._multiplied[1], runs)
        self._multiplied = None
        route = self._places.get(id(call))
        if route is None or inputs[0] is None:
            return
        x = inputs[0] if route.norm is None else route.norm.of(inputs[0])
        most = min(MAX_ROUTER_ROWS, MAX_ROUTER_BYTES // (4 * x.shape[1]))
        _, kept = self._routes.setdefault(route.layer, (route, _Thinned(max(MIN_ROWS, most))))
        kept.add(
            x.astype(np.float32),
            outputs[route.output].astype(np.uint16),
            np.full(len(x), self._run, np.int64) if runs is None else runs,
            np.full(len(x), program in _PICTURES, np.bool_),
        )

    def ran(self) -> None:
        """Note the end of a program's run."""
        self._run += not self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing meanwhile."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def finish(self) -> CalibrationRecord:
        """Return what was seen."""
        kept = [(route, rows.columns()) for _, (route, rows) in sorted(self._routes.items())]
        numbers = [columns[2] for _, columns in kept]
        runs = np.unique(np.concatenate(numbers)) if numbers else np.zeros(0, np.int64)
        return CalibrationRecord(
            source_of=self._source_of,
            samples=tuple(inputs.finish() for inputs in self._inputs),
            routers=tuple(_router_sample(*one, runs) for one in kept),
            live=self._live.finish(),
        )


def _router_sample(route: _Route, columns: tuple[Array, ...], runs: Array) -> RouterSample:
    """Return rows in order of their runs, which are numbered by their places in `runs`."""
    order = np.argsort(columns[2], kind="stable")
    inputs, index, run, vision = (column[order] for column in columns)
    numbers = np.searchsorted(runs, run).astype(np.int32)
    weight, bias = route.weights
    return RouterSample(
        route.layer, weight, bias, inputs, index, numbers, vision, by_logits=route.by_logits
    )


def _sources(module: Module) -> dict[int, int]:
    """Return, by W4 weight, the number of the set of buffers that it is multiplied with.

    A buffer that is normalised on the way counts with its norm. Both matrices of an expert have
    inputs of their own: rows are routed, and hidden rows have no buffer.
    """
    read: dict[int, set[tuple[int, ...]]] = {}
    for program in module.programs:
        for call in program.calls:
            for weight in call.weights:
                if weight == ABSENT or module.weights[weight].kind != "w4":
                    continue
                own = call.op in _EXPERT_OPS
                place = (ABSENT, weight) if own else (call.inputs[0], *call.weights[2:])
                read.setdefault(weight, set()).add(place)
    numbers: dict[frozenset[tuple[int, ...]], int] = {}
    return {
        weight: numbers.setdefault(frozenset(places), len(numbers))
        for weight, places in sorted(read.items())
    }


def _routes(module: Module, program: Program) -> list[tuple[Call, _Route]]:
    """Return the routers of a program that serve an expert layer."""
    experts = {
        call.inputs[1]: _layer(module, call.weights)
        for call in program.calls
        if call.op is Op.EXPERTS
    }
    found = []
    for call in program.calls:
        if call.op is Op.ROUTE and call.outputs[0] in experts:
            weight, bias, correction = (*call.weights, ABSENT, ABSENT)[:3]
            plain = correction == ABSENT and not call_params(call)["groups"]
            layer = experts[call.outputs[0]]
            found.append((call, _Route(layer, (weight, bias), 0, plain)))
        elif call.op is Op.MOE_LAYER:
            gamma, beta, weight, bias = call.weights[:4]
            params = call_params(call)
            norm = _Norm(
                int(params["kind"]),
                float(np.float32(params["eps"])),
                module.weights[gamma].array.reshape(1, -1),
                None if beta == ABSENT else module.weights[beta].array.reshape(1, -1),
            )
            layer = _layer(module, call.weights[4:])
            found.append((call, _Route(layer, (weight, bias), 1, True, norm)))
    return found


def _layer(module: Module, weights: Sequence[int]) -> int:
    """Return the layer of experts in sections `expert.L<layer>.E<expert>`."""
    section = module.weights[weights[0]].section
    return int(section.split(".")[1].removeprefix("L"))
