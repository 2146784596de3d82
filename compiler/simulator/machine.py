"""Run a module's programs over numpy, with a key/value cache: a stand-in for the native plan."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from compiler.contract.expert_pages import is_scheduled
from compiler.contract.native_errors import NativeError, TooManyTokensError
from compiler.contract.pager import Pager
from compiler.contract.session import Buffer as Bytes
from compiler.contract.steering import (
    Counts,
    Residency,
    Steering,
    SteeringError,
    steered_experts,
)
from compiler.kernels.program import (
    ABSENT,
    Buffer,
    Call,
    KvKind,
    Module,
    Program,
    call_params,
    validate_module,
)
from compiler.quant.w4 import PackedW4
from compiler.simulator.numerics import Bits, Exact, Numerics
from compiler.simulator.operations import OPERATIONS
from compiler.simulator.pages import Pages
from compiler.simulator.steering import Steers
from compiler.simulator.step import Cache, Step

Array = NDArray[Any]
Mode = Literal["bits", "f64"]

_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "f32": np.dtype("<f4"),
    "i32": np.dtype("<i4"),
    "u8": np.dtype("u1"),
}


class Observer(Protocol):
    """Sees what a simulator computes; must not change any array."""

    def product(self, weight: int, x: Array) -> None:
        """Take the real rows (R, K) that W4 weight number `weight` is multiplied with."""

    def call(
        self,
        program: str,
        call: Call,
        inputs: Sequence[Array | None],
        outputs: Sequence[Array],
        runs: Array | None = None,
    ) -> None:
        """Take operands and results of a finished call.

        Args:
            program: Name of the program that runs.
            call: What was called.
            inputs: (rows, cols) arrays, None for operands that are absent.
            outputs: (rows, cols) arrays.
            runs: (R,) which run each row belongs to, later runs of a session counted higher; None
                if all belong to the one that goes on.
        """

    def ran(self) -> None:
        """Take note that a program finished."""


class Simulator:
    """The reference interpreter.

    Mode `bits` gives, byte for byte, what the native plan gives. Mode `f64` computes the same
    programs in double precision on the original weights, for comparison with other runtimes.

    Attributes:
        reached: Sections of the experts that ran so far.
    """

    def __init__(
        self,
        module: Module,
        packed: Mapping[int, PackedW4] | None = None,
        mode: Mode = "bits",
        observer: Observer | None = None,
    ) -> None:
        """Prepare a module.

        Args:
            module: A valid module.
            packed: Packed form of every W4 weight, by id; only mode `bits` needs it.
            mode: Which arithmetic.
            observer: Sees every W4 product and every call.

        Raises:
            ProgramError: The module is invalid.
        """
        validate_module(module)
        self._module = module
        product = None if observer is None else observer.product
        self._numerics: Numerics = (
            Bits(module.weights, dict(packed or {}), product)
            if mode == "bits"
            else Exact(module.weights, product)
        )
        self._observer = observer
        self._programs = {program.name: program for program in module.programs}
        self._params = {
            program.name: [call_params(call) for call in program.calls]
            for program in module.programs
        }
        self._constants = [
            None
            if weight.kind in ("w4", "w8")
            else np.atleast_2d(
                weight.array.astype(np.int32 if weight.kind == "i32" else self._numerics.dtype)
            )
            for weight in module.weights
        ]
        self._cache = self._new_cache()
        self._ran: set[int] = set()
        self._checks: Counter[tuple[str, int, bool]] = Counter()
        self._pages = Pages()
        self._steers = Steers()
        rows = [np.atleast_2d(weight.array).shape[0] for weight in module.weights]
        self._mixes = {
            program.name: steered_experts(program.calls, rows) for program in module.programs
        }

    def set_pager(self, pager: Pager) -> None:
        """Have `pager` told what a native plan tells it."""
        self._pages.pager = pager

    def set_steering(self, steering: Steering | None, residency: Residency | None = None) -> None:
        """Have the next runs follow a steering record, None for none.

        Args:
            steering: As `compiler.contract.native_steering.SteeringSeat.publish` takes it.
            residency: Which experts are in memory; None = all. Read while programs run.

        Raises:
            SteeringError: It does not fit the module.
        """
        weights = len(self._module.weights)
        if steering is not None:
            steering.check(weights)
        if residency is not None and len(residency) != weights:
            raise SteeringError(f"a residency table of {len(residency)} for {weights} weights")
        self._steers.record, self._steers.residency = steering, residency

    @property
    def steering_counts(self) -> Counts:
        """What steering did so far."""
        return self._steers.counts

    @property
    def reached(self) -> frozenset[str]:
        """Sections of the experts that ran so far."""
        return frozenset(self._module.weights[weight].section for weight in self._ran)

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return 0 if self._cache is None else self._cache.length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on, and what steered routers remember.

        Raises:
            NativeError: The cache holds fewer rows, or rows that it needs are overwritten.
        """
        if not 0 <= length <= self.kv_length:
            raise NativeError(f"cannot set the cache to {length} rows")
        if self._cache is not None:
            self._cache.truncate(length)
        self._steers.spreads.clear()

    def run(self, program: str, inputs: Mapping[str, Bytes]) -> Mapping[str, memoryview]:
        """Run one program on raw little-endian rows by role, like the native plan.

        Raises:
            NativeError: As `compiler.contract.native.NativePlan.run`.
        """
        chosen = self._program(program, inputs)
        return self._raw(chosen, self._run(chosen, self._arrays(chosen, inputs)))

    def run_arrays(self, program: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one program on (rows, cols) arrays by role; results in the mode's precision.

        Raises:
            NativeError: As `compiler.contract.native.NativePlan.run`.
        """
        chosen = self._program(program, inputs)
        values = self._run(chosen, inputs)
        return {role: values[at] for role, at in chosen.outputs.items()}

    def _run(self, program: Program, inputs: Mapping[str, Array]) -> dict[int, Array]:
        values, appended = self._begin(program, inputs)
        with np.errstate(all="ignore"):
            for at, call in enumerate(program.calls):
                self._execute((program.name, at), call, values)
                if self._observer is not None:
                    self._show(program.name, call, values, None)
        if self._observer is not None:
            self._observer.ran()
        if self._cache is not None:
            self._cache.length += appended
        return values

    def _begin(self, program: Program, inputs: Mapping[str, Array]) -> tuple[dict[int, Array], int]:
        """Return the values that a run starts with, and the cache rows that it appends."""
        values: dict[int, Array] = {}
        tokens = 0
        for role, at in program.inputs.items():
            tokens = self._check_rows(role, self._buffer(at), inputs[role], tokens)
            values[at] = self._received(inputs[role])
        appended = self._appended(program, tokens)
        self._pages.begin(is_scheduled=is_scheduled(program.calls))
        return values, appended

    def _arrays(self, program: Program, inputs: Mapping[str, Bytes]) -> dict[str, Array]:
        return {
            role: np.frombuffer(
                memoryview(inputs[role]).cast("B"), _DTYPES[self._buffer(at).dtype]
            ).reshape(-1, self._buffer(at).cols)
            for role, at in program.inputs.items()
        }

    def _raw(self, program: Program, values: Mapping[int, Array]) -> dict[str, memoryview]:
        return {
            role: memoryview(values[at].astype(_DTYPES[self._buffer(at).dtype]).tobytes())
            for role, at in program.outputs.items()
        }

    def _received(self, array: Array) -> Array:
        is_float = np.issubdtype(array.dtype, np.floating)
        return array.astype(self._numerics.dtype) if is_float else array

    def check_counts(self, program: str) -> dict[int, tuple[int, int]]:
        """Return, by call with a run-time check, how often it held and how often it did not.

        What `compiler.contract.native.NativePlan.check_counts` returns after the same runs, in mode
        `bits`.

        Raises:
            NativeError: There is no such program.
        """
        if program not in self._programs:
            raise NativeError(f"there is no program {program!r}")
        return {
            at: (self._checks[program, at, True], self._checks[program, at, False])
            for at, params in enumerate(self._params[program])
            if params.get("check")
        }

    def _execute(self, place: tuple[str, int], call: Call, values: dict[int, Array]) -> None:
        program, number = place
        step = Step(
            self._numerics,
            tuple(None if at == ABSENT else values[at] for at in call.inputs),
            tuple(None if at == ABSENT else self._constants[at] for at in call.weights),
            call.weights,
            self._params[program][number],
            self._cache,
            tuple(self._buffer(at).rows * self._buffer(at).cols for at in call.outputs),
            self._ran,
            self._pages,
            lambda held: self._checks.update([(program, number, held)]),
            self._steers,
            self._mixes[program].get(number),
        )
        for at, result in zip(call.outputs, OPERATIONS[call.op](step), strict=True):
            buffer = self._buffer(at)
            values[at] = result.reshape(-1, buffer.cols)

    def _show(
        self, program: str, call: Call, values: Mapping[int, Array], runs: Array | None
    ) -> None:
        assert self._observer is not None
        inputs = [None if at == ABSENT else values[at] for at in call.inputs]
        self._observer.call(program, call, inputs, [values[at] for at in call.outputs], runs)

    def _program(self, name: str, inputs: Mapping[str, object]) -> Program:
        if name not in self._programs:
            raise NativeError(f"there is no program {name!r}")
        program = self._programs[name]
        if inputs.keys() != program.inputs.keys():
            raise NativeError(f"inputs must be {sorted(program.inputs)}, not {sorted(inputs)}")
        return program

    def _buffer(self, at: int) -> Buffer:
        return self._module.buffers[at]

    def _check_rows(self, role: str, buffer: Buffer, array: Array, tokens: int) -> int:
        rows = len(array)
        if array.shape != (rows, buffer.cols) or rows < 1:
            raise NativeError(f"input {role!r} of shape {array.shape} does not fit")
        if not buffer.dynamic:
            if rows != buffer.rows:
                raise NativeError(f"input {role!r} has {rows} rows, not {buffer.rows}")
            return tokens
        if tokens not in (0, rows):
            raise NativeError(f"input {role!r} of {rows} rows does not fit the others")
        if rows > self._module.max_tokens:
            raise TooManyTokensError(f"{rows} tokens, at most {self._module.max_tokens}")
        return rows

    def _appended(self, program: Program, tokens: int) -> int:
        """Return the cache rows this run appends, after checking that there is room."""
        rows = 0
        for call, params in zip(program.calls, self._params[program.name], strict=True):
            if params.get("kv_layer", -1) >= 0:
                keys = self._buffer(call.inputs[0])
                rows = tokens if keys.dynamic else keys.rows
        if self._cache is not None:
            self._cache.reserve(rows)
        return rows

    def _new_cache(self) -> Cache | None:
        kv = self._module.kv
        if kv is None:
            return None
        shape = (kv.layers, kv.capacity, kv.heads * kv.head_dim)
        dtype = self._numerics.dtype
        cached = [
            params
            for program in self._params.values()
            for params in program
            if params.get("kv_layer", -1) >= 0
        ]
        window, sink = (max((int(p[n]) for p in cached), default=0) for n in ("window", "sink"))
        cache = Cache(np.zeros(shape, dtype), np.zeros(shape, dtype), window=window, sink=sink)
        if kv.kind is KvKind.I8 and dtype is np.float32:
            steps = (kv.layers, kv.capacity, kv.heads)
            cache.key_scales, cache.value_scales = np.zeros(steps, dtype), np.zeros(steps, dtype)
        return cache
