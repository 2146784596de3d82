"""A device steers a real bundle: by pressure and rung, between answers, and says what it did."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compiler.contract.plan import parse_plan
from compiler.contract.steering import Residency
from compiler.contract.telemetry import known_gauges
from compiler.driver.bundle_files import write_bundle
from compiler.driver.cards import Card, read_cards
from compiler.driver.options import CompiledBundle
from compiler.driver.steering_trial import plan_experts
from device_agent.runtime import MoERuntime
from device_agent.runtime.answers import AnswerRecord, BundleAnswerer, Question
from device_agent.runtime.assembly import SUBSTITUTED, Assembly
from device_agent.runtime.bundle import LoadedBundle, load_directory
from device_agent.runtime.faults import AS_ASKED, Way
from device_agent.runtime.steering_keeper import SteeringKeeper, steering_keeper
from device_agent.runtime.weights import WeightPool
from tests.factories.bundles import compiled_here, submission


class Scene:
    """A loaded bundle whose machine says what a test wants."""

    def __init__(self, bundle: LoadedBundle, plan: bytes, cards: list[Card]) -> None:
        assert bundle.steering is not None
        self.now_s = 0.0
        self.told: dict[str, float | None] = {}
        self.experts = plan_experts(parse_plan(plan))
        self.table = Residency(len(parse_plan(plan).weights))
        self.keeper = SteeringKeeper(
            bundle, bundle.steering, lambda: self.now_s, lambda: self.told, self.table
        )
        self.answerer = BundleAnswerer(Assembly(bundle, steering=self.keeper), 60.0)
        self.questions = [(card.image, item) for card in cards for item in card.questions]

    def ask(self, count: int = 12, way: Way = AS_ASKED, **told: float | None) -> list[AnswerRecord]:
        self.told = told
        found = []
        for image, item in self.questions[:count]:
            self.now_s += 2.0
            question = Question(image, item.prompt, item.words, item.answer)
            found.append(self.answerer.answer(question, way))
        return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> CompiledBundle:
    return compiled_here("v1", folder)


@pytest.fixture
def scene(bundle: CompiledBundle, folder: Path) -> Iterator[Scene]:
    directory = folder / "written"
    if not directory.exists():
        write_bundle(bundle, directory)
    loaded = load_directory(directory)
    image = loaded.pipeline.image
    assert image is not None
    cards = read_cards(submission("v1", folder), "calibration", image)[:4]
    made = Scene(loaded, bundle.sections["plan"], cards)
    yield made
    made.answerer.close()


def right(records: list[AnswerRecord]) -> int:
    return sum(bool(record.correct) for record in records)


def test_sure_tokens_take_fewer_experts_without_pressure(scene: Scene) -> None:
    records = scene.ask(memory_pressure=20.0)
    facts = scene.keeper.facts()
    assert facts["pull"] == 0
    assert facts["margin"] == pytest.approx(0.8)
    assert isinstance(facts["mean_experts"], float)
    assert 1 < facts["mean_experts"] < 2
    assert right(records) >= 9
    assert not any(record.degraded for record in records)


def test_under_pressure_absent_experts_are_replaced_and_told(scene: Scene) -> None:
    for at, first in enumerate(scene.experts):
        scene.table[first] = at % 4 != 0
    records = scene.ask(memory_pressure=95.0)
    assert all(record.reasons == (SUBSTITUTED,) for record in records if record.degraded)
    assert any(record.degraded for record in records)
    assert not any(record.failed for record in records)
    facts = scene.keeper.facts()
    assert facts["may_load"] is False
    assert facts["degraded_answers"] == sum(record.degraded for record in records)
    gauges = known_gauges(scene.answerer.facts)
    assert gauges["experts_substituted"] == facts["substituted"] > 0
    assert 1000 < gauges["experts_per_mille"] < 2000
    records = scene.ask(memory_pressure=10.0)
    records = scene.ask(memory_pressure=10.0)
    assert not any(record.degraded for record in records)


def test_with_nothing_in_memory_it_still_answers(scene: Scene) -> None:
    for first in scene.experts:
        scene.table[first] = False
    records = scene.ask(memory_pressure=99.0)
    assert all(record.degraded for record in records)
    assert not any(record.faults for record in records)


def test_a_rung_takes_one_expert_a_token(scene: Scene) -> None:
    before = scene.keeper.facts()
    assert before["mean_experts"] is None
    scene.ask(way=replace(AS_ASKED, fewest=True))
    assert scene.keeper.facts()["mean_experts"] == 1.0


def test_what_may_not_be_steered_has_no_keeper(scene: Scene, folder: Path) -> None:
    loaded = load_directory(folder / "written")
    try:
        assert steering_keeper(loaded, lambda: 0.0) is not None
        assert steering_keeper(replace(loaded, steering=None), lambda: 0.0) is None
    finally:
        loaded.runner.close()


def test_a_runtime_of_python_steers_unless_told_not_to(scene: Scene, folder: Path) -> None:
    image, item = scene.questions[0]
    for steers in (True, False):
        opened = MoERuntime.open(folder / "written", rules=(), threads=1, steers=steers)
        with opened as runtime, runtime.session() as session:
            session.generate(" ".join(item.words), template=item.prompt, image=image).words()
            facts = runtime.facts.get("steering")
            assert (facts is not None) is steers
            if isinstance(facts, dict):
                assert 1 < facts["mean_experts"] <= 2
                assert facts["degraded_answers"] == 0


def test_with_a_real_pool_fewer_experts_are_waited_for(
    scene: Scene, bundle: CompiledBundle, folder: Path
) -> None:
    sizes = {name: len(data) for name, data in bundle.sections.items()}
    experts = sum(size for name, size in sizes.items() if name.startswith("expert."))
    most = sizes["weights.shared"] + experts // 2 + 400_000
    waited: dict[bool, int] = {}
    for steers in (True, False):
        pool = WeightPool(most)
        opened = MoERuntime.open(folder / "written", rules=(), threads=1, steers=steers, pool=pool)
        with opened as runtime, runtime.session() as session:
            for image, item in scene.questions:
                words = " ".join(item.words)
                session.generate(words, template=item.prompt, image=image).words()
            facts = runtime.facts
            waited[steers] = sum(int(str(facts[f"expert_{name}"])) for name in ("misses", "late"))
    assert 0 < waited[True] < waited[False]
