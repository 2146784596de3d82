"""Variants of `step` that take fewer experts per token, and the measurement that chooses them.

    step = ... MOE_LAYER k=2 ...  ->  step, which also tells its routing entropy per layer
                                      step.band1 = the same calls, k=1, without what only ports need

A variant has buffers of its own (programs never run together, so they lie in the same arena), the
same weights, the same cache. Called by the driver before the schedule goes onto the tape. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from compiler.contract.bands import ENTROPY, STEP
from compiler.contract.operations import Op
from compiler.emitters.variants import BufferTable, needed_calls, with_own_buffers
from compiler.kernels.program import Buffer, Call, Module, Program, call_params

MAX_LAYERS: Final = 64
"""Layers whose entropies one COLS_CONCAT joins."""
_ROUTERS: Final[Mapping[Op, int]] = {Op.ROUTE: 2, Op.MOE_LAYER: 3}
"""Routers, and how many results they have without an entropy."""
_KEPT: Final = ("logits", "token", ENTROPY)


def common_top_k(module: Module) -> int:
    """Return the k of the routers of `step` if all have the same one, else 1; 1 without routers."""
    ks = {int(call_params(call)["k"]) for call in _routers(module)}
    return ks.pop() if len(ks) == 1 else 1


def routed_layers(module: Module) -> int:
    """Return how many routers `step` has."""
    return len(_routers(module))


def can_band(module: Module) -> bool:
    """Return whether `step` has a routing entropy to go by, and fewer experts to take."""
    return common_top_k(module) > 1 and routed_layers(module) <= MAX_LAYERS


def with_entropy(module: Module) -> Module:
    """Return the module whose `step` has an output `entropy` (1, layers) f32, of its last row."""
    table = BufferTable(module)
    step = _step(module)
    calls: list[Call] = []
    parts: list[int] = []
    for call in step.calls:
        if call.op not in _ROUTERS:
            calls.append(call)
            continue
        x = module.buffers[call.inputs[0]]
        measured = table.add(replace(x, cols=1, dtype="f32"))
        calls.append(replace(call, outputs=(*call.outputs, measured)))
        last = table.add(Buffer(0, 1, False, 1, "f32"))
        calls.append(Call(Op.ROWS_SLICE, (measured,), (last,), (), {"start": -1, "count": 1}))
        parts.append(last)
    joined = parts[0]
    if len(parts) > 1:
        joined = table.add(Buffer(0, 1, False, len(parts), "f32"))
        calls.append(Call(Op.COLS_CONCAT, tuple(parts), (joined,), (), {}))
    told = replace(step, calls=tuple(calls), outputs={**step.outputs, ENTROPY: joined})
    programs = tuple(told if program is step else program for program in module.programs)
    return replace(module, programs=programs, buffers=tuple(table.buffers))


def call_sources(module: Module, measured: Module, names: Iterable[str]) -> dict[str, list[int]]:
    """Return, for `step` and variants of it, which call of the first `step` each call is from.

    Args:
        module: Before `with_entropy`.
        measured: After it.
        names: The variants that `with_variants` makes of `measured`.

    Returns:
        By program, a number per call, -1 for a call that came with the entropy.
    """
    step, old = _step(measured), len(module.buffers)
    numbers: list[int] = []
    first = 0
    for call in step.calls:
        is_new = bool(call.outputs) and call.outputs[0] >= old
        numbers.append(-1 if is_new else first)
        first += not is_new
    kept = needed_calls(step.calls, {at for role, at in step.outputs.items() if role in _KEPT})
    variant = [numbers[at] for at in kept]
    return {STEP: numbers, **dict.fromkeys(names, variant)}


def with_variants(module: Module, variants: Mapping[str, Sequence[int]]) -> Module:
    """Return the module with variants of `step`, by name the experts per token of each layer."""
    for name, top_k in variants.items():
        module = _with_variant(module, name, top_k)
    return module


def _with_variant(module: Module, name: str, top_k: Sequence[int]) -> Module:
    table, step = BufferTable(module), _step(module)
    outputs = {role: at for role, at in step.outputs.items() if role in _KEPT}
    calls = [step.calls[at] for at in needed_calls(step.calls, set(outputs.values()))]
    ks = dict(zip(map(id, (c for c in calls if c.op in _ROUTERS)), top_k, strict=True))
    cols = {at: ks[id(call)] for call in calls if id(call) in ks for at in _chosen(call)}
    narrower = tuple(
        replace(call, params={**call.params, "k": ks[id(call)]}) if id(call) in ks else call
        for call in calls
    )
    program = Program(name, narrower, step.inputs, outputs)
    program = with_own_buffers(module, table, program, cols)
    return replace(module, programs=(*module.programs, program), buffers=tuple(table.buffers))


def _chosen(call: Call) -> Sequence[int]:
    """Return the results of a router with a column per expert chosen: index and gate."""
    first = _ROUTERS[call.op] - 2
    return call.outputs[first : first + 2]


def _step(module: Module) -> Program:
    return next(program for program in module.programs if program.name == STEP)


def _routers(module: Module) -> list[Call]:
    """Return the routers of `step`; none if there is no such program."""
    return [
        call
        for program in module.programs
        if program.name == STEP
        for call in program.calls
        if call.op in _ROUTERS
    ]
