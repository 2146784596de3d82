"""The compile benchmark: what it counts, and that the change it makes is one expert."""

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.compile import BARS_SECONDS, CHANGED_EXPERT, Cost, _claims, change_one_expert
from examples.edgecard.materialise import materialise


def test_it_changes_one_expert_of_one_layer_and_another_each_turn(tmp_path) -> None:
    submission = materialise("v1", tmp_path / "v1")
    before = onnx.load(submission / "decoder.onnx").graph.initializer
    change_one_expert(submission, 0)
    after = onnx.load(submission / "decoder.onnx").graph.initializer
    changed = [
        (numpy_helper.to_array(a), numpy_helper.to_array(b))
        for a, b in zip(before, after, strict=True)
        if a.SerializeToString() != b.SerializeToString()
    ]
    ((old, new),) = changed
    assert np.flatnonzero((old != new).any(axis=(1, 2))).tolist() == [CHANGED_EXPERT]


def test_it_compares_medians_with_the_bars() -> None:
    costs = [Cost(9.0, 8.0, 2048), Cost(4.0, 3.5, 1024), Cost(4.5, 4.0, 3072)]
    time, peak = _claims("one_expert", costs)
    assert (time.value, time.bar, time.ok) == (4.5, 1.0, True)
    assert "4.00 s of processor time" in time.note
    assert (peak.value, peak.ok) == (3.0, True)
    slow, _ = _claims("unchanged", costs)
    assert slow.ok is False
    assert _claims("second_target", costs)[0].ok is True
    assert set(BARS_SECONDS) == {"cold", "one_expert", "unchanged", "second_target"}
