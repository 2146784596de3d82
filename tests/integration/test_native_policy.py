"""The policy in the plan VM: Python's lookup, the same bits with any table, swaps while it runs."""

import ctypes
import random

import numpy as np
import pytest

from compiler.contract.native_abi import SfPolicy
from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_policy import readings_since
from compiler.contract.policy import (
    CELLS,
    FULL,
    LEGAL,
    LOOK_AGAIN,
    CallKind,
    Cell,
    PolicyError,
    Variant,
)
from compiler.contract.policy_calls import call_cell, call_kind
from compiler.kernels.program import COO, CSR, ELL, TILES
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import small_decoder
from tests.factories.swapping import every_cell, swap_policies
from tests.integration.test_native_checks import GROUPS, checked, rows
from tests.integration.test_native_elements import linear as stored
from tests.integration.test_native_elements import pruned
from tests.integration.test_native_schedule import fused
from tests.integration.test_native_threads import CASES as THREADED
from tests.integration.test_native_threads import inputs
from tests.integration.test_native_tiles import experts, linear

PLANS = {
    "decoder": lambda: Case.of(small_decoder(5)),
    "fused": lambda: Case.of(fused()),
    "checked": lambda: Case.of(checked(4)),
    "tiles": lambda: Case.of(linear(TILES)),
    "routed tiles": lambda: Case.of(experts(TILES)),
    "csr": lambda: Case.of(stored(CSR, pruned("unstructured", 90, 200))),
    "coo": lambda: Case.of(stored(COO, pruned("unstructured", 90, 200))),
    "ell": lambda: Case.of(stored(ELL, pruned("blocks of 32 x 4", 90, 200))),
    **{name: (lambda case=case: case) for name, case in THREADED.items()},
}


def random_table(seed: int) -> bytes:
    source = random.Random(seed)
    return bytes(source.choice(LEGAL[Cell.at(index).kind]) for index in range(CELLS))


@pytest.mark.parametrize("name", PLANS)
def test_it_looks_up_what_the_python_model_does(name: str) -> None:
    case = PLANS[name]()
    with case.native(native_targets()[0]) as native:
        plan = native.plan
        for program in plan.programs:
            for tokens in range(1, plan.max_tokens + 1):
                for at, call in enumerate(program.calls):
                    expected = call_cell(plan, call, tokens)
                    assert Cell.at(native.policy_cell(program.name, at, tokens)) == expected


def test_its_plans_have_calls_of_every_kind() -> None:
    plans = [case().native(native_targets()[0]).plan for case in PLANS.values()]
    found = {
        call_kind(plan, call) for plan in plans for part in plan.programs for call in part.calls
    }
    assert found == set(CallKind)


@pytest.mark.parametrize("name", THREADED)
@pytest.mark.parametrize("target", native_targets())
def test_it_has_the_same_bits_with_any_table_and_threads(name: str, target: str) -> None:
    case = THREADED[name]
    with case.native(target) as native:

        def run(tokens: int) -> dict[str, bytes]:
            native.kv_length = 0
            return raw(native.run("run", inputs(case, tokens)))

        expected = [run(n) for n in (1, 9)]
        assert native.epoch == 0
        for seed, table in enumerate([*map(every_cell, Variant), *map(random_table, range(4))]):
            native.threads = 1 + seed % 3
            assert native.policy.publish(table).epoch == seed + 1
            for n, results in zip((1, 9), expected, strict=True):
                assert run(n) == results
                assert native.epoch == seed + 1


def test_it_reads_zeros_where_a_check_is_left_out_and_looks_again() -> None:
    case, dense = Case.of(checked(4)), Case.of(checked(0))
    everything = tuple(range(GROUPS))
    with case.native(native_targets()[0]) as native, dense.native(native_targets()[0]) as plain:
        call = native.plan.programs[0].calls[0]
        table = bytearray(CELLS)
        table[call_cell(native.plan, call, 2).index] = Variant.UNCHECKED
        native.policy.publish(bytes(table))

        def run(live: tuple[int, ...]) -> tuple[int, int]:
            x = {"x": rows(2, live)}
            assert raw(native.run("run", x)) == raw(plain.run("run", x))
            return native.check_counts("run")[0]

        for _ in range(LOOK_AGAIN - 1):
            assert run((3,)) == (0, 0), "what it saw last is full: it does not look"
        assert run((3,)) == (1, 0), "but once in a while it does"
        assert Cell.at(native.policy_cell("run", 0, 2)) == call_cell(
            native.plan, call, 2, FULL // GROUPS
        )
        assert run((3,)) == (2, 0), "and where few groups live it looks in every run"
        assert run(everything) == (2, 1)
        assert run(everything) == (2, 1), "full again"
        assert Cell.at(native.policy_cell("run", 0, 2)) == call_cell(native.plan, call, 2)


def test_it_meters_the_calls_of_each_cell() -> None:
    case = PLANS["decoder"]()
    with case.native(native_targets()[0]) as native:
        program = next(part for part in native.plan.programs if part.name == "step")
        cells = [call_cell(native.plan, call, 3) for call in program.calls]
        published = native.policy.publish(bytes(CELLS))
        step = {
            "token_ids": np.zeros((3, 1), np.int32),
            "positions": np.arange(3, dtype=np.int32)[:, None],
        }
        for _ in range(2):
            native.run("step", step)
        found = published.readings()
        counts = {cell.index: 2 * cells.count(cell) for cell in cells}
        assert {cell: runs for cell, (_, runs) in found.items()} == counts
        assert all(ticks > 0 for ticks, _ in found.values())
        assert native.policy.publish(bytes(CELLS)).readings() == {}
        native.kv_length = 0
        native.policy.use(published)
        native.run("step", step)
        more = readings_since(found, published.readings())
        assert {cell: 2 * runs for cell, (_, runs) in more.items()} == counts
        assert native.policy.held == 1


def test_it_refuses_what_is_no_table() -> None:
    with Case.of(checked(4)).native(native_targets()[0]) as native:
        for table in (b"", bytes(CELLS - 1), b"\x05" * CELLS, b"\xff" * CELLS):
            with pytest.raises(PolicyError):
                native.policy.publish(table)
        set_policy = native._library.set_policy
        for size, cells in ((0, CELLS), (ctypes.sizeof(SfPolicy), CELLS - 1)):
            wrong = SfPolicy(struct_bytes=size, cells=cells, variants=ctypes.addressof(SfPolicy()))
            assert set_policy(native._context, ctypes.addressof(wrong)) != 0
        assert set_policy(None, None) != 0
        assert native.policy.present is None
        for program, call in (("run", 2), ("run", -1), ("walk", 0)):
            with pytest.raises(NativeError):
                native.policy_cell(program, call, 1)
        seat = native.policy
    with pytest.raises(NativeError, match="closed"):
        seat.publish(bytes(CELLS))


def test_kernels_that_know_no_policy_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with Case.of(checked(4)).native(native_targets()[0]) as native:
        monkeypatch.setattr(native._library, "set_policy", None)
        with pytest.raises(UnsupportedPlanError, match="build them again"):
            native.policy.publish(bytes(CELLS))
        native.run("run", {"x": rows(1, (3,))})


def test_it_swaps_a_thousand_tables_while_it_runs() -> None:
    found = swap_policies(1_000)
    assert found["wrong"] == 0
    assert found["torn"] == 0
    assert found["swaps"] == 1_000
    assert found["most_held"] <= 2
    assert found["epochs_seen"] > 20
    assert found["left"] == 1
