"""Infinity and NaN where a kernel goes on: what the routers choose, and what attention may see."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.contract.operations import Op, RouteOrder
from compiler.kernels.program import KvCache, KvKind, Module
from compiler.simulator import Simulator
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder, single_call

LOGITS = ((1,), (-1,), (0,), (2,))
"""Of x = infinity: infinity, its opposite, NaN, infinity."""
SIGMOIDS = (RouteOrder.SIGMOID_TOPK, RouteOrder.SIGMOID_TOPK_RENORM)
CHOICES = {np.inf: (0, 3, 1), -np.inf: (1, 0, 3), np.nan: (0, 1, 2)}
IN_GROUPS = {np.inf: (0, 1), -np.inf: (1, 0), np.nan: (0, 1)}
ROWS, WIDTH = 3, 8


def router(k: int, order: RouteOrder, **params: float) -> Module:
    outputs = [(None, k, "i32"), (None, k, "f32")]
    weights = [("f32", np.array(LOGITS, np.float32))]
    params |= {"k": k, "order": order}
    return single_call(Op.ROUTE, [(None, 1, "f32")], outputs, weights, params)


@pytest.mark.parametrize("x", CHOICES)
@pytest.mark.parametrize(
    ("module", "choices"),
    [
        (router(3, RouteOrder.SPARSEMIXER, jitter=0.2), CHOICES),
        (router(3, RouteOrder.TOPK_SOFTMAX), CHOICES),
        *((router(3, order), CHOICES) for order in SIGMOIDS),
        *(
            (router(2, order, groups=2, top_groups=1, group_take=2), IN_GROUPS)
            for order in SIGMOIDS
        ),
    ],
)
def test_routers_choose_each_expert_once_and_nan_last(
    module: Module, choices: dict[float, tuple[int, ...]], x: float
) -> None:
    case = Case.of(module)
    feeds = {"x0": np.full((1, 1), x, np.float32)}
    with np.errstate(invalid="ignore"):
        wanted = raw(case.simulator().run("run", feeds))
        exact = Simulator(module, mode="f64").run("run", feeds)
    assert tuple(np.frombuffer(wanted["y0"], np.int32)) == choices[x]
    assert tuple(np.frombuffer(raw(exact)["y0"], np.int32)) == choices[x]
    for target in native_targets():
        with case.native(target) as plan:
            found = raw(plan.run("run", feeds))
        assert found["y0"] == wanted["y0"]
        gates = [np.frombuffer(run["y1"], np.float32) for run in (found, wanted)]
        np.testing.assert_array_equal(*gates)


@pytest.mark.parametrize("x", CHOICES)
@pytest.mark.parametrize("order", RouteOrder)
def test_an_entropy_says_that_a_logit_is_no_number(order: RouteOrder, x: float) -> None:
    """A router ranks it last and goes on; whoever looks at what comes out must see it."""
    outputs = [(None, 2, "i32"), (None, 2, "f32"), (None, 1, "f32")]
    params = {"k": 2, "order": order, "jitter": 0.2 * (order is RouteOrder.SPARSEMIXER)}
    weights = [("f32", np.array(LOGITS, np.float32))]
    module = single_call(Op.ROUTE, [(None, 1, "f32")], outputs, weights, params)
    case, feeds = Case.of(module), {"x0": np.full((1, 1), x, np.float32)}
    with np.errstate(invalid="ignore"):
        runs = [raw(case.simulator().run("run", feeds))]
    for target in native_targets():
        with case.native(target) as plan:
            runs.append(raw(plan.run("run", feeds)))
    for found in runs:
        assert np.isnan(np.frombuffer(found["y2"], np.float32)).all()


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
