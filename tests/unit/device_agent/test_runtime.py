import json
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from compiler.contract.bands import Band, Bands
from compiler.contract.degrade import Rung, rules_bytes
from compiler.contract.errors import ContractError
from compiler.contract.operations import ExpertEvent
from compiler.contract.pager import PagerSwitch
from compiler.contract.pipeline import ImageSpec, Pipeline, Port, ProgramSpec, TokenSpec
from compiler.contract.session import Buffer
from device_agent.config import AgentConfig
from device_agent.errors import (
    AnswerError,
    ConfigurationError,
    EvaluationSetError,
    NoBundleError,
    PictureError,
)
from device_agent.ports import degrade_rules
from device_agent.runtime.answers import (
    AnswerRecord,
    BundleAnswerer,
    Outcome,
    Question,
    require_answered,
)
from device_agent.runtime.assembly import Assembly
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.degrade_keeper import DEFAULT_RULES, DegradeKeeper, rungs_of
from device_agent.runtime.evaluation import QuestionSource, load_evaluation
from device_agent.runtime.host import SessionHost
from device_agent.runtime.pictures import decode_image, read_image
from device_agent.telemetry.counters import Counters
from device_agent.workload import AnswerLoop
from tests.simulators.engine import ToyAnswerer

WORDS = ("<pad>", "<q>", "<eos>", "<a>", "yes", "no")
PIPELINE = Pipeline(
    family="vision-embed-decoder",
    image=ImageSpec(2, 2, 1),
    tokens=TokenSpec(
        vocabulary=WORDS,
        eos=2,
        position_base=4,
        prompts={"question_prefix": ("<q>",), "question_suffix": ("<a>",)},
        max_answer_tokens=4,
    ),
    max_context=32,
    max_step_tokens=8,
    programs={
        "see": ProgramSpec({"image": Port(1, 4, "u8", False)}, {}),
        "step": ProgramSpec({"token_ids": Port(8, 1, "i32", True)}, {}),
    },
)


class FakeRunner:
    """A plan that says what a test wants, token by token."""

    def __init__(self, *says: int, on_run: Any = None) -> None:
        self.says = list(says)
        self.kv_length = 0
        self.on_run = on_run
        self.closed = False
        self.lost_threads, self.threads = 0, 1
        self.policy = SimpleNamespace(is_supported=False)

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        if self.on_run is not None:
            self.on_run(program)
        if program == "see":
            self.kv_length = 3
            return {}
        self.kv_length += len(inputs["token_ids"]) // 4
        token = self.says.pop(0)
        return {"token": memoryview(token.to_bytes(4, "little"))}

    def close(self) -> None:
        self.closed = True


class Ticks:
    def __init__(self, step: float = 0.0) -> None:
        self.at, self.step = 0.0, step

    def __call__(self) -> float:
        self.at += self.step
        return self.at


def answerer(runner: FakeRunner, clock: Ticks | None = None, timeout_s: float = 1.0):
    bundle = LoadedBundle("a" * 64, runner, PIPELINE, b"")
    return BundleAnswerer(Assembly(bundle, clock or Ticks()), timeout_s)


def question(expected: tuple[str, ...] | None = ("yes",), **changes: Any) -> Question:
    values: dict[str, Any] = {"image": b"\0" * 4, "prompt": "question", "words": ("no",)}
    return Question(**{**values, **changes}, expected=expected)


class TestAnswers:
    @pytest.mark.parametrize(
        ("says", "expected", "outcome", "correct"),
        [
            ((4, 2), ("yes",), Outcome.ENDED, True),
            ((5, 2), ("yes",), Outcome.ENDED, False),
            ((2,), (), Outcome.ENDED, True),
            ((4, 2), None, Outcome.ENDED, None),
            ((4, 4, 4, 4), ("yes",) * 4, Outcome.CUT_OFF, False),
        ],
    )
    def test_it_scores_what_the_model_says(self, says, expected, outcome, correct) -> None:
        record = answerer(FakeRunner(*says)).answer(question(expected))
        assert (record.outcome, record.correct) == (outcome, correct)
        assert record.failed == (outcome is Outcome.CUT_OFF)

    def test_it_counts_an_error_status_and_goes_on(self) -> None:
        def fail(program: str) -> None:
            raise ContractError("program 'step' call 3: an activation is infinite or NaN")

        runner = FakeRunner(4, 2, on_run=fail)
        subject = answerer(runner)
        record = subject.answer(question())
        assert (record.outcome, record.correct) == (Outcome.ERROR, False)
        with pytest.raises(AnswerError, match="infinite"):
            require_answered(record)
        runner.on_run = None
        assert subject.answer(question()).outcome is Outcome.ENDED

    def test_it_stops_between_two_calls_when_time_is_over(self) -> None:
        clock = Ticks()

        def slow(_program: str) -> None:
            clock.at += 0.6

        runner = FakeRunner(4, 4, 4, 2, on_run=slow)
        record = answerer(runner, clock).answer(question())
        assert record.outcome is Outcome.TIMEOUT
        assert record.latency_ms == pytest.approx(1200)
        assert len(runner.says) == 3

    def test_it_measures_the_whole_answer(self) -> None:
        clock = Ticks()

        def work(_program: str) -> None:
            clock.at += 0.010

        record = answerer(FakeRunner(4, 2, on_run=work), clock).answer(question())
        assert record.latency_ms == pytest.approx(30.0)

    def test_it_knows_what_it_can_be_asked(self) -> None:
        subject = answerer(FakeRunner())
        assert subject.understands(question())
        assert not subject.understands(question(words=("unheard-of",)))
        assert not subject.understands(question(image=b"\0" * 5))
        assert not subject.understands(question(prompt="caption"))
        assert subject.understands(question(image=b""))


class TestHost:
    def test_it_has_nobody_to_ask_before_the_first_bundle(self) -> None:
        host = SessionHost()
        with pytest.raises(NoBundleError):
            host.answer(question())
        assert host.manifest_sha256 == ""
        assert not host.understands(question())

    def test_it_ends_the_answer_in_progress_on_the_old_bundle(self) -> None:
        host = SessionHost()
        old = ToyAnswerer("1" * 64, {"version": "1", "answer": "hang"})
        host.swap(old)
        records: list[AnswerRecord] = []
        thread = threading.Thread(target=lambda: records.append(host.answer(question())))
        old.behaviour["answer"] = "ok"
        entered = threading.Event()
        release = threading.Event()
        original = old.answer

        def slow(asked: Question) -> AnswerRecord:
            entered.set()
            release.wait(60)
            return original(asked)

        old.answer = slow  # type: ignore[method-assign]
        thread.start()
        entered.wait(60)
        swap = threading.Thread(target=host.swap, args=(ToyAnswerer("2" * 64, {"version": "2"}),))
        swap.start()
        while host.manifest_sha256 != "2" * 64:
            pass
        assert host.answer(question()).words == ("2",)
        assert not old.closed
        release.set()
        thread.join(60)
        swap.join(60)
        assert records[0].words == ("1",)
        assert old.closed

    def test_it_gives_up_an_answer_that_never_ends(self) -> None:
        host = SessionHost(close_wait_s=0.05)
        stuck = ToyAnswerer("1" * 64, {"version": "1", "answer": "hang"})
        host.swap(stuck)
        thread = threading.Thread(target=host.answer, args=(question(),), daemon=True)
        thread.start()
        while not host._seat.busy.locked():
            pass
        host.swap(ToyAnswerer("2" * 64, {"version": "2"}))
        assert host.answer(question()).words == ("2",)
        assert not stuck.closed
        stuck.behaviour["answer"] = "ok"
        stuck.never.set()
        thread.join(60)

    def test_what_is_in_view_stays_in_view_after_a_swap(self) -> None:
        host, asked = SessionHost(), []

        class Seeing(ToyAnswerer):
            def understands(self, question: Question) -> bool:
                return question.image != b"unknown"

            def answer(self, question: Question) -> AnswerRecord:
                asked.append(question.image)
                return super().answer(question)

        def ask(*images: bytes) -> list[bytes]:
            asked.clear()
            for image in images:
                host.answer(replace(question(), image=image))
            return list(asked)

        host.swap(Seeing("1" * 64, {"version": "1"}))
        assert ask(b"", b"card", b"unknown", b"") == [b"", b"card", b"unknown", b""]
        host.swap(Seeing("2" * 64, {"version": "2"}))
        assert ask(b"unknown", b"", b"") == [b"unknown", b"card", b""]
        host.swap(Seeing("3" * 64, {"version": "3"}))
        assert ask(b"other", b"") == [b"other", b""]
        host._view = b"unknown"  # of a model that sees other pictures
        host.swap(Seeing("4" * 64, {"version": "4"}))
        assert ask(b"") == [b""]

    def test_it_swaps_under_fire(self) -> None:
        host = SessionHost()
        host.swap(ToyAnswerer("0" * 64, {"version": "0"}))
        stop = threading.Event()
        failures: list[Exception] = []

        def ask() -> None:
            try:
                while not stop.is_set():
                    host.answer(question())
            except Exception as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(200):
            host.swap(ToyAnswerer(f"{number:064d}", {"version": str(number)}))
        stop.set()
        for thread in threads:
            thread.join(60)
        assert failures == []


class TestWorkload:
    def test_it_asks_what_the_bundle_understands_and_tells_everybody(self) -> None:
        host = SessionHost()
        seen: list[AnswerRecord] = []
        evaluation = type("Set", (), {"questions": (question(),)})()
        loop = AnswerLoop(
            host, QuestionSource(evaluation, "seed"), 100.0, (seen.append,), Ticks(0.001)
        )
        assert not loop.ask_once()
        host.swap(ToyAnswerer("1" * 64, {"version": "1"}))
        assert loop.ask_once()
        assert [record.words for record in seen] == [("1",)]
        assert loop.in_flight_s() == 0.0

    def test_it_goes_round_in_an_order_of_its_own(self) -> None:
        questions = tuple(question(words=(str(number),)) for number in range(20))
        evaluation = type("Set", (), {"questions": questions})()
        orders = []
        for seed in ("a", "a", "b"):
            source = QuestionSource(evaluation, seed)
            orders.append([source.next().words[0] for _ in range(40)])
        assert orders[0] == orders[1] != orders[2]
        assert sorted(orders[0][:20]) == sorted(orders[0][20:]) == sorted(map(str, range(20)))


def write_set(folder: Path, document: Any = None, images: Any = None) -> Path:
    path = folder / "evaluation.json"
    asked = {"kind": "x", "prompt": "question", "words": ["no"], "answer": ["yes"]}
    document = document or {
        "schema": "sparsefleet.cards/1",
        "images": "evaluation.npz",
        "cards": [{"image": 1, "questions": [asked]}],
    }
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    images = np.arange(8, dtype=np.uint8).reshape(2, 2, 2) if images is None else images
    np.savez(folder / "evaluation.npz", images=images)
    return path


def npy_head(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


class TestEvaluationSet:
    def test_it_reads_questions_with_their_pictures(self, tmp_path: Path) -> None:
        (asked,) = load_evaluation(write_set(tmp_path)).questions
        assert asked == Question(bytes([4, 5, 6, 7]), "question", ("no",), ("yes",))

    @pytest.mark.parametrize(
        "document",
        [
            "not json",
            "[]",
            '{"schema": "other"}',
            '{"schema": "sparsefleet.cards/1"}',
            '{"schema": "sparsefleet.cards/1", "images": "evaluation.npz", "cards": []}',
            '{"schema": "sparsefleet.cards/1", "images": "evaluation.npz", "cards": [{"image":9}]}',
            '{"schema": "sparsefleet.cards/1", "images": "../../etc/passwd", "cards": []}',
        ],
    )
    def test_it_refuses_what_is_no_set(self, tmp_path: Path, document: str) -> None:
        with pytest.raises(EvaluationSetError):
            load_evaluation(write_set(tmp_path, document))

    def test_it_refuses_pictures_of_another_kind(self, tmp_path: Path) -> None:
        with pytest.raises(EvaluationSetError, match="uint8"):
            load_evaluation(write_set(tmp_path, images=np.zeros((2, 2), np.float32)))
        with pytest.raises(EvaluationSetError):
            load_evaluation(write_set(tmp_path, images=np.array([{}], dtype=object)))
        for damaged in (b"PK\3\4 and no archive", b"PK", npy_head("{")):
            path = write_set(tmp_path)
            (tmp_path / "evaluation.npz").write_bytes(damaged)
            with pytest.raises(EvaluationSetError, match=r"evaluation\.npz"):
                load_evaluation(path)
        (tmp_path / "evaluation.npz").unlink()
        with pytest.raises(EvaluationSetError, match="cannot be read"):
            load_evaluation(tmp_path / "evaluation.json")

    def test_it_reads_single_pictures(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.arange(4, dtype=np.uint8))
        assert read_image(tmp_path / "a.npy") == bytes(range(4))
        (tmp_path / "a.pgm").write_bytes(b"P5\n2 2\n255\n\x01\x02\x03\x04")
        assert read_image(tmp_path / "a.pgm") == bytes([1, 2, 3, 4])
        for name, data in (("b.pgm", b"P5 2 2 255 \x01"), ("c.pgm", b"GIF89a")):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(PictureError):
                read_image(tmp_path / name)
        np.save(tmp_path / "d.npy", np.zeros(4))
        with pytest.raises(PictureError):
            read_image(tmp_path / "d.npy")
        with pytest.raises(PictureError):
            read_image(tmp_path / "none.npy")

    @pytest.mark.parametrize(
        "data",
        [
            b"P5" + b" #" * 1000,
            b"P5" + b" " * 100_000 + b"2 2 255 \x01\x02\x03\x04",
            b"P5 " + b"9" * 5000 + b" 1 255 ",
            npy_head("{"),
            npy_head("{[]: 1}"),
            npy_head("'''"),
            npy_head("{'descr': '|u1', 'fortran_order': False, 'shape': (True,)}"),
            npy_head("{'descr': '|u1', 'fortran_order': False, 'shape': (1" + "0" * 30 + ",)}"),
        ],
        ids=["comments", "spaces", "digits", "open", "list", "quotes", "shape", "size"],
    )
    def test_heads_that_are_none_are_refused(self, data: bytes) -> None:
        with pytest.raises(PictureError):
            decode_image(data, "the picture")

    def test_comments_may_stand_between_the_numbers_of_a_head(self) -> None:
        head = b"P5\n# made by hand # twice\n2 # wide\n1\n255\n"
        assert decode_image(head + b"#\n", "the picture") == b"#\n"

    def test_what_is_no_file_is_not_read(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.pgm")
        for path in (tmp_path / "pipe.pgm", tmp_path, Path("/dev/zero")):
            with pytest.raises(PictureError, match="no file"):
                read_image(path)
        with pytest.raises(PictureError, match="cannot be read"):
            read_image(Path("a\0b"))


class BandedFake(FakeRunner):
    """Says yes with the entropy that a test wants, and remembers which programs ran."""

    def __init__(self, entropy: float) -> None:
        super().__init__()
        self.entropy = entropy
        self.ran: list[str] = []

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        self.ran.append(program)
        self.says = self.says or [4, 2]
        outputs = super().run(program, inputs)
        entropy = np.float32(self.entropy).tobytes()
        return {**outputs, "entropy": memoryview(entropy)} if outputs else outputs


class TestDoingLess:
    @staticmethod
    def bands() -> Bands:
        rows = (
            Band(0, "step.band1", 1, 400, 0, 0, "loses nothing"),
            Band(500, "step", 2, 600, 0, 0, "needs two"),
        )
        return Bands(1, 0, 100, 90, 10_000, 0, 0, rows)

    def subject(
        self, runner: FakeRunner, clock: Ticks, heat: list[float], bands: Bands | None
    ) -> BundleAnswerer:
        keeper = DegradeKeeper(
            DEFAULT_RULES, rungs_of(bands), clock, lambda: {"temperature": heat[0]}
        )
        bundle = LoadedBundle("a" * 64, runner, PIPELINE, b"", bands=bands)
        return BundleAnswerer(Assembly(bundle, clock, degrade=keeper), 1.0)

    def test_it_takes_the_variant_of_the_entropy(self) -> None:
        runner = BandedFake(entropy=0.2)
        subject = self.subject(runner, Ticks(), [20.0], self.bands())
        assert not subject.answer(question()).degraded
        assert runner.ran == ["see", "step", "step.band1"]
        runner.entropy = 0.9
        subject.answer(question())
        assert runner.ran[3:] == ["see", "step.band1", "step"]
        assert subject.facts["steps"] == {"step": 2, "step.band1": 2}

    def test_heat_takes_the_fewest_experts_until_it_is_over(self) -> None:
        clock, heat, runner = Ticks(), [95.0], BandedFake(entropy=0.9)
        subject = self.subject(runner, clock, heat, self.bands())
        degraded = []
        for at in range(120):
            clock.at, heat[0] = float(at), 95.0 if at < 20 else 70.0
            runner.ran.clear()
            degraded.append(subject.answer(question()).degraded)
            steps = {"step.band1"} if degraded[-1] else {"step"}
            assert set(runner.ran) - {"see"} == steps
        assert degraded == [False] * 10 + [True] * 40 + [False] * 70
        facts = subject.facts["degrade"]
        assert (facts["rung"], facts["moves"], facts["last_rule"]) == ("normal", 2, "hot")

    def test_a_bundle_without_variants_does_not_look(self) -> None:
        runner = BandedFake(entropy=0.9)
        subject = self.subject(runner, Ticks(0.5), [99.0], None)
        assert not any(subject.answer(question()).degraded for _ in range(60))
        assert subject.facts["degrade"]["rungs"] == ["normal"]

    def test_a_rung_that_changes_no_answer_is_not_degraded(self) -> None:
        rungs, runner = (Rung.NORMAL, Rung.NO_PREFETCH), FakeRunner(4, 2)
        keeper = DegradeKeeper(DEFAULT_RULES, rungs, Ticks(), lambda: {"battery": 5.0})
        bundle = LoadedBundle("a" * 64, runner, PIPELINE, b"")
        told: list[ExpertEvent] = []
        switch = PagerSwitch(lambda event, _weight: not told.append(event))
        assembly = Assembly(bundle, degrade=keeper, pager=switch)
        record = BundleAnswerer(assembly, 1.0).answer(question())
        assert (keeper.present, switch.is_fetching_ahead) == (Rung.NO_PREFETCH, False)
        assert record.words == ("yes",)
        assert (record.degraded, record.reasons) == (False, ())

    def test_what_was_degraded_is_counted(self) -> None:
        counters = Counters()
        record = AnswerRecord("a" * 64, (), Outcome.ENDED, None, 1.0)
        counters.record(record)
        counters.record(replace(record, degraded=True, reasons=("oom", "temperature")))
        assert counters.summary()["degraded"] == 1
        (batch,) = counters.cut("", {})
        assert (batch.answers, batch.degraded) == (2, 1)
        assert batch.degraded_by == {"oom": 1, "temperature": 1}


class TestRules:
    def test_a_file_of_rules_is_followed(self, tmp_path: Path) -> None:
        path = tmp_path / "rules.json"
        path.write_bytes(rules_bytes([]))
        assert degrade_rules(AgentConfig(degrade_rules=str(path))) == ()
        assert degrade_rules(AgentConfig()) == DEFAULT_RULES

    def test_a_file_that_is_none_is_refused_with_a_reason(self, tmp_path: Path) -> None:
        path = tmp_path / "rules.json"
        with pytest.raises(ConfigurationError, match=r"rules\.json"):
            degrade_rules(AgentConfig(degrade_rules=str(path)))
        path.write_text('{"schema": "sparsefleet.degrade/1", "rules": [1]}')
        with pytest.raises(ConfigurationError, match="a rule has the fields"):
            degrade_rules(AgentConfig(degrade_rules=str(path)))
