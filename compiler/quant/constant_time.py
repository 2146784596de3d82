"""Constant-time plans: time and accesses that no activation and no weight's value decides.

    Module -> the same module, dense, without run-time checks; or a refusal

`compile --constant-time` asks for it. What a plan does then depends on its shapes, on how many
tokens a run has and on which experts a router chose, never on values: every weight is read whole,
no zero is looked for, and the kernels choose by masks. Such a bundle has no entropy bands, and its
policy is fixed: the device measures nothing to choose by. Convolutions by live taps become such by
all taps. Results keep their bits, because every
layout and every check gives the bits of the dense product.

Protected: activations, and the values and zeros of weights. Not protected, because each of them is
an address: token ids (rows of a table), the experts that a router chose (their weights are read,
others are not), and lengths. Shapes are public: neurons and heads that are proved dead at compile
time still leave. Errors end a run early. Power is not levelled, and nothing is claimed about it.

Operations outside `CONSTANT_TIME` are refused: those that move rows to where their values say, and
reference kernels. A test compares the path and the addresses of each operation over values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from compiler.analysis.conv_runs import Runs, all_taps
from compiler.contract.operations import Op
from compiler.errors import UnsupportedOperatorError
from compiler.kernels.program import ABSENT, DENSE, Call, Module, Weight, call_params

CONSTANT_TIME: Final = frozenset(
    {
        *(Op.IMAGE_U8, Op.EMBED, Op.LINEAR, Op.LINEAR_F32, Op.NORM, Op.ROPE, Op.ATTENTION),
        *(Op.CONV2D, Op.ROWS_CONCAT, Op.ROWS_SLICE, Op.ADD, Op.MUL, Op.SUB, Op.DIV, Op.UNARY),
        *(Op.SOFTMAX, Op.ROUTE, Op.EXPERTS, Op.ARGMAX, Op.COLS_CONCAT, Op.COLS_SLICE),
        *(Op.MOE_LAYER, Op.EXPERT_PREFETCH, Op.EXPERT_LOAD, Op.CONV_DEPTHWISE),
        *(Op.LINEAR_W8, Op.RECURRENT, Op.RECURRENT_F32),
    }
)
"""Operations whose kernels go one way whatever the values are."""
MOST_NAMED: Final = 5
_NO_PRUNING: Final = "export the model without pruning of tokens: which rows stay is an address"
_WAYS: Final[Mapping[Op, str]] = MappingProxyType(
    {
        Op.PRUNE: _NO_PRUNING,
        Op.PRUNE_TOP_P: _NO_PRUNING,
        Op.ATTENTION_ROW: _NO_PRUNING,
        Op.ATTENTION_SCORE: _NO_PRUNING,
    }
)
_OTHER_WAY: Final = "export the model without these operators: values decide what they do"
"""What else a user can do, by operation."""


def constant_time(module: Module) -> Module:
    """Return the module with every weight stored whole and without run-time checks.

    Raises:
        UnsupportedOperatorError: As `require_constant_time`.
    """
    module = _every_tap(module)
    require_constant_time(module, {})
    programs = tuple(
        replace(program, calls=tuple(map(_unchecked, program.calls))) for program in module.programs
    )
    weights = tuple(map(_whole, module.weights))
    return replace(module, programs=programs, weights=weights)


def _every_tap(module: Module) -> Module:
    """Return the module with convolutions by live taps as convolutions by all."""
    weights = {weight.id: weight for weight in module.weights}
    if Op.SPARSE_CONV not in module.ops:
        return module

    def whole(call: Call) -> Call:
        if call.op is not Op.SPARSE_CONV:
            return call
        params = call_params(call)
        channels = module.buffers[call.outputs[0]].cols
        depth = module.buffers[call.inputs[0]].cols
        parts = [weights[at].array for at in call.weights[:3]]
        taps = all_taps(Runs(*parts), channels, int(params["kh"] * params["kw"]) * depth)
        number = max(weights) + 1
        weights[number] = replace(weights[call.weights[0]], id=number, array=taps)
        return replace(call, op=Op.CONV2D, weights=(number, *call.weights[3:]))

    programs = [
        replace(program, calls=tuple(map(whole, program.calls))) for program in module.programs
    ]
    return _renumbered(replace(module, programs=tuple(programs), weights=tuple(weights.values())))


def _renumbered(module: Module) -> Module:
    """Return the module without weights that no call reads."""
    read = {at for program in module.programs for call in program.calls for at in call.weights}
    kept = [weight for weight in module.weights if weight.id in read]
    numbers = {weight.id: at for at, weight in enumerate(kept)} | {ABSENT: ABSENT}
    programs = [
        replace(
            program,
            calls=tuple(
                replace(call, weights=tuple(numbers[at] for at in call.weights))
                for call in program.calls
            ),
        )
        for program in module.programs
    ]
    weights = tuple(replace(weight, id=at) for at, weight in enumerate(kept))
    return replace(module, programs=tuple(programs), weights=weights)


def require_constant_time(module: Module, sources: Mapping[str, Sequence[str]]) -> None:
    """Require that a plan in constant time can be made of a module.

    Args:
        module: Convolutions by live taps are allowed: they become such by all.
        sources: By program, what each call is about: a node of the model's files. Empty where
            nobody knows; operations are named then.

    Raises:
        UnsupportedOperatorError: An operation goes where values say; the message names the nodes.
    """
    ways: dict[str, None] = {}
    names: dict[str, None] = {}
    for program in module.programs:
        about = sources.get(program.name) or [call.op.name for call in program.calls]
        for call, source in zip(program.calls, about, strict=True):
            if call.op not in CONSTANT_TIME and call.op is not Op.SPARSE_CONV:
                names[source] = ways[_WAYS.get(call.op, _OTHER_WAY)] = None
    if not names:
        return
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    raise UnsupportedOperatorError(
        f"no constant-time kernel for {', '.join([*names][:MOST_NAMED])}{more}",
        hint="; ".join((*ways, "or leave constant time out")),
    )


def _unchecked(call: Call) -> Call:
    if not call_params(call).get("check"):
        return call
    return replace(call, params={**call.params, "check": 0})


def _whole(weight: Weight) -> Weight:
    return replace(weight, layout=DENSE) if weight.kind == "w4" else weight
