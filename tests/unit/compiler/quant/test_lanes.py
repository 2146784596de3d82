"""Sessions side by side compute what they compute one after the other."""

import numpy as np
import pytest

from compiler.contract.native_errors import ContextFullError
from compiler.contract.session import Dialogue, hold, step_inputs
from compiler.quant.record import CalibrationRecord, Recorder
from compiler.simulator import Simulator
from compiler.simulator.lanes import LaneSimulator, hold_together
from tests.factories.modules import small_decoder

PICTURES = [
    np.random.default_rng(seed).integers(0, 256, 256, np.uint8).tobytes() for seed in (5, 6)
]
PROMPTS = ((3, 9, 4), (11,), (7, 7, 30, 2, 18))
STEPS = 3


def seeing(picture: bytes) -> Dialogue[None]:
    yield "see", {"image": picture}


def talking(prompt: tuple[int, ...], steps: int = STEPS) -> Dialogue[list[float]]:
    """Feed a prompt and the tokens that follow it; return all logits."""
    feed, position, logits = prompt, 40, []
    for _ in range(steps):
        outputs = yield "step", step_inputs(feed, position)
        logits += np.frombuffer(outputs["logits"], "<f4").tolist()
        position += len(feed)
        feed = (int.from_bytes(bytes(outputs["token"][:4]), "little"),)
    return logits


def one_after_the_other() -> tuple[list[list[float]], CalibrationRecord]:
    module = small_decoder()
    recorder = Recorder(module)
    simulator, found = Simulator(module, mode="f64", observer=recorder), []
    for picture in PICTURES:
        simulator.kv_length = 0
        hold(simulator, seeing(picture))
        seen = simulator.kv_length
        for at, prompt in enumerate(PROMPTS):
            simulator.kv_length = seen
            found.append(hold(simulator, talking(prompt, STEPS + at)))
    return found, recorder.finish()


def side_by_side() -> tuple[list[list[float]], CalibrationRecord]:
    module = small_decoder()
    recorder = Recorder(module)
    simulator = LaneSimulator(module, recorder)
    seen = [simulator.new_lane(10 * at) for at in range(len(PICTURES))]
    hold_together(simulator, seen, [seeing(picture) for picture in PICTURES])
    lanes = [lane.branch(lane.number + 1 + at) for lane in seen for at in range(len(PROMPTS))]
    dialogues = [talking(prompt, STEPS + at) for _ in seen for at, prompt in enumerate(PROMPTS)]
    return hold_together(simulator, lanes, dialogues), recorder.finish()


def test_they_answer_alike() -> None:
    for one, other in zip(one_after_the_other()[0], side_by_side()[0], strict=True):
        assert np.allclose(one, other, rtol=1e-6, atol=1e-6)


def test_the_recorder_sees_the_same_rows_and_runs() -> None:
    one, other = one_after_the_other()[1], side_by_side()[1]
    assert one.source_of == other.source_of
    for a, b in zip(one.samples, other.samples, strict=True):
        assert a.seen == b.seen
        assert np.array_equal(a.zeros, b.zeros)
        assert np.allclose(a.energy, b.energy, rtol=1e-9)
    for a, b in zip(one.routers, other.routers, strict=True):
        assert np.array_equal(a.run, b.run)
        assert np.array_equal(a.vision, b.vision)
        assert np.array_equal(a.index, b.index)
        assert np.allclose(a.inputs, b.inputs, rtol=1e-5)


def test_the_same_sessions_give_the_same_bytes() -> None:
    assert side_by_side()[1].to_bytes() == side_by_side()[1].to_bytes()


def test_a_branch_leaves_its_lane_as_it_is() -> None:
    simulator = LaneSimulator(small_decoder())
    lane = simulator.new_lane(0)
    hold_together(simulator, [lane], [seeing(PICTURES[0])])
    assert lane.cache is not None
    before = lane.cache.keys.copy()
    branch = lane.branch(1)
    hold_together(simulator, [branch], [talking(PROMPTS[0])])
    assert branch.kv_length > lane.kv_length
    assert np.array_equal(lane.cache.keys, before)


def test_a_lane_whose_cache_is_full_ends_all() -> None:
    simulator = LaneSimulator(small_decoder())
    lanes = [simulator.new_lane(at) for at in range(2)]
    with pytest.raises(ContextFullError):
        hold_together(simulator, lanes, [talking((1,), 1), talking((1, 2, 3, 4), 10_000)])
