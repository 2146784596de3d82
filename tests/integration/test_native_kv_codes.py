"""A cache of int8 codes: the same bits everywhere, near full attention, a quarter of the bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import NotFiniteError
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.plan_format import HEADER
from compiler.driver import cli
from compiler.driver.bundle_files import read_report
from compiler.driver.cache import StageCache
from compiler.driver.native_check import host_target
from compiler.driver.removal_trials import RemovalTrials
from compiler.frontend import import_pipeline
from compiler.kernels.program import KvCache, KvKind, Module, Op
from compiler.passes.pipeline import Loss, raise_pipeline
from compiler.quant.module import pack_weight
from tests.factories.bundles import STORE
from tests.factories.kernels import Case, ids, library, native_targets, raw
from tests.factories.modules import DecoderBuilder, single_call
from tests.factories.onnx_models import write_tiny
from tests.factories.onnx_runs import lowered
from tests.factories.weak_models import cards_of, write_cards, write_weak

STEP = 8
SHAPES = {
    "heads": (4, 4, 32, 40, 0, 0),
    "groups": (6, 2, 16, 64, 0, 0),
    "odd": (3, 1, 10, 33, 0, 0),
    "wide": (2, 1, 72, 40, 0, 0),
    "window": (4, 2, 8, 3 + 21 + STEP, 21, 3),
}
"""Heads, key heads, size of a head, rows of the cache, window, sink."""


def attention(shape: tuple[int, ...], kind: KvKind = KvKind.I8) -> Module:
    heads, groups, width, capacity, window, sink = shape
    ports = [(None, count * width, "f32") for count in (heads, groups, groups)]
    params = {"heads": heads, "kv_heads": groups, "scale": width**-0.5, "kv_layer": 1}
    params |= {"window": window, "sink": sink}
    cache = KvCache(2, groups, width, capacity, kind)
    outputs = [(None, heads * width, "f32")]
    return single_call(Op.ATTENTION, ports, outputs, [], params, kv=cache, max_tokens=STEP)


def rows(shape: tuple[int, ...], count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    widths = (shape[0] * shape[2], shape[1] * shape[2], shape[1] * shape[2])
    return {
        f"x{at}": random.standard_normal((count, width)).astype(np.float32)
        for at, width in enumerate(widths)
    }


def native(case: Case, target: str = native_targets()[0]) -> NativePlan:
    kernels = library(target, case.module.ops)
    return NativePlan(kernels, case.emitted.plan_bytes, case.emitted.sections)


def array(values: dict[str, bytes]) -> np.ndarray:
    return np.frombuffer(values["y0"], "<f4")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("target", native_targets())
def test_it_gives_the_simulators_bits_and_stays_near_f64(name: str, target: str) -> None:
    case = Case.of(attention(SHAPES[name]))
    simulator, exact = case.simulator(), case.exact()
    length = SHAPES[name][3] + (60 if SHAPES[name][4] else 0)
    with native(case, target) as plan:
        for at, start in enumerate(range(0, length, STEP)):
            values = rows(SHAPES[name], min(STEP, length - start), at)
            found = raw(plan.run("run", values))
            assert found == raw(simulator.run("run", values))
            expected = exact.run_arrays("run", values)["y0"].reshape(-1)
            error = np.abs(array(found) - expected).max() / np.abs(expected).max()
            assert 0 < error < 0.02
        assert plan.kv_length == length


def test_chunks_change_no_bit() -> None:
    shape = SHAPES["groups"]
    case = Case.of(attention(shape))
    values = rows(shape, STEP, 5)
    with native(case) as plan:
        whole = raw(plan.run("run", values))["y0"]
        plan.kv_length = 0
        single = [
            raw(plan.run("run", {role: part[at : at + 1].copy() for role, part in values.items()}))
            for at in range(STEP)
        ]
    assert b"".join(part["y0"] for part in single) == whole


def test_it_takes_the_bytes_that_the_plan_says() -> None:
    for kind, head in ((KvKind.F32, 4 * 16), (KvKind.I8, 16 + 4)):
        case = Case.of(attention(SHAPES["groups"], kind))
        wanted = 2 * 2 * 64 * 2 * head
        plan = parse_plan(case.emitted.plan_bytes)
        assert plan.kv is not None
        assert plan.kv.kind is kind
        assert plan.kv.size_bytes == case.emitted.memory.kv_bytes == wanted


def test_a_value_that_is_no_number_ends_the_run_and_nothing_is_kept() -> None:
    shape = SHAPES["heads"]
    case = Case.of(attention(shape))
    simulator = case.simulator()
    with native(case) as plan:
        for role in ("x1", "x2"):
            values = rows(shape, 2, 1)
            values[role][1, 3] = np.nan
            for runner in (plan, simulator):
                with pytest.raises(NotFiniteError):
                    runner.run("run", values)
                assert runner.kv_length == 0


def test_rows_of_zeros_attend_evenly() -> None:
    shape = SHAPES["heads"]
    case = Case.of(attention(shape))
    values = rows(shape, 4, 2)
    values["x0"][:] = 0
    values["x1"][2] = 0
    with native(case) as plan:
        found = raw(plan.run("run", values))
    assert found == raw(case.simulator().run("run", values))
    got = array(found).reshape(4, -1)
    assert np.abs(got[3] - values["x2"].mean(axis=0)).max() < 0.02


def test_an_unknown_kind_of_cache_is_refused() -> None:
    case = Case.of(attention(SHAPES["heads"]))
    good = case.emitted.plan_bytes
    *fields, kind, reserved = HEADER.layout.unpack_from(good)
    assert (kind, reserved) == (KvKind.I8, 0)
    for value in (2, 0xFFFFFFFF):
        with pytest.raises(PlanError, match="unknown kind"):
            parse_plan(HEADER.layout.pack(*fields, value, 0) + good[HEADER.layout.size :])


@pytest.mark.parametrize("target", native_targets())
def test_a_decoder_answers_with_the_simulators_bits(target: str) -> None:
    builder = DecoderBuilder()
    assert builder.kv is not None
    builder.kv = replace(builder.kv, kind=KvKind.I8)
    builder.add_step()
    case = Case.of(builder.module())
    simulator = case.simulator()
    with native(case, target) as plan:
        for step in range(5):
            values = {
                "token_ids": ids([step, step + 1]),
                "positions": ids([2 * step, 2 * step + 1]),
            }
            assert raw(plan.run("step", values)) == raw(simulator.run("step", values))


def test_a_model_is_lowered_with_codes_where_it_may_lose_something(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    plain, coded = (lowered(tmp_path, loss=Loss(kv=kind)).module.kv for kind in KvKind)
    assert plain is not None
    assert coded == replace(plain, kind=KvKind.I8)


def test_the_command_stores_codes_and_explains_them(tmp_path: Path, capsys) -> None:
    target = host_target()
    if target is None:
        pytest.skip("no target runs on this machine")
    weak, out = write_weak(tmp_path / "weak"), tmp_path / "bundle"
    raised = raise_pipeline(import_pipeline(weak))
    write_cards(weak, cards_of(RemovalTrials.of(raised, pack_weight, StageCache(STORE)), 2))
    words = ["compile", str(weak), "--target", target.id, "--out", str(out), "--cache", str(STORE)]
    assert cli.main([*words, "--kv", "int8"]) == 0
    plan = parse_plan((out / "sections" / "plan").read_bytes())
    assert plan.kv is not None
    assert plan.kv.kind is KvKind.I8
    capsys.readouterr()
    assert cli.main(["explain", str(out)]) == 0
    assert " as int8 codes" in capsys.readouterr().out
    assert read_report(out)["provenance"]["kv"] == "I8"
    assert read_report(out)["memory"]["kv_bytes"] == plan.kv.size_bytes
