"""Run-time checks of likely zeros: sparse where the claim holds, dense otherwise, the same bits."""

from dataclasses import replace

import numpy as np
import pytest

from compiler.analysis.checks import checked_groups
from compiler.contract.native import NativeError
from compiler.contract.plan import PlanError, parse_plan
from compiler.kernels.program import DENSE, TILES, Module, NormKind, Op
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import ModuleBuilder

TOKENS, ROWS, COLS = 6, 90, 390
GROUPS = 13


def checked(check: int, layout: str = DENSE) -> Module:
    """Return two LINEAR calls, the first with a check, and the norm of the second's operand."""
    b = ModuleBuilder(5, TOKENS)
    array = b.normal(ROWS, COLS)
    array[:16, :32] = 0.0
    first = b.weight(array, "w4")
    b.weights[first] = replace(b.weights[first], layout=layout)
    second = b.weight(b.normal(COLS, ROWS), "w4")
    x, mid, y = b.buffer(None, COLS), b.buffer(None, ROWS), b.buffer(None, COLS)
    weights = [first, b.vector(ROWS), b.vector(COLS)]
    b.call(Op.LINEAR, [x], [mid], weights, act=1, norm=NormKind.RMS + 1, eps=1e-6, check=check)
    b.call(Op.LINEAR, [mid, x], [y], [second])
    b.program("run", {"x": x}, {"y": y})
    return b.module()


def rows(tokens: int, live: tuple[int, ...]) -> np.ndarray:
    """Return rows that are zero outside some groups of 32 columns."""
    x = np.random.default_rng(tokens).standard_normal((tokens, COLS)).astype(np.float32)
    return x * np.isin(np.arange(COLS) // 32, live)


HOLDING = {(): 0, (3,): 1, (0, 12): 2, (1, 2, 5, 11): 4}
BREAKING = ((0, 1, 2, 3, 12), tuple(range(GROUPS)))


@pytest.mark.parametrize("target", native_targets())
def test_both_paths_have_the_bits_of_the_dense_product(target: str) -> None:
    plain, guarded = Case.of(checked(0)), Case.of(checked(4))
    simulator = guarded.simulator()
    with plain.native(target) as dense, guarded.native(target) as native:
        for tokens in (1, 2, 5, TOKENS):
            for live in (*HOLDING, *BREAKING):
                x = {"x": rows(tokens, live)}
                expected = raw(dense.run("run", x))
                assert raw(native.run("run", x)) == expected
                assert raw(simulator.run("run", x)) == expected
        assert native.check_counts("run") == {0: (4 * len(HOLDING), 4 * len(BREAKING))}
        assert simulator.check_counts("run") == native.check_counts("run")
        assert dense.check_counts("run") == {}


def test_the_claim_is_about_all_rows_together() -> None:
    case = Case.of(checked(2))
    x = np.concatenate([rows(1, (0, 1)), rows(1, (2, 3))])
    with case.native(native_targets()[0]) as native:
        native.run("run", {"x": x})
        assert native.check_counts("run") == {0: (0, 1)}
        native.run("run", {"x": x[:1]})
        native.run("run", {"x": x[1:]})
        assert native.check_counts("run") == {0: (2, 1)}


def test_values_that_round_to_zero_count_as_zero() -> None:
    case = Case.of(checked(1))
    x = rows(1, (4,))
    x[0, 200] = 1e-6 * np.abs(x).max()
    simulator = case.simulator()
    with case.native(native_targets()[0]) as native:
        assert raw(native.run("run", {"x": x})) == raw(simulator.run("run", {"x": x}))
        assert native.check_counts("run") == simulator.check_counts("run") == {0: (1, 0)}


def test_a_broken_claim_harms_no_run_and_a_loaded_plan_starts_at_zero() -> None:
    case = Case.of(checked(1))
    full, sparse = {"x": rows(3, tuple(range(GROUPS)))}, {"x": rows(3, (7,))}
    with case.native(native_targets()[0]) as native:
        first = raw(native.run("run", sparse))
        native.run("run", full)
        assert raw(native.run("run", sparse)) == first
        assert native.check_counts("run") == {0: (2, 1)}
        with pytest.raises(NativeError):
            native.check_counts("walk")
    with case.native(native_targets()[0]) as native:
        assert native.check_counts("run") == {0: (0, 0)}


def test_weights_that_leave_out_tiles_are_read_as_they_are() -> None:
    plain, tiled = Case.of(checked(0)), Case.of(checked(4, TILES))
    target = native_targets()[0]
    with plain.native(target) as dense, tiled.native(target) as native:
        for live in (*HOLDING, *BREAKING):
            x = {"x": rows(2, live)}
            assert raw(native.run("run", x)) == raw(dense.run("run", x))
        assert native.check_counts("run") == {0: (0, 0)}


def test_the_device_refuses_claims_out_of_range() -> None:
    plan_bytes = Case.of(checked(77)).emitted.plan_bytes
    assert parse_plan(plan_bytes).programs[0].calls[0].params["check"] == 77
    wrong = plan_bytes.replace((77).to_bytes(4, "little"), (257).to_bytes(4, "little"))
    with pytest.raises(PlanError, match="check"):
        parse_plan(wrong)


def test_a_check_needs_groups_to_pay() -> None:
    assert [checked_groups(cols) for cols in (32, 224, 225, 256, 390, 8192, 8193)] == [
        *(0, 0, 7, 7, 11, 224, 0)
    ]
