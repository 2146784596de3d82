"""The steps beside each routed layer, from a lowered module: `moe.schedule`, and its section.

The driver writes the section; the device's planner obeys it. The default is what holds for every
model: while layer l of a program computes, the likely experts of the next one are loaded. Deferral
changes what a token gets, so nothing defers unless it is asked for.
"""

from compiler.contract.operations import Op
from compiler.contract.schedule import Schedule, Step
from compiler.dialects.moe_schedule import ScheduleOp
from compiler.kernels.program import Module, Program

_ROUTED = (Op.EXPERTS, Op.MOE_LAYER)


def schedule_ops(module: Module, *, distance: int = 1, defer: int = 0) -> list[ScheduleOp]:
    """Return one `moe.schedule` per program with routed layers.

    Args:
        module: A lowered module; layers are numbered in the order of a program's calls.
        distance: How many layers ahead experts are loaded.
        defer: How many of a layer's experts may come one layer late; not beside the last layer.
    """
    found = []
    for program in module.programs:
        layers = _layers(program)
        steps: list[tuple[int, str, int]] = []
        for layer in range(layers):
            if layer + distance < layers:
                steps.append((layer, "prefetch", distance))
            if defer and layer + 1 < layers:
                steps.append((layer, "defer", defer))
        if layers:
            found.append(ScheduleOp(program.name, steps))
    return found


def schedule_of(ops: list[ScheduleOp]) -> Schedule:
    """Return what the operations say, as the contract holds it."""
    return Schedule({op.program.data: tuple(Step(*entry) for entry in op.entries()) for op in ops})


def _layers(program: Program) -> int:
    return sum(call.op in _ROUTED for call in program.calls)
