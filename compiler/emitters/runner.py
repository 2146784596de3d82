"""Run a target's code where no such device is: a freestanding program under an emulator.

The program holds the same runtime and kernels as the shared library and plays a script: load this
plan, run these programs, print what they answered. It says nothing about speed.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compiler.contract.native_errors import raise_status
from compiler.contract.native_steering import steering_record
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanProgram, parse_plan
from compiler.contract.plan_format import DTYPE_BYTES, Direction, Status, align
from compiler.contract.steering import Residency, Steering
from compiler.emitters.backends import emitter_for
from compiler.emitters.c import CEmitter
from compiler.emitters.interface import EmitterError
from compiler.emitters.toolchain import run_program
from compiler.errors import ToolchainError
from compiler.hardware.targets import Target

MAGIC: Final = int.from_bytes(b"SFRUN002", "little")
KEEP_ALL: Final = 0xFFFFFFFF
_HEAD: Final = struct.Struct("<10Q")
_RUN: Final = struct.Struct("<6IQ")
_COPY: Final = struct.Struct("<3Q")


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """One run of a program.

    Attributes:
        inputs: Raw little-endian rows by role.
        keep: Cache rows to keep before the run; None = all.
    """

    program: str
    inputs: Mapping[str, bytes]
    keep: int | None = None


def build_runner(target: Target, ops: Iterable[Op], cache_dir: Path) -> bytes:
    """Return the emulator program of a target.

    Raises:
        EmitterError: The target's back end makes no programs.
        ToolchainError: The compiler failed.
    """
    emitter = emitter_for(target)
    if not isinstance(emitter, CEmitter):
        raise EmitterError(f"the {emitter.name} back end makes no programs")
    return emitter.build_program(ops, target, cache_dir)


def play(
    runner: bytes,
    emulator: Sequence[str],
    plan_bytes: bytes,
    sections: Mapping[str, bytes],
    runs: Sequence[ScriptRun],
    *,
    threads: int = 1,
    steering: Steering | None = None,
    residency: Residency | None = None,
) -> list[dict[str, bytes]]:
    """Play runs in order and return the outputs of each, by role.

    Args:
        runner: A program of `build_runner`.
        emulator: Command that runs it, for example `("qemu-aarch64",)`; empty = run it directly.
        plan_bytes: A plan.
        sections: Its weight sections.
        runs: What to run.
        threads: Threads of a run, 1 to 64; the bits are the same with any number.
        steering: What its routers are steered by.
        residency: Which experts are in memory; None = all.

    Raises:
        SteeringError: The steering does not fit the plan.
        NativeError: A run ended with an error status.
        ToolchainError: The program could not be started or crashed.
    """
    plan = parse_plan(plan_bytes)
    programs = {program.name: (at, program) for at, program in enumerate(plan.programs)}
    script = _Script(plan, plan_bytes, sections, threads)
    if steering is not None:
        script.steer(steering, residency)
    for run in runs:
        script.add(run, *programs[run.program])
    output = run_program(runner, emulator, script.encode())
    return _decode(output, [layout for _, layout in script.rows])


class _Script:
    """Collects blobs at aligned offsets, then the tables."""

    def __init__(
        self, plan: Plan, plan_bytes: bytes, sections: Mapping[str, bytes], threads: int
    ) -> None:
        self.threads = threads
        self.steering_at = 0
        self.data = bytearray(align(_HEAD.size))
        self.plan = plan
        self.plan_at, self.plan_bytes = self._put(plan_bytes), len(plan_bytes)
        placed = [(self._put(sections[s.name]), s.length) for s in plan.sections]
        self.section_table = self._put(b"".join(struct.pack("<2Q", *row) for row in placed))
        self.rows: list[tuple[bytes, list[tuple[str, int]]]] = []

    def _put(self, blob: bytes) -> int:
        at = len(self.data)
        self.data += blob + bytes(align(len(blob)) - len(blob))
        return at

    def steer(self, steering: Steering, residency: Residency | None) -> None:
        """Say what routers are steered by; pointers of the record are offsets here."""
        weights = len(self.plan.weights)
        record = steering_record(steering, weights)
        if residency is not None:
            record.resident = self._put(bytes(residency[at] for at in range(weights)))
        if steering.bias:
            record.bias = self._put(struct.pack(f"<{weights}f", *steering.bias))
        self.steering_at = self._put(bytes(record))

    def add(self, run: ScriptRun, number: int, program: PlanProgram) -> None:
        """Append one run."""
        copies: list[bytes] = []
        layout: list[tuple[str, int]] = []
        tokens = self._tokens(run, program)
        for port in program.ports:
            buffer = self.plan.buffers[port.buffer]
            if port.direction is Direction.INPUT:
                data = run.inputs[port.role]
                copies.append(_COPY.pack(buffer.offset, self._put(data), len(data)))
            else:
                row = buffer.cols * DTYPE_BYTES[buffer.dtype]
                size = row * (tokens if buffer.dynamic else buffer.rows)
                layout.append((port.role, size))
        inputs = len(copies)
        outputs = [port for port in program.ports if port.direction is Direction.OUTPUT]
        for port, (_, size) in zip(outputs, layout, strict=True):
            copies.append(_COPY.pack(self.plan.buffers[port.buffer].offset, 0, size))
        first = self._put(b"".join(copies))
        keep = KEEP_ALL if run.keep is None else run.keep
        self.rows.append((_RUN.pack(number, tokens, keep, inputs, len(outputs), 0, first), layout))

    def _tokens(self, run: ScriptRun, program: PlanProgram) -> int:
        for port in program.ports:
            buffer = self.plan.buffers[port.buffer]
            if port.direction is Direction.INPUT and buffer.dynamic:
                return len(run.inputs[port.role]) // (buffer.cols * DTYPE_BYTES[buffer.dtype])
        return 0

    def encode(self) -> bytes:
        """Return the script."""
        run_table = self._put(b"".join(row for row, _ in self.rows))
        head = _HEAD.pack(
            MAGIC,
            len(self.data),
            self.plan_at,
            self.plan_bytes,
            len(self.plan.sections),
            self.section_table,
            len(self.rows),
            run_table,
            self.threads,
            self.steering_at,
        )
        return head + bytes(self.data[_HEAD.size :])


def _decode(output: bytes, layouts: list[list[tuple[str, int]]]) -> list[dict[str, bytes]]:
    found = []
    at = 0
    for number, layout in enumerate(layouts):
        if at + 4 > len(output):
            raise ToolchainError(f"the program stopped before run {number}")
        status = int.from_bytes(output[at : at + 4], "little", signed=True)
        at += 4
        if status != Status.OK:
            raise_status(status, f"run {number}")
        results = {}
        for role, size in layout:
            results[role] = output[at : at + size]
            at += size
        found.append(results)
    return found
