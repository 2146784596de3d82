"""A whole small model on every instruction set of this machine, with its cache."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest

from compiler.contract.native import NativePlan
from compiler.contract.native_errors import (
    BadPositionError,
    BadTokenError,
    ContextFullError,
    NativeError,
    NotFiniteError,
    TooManyTokensError,
)
from compiler.kernels.program import Module, Op, Program
from tests.factories.kernels import Case, ids, native_targets, raw
from tests.factories.modules import DecoderBuilder, small_decoder

IMAGE = np.random.default_rng(5).integers(0, 256, (1, 256), dtype=np.uint8)


def step(tokens: list[int], first: int) -> dict[str, np.ndarray]:
    return {"token_ids": ids(tokens), "positions": ids(range(first, first + len(tokens)))}


@pytest.fixture(scope="module", params=[False, True], ids=["relu", "swiglu"])
def case(request: pytest.FixtureRequest) -> Case:
    return Case.of(small_decoder(3, swiglu=request.param))


@pytest.fixture(scope="module")
def plain() -> Case:
    return Case.of(small_decoder(3))


@pytest.fixture
def plan(plain: Case) -> Iterator[NativePlan]:
    with plain.native(native_targets()[0]) as loaded:
        yield loaded


@pytest.mark.parametrize("target", native_targets())
def test_it_follows_the_simulator_through_a_conversation(case: Case, target: str) -> None:
    simulator = case.simulator()
    with case.native(target) as plan:
        for runner_step in (
            ("see", {"image": IMAGE}, None),
            ("step", step([4, 5, 6, 7, 8], 20), None),
            ("step", step([9], 25), None),
            ("step", step([10], 26), 7),
            ("step", step(list(range(16)), 20), 6),
            ("see", {"image": 255 - IMAGE}, 0),
        ):
            program, inputs, keep = runner_step
            if keep is not None:
                plan.kv_length = simulator.kv_length = keep
            assert raw(plan.run(program, inputs)) == raw(simulator.run(program, inputs))
            assert plan.kv_length == simulator.kv_length


def test_it_has_one_hash_on_every_instruction_set(plain: Case) -> None:
    digests = set()
    for target in native_targets():
        digest = hashlib.sha256()
        with plain.native(target) as plan:
            for values in (plan.run("see", {"image": IMAGE}), plan.run("step", step([1, 2], 20))):
                digest.update(b"".join(bytes(values[role]) for role in sorted(values)))
        digests.add(digest.hexdigest())
    assert len(digests) == 1


def test_it_gives_a_token_the_same_bits_alone_or_in_a_batch(plan: NativePlan) -> None:
    batch = raw(plan.run("step", step([3, 1, 4, 1, 5], 0)))
    plan.kv_length = 0
    for at, token in enumerate([3, 1, 4, 1, 5]):
        alone = raw(plan.run("step", step([token], at)))
    assert alone == batch


def test_it_forgets_truncated_rows(plan: NativePlan) -> None:
    plan.run("step", step([3, 1], 0))
    expected = raw(plan.run("step", step([7], 2)))
    plan.kv_length = 2
    plan.run("step", step([9, 9, 9], 2))
    plan.kv_length = 2
    assert raw(plan.run("step", step([7], 2))) == expected
    assert plan.kv_length == 3


def test_it_refuses_bad_inputs_and_keeps_its_cache(plan: NativePlan) -> None:
    good = step([1, 2, 3], 0)
    plan.run("step", good)
    expected = raw(plan.run("step", step([5], 3)))
    plan.kv_length = 3
    for error, inputs in (
        (BadTokenError, step([50], 3)),
        (BadTokenError, step([-1], 3)),
        (BadPositionError, step([1], 256)),
        (BadPositionError, {"token_ids": ids([1]), "positions": ids([-5])}),
        (TooManyTokensError, step(list(range(17)), 3)),
        (NativeError, {"token_ids": ids([1])}),
        (NativeError, {"token_ids": ids([1]), "positions": ids([1, 2])}),
        (NativeError, {"token_ids": b"abc", "positions": ids([1])}),
        (NativeError, {"token_ids": b"", "positions": b""}),
        (NativeError, {**good, "extra": b""}),
    ):
        with pytest.raises(error):
            plan.run("step", inputs)
        assert plan.kv_length == 3
    with pytest.raises(NativeError):
        plan.run("see", {"image": IMAGE[:, 1:]})
    with pytest.raises(NativeError):
        plan.run("walk", {})
    assert raw(plan.run("step", step([5], 3))) == expected


def test_it_says_when_the_context_is_full(plan: NativePlan) -> None:
    for chunk in range(4):
        plan.run("step", step(list(range(16)), 16 * chunk))
    assert plan.kv_length == 64
    with pytest.raises(ContextFullError):
        plan.run("step", step([1], 64))
    plan.kv_length = 63
    plan.run("step", step([1], 63))
    with pytest.raises(NativeError):
        plan.kv_length = 65
    with pytest.raises(NativeError):
        plan.kv_length = -1


def test_it_names_the_same_errors_in_the_simulator(plain: Case) -> None:
    simulator = plain.simulator()
    for error, inputs in (
        (BadTokenError, step([50], 0)),
        (BadPositionError, step([1], 256)),
        (TooManyTokensError, step(list(range(17)), 0)),
        (NativeError, {"token_ids": ids([1])}),
        (NativeError, {"token_ids": ids([1]), "positions": ids([1, 2])}),
    ):
        with pytest.raises(error):
            simulator.run("step", inputs)
        assert simulator.kv_length == 0
    for chunk in range(4):
        simulator.run("step", step(list(range(16)), 16 * chunk))
    with pytest.raises(ContextFullError):
        simulator.run("step", step([1], 64))


def overflowing() -> Module:
    builder = DecoderBuilder(1)
    x = builder.buffer(None, 40)
    squared = builder.call(Op.MUL, [x, x], [builder.buffer(None, 40)])
    y = builder.call(Op.LINEAR, [squared], [builder.buffer(None, 8)], [builder.w4(8, 40)])
    builder.program("forward", {"tensor": x}, {"tensor": y})
    return builder.module()


def test_it_reports_an_overflow_instead_of_an_answer() -> None:
    case = Case.of(overflowing())
    huge = np.full((2, 40), 1e30, np.float32)
    with case.native(native_targets()[0]) as plan:
        for runner in (plan, case.simulator()):
            with pytest.raises(NotFiniteError):
                runner.run("forward", {"tensor": huge})
            runner.run("forward", {"tensor": huge / np.float32(1e20)})


def test_it_counts_the_experts_that_ran(plain: Case) -> None:
    simulator = plain.simulator()
    results = simulator.run("step", step([1], 0))
    routing = np.frombuffer(results["routing"], np.int32).reshape(2, 2)
    expected = {f"expert.L{layer}.E{e}" for layer in range(2) for e in routing[layer]}
    assert simulator.reached == expected


def test_it_runs_the_exact_mode_close_to_the_quantised_one() -> None:
    builder = DecoderBuilder(2, experts=2)
    builder.add_step()
    case = Case.of(builder.module())
    got = case.simulator().run_arrays("step", step([1, 2, 3], 0))["logits"]
    exact = case.exact().run_arrays("step", step([1, 2, 3], 0))["logits"]
    assert exact.dtype == np.float64
    assert np.corrcoef(got[0], exact[0])[0, 1] > 0.97


def test_it_keeps_programs_apart(plain: Case) -> None:
    """A program's results must not depend on what another left in the arena."""
    module = plain.module
    only = Module(
        (Program("step", module.programs[1].calls, *_ports(module)),),
        module.buffers,
        module.weights,
        module.kv,
        module.max_tokens,
    )
    alone = Case.of(only).native(native_targets()[0])
    both = plain.native(native_targets()[0])
    both.run("see", {"image": IMAGE})
    both.kv_length = 0
    assert raw(alone.run("step", step([1, 2], 0))) == raw(both.run("step", step([1, 2], 0)))


def _ports(module: Module) -> tuple[dict[str, int], dict[str, int]]:
    return dict(module.programs[1].inputs), dict(module.programs[1].outputs)
