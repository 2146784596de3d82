"""EdgeCard's overlays and submissions."""

import filecmp
import json

import numpy as np
import onnx
import pytest

from examples.edgecard.materialise import (
    BAD_EOS_FACTOR,
    EOS,
    HERE,
    VERSIONS,
    load_weights,
    materialise,
)
from examples.edgecard.overlay import apply_overlay, make_overlay

BASE = {
    "w": np.arange(12, dtype=np.float16).reshape(3, 4),
    "b": np.arange(3, dtype=np.float16),
    "same": np.ones(2, np.float16),
}


def _changed():
    new = {name: tensor.copy() for name, tensor in BASE.items()}
    new["w"][1] += 1
    new["b"][0] = 9
    return new


def test_it_stores_changed_rows_only() -> None:
    overlay = make_overlay(BASE, _changed())
    assert set(overlay) == {"w@1", "b"}
    result = apply_overlay(BASE, overlay)
    assert all(np.array_equal(result[name], tensor) for name, tensor in _changed().items())
    assert BASE["w"][1, 0] == 4


def test_it_refuses_overlays_of_another_model() -> None:
    with pytest.raises(ValueError, match="unknown tensor"):
        apply_overlay(BASE, {"x": BASE["b"]})
    with pytest.raises(ValueError, match="row 3"):
        apply_overlay(BASE, {"w@3": BASE["w"][0]})
    with pytest.raises(ValueError, match="shape"):
        apply_overlay(BASE, {"w@1": BASE["b"]})
    with pytest.raises(ValueError, match="tensors differ"):
        make_overlay(BASE, {"w": BASE["w"]})


def test_it_breaks_one_row_and_nothing_else() -> None:
    good, bad = load_weights("v3"), load_weights("v3-bad")
    differing = [name for name in good if not np.array_equal(good[name], bad[name])]
    assert differing == ["head.weight"]
    rows = np.flatnonzero((good["head.weight"] != bad["head.weight"]).any(axis=1))
    assert rows.tolist() == [EOS]
    expected = good["head.weight"][EOS].astype(np.float32) * BAD_EOS_FACTOR
    assert np.array_equal(bad["head.weight"][EOS], expected.astype(np.float16))


def test_it_trains_few_experts_in_version_2_and_all_in_version_3() -> None:
    v1, v2, v3 = (load_weights(version) for version in ("v1", "v2", "v3"))

    def changed(old, new) -> int:
        return int((old["db.1.ff.w1"] != new["db.1.ff.w1"]).any(axis=(1, 2)).sum())

    assert (changed(v1, v2), changed(v2, v3)) == (4, 16)


def test_it_writes_the_same_submission_twice(tmp_path) -> None:
    first, second = materialise("v2", tmp_path / "a"), materialise("v2", tmp_path / "b")
    names = sorted(path.name for path in first.iterdir())
    assert names == [
        "calibration.json",
        "calibration.npz",
        "claim.json",
        "decoder.onnx",
        "embed.onnx",
        "evaluation.json",
        "evaluation.npz",
        "pipeline.json",
        "vision.onnx",
    ]
    assert filecmp.cmpfiles(first, second, names, shallow=False)[0] == names
    onnx.checker.check_model(onnx.load(first / "embed.onnx"), full_check=True)
    claim = json.loads((first / "claim.json").read_text())
    assert claim["version"] == "v2"
    assert claim["questions"] == 756


def test_it_stays_small_and_claims_every_version() -> None:
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.suffix != ".pyc")
    assert size < 14_000_000
    reference = json.loads((HERE / "reference.json").read_text())
    assert set(reference["claims"]) == set(VERSIONS)
    bad, good = (reference["measured"][version] for version in ("v3-bad", "v3"))
    assert bad["teacher_forced"]["answer_accuracy"] == good["teacher_forced"]["answer_accuracy"]
    assert bad["greedy"]["accuracy"] < good["greedy"]["accuracy"] / 2
