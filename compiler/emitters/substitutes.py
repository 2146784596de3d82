"""Variants of programs that do without routers, and what has to hold for them.

    step = .. h -> ROUTE -> EXPERTS -> y ..        ->  step.shared = .. h -> h - h -> y ..
    (or MOE_LAYER: NORM and residual are its own)      step.narrow = .. h -> LINEAR, LINEAR -> y ..
                                                       step.full   = .. ROUTE of constants, k = E ..

Every program with routed layers gets a variant, and `step` always: pictures and prompts go the same
way as answers. Results that only a router has are left out. Called by the driver after entropy
bands were chosen and before the schedule goes onto the tape. Pure.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.expert_pages import ROUTED, Expert, experts_of
from compiler.contract.operations import GATED, ExpertAct, Op, RouteOrder
from compiler.contract.session import STEP
from compiler.contract.substitutes import Substitute, variant_name
from compiler.emitters.variants import BufferTable, needed_calls, with_own_buffers
from compiler.errors import CompilerError
from compiler.kernels.program import (
    ABSENT,
    Act,
    Call,
    Module,
    Program,
    UnaryKind,
    Weight,
    call_params,
)
from compiler.quant.narrow_dense import NarrowLayer
from compiler.quant.row_codes import I8
from compiler.quant.w4 import PackedW4

MAX_FULL_K: Final = 64
"""The most experts that a router takes at once."""
_EXPERT: Final = re.compile(r"expert\.L(\d+)\.E\d+")
_LEAST_PRODUCTS: Final = 2
_ANSWERS: Final = ("token", "logits")
_DEPTHS: Final[Mapping[Op, int]] = MappingProxyType(
    {
        **dict.fromkeys((Op.LINEAR, Op.LINEAR_F32, Op.LINEAR_W8), 1),
        **dict.fromkeys((Op.UNARY, Op.MUL, Op.ADD, Op.COLS_SLICE, Op.COLS_CONCAT), 0),
    }
)
"""Operations of a dense layer, and how many products each is."""
_HIDDEN: Final[Mapping[ExpertAct, tuple[Act, UnaryKind | None]]] = MappingProxyType(
    {
        ExpertAct.RELU: (Act.RELU, None),
        ExpertAct.SILU: (Act.SILU, None),
        ExpertAct.IDENTITY: (Act.NONE, None),
        ExpertAct.GELU: (Act.NONE, UnaryKind.GELU),
        ExpertAct.GELU_TANH: (Act.NONE, UnaryKind.GELU_TANH),
        ExpertAct.SWIGLU: (Act.SILU, None),
        ExpertAct.REGLU: (Act.RELU, None),
    }
)
"""Activations of experts that a narrow layer can have: of its first product, and behind it."""


DENSE_SECTION: Final = "dense.L{}"
"""What stands in for a layer, one section each; experts of no pool, always in memory."""


class NoSubstituteError(CompilerError):
    """A model cannot do without its routers; the message says why, for the report."""


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """One layer of experts; all programs share its weights.

    Attributes:
        number: As in `expert.L<number>.E<expert>`.
        route: The call that chooses, ROUTE or MOE_LAYER.
        mix: The call that runs experts, EXPERTS or the same MOE_LAYER.
    """

    number: int
    route: Call
    mix: Call

    @property
    def experts(self) -> tuple[Expert, ...]:
        """Numbers of the weights of each expert."""
        return experts_of(self.mix)

    @property
    def has_biases(self) -> bool:
        """Whether experts have them."""
        return bool(self.mix.params.get("biases", 0))

    @property
    def act(self) -> ExpertAct:
        """What stands between the matrices of an expert."""
        return ExpertAct(int(self.mix.params["act"]))

    @property
    def router(self) -> tuple[int, int, int]:
        """Weights of the router: matrix, bias and correction, `ABSENT` where there is none."""
        first = 2 if self.mix is self.route else 0
        known = (*self.route.weights[first : first + (2 if first else 3)], ABSENT, ABSENT)
        return known[0], known[1], known[2]


StandIn = Callable[[BufferTable, RoutedLayer], list[Call]]
"""Returns the calls whose last one writes the result of a layer's `mix`."""


@dataclass(frozen=True, slots=True)
class Substituted:
    """A module with the variants of one or more substitutes.

    Attributes:
        packed: Packed form of the weights that came with them, by id.
        sources: By variant, for each of its calls the place of the call of its program that it
            stands for, -1 = none.
    """

    module: Module
    packed: Mapping[int, PackedW4] = field(default_factory=dict)
    sources: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def then(self, later: "Substituted") -> "Substituted":
        """Return what came of this and a further substitute of its module."""
        packed = {**self.packed, **later.packed}
        return Substituted(later.module, packed, {**self.sources, **later.sources})


def routed_layers(module: Module) -> dict[int, RoutedLayer]:
    """Return the layers of experts by number.

    Raises:
        NoSubstituteError: Experts are chosen in a way that cannot be followed.
    """
    found: dict[int, RoutedLayer] = {}
    for program in _bases(module):
        for layer in _layers(module, program):
            known = found.setdefault(layer.number, layer)
            if (known.experts, known.router, known.act) != (layer.experts, layer.router, layer.act):
                raise NoSubstituteError("programs run other experts in the same layer")
    return found


def has_shared(module: Module) -> bool:
    """Return whether beside each layer of experts stand some that every token has.

    They are products of the layer's own input, at least two of them one after the other, whose
    result is added to that of the routed experts.
    """
    pairs = [(program, one) for program in _bases(module) for one in _layers(module, program)]
    return bool(pairs) and all(_is_shared(program, one) for program, one in pairs)


def _is_shared(program: Program, layer: RoutedLayer) -> bool:
    """Follow how many products deep buffers are below the layer's input, and what is added to it.

    A product that adds a residual is one deeper than what it multiplies.
    """
    depth, sums = {layer.mix.inputs[0]: 0}, {layer.mix.outputs[0]}
    for call in program.calls:
        if call is layer.mix or call.op not in _DEPTHS:
            continue
        known = [depth[at] for at in call.inputs if at in depth]
        deep = max(known) + _DEPTHS[call.op] if known else 0
        if sums & {*call.inputs}:
            if deep >= _LEAST_PRODUCTS:
                return True
            sums.add(call.outputs[0])
        elif known:
            depth[call.outputs[0]] = deep
    return False


def with_shared(module: Module) -> Substituted:
    """Return the module with variants in which routed experts add nothing."""

    def stand_in(table: BufferTable, layer: RoutedLayer) -> list[Call]:
        x, y = layer.mix.inputs[0], layer.mix.outputs[0]
        if int(layer.mix.params.get("residual", 0)):
            whole = {"start": 0, "count": table.buffers[y].cols}
            return [Call(Op.COLS_SLICE, (x,), (y,), (), whole)]
        return [Call(Op.SUB, (x, x), (y,), (), {})]

    return _with_variants(module, Substitute.SHARED_ONLY, stand_in)


def narrow_names(layer: RoutedLayer) -> tuple[str, ...]:
    """Return the names of the arrays of a narrow layer, in the order of their weights."""
    parts = ("gate", "up") if layer.act in GATED else ("gate",)
    biased = ("", "_bias") if layer.has_biases else ("",)
    return (*(f"{part}{end}" for part in parts for end in biased), "out", "out_bias")


def with_narrow(module: Module, layers: Mapping[int, NarrowLayer]) -> Substituted:
    """Return the module with variants in which a narrow dense layer stands for each routed one.

    Args:
        module: A lowered module.
        layers: What was fitted, by number of the routed layer.
    """
    weights = list(module.weights)
    packed: dict[int, PackedW4] = {}
    places: dict[int, dict[str, int]] = {}
    for number, narrow in layers.items():
        places[number] = {}
        for name in narrow.arrays:
            at = places[number][name] = len(weights)
            kind = "w4" if name in narrow.packed else "f32"
            weights.append(Weight(at, kind, narrow.arrays[name], DENSE_SECTION.format(number)))
            if kind == "w4":
                packed[at] = narrow.packed[name]

    def stand_in(table: BufferTable, layer: RoutedLayer) -> list[Call]:
        width = layers[layer.number].width
        return _narrow_calls(table, layer, places[layer.number], width)

    grown = replace(module, weights=tuple(weights))
    found = _with_variants(grown, Substitute.NARROW_DENSE, stand_in)
    return replace(found, packed=packed)


def _narrow_calls(
    table: BufferTable, layer: RoutedLayer, weights: Mapping[str, int], width: int
) -> list[Call]:
    """Return products, activation and products of a narrow layer; see `NarrowLayer` for names."""
    mix, (act, unary) = layer.mix, _HIDDEN[layer.act]
    x, y = mix.inputs[0], mix.outputs[0]
    is_fused = mix.op is Op.MOE_LAYER
    norm = mix.weights[:2] if is_fused else (ABSENT, ABSENT)
    params = {"norm": int(mix.params["kind"]) + 1, "eps": mix.params["eps"]} if is_fused else {}
    wide = replace(table.buffers[y], cols=width)
    calls: list[Call] = []

    def product(name: str, after: Act) -> int:
        operands = (weights[name], weights.get(f"{name}_bias", ABSENT), *norm)
        calls.append(Call(Op.LINEAR, (x,), (table.add(wide),), operands, {"act": after, **params}))
        return calls[-1].outputs[0]

    z = product("gate", act)
    if unary is not None:
        calls.append(Call(Op.UNARY, (z,), (table.add(wide),), (), {"kind": unary}))
        z = calls[-1].outputs[0]
    if layer.act in GATED:
        calls.append(Call(Op.MUL, (z, product("up", Act.NONE)), (table.add(wide),), (), {}))
        z = calls[-1].outputs[0]
    sources = (z, x) if int(mix.params.get("residual", 0)) else (z,)
    calls.append(Call(Op.LINEAR, sources, (y,), (weights["out"], weights["out_bias"]), {}))
    return calls


def with_full(module: Module, biases: Mapping[int, NDArray[np.float32]]) -> Substituted:
    """Return the module with variants in which every token has all experts at constant gates.

    The router is one whose matrix is zero and whose gates are sigmoids of a bias: what it gives
    depends on no weight that could be at fault.

    Args:
        module: A lowered module.
        biases: (E,) by number of the routed layer; see `gate_biases`.

    Raises:
        NoSubstituteError: A layer has more experts than a router takes.
    """
    weights = list(module.weights)
    routers: dict[int, tuple[int, int]] = {}
    for number, layer in routed_layers(module).items():
        shape = module.weights[layer.router[0]].array.shape
        if shape[0] > MAX_FULL_K:
            raise NoSubstituteError(f"no router takes all {shape[0]} experts of a layer")
        section, first = DENSE_SECTION.format(number), len(weights)
        weights.append(Weight(first, "f32", np.zeros(shape, np.float32), section, I8))
        weights.append(Weight(first + 1, "f32", biases[number], section))
        routers[number] = first, first + 1

    def stand_in(table: BufferTable, layer: RoutedLayer) -> list[Call]:
        return _full_calls(table, layer, routers[layer.number])

    return _with_variants(replace(module, weights=tuple(weights)), Substitute.FULL_DENSE, stand_in)


def _full_calls(table: BufferTable, layer: RoutedLayer, router: tuple[int, int]) -> list[Call]:
    mix, count = layer.mix, len(layer.experts)
    like = table.buffers[mix.outputs[0]]
    index = table.add(replace(like, cols=count, dtype="i32"))
    gate = table.add(replace(like, cols=count, dtype="f32"))
    choice = {"k": count, "order": RouteOrder.SIGMOID_TOPK}
    if mix.op is Op.MOE_LAYER:
        operands = (*mix.weights[:2], *router, *mix.weights[4:])
        outputs = (mix.outputs[0], index, gate)
        return [Call(mix.op, mix.inputs, outputs, operands, {**mix.params, **choice})]
    x = mix.inputs[0]
    chosen = Call(Op.ROUTE, (x,), (index, gate), router, choice)
    return [chosen, replace(mix, inputs=(x, index, gate))]


def _with_variants(module: Module, kind: Substitute, stand_in: StandIn) -> Substituted:
    programs, table = list(module.programs), BufferTable(module)
    sources: dict[str, Sequence[int]] = {}
    for program in _bases(module):
        layers = {id(layer.mix): layer for layer in _layers(module, program)}
        if not layers and program.name != STEP:
            continue
        made, places = _variant(program, layers, kind, lambda layer: stand_in(table, layer))
        programs.append(with_own_buffers(module, table, made))
        sources[made.name] = places
    grown = replace(module, programs=tuple(programs), buffers=tuple(table.buffers))
    return Substituted(grown, sources=sources)


def _variant(
    program: Program,
    layers: Mapping[int, RoutedLayer],
    kind: Substitute,
    stand_in: Callable[[RoutedLayer], list[Call]],
) -> tuple[Program, list[int]]:
    """Return a variant in the buffers of its program, and which call each of its calls is for.

    What a router gave does not exist: what reads it is left out, and so are results that need it.
    """
    calls: list[Call] = []
    places: list[int] = []
    gone: set[int] = set()
    for at, call in enumerate(program.calls):
        if id(call) in layers:
            made = stand_in(layers[id(call)])
            gone |= {*call.outputs[1:]}
        elif call.op is Op.ROUTE or gone & {*call.inputs}:
            made = []
            gone |= {*call.outputs}
            if call_params(call).get("kv_layer", ABSENT) >= 0:
                raise NoSubstituteError("the cache depends on what a router chooses")
        else:
            made = [call]
        calls += made
        places += [at] * len(made)
    outputs = {role: at for role, at in program.outputs.items() if at not in gone}
    if not {*outputs} >= {role for role in _ANSWERS if role in program.outputs}:
        raise NoSubstituteError("answers depend on what a router chooses besides its experts")
    kept = needed_calls(calls, {*outputs.values()})
    name = variant_name(program.name, kind)
    variant = replace(program, name=name, calls=tuple(calls[at] for at in kept), outputs=outputs)
    return variant, [places[at] for at in kept]


def _bases(module: Module) -> list[Program]:
    """Return the programs that are no variants."""
    return [program for program in module.programs if "." not in program.name]


def _layers(module: Module, program: Program) -> list[RoutedLayer]:
    routes = {call.outputs[0]: call for call in program.calls if call.op is Op.ROUTE}
    found = []
    for call in program.calls:
        if call.op not in ROUTED:
            continue
        route = call if call.op is Op.MOE_LAYER else routes.get(call.inputs[1])
        section = module.weights[experts_of(call)[0][0]].section
        number = _EXPERT.fullmatch(section)
        if route is None or number is None:
            raise NoSubstituteError("experts are chosen by something else than a router")
        found.append(RoutedLayer(int(number[1]), route, call))
    return found
