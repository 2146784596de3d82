"""The simulator over a bundle's own bytes: plan and sections as they are shipped.

    plan bytes -> parse_plan -> Module        sections -> packed weights and f32 arrays

Running what is shipped, and not the module it was emitted from, makes the expected answers of the
self-test check the emitter as well.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from compiler.contract.plan import Plan, PlanProgram, PlanWeight, parse_plan
from compiler.contract.plan_format import DTYPE_NAMES, PANEL, Direction, Kind, weight_parts
from compiler.contract.session import Buffer as Bytes
from compiler.emitters.plan import read_packed
from compiler.kernels.program import DENSE, Buffer, Call, KvCache, Module, Program, Weight
from compiler.quant.row_codes import I8, I16, read_codes
from compiler.quant.w4 import PackedW4, dequantise_w4, unpack_w4
from compiler.quant.w8 import unpack_w8
from compiler.simulator import Simulator

_MODULE_KINDS: Final = {
    Kind.W4: "w4",
    Kind.W4_TILES: "w4",
    Kind.W4_CSR: "w4",
    Kind.W4_COO: "w4",
    Kind.W4_ELL: "w4",
    Kind.W4_UP_ROWS: "w4",
    Kind.W4_COLUMNS: "w4",
    Kind.F32: "f32",
    Kind.I32: "i32",
    Kind.F32_TAPS: "f32",
    Kind.I8_ROWS: "f32",
    Kind.I16_ROWS: "f32",
    Kind.W8: "w8",
    Kind.W4_NM: "w4",
}
_LAYOUTS: Final = {Kind.I8_ROWS: I8, Kind.I16_ROWS: I16}


def module_of(
    sections: Mapping[str, bytes], plan: Plan | None = None
) -> tuple[Module, dict[int, PackedW4]]:
    """Return the module that a bundle's plan stands for, and its packed weights by id.

    W4 weights have the values that their codes stand for, not the original ones.

    Args:
        sections: `plan` and all weights.
        plan: What section `plan` says, if the caller has read it.

    Raises:
        PlanError: The plan is malformed.
        QuantError: A packed weight is malformed.
    """
    plan = parse_plan(sections["plan"]) if plan is None else plan
    packed = read_packed(plan, sections)
    weights = tuple(
        Weight(
            number,
            _MODULE_KINDS[weight.kind],
            dequantise_w4(unpack_w4(packed[number]))
            if number in packed
            else _array(weight, sections[plan.sections[weight.section].name]),
            plan.sections[weight.section].name,
            _LAYOUTS.get(weight.kind, DENSE),
        )
        for number, weight in enumerate(plan.weights)
    )
    buffers = tuple(
        Buffer(at, item.rows, item.dynamic, item.cols, DTYPE_NAMES[item.dtype])
        for at, item in enumerate(plan.buffers)
    )
    programs = tuple(_program(program) for program in plan.programs)
    return Module(programs, buffers, weights, _cache(plan), plan.max_tokens), packed


class BundleSimulator:
    """A `PlanRunner` that gives, byte for byte, what the native plan of the bundle gives."""

    def __init__(self, sections: Mapping[str, bytes], plan: Plan | None = None) -> None:
        """Load plan and weights; see `module_of`."""
        self._simulator = Simulator(*module_of(sections, plan))
        self._reported: frozenset[str] = frozenset()

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return self._simulator.kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self._simulator.kv_length = length

    def run(self, program: str, inputs: Mapping[str, Bytes]) -> Mapping[str, memoryview]:
        """Run one program; see `compiler.contract.native.NativePlan.run`."""
        return self._simulator.run(program, inputs)

    def take_reached(self) -> frozenset[str]:
        """Return the sections of experts that ran for the first time since the last call."""
        reached = self._simulator.reached
        fresh, self._reported = reached - self._reported, reached
        return fresh


def _array(weight: PlanWeight, section: bytes) -> np.ndarray:
    data = section[weight.offset : weight.offset + weight.length]
    if weight.kind in _LAYOUTS:
        (at, codes), (steps_at, steps) = weight_parts(weight.kind, weight.rows, weight.cols)
        parts = data[at : at + codes], data[steps_at : steps_at + steps]
        return read_codes(parts[0], _LAYOUTS[weight.kind], weight.rows, parts[1]).values()
    if weight.kind is Kind.W8:
        w8_parts = weight_parts(weight.kind, weight.rows, weight.cols)
        arrays = tuple(data[at : at + length] for at, length in w8_parts)
        return unpack_w8(arrays, weight.rows, weight.cols).values()
    if weight.kind is Kind.F32_TAPS:
        panels = np.frombuffer(data, "<f4").reshape(-1, weight.cols, PANEL)
        rows = panels.transpose(0, 2, 1).reshape(-1, weight.cols)
        return np.ascontiguousarray(rows[: weight.rows])
    return np.frombuffer(data, "<i4" if weight.kind is Kind.I32 else "<f4").reshape(
        weight.rows, weight.cols
    )


def _program(program: PlanProgram) -> Program:
    ports: dict[Direction, dict[str, int]] = {Direction.INPUT: {}, Direction.OUTPUT: {}}
    for port in program.ports:
        ports[port.direction][port.role] = port.buffer
    calls = tuple(
        Call(call.op, call.inputs, call.outputs, call.weights, call.params)
        for call in program.calls
    )
    return Program(program.name, calls, ports[Direction.INPUT], ports[Direction.OUTPUT])


def _cache(plan: Plan) -> KvCache | None:
    if plan.kv is None:
        return None
    return KvCache(*plan.kv)
