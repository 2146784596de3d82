"""Routers that are asked before their layer, of a state that is known earlier.

    x = ... ; MOE_LAYER l (x) ; attention ; MOE_LAYER l + 1       x: the residual stream before l
         ^ EXPERT_FORESEE (x; norm, router and experts of layer l + 1): distance 1

The residual stream changes little from one layer to the next, so the next layer's own router, asked
of the stream before this layer, names most of what it will choose; what it names is read while this
layer and the next attention compute. For the first layer of a program that is the stream before its
own attention, distance 0. A layer for whose router no such state is known is left to what a pool
learns. Called by `emitters.schedule`; nothing here changes what is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from compiler.contract.expert_pages import ROUTED, experts_of
from compiler.contract.operations import Op
from compiler.kernels.program import ABSENT, Call, Module, Program, call_params

_CHOICE: Final = ("k", "order", "groups", "top_groups", "group_take")
_PAGED: Final = "expert."


@dataclass(frozen=True, slots=True)
class Foresight:
    """A call that asks a router early.

    Attributes:
        after: Number of the call of the program behind which it may stand, -1 = none.
    """

    after: int
    call: Call


@dataclass(frozen=True, slots=True)
class _Router:
    """A router and its norm.

    Attributes:
        x: Buffer of the rows before the norm.
        weights: gamma, beta, matrix, bias, correction; `ABSENT` where there is none.
        params: Of its EXPERT_FORESEE.
    """

    x: int
    weights: tuple[int, ...]
    params: Mapping[str, int | float]


def foresights(module: Module, program: Program) -> dict[tuple[int, int], Foresight]:
    """Return the routers of a program that can be asked early, by (layer, distance) of where.

    Layers are the routed calls in their order; (l, d) is beside layer l and about layer l + d.
    """
    made = {out: at for at, call in enumerate(program.calls) for out in call.outputs}
    layers = [call for call in program.calls if call.op in ROUTED]
    routers = [_router(program, made, call) for call in layers]
    found = {}
    for layer, (call, router) in enumerate(zip(layers, routers, strict=True)):
        if router is None or not _is_paged(module, call):
            continue
        before = routers[layer - 1] if layer else None
        state = before.x if before is not None else _earlier(module, program, made, router.x)
        if state is None or not _fits(module, state, router):
            continue
        weights = (*router.weights, *(weight for one in experts_of(call) for weight in one))
        early = Call(Op.EXPERT_FORESEE, (state,), (), weights, router.params)
        distance = 0 if before is None else 1
        found[layer - distance, distance] = Foresight(made.get(state, -1), early)
    return found


def _router(program: Program, made: Mapping[int, int], routed: Call) -> _Router | None:
    """Return the router of a routed call; None if what it chooses by comes from elsewhere."""
    params = call_params(routed)
    if routed.op is Op.MOE_LAYER:
        return _Router(
            routed.inputs[0],
            (*routed.weights[:4], ABSENT),
            {name: params[name] for name in ("k", "order", "kind", "eps")},
        )
    at = made.get(routed.inputs[1])
    route = None if at is None else program.calls[at]
    if route is None or route.op is not Op.ROUTE:
        return None
    choice = {name: call_params(route)[name] for name in _CHOICE} | {"biases": params["biases"]}
    matrix, bias, correction, *_ = (*route.weights, ABSENT, ABSENT)
    x = route.inputs[0]
    norm = program.calls[made[x]] if x in made else None
    if norm is None or norm.op is not Op.NORM:
        return _Router(x, (ABSENT, ABSENT, matrix, bias, correction), choice)
    gamma, beta, *_ = (*norm.weights, ABSENT)
    kind = {name: call_params(norm)[name] for name in ("kind", "eps")}
    return _Router(norm.inputs[0], (gamma, beta, matrix, bias, correction), choice | kind)


def _earlier(module: Module, program: Program, made: Mapping[int, int], x: int) -> int | None:
    """Return what the stream `x` was before the call that added to it; None if nothing did."""
    if x not in made:
        return None
    shape = module.buffers[x]
    alike = [
        at
        for at in program.calls[made[x]].inputs
        if at != ABSENT
        and module.buffers[at].dtype == "f32"
        and module.buffers[at].cols == shape.cols
    ]
    return min(alike, key=lambda at: made.get(at, -1)) if len(alike) > 1 else None


def _fits(module: Module, state: int, router: _Router) -> bool:
    buffer, matrix = module.buffers[state], module.weights[router.weights[2]]
    return buffer.dtype == "f32" and buffer.cols == matrix.array.shape[1]


def _is_paged(module: Module, call: Call) -> bool:
    """Return whether a device can keep some of the experts of a call out of memory."""
    firsts = {module.weights[expert[0]].section for expert in experts_of(call)}
    return len(firsts) == len(experts_of(call)) and all(one.startswith(_PAGED) for one in firsts)
