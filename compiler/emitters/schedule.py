"""`moe.schedule` and the tape that obeys it: prefetch and load steps beside each routed layer.

    lowered module --schedule_ops--> moe.schedule per program --obey--> module whose tape does it
                                            |
                                            +--schedule_of--> section `schedule` beside the plan

While layer l of a program computes, the likely experts of layer l + d are brought nearer
(`prefetch(d)`), and those that its router names of what is known already (`foresee(d)`, see
`foresight`); every routed layer has a load step of its own in front of it. What is likely comes
from calibration: without it nothing is prefetched. Deferral changes what a token gets, and no tape
does it yet: a schedule that defers is refused here, not ignored. Called by the driver between
packing and emitting; `compiler.contract.schedule_order` checks the outcome once more on the bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from compiler.contract.expert_pages import ROUTED, Expert, experts_of, is_scheduled
from compiler.contract.operations import Op
from compiler.contract.schedule import Schedule, Step
from compiler.dialects.moe_schedule import ScheduleOp
from compiler.emitters.foresight import Foresight, foresights
from compiler.kernels.program import Call, Module, Program, ProgramError

PREFETCH_BYTES: Final = 512
"""Bytes of each matrix that the processor reads ahead where nothing has to be fetched from storage:
what the first tile of a product needs. More only drives out of the cache what the layer beside it
works on, because most of the likely experts are not chosen."""
FORESEE: Final = "foresee"
Likely = Mapping[int, Sequence[int]]
"""By layer number, as in `expert.L<layer>.E<expert>`, the experts worth prefetching, ascending."""


def schedule_ops(
    module: Module,
    likely: Mapping[str, Likely] | None = None,
    *,
    distance: int = 1,
    defer: int = 0,
    foresee: bool = False,
) -> list[ScheduleOp]:
    """Return one `moe.schedule` per program with routed layers.

    Args:
        module: A lowered module; layers are numbered in the order of a program's calls.
        likely: By program, the experts that are worth prefetching; a layer without any is not
            prefetched. None = every layer is.
        distance: How many layers ahead experts are loaded.
        defer: How many of a layer's experts may come one layer late; not beside the last layer.
        foresee: Whether routers are asked early, where that is possible.
    """
    found = []
    for program in module.programs:
        layers = _layers(program)
        early = foresights(module, program) if foresee else {}
        steps: list[tuple[int, str, int]] = []
        for layer in range(len(layers)):
            steps += [(layer, FORESEE, d) for at, d in sorted(early) if at == layer]
            ahead = layers[layer + distance : layer + distance + 1]
            if ahead and (likely is None or _likely(module, ahead[0], likely.get(program.name))):
                steps.append((layer, "prefetch", distance))
            if defer and layer + 1 < len(layers):
                steps.append((layer, "defer", defer))
        if layers:
            found.append(ScheduleOp(program.name, steps))
    return found


def schedule_of(ops: Sequence[ScheduleOp]) -> Schedule:
    """Return what the operations say, as the contract holds it."""
    return Schedule({op.program.data: tuple(Step(*entry) for entry in op.entries()) for op in ops})


def obey(
    module: Module, ops: Sequence[ScheduleOp], likely: Mapping[str, Likely] | None = None
) -> Module:
    """Return the module with the steps of its schedule on the tape.

    Args:
        module: A lowered module without such steps.
        ops: What `schedule_ops` returned for the same module and `likely`.
        likely: As there; None = all experts of a layer.

    Raises:
        ProgramError: The schedule is about a program or layer that is not there, defers, or the
            module has steps already.
    """
    steps = {op.program.data: op.entries() for op in ops}
    unknown = set(steps) - {program.name for program in module.programs}
    if unknown:
        raise ProgramError(f"a schedule for {min(unknown)!r}, which is no program")
    programs = tuple(
        replace(program, calls=_tape(module, program, steps[program.name], likely))
        if program.name in steps
        else program
        for program in module.programs
    )
    return replace(module, programs=programs)


def _tape(
    module: Module,
    program: Program,
    steps: Sequence[tuple[int, str, int]],
    likely: Mapping[str, Likely] | None,
) -> tuple[Call, ...]:
    if is_scheduled(program.calls):
        raise ProgramError(f"{program.name!r} has its steps already")
    layers = _layers(program)
    early = _early(module, program, steps)
    at_once = [one for (_, distance), one in early.items() if not distance]
    calls = [one.call for one in at_once if one.after < 0]
    layer = 0
    for number, call in enumerate(program.calls):
        if call.op in ROUTED:
            calls += [one.call for (at, distance), one in early.items() if distance and at == layer]
            for beside, kind, amount in steps:
                if beside == layer and kind == "prefetch":
                    calls.append(_prefetch(module, program, layers, beside + amount, likely))
            calls.append(_page_call(Op.EXPERT_LOAD, call, experts_of(call)))
            layer += 1
        calls.append(call)
        calls += [one.call for one in at_once if one.after == number]
    if any(beside >= layer for beside, _, _ in steps):
        raise ProgramError(f"{program.name!r} has {layer} routed layers, its schedule more")
    return tuple(calls)


def _early(
    module: Module, program: Program, steps: Sequence[tuple[int, str, int]]
) -> dict[tuple[int, int], Foresight]:
    """Return the calls that ask routers early, by layer and distance."""
    known = foresights(module, program)
    found = {}
    for beside, kind, amount in steps:
        if kind == FORESEE and (beside, amount) in known:
            found[beside, amount] = known[beside, amount]
        elif kind != "prefetch":
            raise ProgramError(f"{program.name!r}: no tape can {kind}({amount}) at layer {beside}")
    return found


def _prefetch(
    module: Module,
    program: Program,
    layers: Sequence[Call],
    ahead: int,
    likely: Mapping[str, Likely] | None,
) -> Call:
    if ahead >= len(layers):
        raise ProgramError(f"{program.name!r} has no layer {ahead} to prefetch")
    experts = experts_of(layers[ahead])
    if likely is not None:
        chosen = _likely(module, layers[ahead], likely.get(program.name))
        experts = tuple(experts[at] for at in chosen)
    if not experts:
        raise ProgramError(f"{program.name!r}: nothing of layer {ahead} is worth prefetching")
    return _page_call(Op.EXPERT_PREFETCH, layers[ahead], experts, bytes=PREFETCH_BYTES)


def _page_call(op: Op, routed: Call, experts: Sequence[Expert], **params: int) -> Call:
    weights = tuple(weight for expert in experts for weight in expert)
    return Call(op, (), (), weights, {"biases": routed.params.get("biases", 0), **params})


def _likely(module: Module, call: Call, likely: Likely | None) -> Sequence[int]:
    """Return which experts of a routed call, by position, are worth prefetching."""
    section = module.weights[experts_of(call)[0][0]].section
    number = section.split(".")[1].removeprefix("L") if section.startswith("expert.") else ""
    return (likely or {}).get(int(number), ()) if number else ()


def _layers(program: Program) -> list[Call]:
    return [call for call in program.calls if call.op in ROUTED]
