"""Infinity and NaN where a kernel goes on: what routers refuse, and what attention may see."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from compiler.contract.native_errors import NotFiniteError
from compiler.contract.operations import Op, RouteOrder
from compiler.kernels.program import KvCache, KvKind, Module
from compiler.simulator import Simulator
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder, single_call

LOGITS = ((1,), (-1,), (0,), (2,))
"""Of x = infinity: infinity, its opposite, NaN, infinity."""
BAD = (np.inf, -np.inf, np.nan)
ROWS, WIDTH = 3, 8


def router(order: RouteOrder, *, entropy: bool = False, **params: float) -> Module:
    outputs = [(None, 2, "i32"), (None, 2, "f32")] + [(None, 1, "f32")] * entropy
    weights = [("f32", np.array(LOGITS, np.float32))]
    params |= {"k": 2, "order": order, "jitter": 0.2 * (order is RouteOrder.SPARSEMIXER)}
    return single_call(Op.ROUTE, [(None, 1, "f32")], outputs, weights, params)


@pytest.mark.parametrize("x", BAD)
@pytest.mark.parametrize("order", RouteOrder)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_router_without_a_number_for_an_expert_ends_the_run(
    order: RouteOrder, entropy: bool, x: float
) -> None:
    """An expert that is chosen among such logits may be any: nothing that it says may pass."""
    module = router(order, entropy=entropy)
    good, bad = ({"x0": np.array([[1.0], [y]], np.float32)} for y in (2.0, x))
    case = Case.of(module)
    runners = [case.simulator(), Simulator(module, mode="f64")]
    with ExitStack() as stack, np.errstate(invalid="ignore"):
        runners += [stack.enter_context(case.native(target)) for target in native_targets()]
        for runner in runners:
            found = raw(runner.run("run", good))
            with pytest.raises(NotFiniteError):
                runner.run("run", bad)
            assert raw(runner.run("run", good)) == found


@pytest.mark.parametrize("at", range(4))
def test_it_ends_for_an_expert_that_would_not_be_chosen(at: int) -> None:
    """NaN orders lowest, so the choice itself would look right."""
    weight = np.array(LOGITS, np.float32)
    weight[at] = np.finfo(np.float32).max
    outputs = [(None, 2, "i32"), (None, 2, "f32")]
    params = {"k": 2, "order": RouteOrder.TOPK_SOFTMAX}
    module = single_call(Op.ROUTE, [(None, 1, "f32")], outputs, [("f32", weight)], params)
    case, feeds = Case.of(module), {"x0": np.full((1, 1), -9.0, np.float32)}
    with pytest.raises(NotFiniteError):
        case.simulator().run("run", feeds)
    for target in native_targets():
        with case.native(target) as plan, pytest.raises(NotFiniteError):
            plan.run("run", feeds)


def attending(kind: KvKind | None) -> Module:
    b = ModuleBuilder(6, ROWS, None if kind is None else KvCache(1, 1, WIDTH, 2 * ROWS, kind))
    q, k, v, y = (b.buffer(None, WIDTH) for _ in range(4))
    cached = {} if kind is None else {"kv_layer": 0}
    params = {"heads": 1, "kv_heads": 1, "scale": 0.35, "causal": 1} | cached
    b.call(Op.ATTENTION, [q, k, v], [y], [], **params)
    b.program("run", {"q": q, "k": k, "v": v}, {"y": y})
    return b.module()


@pytest.mark.parametrize("kind", [None, KvKind.F32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["k", "v"])
def test_rows_do_not_see_what_comes_later(kind: KvKind | None, bad: float, operand: str) -> None:
    module = attending(kind)
    case, random = Case.of(module), np.random.default_rng(1)
    feeds = {name: random.standard_normal((ROWS, WIDTH)).astype(np.float32) for name in "qkv"}

    def rows(run: Callable[..., Any]) -> np.ndarray:
        return np.frombuffer(raw(run("run", feeds))["y"], np.float32).reshape(ROWS, WIDTH)

    def exact() -> np.ndarray:
        return rows(Simulator(module, mode="f64").run)

    before, before_exact = rows(case.simulator().run), exact()
    feeds[operand][-1, 3] = bad
    with np.errstate(invalid="ignore"):
        after, after_exact = rows(case.simulator().run), exact()
    assert np.array_equal(after[:-1], before[:-1])
    assert np.array_equal(after_exact[:-1], before_exact[:-1])
    assert np.isfinite(before).all()
    if operand == "v":
        np.testing.assert_array_equal(after[-1, 3], np.float32(bad))
    for target in native_targets():
        with case.native(target) as plan:
            np.testing.assert_array_equal(rows(plan.run), after)
