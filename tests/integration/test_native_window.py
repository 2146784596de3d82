"""Attention sink and sliding window: a long decode in the memory of a short one."""

from pathlib import Path

import numpy as np
import pytest

from compiler.contract.native_errors import ContextLostError
from compiler.contract.plan import PlanError, parse_plan
from compiler.contract.session import Session
from compiler.driver.sections import pipeline_section
from compiler.frontend.pipeline_json import read_pipeline
from compiler.kernels.program import KvCache, Module, Op, ProgramError, validate_module
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import single_call
from tests.factories.onnx_models import write_tiny, write_windowed
from tests.factories.onnx_runs import lowered

HEADS, GROUPS, HEAD, STEP = 4, 2, 8, 8
SINK, WINDOW = 3, 21
CAPACITY = SINK + WINDOW + STEP
SCALE = float(np.float32(HEAD**-0.5))


def windowed(*, capacity: int = CAPACITY, sink: int = SINK, window: int = WINDOW) -> Module:
    ports = [(None, heads * HEAD, "f32") for heads in (HEADS, GROUPS, GROUPS)]
    params = {"heads": HEADS, "kv_heads": GROUPS, "scale": SCALE, "kv_layer": 0}
    params |= {"window": window, "sink": sink}
    cache = KvCache(1, GROUPS, HEAD, capacity)
    outputs = [(None, HEADS * HEAD, "f32")]
    return single_call(Op.ATTENTION, ports, outputs, [], params, kv=cache, max_tokens=STEP)


def band_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Full attention over all rows in f64, with the mask written out."""
    n = len(q)
    rows, keys = np.arange(n)[:, None], np.arange(n)[None, :]
    seen = (keys <= rows) & ((keys < SINK) | (keys > rows - WINDOW))
    out = np.zeros_like(q)
    for head in range(HEADS):
        at, group = slice(head * HEAD, (head + 1) * HEAD), head * GROUPS // HEADS
        of = slice(group * HEAD, (group + 1) * HEAD)
        scores = np.where(seen, q[:, at] @ k[:, of].T * SCALE, -np.inf)
        terms = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, at] = terms / terms.sum(axis=1, keepdims=True) @ v[:, of]
    return out


def rows(count: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    widths = (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD)
    return [random.standard_normal((count, width)).astype(np.float32) for width in widths]


def chunks(count: int, seed: int) -> list[slice]:
    random = np.random.default_rng(seed)
    cuts, at = [], 0
    while at < count:
        size = min(int(random.integers(1, STEP + 1)), count - at)
        cuts.append(slice(at, at + size))
        at += size
    return cuts


@pytest.mark.parametrize("target", native_targets())
def test_a_long_decode_equals_full_attention_under_the_band(target: str) -> None:
    case = Case.of(windowed())
    simulator, exact = case.simulator(), case.exact()
    given = rows(300, 1)
    expected = band_attention(*(part.astype(np.float64) for part in given))
    with case.native(target) as plan:
        for cut in chunks(300, 2):
            values = {f"x{at}": part[cut].copy() for at, part in enumerate(given)}
            native = raw(plan.run("run", values))
            assert native == raw(simulator.run("run", values))
            found = exact.run_arrays("run", values)["y0"]
            assert np.abs(found - expected[cut]).max() < 1e-12
            got = np.frombuffer(native["y0"], "<f4").reshape(-1, HEADS * HEAD)
            assert np.abs(got - expected[cut]).max() < 1e-5
        assert plan.kv_length == simulator.kv_length == 300


def test_ten_thousand_tokens_take_no_more_memory() -> None:
    case = Case.of(windowed())
    given = rows(10_000, 3)
    with case.native(native_targets()[0]) as plan:
        before = plan.context_bytes
        for start in range(0, 10_000, STEP):
            values = {f"x{at}": part[start : start + STEP] for at, part in enumerate(given)}
            result = raw(plan.run("run", values))
        assert plan.kv_length == 10_000
        assert plan.context_bytes == before
    assert case.emitted.memory.kv_bytes == 2 * 4 * GROUPS * HEAD * CAPACITY
    tail = slice(10_000 - STEP - WINDOW, None)
    last = [np.concatenate([part[:SINK], part[tail]]).astype(np.float64) for part in given]
    expected = band_attention(*last)[-STEP:]
    got = np.frombuffer(result["y0"], "<f4").reshape(-1, HEADS * HEAD)
    assert np.abs(got - expected).max() < 1e-5


def test_a_window_that_everything_fits_in_changes_no_bit() -> None:
    wide, full = Case.of(windowed(window=40, capacity=64)), Case.of(windowed(window=0, sink=0))
    given = rows(CAPACITY, 4)
    with wide.native(native_targets()[0]) as one, full.native(native_targets()[0]) as other:
        for start in range(0, CAPACITY, STEP):
            values = {f"x{at}": part[start : start + STEP] for at, part in enumerate(given)}
            assert raw(one.run("run", values)) == raw(other.run("run", values))


def test_it_goes_back_only_to_rows_that_are_left() -> None:
    case = Case.of(windowed())
    simulator = case.simulator()
    given = rows(64, 5)
    with case.native(native_targets()[0]) as plan:
        for runner in (plan, simulator):
            for start in range(0, 64, STEP):
                values = {f"x{at}": part[start : start + STEP] for at, part in enumerate(given)}
                runner.run("run", values)
            with pytest.raises(ContextLostError):
                runner.kv_length = 40
            assert runner.kv_length == 64
            runner.kv_length = 64 - STEP
            runner.run("run", values)
            assert runner.kv_length == 64
            runner.kv_length = SINK
            runner.kv_length = 0
        simulator.kv_length = plan.kv_length = 0
        values = {f"x{at}": part[:STEP] for at, part in enumerate(given)}
        assert raw(plan.run("run", values)) == raw(simulator.run("run", values))


def test_it_repeats_a_step_with_the_same_bits() -> None:
    case = Case.of(windowed())
    given = rows(80, 6)
    with case.native(native_targets()[0]) as plan:
        for start in range(0, 80, STEP):
            values = {f"x{at}": part[start : start + STEP] for at, part in enumerate(given)}
            first = raw(plan.run("run", values))
            plan.kv_length = start
            assert raw(plan.run("run", values)) == first


def test_a_cache_too_small_for_its_window_is_refused() -> None:
    with pytest.raises(ProgramError, match="exceed"):
        validate_module(windowed(capacity=CAPACITY - 1))
    good = Case.of(windowed()).emitted.plan_bytes
    small = good.replace(CAPACITY.to_bytes(4, "little"), (CAPACITY - 1).to_bytes(4, "little"), 1)
    with pytest.raises(PlanError, match="exceed"):
        parse_plan(small)


def test_a_model_with_a_window_answers_natively_as_in_the_simulator(tmp_path: Path) -> None:
    limits = {"max_step_tokens": 4, "max_context": 96}
    module = lowered(write_windowed(tmp_path, sink=2, window=10, **limits)).module
    assert module.kv is not None
    assert module.kv.capacity == 2 + 10 + 6  # the picture's six rows arrive at once
    case = Case.of(module)
    simulator = case.simulator()
    with case.native(native_targets()[0]) as plan:
        for at in range(60):
            step = {"token_ids": ids([at % 12]), "positions": ids([at])}
            assert raw(plan.run("step", step)) == raw(simulator.run("step", step))
        assert plan.kv_length == 60


def test_a_wide_window_is_left_off(tmp_path: Path) -> None:
    full = lowered(write_tiny(tmp_path / "full")).module
    wide = lowered(write_windowed(tmp_path / "wide", sink=4, window=10_000)).module
    assert full.kv == wide.kv
    assert [p.calls for p in full.programs] == [p.calls for p in wide.programs]


def test_a_session_looks_again_when_an_answer_went_over_the_picture(tmp_path: Path) -> None:
    limits = {"max_step_tokens": 4, "max_context": 96}
    directory = write_windowed(tmp_path, sink=2, window=10, **limits)
    case = Case.of(lowered(directory).module)
    pipeline = pipeline_section(read_pipeline(directory), parse_plan(case.emitted.plan_bytes))
    assert pipeline.max_context == 96
    assert pipeline.image is not None
    image = np.random.default_rng(0).integers(0, 256, pipeline.image.size_bytes, np.uint8).tobytes()
    simulator = case.simulator()
    session = Session(simulator, pipeline)
    session.see(image)
    prompt = [3, 5, 7, 1] * 10
    first = session.answer(prompt)
    assert simulator.kv_length > 18
    assert session.answer(prompt) == first
