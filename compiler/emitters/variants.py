"""Variants of a program: the same cache and weights, another tape, buffers of its own.

Programs never run together, so the buffers of a variant lie in the same arena. `bands` and
`substitutes` make variants with these. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from compiler.kernels.program import ABSENT, Buffer, Call, Module, Program, call_params


@dataclass(slots=True)
class BufferTable:
    """The buffers of a module, growing."""

    buffers: list[Buffer]

    def __init__(self, module: Module) -> None:
        self.buffers = list(module.buffers)

    def add(self, buffer: Buffer) -> int:
        """Add a copy of a buffer; return its number."""
        self.buffers.append(replace(buffer, id=len(self.buffers)))
        return len(self.buffers) - 1


def needed_calls(calls: Sequence[Call], wanted: set[int]) -> list[int]:
    """Return the places of the calls that some wanted buffer, or the cache, depends on, ascending.

    Args:
        calls: Of one program.
        wanted: Numbers of buffers.
    """
    kept: list[int] = []
    wanted = set(wanted)
    for at in reversed(range(len(calls))):
        call = calls[at]
        if wanted & {*call.outputs} or call_params(call).get("kv_layer", ABSENT) >= 0:
            kept.append(at)
            wanted |= {source for source in call.inputs if source != ABSENT}
    return kept[::-1]


def with_own_buffers(
    module: Module, table: BufferTable, program: Program, cols: Mapping[int, int] | None = None
) -> Program:
    """Return the program with copies of all buffers of the module that it uses.

    Args:
        module: Has the buffers that are copied; later ones of `table` are the program's already.
        table: Gets the copies.
        program: Its calls and ports name buffers of either.
        cols: Columns of copies that differ from what is copied, by number before.
    """
    own = {ABSENT: ABSENT}
    used = (at for call in program.calls for at in (*call.inputs, *call.outputs))
    for at in (*program.inputs.values(), *used):
        if at not in own:
            is_old = at < len(module.buffers)
            buffer = table.buffers[at]
            width = (cols or {}).get(at, buffer.cols)
            own[at] = table.add(replace(buffer, cols=width)) if is_old else at
    calls = tuple(
        replace(
            call,
            inputs=tuple(own[at] for at in call.inputs),
            outputs=tuple(own[at] for at in call.outputs),
        )
        for call in program.calls
    )
    inputs = {role: own[at] for role, at in program.inputs.items()}
    outputs = {role: own[at] for role, at in program.outputs.items()}
    return replace(program, calls=calls, inputs=inputs, outputs=outputs)
