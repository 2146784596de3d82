"""The rules of lowered programs: what a pass may hand over, and what is refused with a reason."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.operand_rules import RULES, OperandError, complete_params
from compiler.contract.operations import MAX_PARAMS, PARAMS
from compiler.contract.windows import pad_code
from compiler.kernels.program import (
    Buffer,
    Call,
    KvCache,
    Module,
    Op,
    Program,
    ProgramError,
    Weight,
    call_params,
    validate_module,
)
from tests.factories.modules import single_call, small_decoder

F = "f32"


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def top_p(params: dict[str, float], *, keys: int = 5, places: int = 3) -> Module:
    """A call that prunes 3 tokens; `keys` columns of keys, `places` rows of results."""
    inputs = [(3, 4, F), (3, 1, F), (3, keys, F)]
    outputs = [(places, 4, F), (places, 1, "i32"), (1, 1, "i32")]
    return single_call(Op.PRUNE_TOP_P, inputs, outputs, [], {"p": 0.5, **params})


def sparse_conv(
    params: dict[str, float] | None = None,
    taps: tuple[int, int] = (4, 16),
    first: int = 2,
    runs: tuple[int, int] = (2, 2),
) -> Module:
    """A call over an image of 3 x 3 of one channel."""
    weights: list[tuple[str, np.ndarray] | None] = [("f32", ones(*taps))]
    weights += [("i32", np.ones(shape, np.int32)) for shape in ((2, first), runs)]
    window = {"kh": 3, "kw": 3, "stride": 1, "pad": 0, "H": 3, "W": 3}
    given = {**window, **(params or {})}
    return single_call(Op.SPARSE_CONV, [(9, 1, F)], [(1, 5, F)], weights, given)


def refuse(module: Module, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        validate_module(module)


def test_it_accepts_a_whole_decoder() -> None:
    validate_module(small_decoder())
    validate_module(small_decoder(swiglu=True, see=False))


def test_it_has_a_rule_and_parameters_for_every_operation() -> None:
    assert set(RULES) == set(PARAMS) == set(Op)
    assert all(len(params) <= MAX_PARAMS for params in PARAMS.values())


def test_it_fills_in_defaults_in_slot_order() -> None:
    call = Call(Op.ATTENTION, (), (), (), {"scale": 1, "heads": 2})
    assert list(call_params(call).items()) == [
        ("heads", 2),
        ("scale", 1.0),
        ("causal", 0),
        ("kv_layer", -1),
        ("kv_heads", 0),
        ("window", 0),
        ("sink", 0),
        ("append_only", 0),
    ]


@pytest.mark.parametrize(
    ("op", "params", "message"),
    [
        (Op.LINEAR, {"akt": 1}, "no parameter 'akt'"),
        (Op.NORM, {"kind": 0}, "needs parameter 'eps'"),
        (Op.LINEAR, {"act": 9}, "outside"),
        (Op.LINEAR, {"act": 0.5}, "integer"),
        (Op.NORM, {"kind": 0, "eps": float("nan")}, "outside"),
        (Op.NORM, {"kind": 0, "eps": float("inf")}, "outside"),
        (Op.IMAGE_U8, {"divide": 0, "subtract": 1}, "outside"),
    ],
)
def test_it_refuses_bad_parameters(op: Op, params: dict[str, float], message: str) -> None:
    with pytest.raises(OperandError, match=message):
        complete_params(op, params)


BAD_CALLS: Sequence[tuple[str, Module]] = (
    (
        "weight is 3 x 5",
        single_call(Op.LINEAR, [(None, 4, F)], [(None, 3, F)], [("w4", ones(3, 5))]),
    ),
    (
        "at most 8192",
        single_call(Op.LINEAR, [(None, 9000, F)], [(None, 3, F)], [("w4", ones(3, 9000))]),
    ),
    ("not w4", single_call(Op.LINEAR, [(None, 4, F)], [(None, 3, F)], [("f32", ones(3, 4))])),
    ("not f32", single_call(Op.LINEAR_F32, [(None, 4, F)], [(None, 3, F)], [("w4", ones(3, 4))])),
    (
        "vector of 3",
        single_call(
            Op.LINEAR, [(None, 4, F)], [(None, 3, F)], [("w4", ones(3, 4)), ("f32", ones(4))]
        ),
    ),
    ("differ in rows", single_call(Op.LINEAR, [(None, 4, F)], [(2, 3, F)], [("w4", ones(3, 4))])),
    (
        "residual",
        single_call(Op.LINEAR, [(None, 4, F), (None, 4, F)], [(None, 3, F)], [("w4", ones(3, 4))]),
    ),
    ("takes 1 to 4 weights", single_call(Op.LINEAR, [(None, 4, F)], [(None, 3, F)])),
    ("is i32", single_call(Op.UNARY, [(None, 4, "i32")], [(None, 4, F)], [], {"kind": 0})),
    (
        "no beta",
        single_call(
            Op.NORM,
            [(2, 4, F)],
            [(2, 4, F)],
            [("f32", ones(4)), ("f32", ones(4))],
            {"kind": 0, "eps": 0},
        ),
    ),
    (
        "4 heads",
        single_call(
            Op.ROPE,
            [(2, 6, F), (2, 1, "i32")],
            [(2, 6, F)],
            [("f32", ones(9, 1))] * 2,
            {"heads": 4},
        ),
    ),
    (
        "even head",
        single_call(
            Op.ROPE,
            [(2, 6, F), (2, 1, "i32")],
            [(2, 6, F)],
            [("f32", ones(9, 1))] * 2,
            {"heads": 2},
        ),
    ),
    (
        "ATTENTION keys: ",  # what is causal hides keys by the row of their query
        single_call(
            *(Op.ATTENTION, [(2, 4, F), (3, 4, F), (3, 4, F)], [(2, 4, F)], []),
            {"heads": 2, "scale": 1, "causal": 1},
        ),
    ),
    (
        "ATTENTION keys: ",  # q and k in one operand have the same rows
        single_call(
            *(Op.ATTENTION, [(2, 8, F), (3, 4, F)], [(2, 4, F)], []),
            {"heads": 2, "scale": 1},
        ),
    ),
    (
        "ATTENTION keys and values",
        single_call(
            *(Op.ATTENTION, [(2, 4, F), (3, 4, F), (2, 4, F)], [(2, 4, F)], []),
            {"heads": 2, "scale": 1},
        ),
    ),
    (
        "plan has none",
        single_call(
            Op.ATTENTION, [(2, 4, F)] * 3, [(2, 4, F)], [], {"heads": 2, "scale": 1, "kv_layer": 0}
        ),
    ),
    (
        "of 1",
        single_call(
            Op.ATTENTION,
            [(2, 4, F)] * 3,
            [(2, 4, F)],
            [],
            {"heads": 2, "scale": 1, "kv_layer": 1},
            kv=KvCache(1, 2, 2, 9),
        ),
    ),
    (
        "cache's",
        single_call(
            Op.ATTENTION,
            [(2, 4, F)] * 3,
            [(2, 4, F)],
            [],
            {"heads": 2, "scale": 1, "kv_layer": 0},
            kv=KvCache(1, 4, 1, 9),
        ),
    ),
    (
        "do not share",
        single_call(
            Op.ATTENTION, [(2, 4, F)] * 3, [(2, 4, F)], [], {"heads": 2, "scale": 1, "kv_heads": 3}
        ),
    ),
    (
        "inside q",
        single_call(
            Op.ATTENTION_ROW, [(2, 4, F)] * 2, [(2, 1, F)], [], {"heads": 2, "scale": 1, "row": 2}
        ),
    ),
    (
        "beyond the rows",
        single_call(
            Op.PRUNE,
            [(3, 4, F), (3, 1, F)],
            [(2, 4, F), (2, 1, "i32")],
            [],
            {"k": 2, "score_offset": 1},
        ),
    ),
    (
        "among them",
        single_call(
            Op.ATTENTION_SCORE, [(2, 4, F)] * 2, [(2, 1, F)], [], {"heads": 2, "scale": 1, "row": 2}
        ),
    ),
    (
        "ATTENTION_SCORE result must be fixed",
        single_call(
            Op.ATTENTION_SCORE,
            [(2, 4, F)] * 2,
            [(2, 1, F)],
            [],
            {"heads": 2, "scale": 1, "row": -1, "first": 1},
        ),
    ),
    ("keeps 3 to 2 of 3", top_p({"min_keep": 3, "max_keep": 2})),
    ("keeps 1 to 4 of 3", top_p({"max_keep": 4})),
    ("outside .1e-06, 1.0", top_p({"max_keep": 2, "p": 0.0})),
    ("takes keys to merge", top_p({"max_keep": 2, "merge": 1}, keys=0)),
    ("and only then", top_p({"max_keep": 2})),
    ("fixed key for every", top_p({"max_keep": 2, "merge": 1, "key_offset": 1})),
    ("PRUNE_TOP_P kept must be fixed", top_p({"max_keep": 2, "merge": 1}, places=2)),
    (
        "exceeds",
        single_call(
            Op.CONV2D,
            [(4, 1, F)],
            [(1, 1, F)],
            [("f32", ones(1, 9))],
            {"kh": 3, "kw": 3, "stride": 1, "pad": 0, "H": 2, "W": 2},
        ),
    ),
    (
        "must be fixed",
        single_call(
            Op.CONV2D,
            [(9, 1, F)],
            [(4, 1, F)],
            [("f32", ones(1, 9))],
            {"kh": 3, "kw": 3, "stride": 1, "pad": 0, "H": 3, "W": 3},
        ),
    ),
    (
        "must be .9, 2.",
        single_call(
            Op.CONV_DEPTHWISE,
            [(9, 2, F)],
            [(1, 2, F)],
            [("f32", ones(2, 9))],
            {"kh": 3, "kw": 3, "stride": 1, "pad": 0, "H": 3, "W": 3},
        ),
    ),
    (
        "CONV_DEPTHWISE result",
        single_call(
            Op.CONV_DEPTHWISE,
            [(9, 2, F)],
            [(9, 2, F)],
            [("f32", ones(9, 2))],
            {"kh": 3, "kw": 3, "stride": 1, "pad": 1, "H": 3, "W": 3, "stride_x": 2},
        ),
    ),
    ("bits that mean nothing", sparse_conv(params={"pad": 1 << 7})),
    ("taps need 16 columns", sparse_conv(taps=(4, 8))),
    ("has 9 taps", sparse_conv(taps=(10, 16))),
    ("first must be .2, 2.", sparse_conv(first=3)),
    ("runs are pairs", sparse_conv(runs=(1, 3))),
    ("runs are pairs", sparse_conv(runs=(5, 2))),
    ("SPARSE_CONV result must be fixed", sparse_conv(params={"pad": pad_code(0, 1, 0, 0)})),
    (
        "at most one constant",
        single_call(Op.ROWS_CONCAT, [(2, 4, F), (2, 4, F)], [(5, 4, F)], [("f32", ones(1, 4))]),
    ),
    (
        "last row",
        single_call(Op.ROWS_SLICE, [(None, 4, F)], [(2, 4, F)], [], {"start": 0, "count": 2}),
    ),
    (
        "of 3 rows",
        single_call(Op.ROWS_SLICE, [(3, 4, F)], [(2, 4, F)], [], {"start": 2, "count": 2}),
    ),
    ("one second operand", single_call(Op.ADD, [(2, 4, F)], [(2, 4, F)])),
    ("3 columns", single_call(Op.MUL, [(2, 4, F), (2, 3, F)], [(2, 4, F)])),
    (
        "takes 5 of 4",
        single_call(
            Op.ROUTE,
            [(2, 4, F)],
            [(2, 5, "i32"), (2, 5, F)],
            [("f32", ones(4, 4))],
            {"k": 5, "order": 0},
        ),
    ),
    (
        "2 weights per expert",
        single_call(
            Op.EXPERTS,
            [(2, 4, F), (2, 1, "i32"), (2, 1, F)],
            [(2, 4, F)],
            [("w4", ones(4, 4))] * 3,
            {"act": 0},
        ),
    ),
    (
        "gate rows",
        single_call(
            Op.EXPERTS,
            [(2, 4, F), (2, 1, "i32"), (2, 1, F)],
            [(2, 4, F)],
            [("w4", ones(5, 4)), ("w4", ones(4, 5))],
            {"act": 1},
        ),
    ),
    (
        "expert 1",
        single_call(
            Op.EXPERTS,
            [(2, 4, F), (2, 1, "i32"), (2, 1, F)],
            [(2, 4, F)],
            [("w4", ones(4, 4))] * 3 + [("w4", ones(4, 8))],
            {"act": 0},
        ),
    ),
    ("fixed", single_call(Op.ARGMAX, [(2, 4, F)], [(1, 1, "i32")])),
    ("add up", single_call(Op.COLS_CONCAT, [(2, 4, F)] * 2, [(2, 9, F)])),
    ("one type", single_call(Op.COLS_CONCAT, [(2, 4, F), (2, 4, "i32")], [(2, 8, F)])),
    (
        "of 4 columns",
        single_call(Op.COLS_SLICE, [(2, 4, F)], [(2, 3, F)], [], {"start": 2, "count": 3}),
    ),
    (
        "do not fill",
        single_call(Op.IMAGE_U8, [(1, 9, "u8")], [(2, 4, F)], [], {"divide": 1, "subtract": 0}),
    ),
    ("one column", single_call(Op.EMBED, [(2, 2, "i32")], [(2, 4, F)], [("f32", ones(9, 4))])),
    ("not finite", single_call(Op.ADD, [(2, 4, F)], [(2, 4, F)], [("f32", ones(4) * np.inf)])),
)


@pytest.mark.parametrize(("message", "module"), BAD_CALLS, ids=[m for m, _ in BAD_CALLS])
def test_it_refuses_a_bad_call(message: str, module: Module) -> None:
    refuse(module, message)


def chain() -> Module:
    """x0 -> relu -> neg -> y0."""
    buffers = tuple(Buffer(at, 2, False, 4, F) for at in range(3))
    calls = (
        Call(Op.UNARY, (0,), (1,), (), {"kind": 0}),
        Call(Op.UNARY, (1,), (2,), (), {"kind": 3}),
    )
    return Module((Program("run", calls, {"x0": 0}, {"y0": 2}),), buffers, (), None, 8)


def with_program(module: Module, **changes: object) -> Module:
    program = replace(module.programs[0], **changes)  # type: ignore[arg-type]
    return replace(module, programs=(program,))


def test_it_refuses_wrong_order_and_reuse() -> None:
    module = chain()
    first, second = module.programs[0].calls
    validate_module(module)
    refuse(with_program(module, calls=(second, first)), "before they are written")
    refuse(with_program(module, calls=(first, first)), "already has a value")
    refuse(with_program(module, calls=(replace(first, outputs=(0,)),)), "already has a value")
    refuse(with_program(module, outputs={"y0": 1, "y1": 2}, calls=(first,)), "never written")
    refuse(with_program(module, calls=(replace(first, inputs=(7,)),)), "no buffer 7")
    refuse(with_program(module, calls=(replace(first, weights=(0,)),)), "no weight 0")
    refuse(with_program(module, inputs={"a": 0, "b": 0}), "share a buffer")
    refuse(with_program(module, inputs={"x0": 9}), "names buffer 9")
    refuse(with_program(module, name=""), "bad name")
    refuse(replace(module, programs=()), "unique")
    refuse(replace(module, programs=module.programs * 2), "unique")


def test_it_refuses_bad_tables() -> None:
    module = chain()
    refuse(replace(module, buffers=module.buffers[::-1]), "position")
    refuse(replace(module, max_tokens=0), "max_tokens")
    wrong = (replace(module.buffers[0], dtype="f16"), *module.buffers[1:])
    refuse(replace(module, buffers=wrong), "dtype")
    dynamic = (replace(module.buffers[0], dynamic=True), *module.buffers[1:])
    refuse(replace(module, buffers=dynamic), "max_tokens is 8")
    for weight, message in (
        (Weight(0, "w5", ones(2, 2), "s"), "kind"),
        (Weight(1, "f32", ones(2, 2), "s"), "position"),
        (Weight(0, "f32", ones(2, 2, 2), "s"), "dimensions"),
        (Weight(0, "f32", ones(2, 2), ""), "section"),
    ):
        refuse(replace(module, weights=(weight,)), message)
    refuse(replace(module, kv=KvCache(1, 0, 8, 8)), "out of range")


def test_it_refuses_to_append_a_cache_layer_twice() -> None:
    module = small_decoder(see=False)
    calls = [
        replace(call, params={**call.params, "kv_layer": 0}) if call.op is Op.ATTENTION else call
        for call in module.programs[0].calls
    ]
    refuse(with_program(module, calls=tuple(calls)), "appended to twice")
