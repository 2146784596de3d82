"""Run a target's code where no such device is: a freestanding program under an emulator.

The program holds the same runtime and kernels as the shared library and speaks the protocol of
`compiler.contract.runner_frames`; here it is given everything at once. It says nothing about speed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compiler.contract.native_errors import raise_status
from compiler.contract.operations import Op
from compiler.contract.plan import parse_plan
from compiler.contract.plan_format import Status
from compiler.contract.runner_frames import (
    REPLY,
    ProgramFrames,
    encode_script,
    frames_of,
    read_reply,
)
from compiler.contract.steering import Residency, Steering
from compiler.emitters.backends import emitter_for
from compiler.emitters.c import CEmitter
from compiler.emitters.interface import EmitterError
from compiler.emitters.toolchain import run_program
from compiler.errors import ToolchainError
from compiler.hardware.targets import Target


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
    frames = frames_of(plan)
    asked = [(frames[run.program], run, frames[run.program].tokens(run.inputs)) for run in runs]
    requests = [program.request(run.inputs, tokens, run.keep) for program, run, tokens in asked]
    script = encode_script(plan, plan_bytes, sections, threads, steering, residency)
    output = run_program(runner, emulator, b"".join((script, *requests)))
    return _decode(output, [(program, tokens) for program, _, tokens in asked])


def _decode(output: bytes, asked: Sequence[tuple[ProgramFrames, int]]) -> list[dict[str, bytes]]:
    found = []
    at = REPLY.size  # the one that says that the plan is loaded
    for number, (program, tokens) in enumerate(asked):
        if at + REPLY.size > len(output):
            raise ToolchainError(f"the program stopped before run {number}")
        try:
            reply = read_reply(output[at : at + REPLY.size], program.reply_bytes(tokens))
        except ValueError as error:
            raise ToolchainError(f"run {number}: {error}") from error
        at += REPLY.size
        if reply.status != Status.OK:
            raise_status(reply.status, f"run {number} call {reply.failed_call}")
        made = program.outputs_of(memoryview(output)[at : at + reply.size_bytes], tokens)
        found.append({role: bytes(data) for role, data in made.items()})
        at += reply.size_bytes
    return found
