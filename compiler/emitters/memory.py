"""Place activation buffers in one arena: two that live at the same time never share a byte.

Within a program a buffer lives from the call that writes it (or from the start, if the caller fills
it) through the last call that reads it (or to the end, if the caller reads it), both included, so a
call's results never alias its operands. Programs run one at a time and may share the same bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.contract.plan_format import DTYPE_BYTES, DTYPE_NAMES, align
from compiler.kernels.program import ABSENT, Buffer, Module, Program

_ELEMENT_BYTES = {name: DTYPE_BYTES[dtype] for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Byte offset of each buffer by id, and the bytes of the arena."""

    offsets: Mapping[int, int]
    arena_bytes: int


@dataclass(frozen=True, slots=True)
class _Life:
    program: int
    first: int
    last: int


def buffer_bytes(buffer: Buffer) -> int:
    """Return how many bytes a buffer holds, at its maximum of rows."""
    return buffer.rows * buffer.cols * _ELEMENT_BYTES[buffer.dtype]


def plan_memory(module: Module) -> MemoryPlan:
    """Return a placement: larger buffers first, each at the lowest offset free during its life.

    Deterministic: ties go to the lower id.
    """
    lives: dict[int, list[_Life]] = {}
    for number, program in enumerate(module.programs):
        for held, first, last in _lives(program):
            lives.setdefault(held, []).append(_Life(number, first, last))
    offsets: dict[int, int] = {}
    order = sorted(module.buffers, key=lambda buffer: (-buffer_bytes(buffer), buffer.id))
    for buffer in order:
        taken = sorted(
            (offset, offset + align(buffer_bytes(module.buffers[other])))
            for other, offset in offsets.items()
            if _meet(lives.get(buffer.id, []), lives.get(other, []))
        )
        offsets[buffer.id] = _lowest_gap(taken, align(buffer_bytes(buffer)))
    ends = (offsets[b.id] + align(buffer_bytes(b)) for b in module.buffers)
    return MemoryPlan(offsets, max(ends, default=0))


def _lives(program: Program) -> list[tuple[int, int, int]]:
    first = dict.fromkeys(program.inputs.values(), -1)
    last = dict.fromkeys(program.inputs.values(), len(program.calls))
    for at, call in enumerate(program.calls):
        for buffer in call.outputs:
            first[buffer] = last[buffer] = at
        for buffer in call.inputs:
            if buffer != ABSENT:
                last[buffer] = at
    for buffer in program.outputs.values():
        last[buffer] = len(program.calls)
    return [(buffer, first[buffer], last[buffer]) for buffer in first]


def _meet(some: list[_Life], others: list[_Life]) -> bool:
    return any(
        a.program == b.program and a.first <= b.last and b.first <= a.last
        for a in some
        for b in others
    )


def _lowest_gap(taken: list[tuple[int, int]], size: int) -> int:
    at = 0
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at
