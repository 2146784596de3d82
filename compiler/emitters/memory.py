"""Place activation buffers in one arena: two that live at the same time never share a byte.

Within a program a buffer lives from the call that writes it (or from the start, if the caller fills
it) through the last call that reads it (or to the end, if the caller reads it), both included.
Programs run one at a time and may share the same bytes. Where `IN_PLACE` allows it and an operand
of the same size dies in the call, the result takes the operand's place.

Experts that a program prefetches and loads count as well, each from the step that asks for it to
the call that uses it, and beside them as many of its other experts as the rows of the call can
choose: `peak_bytes` is the most of both kinds at one moment, what a caller with a pager gets by
with. A device maps every expert, unless a budget makes it keep a pool (`contract.pool_plan`).

The plan carries its own bound: `max_live_bytes` is the most bytes alive at one moment, so no
placement of these buffers is smaller; `arena_bytes` is what was reached. The device's
`parse_plan` checks offsets against lifetimes with code of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.contract.expert_pages import ROUTED, Expert, experts_of, is_scheduled
from compiler.contract.operations import IN_PLACE, Op
from compiler.contract.plan_format import DTYPE_BYTES, DTYPE_NAMES, align
from compiler.emitters.placement import Block, Life, most_alive, place
from compiler.kernels.program import ABSENT, Buffer, Call, Module, Program

_ELEMENT_BYTES = {name: DTYPE_BYTES[dtype] for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of one program.

    Attributes:
        max_live_bytes: The most of the arena alive at one moment.
        arena_bytes: The end of its highest buffer.
        page_bytes: The most bytes of experts that the schedule holds at one moment; 0 without one.
        peak_bytes: The most of buffers and such experts at one moment.
        expert_bytes: All experts that the program may use.
    """

    max_live_bytes: int
    arena_bytes: int
    page_bytes: int
    peak_bytes: int
    expert_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where buffers lie.

    Attributes:
        offsets: Byte offset of each buffer by id, a multiple of `ALIGNMENT`.
        arena_bytes: Bytes of the arena.
        max_live_bytes: The lower bound: the most bytes of any program alive at one moment.
        kv_bytes: Bytes of the key/value cache, which lies outside the arena.
        in_place: Buffers that took the place of an operand, by id, and that operand.
        programs: The same figures for each program.
    """

    offsets: Mapping[int, int]
    arena_bytes: int
    max_live_bytes: int
    kv_bytes: int
    in_place: Mapping[int, int]
    programs: Mapping[str, ProgramMemory]


def buffer_bytes(buffer: Buffer) -> int:
    """Return how many bytes a buffer holds, at its maximum of rows."""
    return buffer.rows * buffer.cols * _ELEMENT_BYTES[buffer.dtype]


def plan_memory(module: Module, stored: Mapping[int, int] | None = None) -> MemoryPlan:
    """Return a placement of all buffers and its bound; deterministic.

    Args:
        module: A valid module.
        stored: Bytes of each weight as stored, by id; without it experts count nothing.
    """
    lives: dict[int, list[Life]] = {buffer.id: [] for buffer in module.buffers}
    for number, program in enumerate(module.programs):
        for held, first, last in _lives(program):
            lives[held].append(Life(number, first, last))
    in_place = _in_place(module, lives)
    groups: dict[int, list[int]] = {}
    for buffer in module.buffers:
        groups.setdefault(_root(buffer.id, in_place), []).append(buffer.id)
    blocks = [
        Block(
            align(buffer_bytes(module.buffers[root])),
            tuple(life for member in members for life in lives[member]),
        )
        for root, members in groups.items()
    ]
    starts = place([_joined(block) for block in blocks])
    offsets = {
        member: start
        for start, members in zip(starts, groups.values(), strict=True)
        for member in members
    }
    programs = {
        program.name: _program_memory(module, program, number, blocks, offsets, stored or {})
        for number, program in enumerate(module.programs)
    }
    kv = module.kv
    return MemoryPlan(
        offsets,
        max(
            (at + align(buffer_bytes(module.buffers[id_])) for id_, at in offsets.items()),
            default=0,
        ),
        max((memory.max_live_bytes for memory in programs.values()), default=0),
        kv.shape.size_bytes if kv else 0,
        in_place,
        programs,
    )


def _program_memory(
    module: Module,
    program: Program,
    number: int,
    blocks: list[Block],
    offsets: Mapping[int, int],
    stored: Mapping[int, int],
) -> ProgramMemory:
    own = [
        Block(block.size, tuple(life for life in _joined(block).lives if life.program == number))
        for block in blocks
    ]
    ends = (
        offsets[held] + align(buffer_bytes(module.buffers[held])) for held, _, _ in _lives(program)
    )
    pages = page_blocks(module, program, number, stored)
    used = {weight for call in program.calls for expert in experts_of(call) for weight in expert}
    return ProgramMemory(
        most_alive(own),
        max(ends, default=0),
        most_alive(pages),
        most_alive([*own, *pages]),
        sum(stored.get(weight, 0) for weight in used),
    )


def page_blocks(
    module: Module, program: Program, number: int, stored: Mapping[int, int]
) -> list[Block]:
    """Return what the schedule of program `number` holds: pages, and when; none without a schedule.

    A page lives from the first step that names its expert through the call that uses it. At that
    call every row may choose k further experts; those count with the largest pages left.
    """
    if not is_scheduled(program.calls):
        return []
    asked: dict[Expert, int] = {}
    blocks = []
    for at, call in enumerate(program.calls):
        named = experts_of(call)
        sizes = {expert: sum(stored.get(weight, 0) for weight in expert) for expert in named}
        if call.op is Op.EXPERT_PREFETCH:
            asked |= dict.fromkeys(named, at)
        elif call.op in ROUTED:
            held = [expert for expert in named if expert in asked]
            blocks += [Block(sizes[e], (Life(number, asked.pop(e), at),)) for e in held]
            index = module.buffers[call.outputs[1] if call.op is Op.MOE_LAYER else call.inputs[1]]
            left = sorted((sizes[e] for e in named if e not in held), reverse=True)
            blocks.append(Block(sum(left[: index.rows * index.cols]), (Life(number, at, at),)))
    return blocks


def _joined(block: Block) -> Block:
    """Return a block with the lives that meet, of results written in place, made one."""
    joined: list[Life] = []
    for life in sorted(block.lives):
        last = joined[-1] if joined else None
        if last is not None and last.program == life.program and life.first <= last.last:
            joined[-1] = Life(last.program, last.first, max(last.last, life.last))
        else:
            joined.append(life)
    return Block(block.size, tuple(joined))


def _root(buffer: int, in_place: Mapping[int, int]) -> int:
    while buffer in in_place:
        buffer = in_place[buffer]
    return buffer


def _in_place(module: Module, lives: Mapping[int, list[Life]]) -> dict[int, int]:
    """Return which buffer takes the place of which operand."""
    found: dict[int, int] = {}
    for number, program in enumerate(module.programs):
        for at, call in enumerate(program.calls):
            for operand in _replaceable(call):
                alone = lives[operand] == [Life(number, lives[operand][0].first, at)]
                fits = len(lives[call.outputs[0]]) == 1 and _alike(
                    module.buffers[operand], module.buffers[call.outputs[0]]
                )
                if alone and fits:
                    found[call.outputs[0]] = operand
                    break
    return found


def _replaceable(call: Call) -> list[int]:
    slots = IN_PLACE.get(call.op, ())
    return [call.inputs[s] for s in slots if s < len(call.inputs) and call.inputs[s] != ABSENT]


def _alike(some: Buffer, other: Buffer) -> bool:
    return (some.rows, some.cols, some.dtype, some.dynamic) == (
        other.rows,
        other.cols,
        other.dtype,
        other.dynamic,
    )


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
