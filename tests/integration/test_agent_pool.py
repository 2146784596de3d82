"""A device that keeps a part of EdgeCard's experts in memory answers as one that keeps all."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.fingerprint import target_of
from compiler.contract.pool_abi import ExpertState
from compiler.contract.pool_plan import plan_pool
from compiler.contract.pooled_weights import PooledWeights
from compiler.contract.telemetry import GAUGES, known_gauges
from compiler.driver.bundle_files import write_bundle
from device_agent.errors import BundleError
from device_agent.probe.linux import probe
from device_agent.runtime.answers import Outcome, Question
from device_agent.runtime.bundle import load_bundle, load_directory
from device_agent.runtime.engine import NativeEngine
from device_agent.runtime.evaluation import load_evaluation
from device_agent.runtime.guard import InferenceGuard
from device_agent.runtime.hotset import HOTSET_FILE, HotSetFile
from device_agent.runtime.weights import WeightPool
from device_agent.storage.disk import Disk
from tests.factories.bundles import compiled
from tests.factories.guarded import TIMEOUT_S, Installed, installed

ASKED = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooled")


@pytest.fixture(scope="module")
def at(folder: Path) -> Installed:
    return installed(folder)


@pytest.fixture(scope="module")
def asked(at: Installed, folder: Path) -> tuple[Question, ...]:
    return load_evaluation(folder / "v1" / "evaluation.json").cards[0][:ASKED]


@pytest.fixture(scope="module")
def sizes(at: Installed) -> tuple[int, int]:
    """Return the smallest budget, and the bytes of all weights."""
    bundle = load_bundle(at.store, at.pointer)
    plan = bundle.runner.plan  # type: ignore[attr-defined]
    bundle.runner.close()
    return plan_pool(plan, 1 << 50).least_bytes, bundle.runner.weight_bytes


@pytest.fixture(scope="module")
def expected(at: Installed, asked: tuple[Question, ...], folder: Path) -> list[Any]:
    guard = engine(at, folder, 0).start(at.pointer)
    words = [guard.answer(question).words for question in asked]
    guard.close()
    return words


def engine(at: Installed, folder: Path, budget: int, threads: int = 1) -> NativeEngine:
    pool = WeightPool(budget)
    return NativeEngine(at.store, folder / "state", 60.0, TIMEOUT_S, threads, weights=pool)


@pytest.fixture
def start(at: Installed, folder: Path) -> Iterator[Callable[..., InferenceGuard]]:
    made: list[InferenceGuard] = []

    def start_one(budget: int, threads: int = 1) -> InferenceGuard:
        made.append(engine(at, folder, budget, threads).start(at.pointer))
        return made[-1]

    yield start_one
    for guard in made:
        guard.close()


@pytest.mark.parametrize(("share", "threads"), [(0.0, 1), (0.25, 2), (0.5, 1), (0.75, 3)])
def test_it_answers_the_same_within_the_budget(
    share: float,
    threads: int,
    sizes: tuple[int, int],
    asked: tuple[Question, ...],
    expected: list[Any],
    start: Callable[..., InferenceGuard],
) -> None:
    least, whole = sizes
    budget = least + int(share * (whole - least))
    guard = start(budget, threads)
    records = [guard.answer(question) for question in asked]
    assert [record.words for record in records] == expected
    assert not any(record.degraded or record.faults for record in records)
    gauges = known_gauges(guard.facts)
    told = {name for name in GAUGES if name.startswith(("expert_", "fragmentation_", "resident_"))}
    assert len(told) == 13
    assert told <= gauges.keys()
    assert gauges["resident_bytes"] <= gauges["weight_bytes"] <= budget
    assert gauges["expert_hits"] > 0
    assert gauges["expert_misses"] + gauges["expert_late"] + gauges["expert_hidden"] > 0
    assert gauges["expert_damaged"] == 0
    facts = guard.facts
    assert (facts["max_weight_bytes"], facts["least_weight_bytes"]) == (budget, least)


def test_what_fits_is_loaded_whole(
    sizes: tuple[int, int], start: Callable[..., InferenceGuard]
) -> None:
    facts = start(sizes[1]).facts
    assert facts["weight_bytes"] == sizes[1]
    assert (facts["max_weight_bytes"], facts["least_weight_bytes"]) == (sizes[1], sizes[0])
    assert "resident_bytes" not in facts
    assert "max_weight_bytes" not in start(0).facts


def test_huge_pages_beside_the_weights_are_not_the_weights(
    at: Installed, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_bundle(at.store, at.pointer, WeightPool(sizes[0])).runner
    found: list[int | None] = [None, 5, 1 << 40]
    for huge, told in zip(found, [None, 5, runner.weight_bytes], strict=True):
        monkeypatch.setattr(PooledWeights, "huge_bytes", lambda _, huge=huge: huge)
        assert runner.huge_weight_bytes == told
    runner.close()


def test_a_budget_too_small_is_refused_with_the_numbers(
    at: Installed, sizes: tuple[int, int], start: Callable[..., InferenceGuard]
) -> None:
    with pytest.raises(BundleError) as caught:
        start(sizes[0] - 1)
    assert str(sizes[0]) in str(caught.value)
    assert str(sizes[0] - 1) in str(caught.value)
    assert "max_weight_bytes" in caught.value.hint


def test_the_self_test_runs_within_the_budget(
    at: Installed, folder: Path, sizes: tuple[int, int]
) -> None:
    engine(at, folder, sizes[0]).self_test(at.pointer)
    with pytest.raises(Exception, match="may be used"):
        engine(at, folder, 1000).self_test(at.pointer)


def test_the_hot_set_outlives_a_restart(
    at: Installed, folder: Path, sizes: tuple[int, int], asked: tuple[Question, ...], tmp_path: Path
) -> None:
    """What was used most is there from the start, and a damaged file is as good as none."""
    path = tmp_path / HOTSET_FILE
    budget = (sizes[0] + sizes[1]) // 2

    def started() -> InferenceGuard:
        pool = WeightPool(budget, HotSetFile(Disk(), path))
        return NativeEngine(at.store, folder / "state", 60.0, TIMEOUT_S, 1, weights=pool).start(
            at.pointer
        )

    guard = started()
    for question in asked:
        guard.answer(question)
    assert not path.exists()
    guard.close()
    bundle = load_bundle(at.store, at.pointer, WeightPool(budget, HotSetFile(Disk(), path)))
    weights = bundle.runner.weights
    assert isinstance(weights, PooledWeights)
    heats, states = [file.heat for file in weights.pool.files], weights.pool.states()
    assert max(heats) > 0
    present = [h for h, s in zip(heats, states, strict=True) if s is ExpertState.PRESENT]
    absent = [h for h, s in zip(heats, states, strict=True) if s is ExpertState.ABSENT]
    assert present
    assert absent
    assert sum(present) / len(present) > sum(absent) / len(absent)
    bundle.runner.close()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    started().close()


def test_bundles_with_the_same_weights_share_a_pool(at: Installed, sizes: tuple[int, int]) -> None:
    pool = WeightPool(sizes[0])
    first, second = (load_bundle(at.store, at.pointer, pool) for _ in range(2))
    assert isinstance(first.runner.weights, PooledWeights)
    assert first.runner.weights is second.runner.weights
    assert len(pool) == 1
    flags = {
        fcntl.fcntl(file.fd, fcntl.F_GETFL) & os.O_ACCMODE
        for file in first.runner.weights.pool.files
    }
    assert flags == {os.O_RDONLY}
    first.runner.close()
    second.runner.close()


def test_a_directory_is_opened_within_a_budget(folder: Path, sizes: tuple[int, int]) -> None:
    target = target_of(probe(device_class="pc"))
    write_bundle(compiled("v1", target, folder), folder / "bundle")
    bundle = load_directory(folder / "bundle", WeightPool(sizes[0]))
    weights = bundle.runner.weights
    assert isinstance(weights, PooledWeights)
    assert ExpertState.ABSENT in weights.pool.states()
    bundle.runner.close()


def test_an_expert_that_is_damaged_at_the_start_is_dropped(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    here = installed(tmp_path)
    bundle = load_bundle(here.store, here.pointer)
    bundle.runner.close()
    name = next(name for name in bundle.sections if name.startswith("expert."))
    sha256, size = bundle.sections[name]
    with here.store.path(sha256).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BundleError, match="damaged and was dropped"):
        load_bundle(here.store, here.pointer, WeightPool(sizes[0]))
    assert not here.store.has(sha256, size)
    with pytest.raises(BundleError, match="missing"):
        load_bundle(here.store, here.pointer, WeightPool(sizes[0]))


def test_experts_that_change_on_disk_end_no_answer_wrongly(
    tmp_path: Path, sizes: tuple[int, int], asked: tuple[Question, ...], expected: list[Any]
) -> None:
    """Other bytes are never computed with: an answer is right, marked degraded, or none."""
    here = installed(tmp_path)
    guard = engine(here, tmp_path, sizes[0]).start(here.pointer)
    for path in (tmp_path / "state" / "objects").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        with path.open("r+b") as file:
            file.write(data)
    for question, words in zip(asked, expected, strict=True):
        record = guard.answer(question)
        assert record.words == words or record.reasons or record.outcome is not Outcome.ENDED
    guard.close()
