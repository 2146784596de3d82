"""Choose which rows behind a ReLU are packed: a bitmap and the values that are not zero.

    UNARY relu > ADD | MUL | SUB | NORM (all readers)  ->  PACK > PACKED

Rows qualify if every call that reads them takes them as its first operand and can spread them. The
bits stay, whatever the zeros. Chosen are rows whose measured gain (`compiler.analysis.
packed_points`, by their dense bytes) is at least `LEAST_GAIN`: a group costs
`packing + readers / reader` against `1 + readers`, in units of a pass over dense rows. Called by
the compilation on a lowered module; `points` are the measured ones there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from compiler.analysis import packed_points
from compiler.contract.operand_rules import MASK_BITS
from compiler.kernels.program import (
    Act,
    Buffer,
    Call,
    Module,
    NormKind,
    Op,
    PackedKind,
    Program,
    UnaryKind,
    call_params,
)

LEAST_GAIN: Final = 1.03
ASSUMED_DENSITY: Final = 0.5
_KINDS: Final[Mapping[Op, PackedKind]] = MappingProxyType(
    {Op.ADD: PackedKind.ADD, Op.MUL: PackedKind.MUL, Op.SUB: PackedKind.SUB}
)
_NORMS: Final[Mapping[int, PackedKind]] = MappingProxyType(
    {NormKind.RMS: PackedKind.RMS, NormKind.LAYER: PackedKind.LAYER}
)


@dataclass(frozen=True, slots=True)
class Points:
    """Measured speeds by bytes of dense rows; see `compiler.analysis.packed_points`."""

    sizes: tuple[float, ...] = packed_points.SIZES
    reader: tuple[float, ...] = packed_points.READER
    packing: tuple[float, ...] = packed_points.PACKING

    def gain(self, dense_bytes: int, readers: int) -> float:
        """Return how many times faster packed rows are than dense ones."""
        reader = float(np.interp(dense_bytes, self.sizes, self.reader))
        packing = float(np.interp(dense_bytes, self.sizes, self.packing))
        return (1 + readers) / (packing + readers / reader)


@dataclass(frozen=True, slots=True)
class PackedChoice:
    """Rows that could be packed.

    Attributes:
        program: Where they are made.
        rows, cols: Their most, and their columns.
        readers: Calls that read them.
        dense_bytes, packed_bytes: What one reader reads; packed, if half of them are zero.
        gain: How many times faster all of it is expected to be packed.
        chosen: Whether they are packed.
    """

    program: str
    rows: int
    cols: int
    readers: int
    dense_bytes: int
    packed_bytes: int
    gain: float
    chosen: bool


def choose_packed(
    module: Module, points: Points | None = None
) -> tuple[Module, tuple[PackedChoice, ...]]:
    """Return the module with the rows packed that are worth it, and all that could be."""
    speeds = points or Points()
    rows: list[PackedChoice] = []
    for at, program in enumerate(module.programs):
        for number, call in enumerate(program.calls):
            readers = _readers(module, program, call)
            if not readers:
                continue
            choice = _choice(module, program, call, len(readers), speeds)
            rows.append(choice)
            if choice.chosen:
                module = _packed(module, at, number, readers)
                program = module.programs[at]
    return module, tuple(rows)


def _readers(module: Module, program: Program, call: Call) -> tuple[int, ...]:
    """Return the calls that read what a ReLU makes, none unless all of them can spread it."""
    if call.op is not Op.UNARY or call_params(call)["kind"] != UnaryKind.RELU:
        return ()
    made = call.outputs[0]
    elsewhere = (p for p in module.programs if p is not program)
    others = any(made in c.inputs for p in elsewhere for c in p.calls)
    if others or made in program.outputs.values():
        return ()
    users = [at for at, user in enumerate(program.calls) if made in user.inputs]
    fits = all(_can_spread(program.calls[at], made) for at in users)
    return tuple(users) if fits else ()


def _can_spread(call: Call, rows: int) -> bool:
    if call.op is Op.NORM:
        return True
    is_square = call.op is Op.MUL and call.inputs == (rows, rows)
    return (
        call.op in _KINDS and call.inputs[0] == rows and (rows not in call.inputs[1:] or is_square)
    )


def _choice(
    module: Module, program: Program, call: Call, readers: int, points: Points
) -> PackedChoice:
    made = module.buffers[call.outputs[0]]
    dense = 4 * made.rows * made.cols
    gain = points.gain(dense, readers)
    return PackedChoice(
        program.name,
        made.rows,
        made.cols,
        readers,
        dense,
        packed_points.packed_bytes(made.rows, made.cols, ASSUMED_DENSITY),
        round(gain, 3),
        gain >= LEAST_GAIN,
    )


def _packed(module: Module, program: int, number: int, readers: tuple[int, ...]) -> Module:
    """Return the module with a ReLU and its readers replaced; its rows become values."""
    calls = list(module.programs[program].calls)
    relu = calls[number]
    made = module.buffers[relu.outputs[0]]
    words = -(-made.cols // MASK_BITS)
    mask = Buffer(len(module.buffers), made.rows, made.dynamic, words, "i32")
    calls[number] = Call(Op.PACK, relu.inputs, (made.id, mask.id), (), {"act": Act.RELU})
    for at in readers:
        calls[at] = _reader(calls[at], made.id, mask.id)
    changed = replace(module.programs[program], calls=tuple(calls))
    programs = tuple(changed if at == program else p for at, p in enumerate(module.programs))
    return replace(module, programs=programs, buffers=(*module.buffers, mask))


def _reader(call: Call, values: int, mask: int) -> Call:
    params = call_params(call)
    if call.op is Op.NORM:
        given = {"kind": _NORMS[int(params["kind"])], "eps": params["eps"]}
    else:
        given = {"kind": _KINDS[call.op], "act": params["act"]}
    second = tuple(at for at in call.inputs[1:] if at != values)
    return replace(call, op=Op.PACKED, inputs=(values, mask, *second), params=given)
