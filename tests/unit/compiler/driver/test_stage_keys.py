"""What the keys of the stages depend on: every byte that is read, and nothing else."""

import dataclasses

import numpy as np
import onnx
import pytest

from compiler.driver.cache import StageCache
from compiler.driver.external_data import external_files
from compiler.driver.native_check import NativeCheck
from compiler.driver.options import no_progress
from compiler.driver.portable_stage import WEIGHT, Packing, lower_cached
from compiler.driver.provenance import calibration_digests, model_digests
from compiler.driver.stages import StageClock
from compiler.driver.verdicts import find_verdict, keep_verdict, verdict_key
from compiler.frontend.pipeline_json import read_pipeline
from compiler.hardware.targets import find_target
from compiler.quant.module import pack_weight
from tests.factories.submissions import linear_submission

SECTIONS = {"plan": b"p", "kernels": b"k", "weights.shared": b"w", "selftest": b"s"}
TARGET = find_target("x86-64-v1")


@pytest.fixture
def submission(tmp_path):
    return linear_submission(tmp_path / "submission")


def test_it_keys_a_submission_by_its_external_data(submission) -> None:
    assert external_files(submission / "m.onnx") == {"m.data"}
    spec = read_pipeline(submission)
    before = model_digests(submission, spec)
    assert set(before) == {"pipeline.json", "m.onnx", "m.data"}
    (submission / "notes.txt").write_text("not read")
    assert model_digests(submission, spec) == before
    data = bytearray((submission / "m.data").read_bytes())
    data[-1] ^= 1
    (submission / "m.data").write_bytes(data)
    after = model_digests(submission, spec)
    assert [name for name in before if before[name] != after[name]] == ["m.data"]
    (submission / "m.data").unlink()
    assert set(model_digests(submission, spec)) == {"pipeline.json", "m.onnx"}
    assert calibration_digests(submission) == {}


def test_it_keys_links_by_what_they_point_at(submission, tmp_path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for path in submission.iterdir():
        (links / path.name).symlink_to(path)
    spec = read_pipeline(links)
    digests = model_digests(links, spec)
    assert digests == model_digests(submission, spec)
    assert {"pipeline.json", *(component.file for component in spec.components)} <= digests.keys()


def test_it_does_not_look_outside_the_submission(submission, tmp_path) -> None:
    model = onnx.load(submission / "m.onnx", load_external_data=False)
    (tmp_path / "secret").write_bytes(b"x" * 4096)
    model.graph.initializer[0].external_data[0].value = "../secret"
    (submission / "m.onnx").write_bytes(model.SerializeToString())
    assert external_files(submission / "m.onnx") == {"../secret"}
    assert "../secret" not in model_digests(submission, read_pipeline(submission))


@pytest.mark.parametrize("content", [b"", b"location", b"\x00" * 100 + b"location" * 9])
def test_it_leaves_broken_files_to_the_importer(tmp_path, content) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    assert external_files(tmp_path / "m.onnx") == frozenset()
    assert external_files(tmp_path / "missing.onnx") == frozenset()


def test_it_lowers_the_same_files_once(submission, tmp_path) -> None:
    cache, clock = StageCache(tmp_path / "cache"), StageClock(no_progress)
    files = model_digests(submission, read_pipeline(submission))
    first = lower_cached(submission, files, cache, clock)
    assert [row["cached"] for row in clock.rows()][:2] == [False, False]
    (submission / "m.onnx").unlink()  # the key says that nothing needs to be read
    again = lower_cached(submission, files, cache, clock)
    assert [row["cached"] for row in clock.rows()][:2] == [True, True]
    assert again.ir_text == first.ir_text
    assert again.module.programs == first.module.programs


def _bytes(weight):
    packed, report, error = weight
    return packed.n, packed.k, packed.codes, packed.scales, packed.rows, report, error


def test_it_packs_again_only_what_has_changed(tmp_path) -> None:
    cache = StageCache(tmp_path)
    random = np.random.default_rng(2)
    weights = [random.standard_normal((16, 64)).astype(np.float32) for _ in range(4)]
    first = Packing(cache)
    packed = [first.pack(weight, None) for weight in weights]
    assert first.found == 0
    weights[2] = weights[2] * np.float32(1.5)
    second = Packing(cache)
    again = [second.pack(weight, None) for weight in weights]
    assert second.found == 3
    assert [_bytes(a) == _bytes(b) for a, b in zip(packed, again, strict=True)] == [
        *(True, True, False, True)
    ]
    assert [_bytes(item) for item in again] == [_bytes(pack_weight(item, None)) for item in weights]
    assert cache.use_by_stage()[WEIGHT].entries == 5


def test_it_keeps_a_verdict_for_the_very_same_bytes_only(tmp_path, monkeypatch) -> None:
    cache = StageCache(tmp_path)
    key = verdict_key(SECTIONS, TARGET, None)
    assert find_verdict(cache, key) is None
    keep_verdict(cache, key, NativeCheck("host", {"runs": 3}))
    assert find_verdict(cache, key) == NativeCheck("host", {"runs": 3, "kept": True})
    for name in SECTIONS:
        changed = {**SECTIONS, name: SECTIONS[name] + b"!"}
        assert find_verdict(cache, verdict_key(changed, TARGET, None)) is None
    other = dataclasses.replace(TARGET, id="other")
    assert verdict_key(SECTIONS, other, None) != key
    assert verdict_key(SECTIONS, TARGET, ("qemu-aarch64",)) != key
    monkeypatch.setattr("compiler.driver.verdicts.host_features", lambda: frozenset({"sse9"}))
    assert verdict_key(SECTIONS, TARGET, None) != key
