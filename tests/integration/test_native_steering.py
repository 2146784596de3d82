"""Steered routers: the simulator's bits on every target, no bits without a record, safe swaps."""

import ctypes
import threading
from dataclasses import replace

import numpy as np
import pytest

from compiler.contract.native_abi import SfSteering
from compiler.contract.native_errors import BadIndexError, NativeError, UnsupportedPlanError
from compiler.contract.native_steering import steering_record
from compiler.contract.operations import RouteOrder
from compiler.contract.session import Manner, Session, step_inputs
from compiler.contract.steering import Counts, Residency, Steering, SteeringError
from compiler.emitters.runner import ScriptRun, play
from tests.factories import soaked
from tests.factories.emulated import RUNS
from tests.factories.kernels import Case, native_targets, raw
from tests.factories.modules import small_decoder
from tests.factories.steering import TOKENS, WIDTH, random_steering, residency, routed
from tests.integration.test_native_emulated import runner
from tests.integration.test_native_tiles import experts as plain_experts

CASES = {order.name: routed(order) for order in RouteOrder} | {
    "fused": routed(RouteOrder.TOPK_SOFTMAX, fused=True),
    "fused probabilities": routed(RouteOrder.SOFTMAX_TOPK, fused=True),
}
LATER = step_inputs((3,), 20)
BUILT = {name: Case.of(module) for name, module in CASES.items()}


def rows(seed: int, tokens: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": (random.standard_normal((tokens, WIDTH)) * 2).astype(np.float32)}


@pytest.mark.parametrize("target", native_targets())
@pytest.mark.parametrize("name", CASES)
def test_it_chooses_as_the_simulator_does(name: str, target: str) -> None:
    case = BUILT[name]
    simulator = case.simulator()
    with case.native(target) as native:
        for seed in range(40):
            steering, table = random_steering(case.module, seed)
            native.steering.publish(steering, table)
            simulator.set_steering(steering, table)
            values = rows(seed, 1 + seed % TOKENS)
            assert raw(native.run("run", values)) == raw(simulator.run("run", values)), steering
            assert native.steering.counts() == simulator.steering_counts, steering
            if seed % 7 == 0:
                native.kv_length = simulator.kv_length = 0
        assert native.steering.counts().substituted > 0
        assert native.steering.counts().narrowed > 0


@pytest.mark.parametrize("name", CASES)
def test_a_record_that_steers_nothing_changes_no_bit(name: str) -> None:
    case = BUILT[name]
    some = residency(case.module, {0, 2})
    with case.native(native_targets()[0]) as native:
        for seed in range(5):
            values = rows(seed, TOKENS)
            native.steering.clear()
            expected = raw(native.run("run", values))
            for table in (None, some):
                native.steering.publish(Steering(protect=seed), table)
                assert raw(native.run("run", values)) == expected
        counts = native.steering.counts()
        assert counts == Counts(10 * TOKENS, 10 * TOKENS * 3)


@pytest.mark.parametrize("name", RUNS)
def test_every_machine_chooses_alike(name: str) -> None:
    program, emulator = runner(name)
    for key in ("TOPK_SOFTMAX", "SIGMOID_TOPK_RENORM", "SPARSEMIXER", "fused"):
        case = BUILT[key]
        for seed in (1, 2, 3):
            steering, table = random_steering(case.module, seed)
            values = [{"x": rows(at, TOKENS)["x"].tobytes()} for at in range(2)]
            found = play(
                program,
                emulator,
                case.emitted.plan_bytes,
                case.emitted.sections,
                [ScriptRun("run", value) for value in values],
                steering=steering,
                residency=table,
            )
            simulator = case.simulator()
            simulator.set_steering(steering, table)
            assert found == [raw(simulator.run("run", value)) for value in values]


def test_a_whole_decoder_goes_on_where_nothing_is_in_memory() -> None:
    case = Case.of(small_decoder(5, see=False))
    table = Residency(len(case.module.weights))
    for weight in range(len(table)):
        table[weight] = False
    values = {
        "token_ids": np.array([[1], [2]], np.int32),
        "positions": np.array([[0], [1]], np.int32),
    }
    simulator = case.simulator()
    simulator.set_steering(Steering(may_load=False), table)
    with case.native(native_targets()[0]) as native:
        native.steering.publish(Steering(may_load=False), table)
        found = raw(native.run("step", values))
        assert found == raw(simulator.run("step", values))
        counts = native.steering.counts()
        assert counts.chosen == 0
        assert counts.missing == counts.substituted == 2 * counts.rows > 0
        assert np.isfinite(np.frombuffer(found["logits"], np.float32)).all()


def test_the_choice_does_not_depend_on_threads() -> None:
    case = BUILT["fused"]
    steering, table = random_steering(case.module, 3)
    results = []
    for threads in (1, 3):
        with case.native(native_targets()[0]) as native:
            native.threads = threads
            native.steering.publish(steering, table)
            results.append([raw(native.run("run", rows(seed, TOKENS))) for seed in range(4)])
    assert results[0] == results[1]


def test_cutting_the_cache_forgets_what_routers_saw() -> None:
    case = BUILT["TOPK_SOFTMAX"]
    steering = Steering(pull=0.3, protect=0)
    with case.native(native_targets()[0]) as native:
        native.steering.publish(steering, residency(case.module, {0, 5}))
        first = raw(native.run("run", rows(1, 1)))
        native.run("run", {"x": rows(2, TOKENS)["x"] * 50})
        native.kv_length = 0
        assert raw(native.run("run", rows(1, 1))) == first


def test_without_a_record_no_slot_may_be_empty() -> None:
    case = Case.of(plain_experts("dense"))
    roles = {role: case.module.buffers[at] for role, at in case.module.programs[0].inputs.items()}
    values = {
        role: np.full((2, b.cols), -1, np.int32)
        if b.dtype == "i32"
        else np.ones((2, b.cols), np.float32)
        for role, b in roles.items()
    }
    assert any(b.dtype == "i32" for b in roles.values())
    with case.native(native_targets()[0]) as native, pytest.raises(BadIndexError):
        native.run("run", values)


def test_it_refuses_records_that_make_no_sense() -> None:
    case = BUILT["fused"]
    weights = len(case.module.weights)
    nonsense = [
        Steering(pull=-0.1),
        Steering(pull=float("nan")),
        Steering(pull=65.0),
        Steering(margin=1.5),
        Steering(max_k=65),
        Steering(protect=-1),
        Steering(modality=2.0),
        Steering(bias=(0.0,) * (weights - 1)),
        Steering(bias=(float("inf"),) * weights),
    ]
    with case.native(native_targets()[0]) as native:
        for steering in nonsense:
            with pytest.raises(SteeringError):
                native.steering.publish(steering)
            with pytest.raises(SteeringError):
                case.simulator().set_steering(steering)
        with pytest.raises(SteeringError, match="residency"):
            native.steering.publish(Steering(), Residency(weights + 1))
        set_steering = native._library.set_steering
        assert set_steering is not None
        wrong = {"struct_bytes": 8, "weights": 1, "may_load": 2, "protect": 65, "max_k": 65}
        wrong |= {"pull": float("nan"), "margin": float("nan"), "modality": -1.5}
        for name, value in wrong.items():
            record = steering_record(Steering(), weights)
            setattr(record, name, value)
            assert set_steering(native._context, ctypes.addressof(record)) != 0, name
        assert set_steering(None, None) != 0
        assert native.steering.present is None
        seat = native.steering
    for use in (lambda: seat.publish(Steering()), seat.clear, seat.counts):
        with pytest.raises(NativeError, match="closed"):
            use()
    assert ctypes.sizeof(SfSteering) == 56


def test_kernels_that_steer_nothing_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    with BUILT["fused"].native(native_targets()[0]) as native:
        monkeypatch.setattr(native._library, "set_steering", None)
        assert not native.steering.is_supported
        with pytest.raises(UnsupportedPlanError, match="build them again"):
            native.steering.publish(Steering())
        native.run("run", rows(1, 2))


def test_records_and_tables_change_while_it_runs() -> None:
    """Whatever a run saw, its rows choose experts that exist, and gates that sum to one."""
    case = BUILT["TOPK_SOFTMAX"]
    done = threading.Event()
    table = residency(case.module, {0, 1, 2})
    with case.native(native_targets()[0]) as native:

        def swap() -> None:
            for seed in range(400):
                steering, _ = random_steering(case.module, seed)
                native.steering.publish(steering, table)
                table[seed % len(table)] = not table[seed % len(table)]
            done.set()

        other = threading.Thread(target=swap)
        other.start()
        held = 0
        while not done.is_set():
            found = native.run("run", rows(1, TOKENS))
            index = np.frombuffer(found["index"], np.int32).reshape(TOKENS, -1)
            gate = np.frombuffer(found["gate"], np.float32).reshape(TOKENS, -1)
            some = index[:, 0] >= 0
            assert ((gate == 0) == (index < 0)).all() or (gate[index < 0] == 0).all()
            assert np.allclose(gate[some].sum(axis=1), 1.0, atol=1e-5)
            held = max(held, native.steering.held)
        other.join()
        assert held <= 2


def test_an_answer_does_not_depend_on_when_the_picture_was_looked_at() -> None:
    """Its steered routers begin anew after the picture, seen with the question or long before."""
    made = soaked.module()
    case, pipeline = Case.of(made), soaked.pipeline_of(made)
    image = np.arange(soaked.SIDE**2, dtype=np.uint8).tobytes()
    with case.native(native_targets()[0]) as native:
        for seed in range(20):
            steered = soaked.random_steered(len(made.weights), seed)
            record = replace(steered.steering, pull=0.3, protect=0, max_k=0)
            native.steering.publish(record, steered.residency)
            said = []
            for looks in ("see", "keep"):
                session = Session(native, pipeline)
                getattr(session, looks)(image)
                answer = session.answer((1, 7 + seed, 9, 1), Manner(most=1))
                said.append((answer.tokens, bytes(native.run("step", LATER)["logits"])))
            assert said[0] == said[1], seed
