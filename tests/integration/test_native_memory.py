"""A running plan stays inside the memory that was planned: canaries around context and arena.

The runtime has no allocator: everything it may write was handed to `sf_init`. Here that memory is
laid between poisoned guards, and the arena itself is poisoned, so that the highest byte ever
written (the high-water mark) can be read off afterwards.
"""

import ctypes

import numpy as np
import pytest

from compiler.contract.native_abi import SfArgs, SfSection, SfSetup, SfSizeReport
from compiler.contract.native_library import KernelLibrary
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import Direction, align
from compiler.kernels.program import Program
from tests.factories.kernels import Case, library, native_targets
from tests.factories.modules import small_decoder

GUARD = 4096
POISON = 0xA5


class Guarded:
    """A plan in memory of exactly the planned sizes, poison on both sides of each part."""

    def __init__(self, case: Case, target: str) -> None:
        self.library = KernelLibrary(library(target))
        self.plan: Plan = parse_plan(case.emitted.plan_bytes)
        self.parts: dict[str, np.ndarray] = {}
        plan = self.part("plan", len(case.emitted.plan_bytes))
        self.inside("plan")[:] = np.frombuffer(case.emitted.plan_bytes, np.uint8)
        report = SfSizeReport(struct_bytes=ctypes.sizeof(SfSizeReport))
        size = len(case.emitted.plan_bytes)
        assert self.library.sizes(plan, size, ctypes.addressof(report)) == 0
        assert report.arena_bytes == align(case.emitted.memory.arena_bytes)
        table = (SfSection * len(self.plan.sections))()
        for entry, section in zip(table, self.plan.sections, strict=True):
            entry.data = self.part(section.name, section.length)
            entry.bytes = section.length
            self.inside(section.name)[:] = np.frombuffer(
                case.emitted.sections[section.name], np.uint8
            )
        self.context = self.part("context", report.context_bytes)
        setup = SfSetup(
            struct_bytes=ctypes.sizeof(SfSetup),
            sections=len(table),
            context=self.context,
            context_bytes=report.context_bytes,
            arena=self.part("arena", report.arena_bytes),
            arena_bytes=report.arena_bytes,
            plan=plan,
            plan_bytes=size,
            section=ctypes.addressof(table),
        )
        assert self.library.init(ctypes.addressof(setup)) == 0

    def part(self, name: str, size: int) -> int:
        """Add a part; return the aligned address of its `size` bytes between two guards."""
        self.parts[name] = np.full(size + 2 * GUARD + 64, POISON, np.uint8)
        return int(self.inside(name, size).ctypes.data)

    def inside(self, name: str, size: int | None = None) -> np.ndarray:
        part = self.parts[name]
        start = GUARD + -(part.ctypes.data + GUARD) % 64
        return part[start : start + (len(part) - 2 * GUARD - 64 if size is None else size)]

    def run(self, program: Program, number: int, tokens: int) -> None:
        random = np.random.default_rng(number)
        arena = self.inside("arena")
        for port in self.plan.programs[number].ports:
            if port.direction is Direction.INPUT:
                buffer = self.plan.buffers[port.buffer]
                values = random.integers(0, 40, buffer.rows * buffer.cols)
                data = values.astype(np.uint8 if buffer.dtype == 2 else np.int32).view(np.uint8)
                arena[buffer.offset : buffer.offset + len(data)] = data
        args = SfArgs(struct_bytes=ctypes.sizeof(SfArgs), tokens=tokens)
        assert self.library.run(self.context, number, ctypes.addressof(args)) == 0, program.name

    def high_water_bytes(self) -> int:
        """Return the end of the highest arena byte that is no longer poison."""
        written = np.flatnonzero(self.inside("arena") != POISON)
        return int(written[-1]) + 1 if len(written) else 0

    def guards_intact(self) -> bool:
        for name, part in self.parts.items():
            inside = self.inside(name)
            start = inside.ctypes.data - part.ctypes.data
            around = np.concatenate([part[:start], part[start + len(inside) :]])
            if not (around == POISON).all():
                return False
        return True


@pytest.mark.parametrize("target", native_targets())
def test_it_never_leaves_the_planned_memory(target: str) -> None:
    case = Case.of(small_decoder(4, swiglu=True))
    guarded = Guarded(case, target)
    weights = {name: guarded.inside(name).tobytes() for name in case.emitted.sections}
    for number, program in enumerate(case.module.programs):
        guarded.inside("arena")[:] = POISON
        guarded.run(program, number, case.module.max_tokens)
        planned = case.emitted.memory.programs[program.name]
        assert 0 < guarded.high_water_bytes() <= planned.arena_bytes
        assert guarded.high_water_bytes() > planned.arena_bytes - 64
    assert guarded.guards_intact()
    for name, data in weights.items():
        assert guarded.inside(name).tobytes() == data


def test_the_guards_notice_a_write() -> None:
    guarded = Guarded(Case.of(small_decoder(4)), native_targets()[0])
    assert guarded.guards_intact()
    arena = guarded.inside("arena")
    ctypes.memset(arena.ctypes.data + len(arena), 0, 1)
    assert not guarded.guards_intact()
