"""Sessions over a runner that says what a test wants: streaming, stopping, limits, errors."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.pipeline import Port, ProgramSpec
from compiler.contract.session import Buffer
from device_agent.errors import (
    AnswerError,
    BundleError,
    ConfigurationError,
    NoBundleError,
    PictureError,
    RequestError,
    RuntimeBusyError,
)
from device_agent.runtime import MoERuntime
from device_agent.runtime.assembly import Opening
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.degrade_keeper import DEFAULT_RULES, DegradeKeeper, rungs_of
from device_agent.runtime.generation import Reason
from tests.unit.device_agent import test_runtime
from tests.unit.device_agent.test_runtime import (
    PIPELINE,
    BandedFake,
    FakeRunner,
    Ticks,
)

PICTURE = bytes(range(4))


def opened(
    *says: int, on_run: Any = None, clock: Ticks | None = None, **changes: Any
) -> tuple[FakeRunner, MoERuntime]:
    runner = FakeRunner(*says, on_run=on_run)
    bundle = LoadedBundle("a" * 64, runner, replace(PIPELINE, **changes), b"")
    return runner, MoERuntime(Opening(lambda: bundle, monotonic=clock or Ticks()))


def over(runner: FakeRunner, **settings: Any) -> MoERuntime:
    bundle = LoadedBundle("a" * 64, runner, PIPELINE, b"")
    return MoERuntime(Opening(lambda: bundle, **settings))


class Recorder:
    """Remembers which programs ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, program: str) -> None:
        self.ran.append(program)


class TestStreaming:
    def test_each_token_comes_before_the_next_native_call(self) -> None:
        ran = Recorder()
        _, runtime = opened(4, 5, 2, on_run=ran)
        answer = runtime.session().generate("no", image=PICTURE)
        assert ran.ran == []
        assert next(answer).text == "yes"
        assert ran.ran == ["see", "step"]
        assert next(answer).id == 5
        assert ran.ran == ["see", "step", "step"]
        assert answer.reason is None
        assert list(answer) == []
        assert (answer.reason, answer.ids) == (Reason.ENDED, [4, 5])
        assert answer.stats.native_calls == 4
        assert list(answer) == []

    @pytest.mark.parametrize(
        ("settings", "said", "reason"),
        [
            ({}, 4, Reason.MAX_TOKENS),
            ({"max_tokens": 1}, 1, Reason.MAX_TOKENS),
            ({"max_tokens": 6}, 6, Reason.MAX_TOKENS),
            ({"max_tokens": 99}, 8, Reason.CONTEXT_FULL),
        ],
    )
    def test_limits_end_it_and_say_which(self, settings: Any, said: int, reason: Reason) -> None:
        _, runtime = opened(*[4] * 20, max_context=10)
        answer = runtime.session().generate("no", **settings)
        assert answer.words() == ("yes",) * said
        assert answer.reason is reason

    def test_the_picture_stays_in_view_until_it_is_forgotten(self) -> None:
        ran = Recorder()
        runner, runtime = opened(*[4, 2] * 4, on_run=ran)
        session = runtime.session()
        assert session.generate("no", image=PICTURE).text() == "yes"
        assert runner.kv_length == 3 + 3 + 1
        session.generate("no").text()
        assert ran.ran.count("see") == 1
        session.forget()
        session.generate("no").text()
        assert runner.kv_length == 3 + 1

    def test_statistics_count_work_and_not_the_caller(self) -> None:
        clock = Ticks()

        def work(_program: str) -> None:
            clock.at += 0.010

        _, runtime = opened(4, 4, 4, 2, on_run=work, clock=clock)
        answer = runtime.session().generate("no", image=PICTURE)
        for _ in answer:
            clock.at += 5.0
        assert answer.stats.first_token_ms == pytest.approx(20.0)
        assert answer.stats.total_ms == pytest.approx(50.0)
        assert answer.stats.tokens_per_s == pytest.approx(100.0)
        assert (answer.stats.prompt_tokens, answer.stats.tokens) == (3, 3)
        assert answer.stats.to_json()["degraded"] is False


class TestStopping:
    def test_a_deadline_leaves_what_was_said(self) -> None:
        clock = Ticks()

        def slow(_program: str) -> None:
            clock.at += 0.4

        _, runtime = opened(*[4] * 4, on_run=slow, clock=clock)
        answer = runtime.session().generate("no", deadline=1.0)
        assert answer.words() == ("yes",) * 3
        assert answer.reason is Reason.DEADLINE

    def test_another_thread_cancels(self) -> None:
        inside, go_on = threading.Event(), threading.Event()

        def wait(program: str) -> None:
            inside.set()
            go_on.wait(60)

        _, runtime = opened(*[4] * 4, on_run=wait)
        answer = runtime.session().generate("no")

        def cancel() -> None:
            inside.wait(60)
            answer.cancel()
            go_on.set()

        thread = threading.Thread(target=cancel)
        thread.start()
        assert answer.words() == ("yes",)
        thread.join(60)
        assert answer.reason is Reason.CANCELLED

    def test_an_event_of_the_caller_cancels_before_the_first_call(self) -> None:
        ran = Recorder()
        _, runtime = opened(4, on_run=ran)
        stop = threading.Event()
        stop.set()
        answer = runtime.session().generate("no", cancel=stop)
        assert (answer.words(), answer.reason, ran.ran) == ((), Reason.CANCELLED, [])

    def test_closing_and_asking_anew_end_it(self) -> None:
        _, runtime = opened(4, 5, 4, 2)
        session = runtime.session()
        with session.generate("no", image=PICTURE) as first:
            assert next(first).id == 4
        assert first.reason is Reason.CANCELLED
        assert list(first) == []
        second = session.generate("no")
        next(second)
        assert session.generate("no").words() == ("yes",)
        assert (second.reason, second.ids) == (Reason.CANCELLED, [5])

    def test_a_picture_looked_at_half_way_is_looked_at_again(self) -> None:
        ran = Recorder()
        _, runtime = opened(4, 2, on_run=ran)
        session = runtime.session()
        answer = session.generate("no", image=PICTURE)
        answer.cancel()
        assert answer.words() == ()
        assert session.generate("no").words() == ("yes",)
        assert ran.ran == ["see", "step", "step"]

    def test_an_error_of_the_plan_is_typed_and_the_session_goes_on(self) -> None:
        def fail(program: str) -> None:
            if len(runner.says) == 3:
                raise ContractError("an activation is infinite or NaN", hint="ask something else")

        runner, runtime = opened(4, 5, 4, 2, on_run=fail)
        session = runtime.session()
        answer = session.generate("no")
        assert next(answer).id == 4
        assert list(answer) == []
        assert (answer.reason, answer.ids) == (Reason.ERROR, [4])
        with pytest.raises(AnswerError, match="broke off: an activation") as error:
            answer.require_answered()
        assert error.value.hint == "ask something else"
        assert list(answer) == []
        runner.on_run = None
        assert session.generate("no").words() == ("no", "yes")


class TestRequests:
    @pytest.mark.parametrize(
        ("settings", "message", "hint"),
        [
            ({"prompt": "yess"}, "unknown word 'yess'", "did you mean 'yes'"),
            ({"prompt": "  "}, "nothing was asked", "give words"),
            ({"prompt": []}, "empty prompt", ""),
            ({"prompt": [6]}, "token 6 is outside", "0 to 5"),
            ({"prompt": [-1]}, "token -1 is outside", "0 to 5"),
            ({"prompt": ["a"]}, "no token ids: 'str' object", "0 to 5"),
            ({"prompt": [1.5]}, "no token ids: 'float' object", "0 to 5"),
            ({"prompt": [None]}, "no token ids: 'NoneType' object", "0 to 5"),
            ({"prompt": [1, 10**5000]}, "token number 1 is outside", "0 to 5"),
            ({"prompt": "x" * 2_000_000}, f"^unknown word '{'x' * 64}...'$", "only its vocabulary"),
            ({"prompt": "no", "template": "y" * 2_000_000}, f"^no prompt '{'y' * 64}...'$", ""),
            ({"prompt": "no", "template": "caption"}, "no prompt 'caption'", "prompts: "),
            ({"prompt": "no", "template": "nope"}, "no prompt 'nope'", "prompts: "),
            ({"template": "nope"}, "no prompt 'nope'", "prompts: "),
            ({"prompt": "no", "max_tokens": 0}, "max_tokens 0", "at least 1"),
            ({"prompt": "no", "deadline": 0.0}, "deadline of 0", "above 0"),
            ({"prompt": "no", "deadline": float("nan")}, "deadline of nan", "above 0"),
            ({"prompt": "no", "max_tokens": 1.5}, "max_tokens 1.5", "a whole number"),
            ({"prompt": "no", "max_tokens": True}, "max_tokens True", "a whole number"),
            ({"prompt": "no", "max_tokens": "3"}, "max_tokens '3'", "a whole number"),
            ({"prompt": "no", "deadline": "1"}, "deadline of '1'", "seconds above 0"),
            ({"prompt": "no", "deadline": True}, "deadline of True", "seconds above 0"),
            ({"prompt": None}, "a prompt of None", "words, or a list"),
            ({"prompt": 5}, "a prompt of 5", "words, or a list"),
            ({"prompt": "no", "temperature": "1"}, "temperature '1'", ""),
            ({"prompt": "no", "seed": None}, "seed None", "a whole number"),
            ({"prompt": "no", "temperature": -1.0}, "temperature -1", ""),
            ({"prompt": "no", "temperature": float("nan")}, "temperature nan", ""),
            ({"prompt": "no", "temperature": 1.0}, "gives no logits", "greedy"),
            ({"prompt": "no " * 40}, "room for 32", ""),
        ],
    )
    def test_what_the_model_cannot_take_is_refused_with_a_hint(
        self, settings: dict[str, Any], message: str, hint: str
    ) -> None:
        ran = Recorder()
        _, runtime = opened(on_run=ran)
        with pytest.raises(RequestError, match=message) as error:
            runtime.session().generate(**settings)
        assert hint in error.value.hint
        assert ran.ran == []

    def test_token_ids_and_words_without_a_template_go_in_as_they_are(self) -> None:
        fed: list[bytes] = []

        class Runner(FakeRunner):
            def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
                fed.append(bytes(inputs["token_ids"]))
                return super().run(program, inputs)

        runtime = over(Runner(*[2] * 3))
        session = runtime.session()
        for settings in ({"prompt": [5]}, {"prompt": "no", "template": ""}, {"prompt": "no"}):
            session.generate(**settings).text()
        assert [list(data[::4]) for data in fed] == [[5], [5], [1, 5, 3]]

    def test_a_model_without_words_says_what_it_has(self) -> None:
        _, runtime = opened(tokens=None)
        with pytest.raises(RequestError, match="does not answer in words") as error:
            runtime.session()
        assert "see, step" in error.value.hint

    def test_one_context_has_one_session(self) -> None:
        runner, runtime = opened(4, 2)
        with runtime.session() as session:
            with pytest.raises(RuntimeBusyError, match="open session"):
                runtime.session()
            answer = session.generate("no")
        assert answer.reason is Reason.CANCELLED
        with pytest.raises(RuntimeBusyError, match="session is closed"):
            session.generate("no")
        assert runtime.session().generate("no").text() == "yes"
        runtime.close()
        assert runner.closed
        with pytest.raises(RuntimeBusyError, match="runtime is closed"):
            runtime.session()

    def test_nothing_is_made_where_nothing_is(self, tmp_path: Path) -> None:
        with pytest.raises(NoBundleError, match="no folder"):
            MoERuntime.installed(tmp_path / "absent")
        with pytest.raises(NoBundleError, match="no bundle is installed"):
            MoERuntime.installed(tmp_path)
        assert list(tmp_path.iterdir()) == []
        for directory in (tmp_path, tmp_path / "absent", Path("/dev/null")):
            with pytest.raises(BundleError, match="no bundle in") as error:
                MoERuntime.open(directory)
            assert "compile --out" in error.value.hint


class TestPictures:
    @pytest.mark.parametrize(
        "make",
        [
            lambda path: (path / "a.pgm").write_bytes(b"P5 2 2 255\n" + PICTURE) and path / "a.pgm",
            lambda path: (
                str(np.save(path / "a.npy", np.arange(4, dtype=np.uint8)) or path) + "/a.npy"
            ),
            lambda path: b"P5\n# made by hand\n2 2\n255\n" + PICTURE,
            lambda path: memoryview(PICTURE),
        ],
    )
    def test_it_sees_files_their_bytes_and_bare_pixels(
        self, tmp_path: Path, make: Callable[[Path], Any]
    ) -> None:
        shown: list[bytes] = []

        class Runner(FakeRunner):
            def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
                shown.extend([bytes(inputs["image"])] if program == "see" else [])
                return super().run(program, inputs)

        runtime = over(Runner(4, 2))
        runtime.session().generate("no", image=make(tmp_path)).text()
        assert shown == [PICTURE]

    def test_colours_come_in_a_file_too(self) -> None:
        image = replace(PIPELINE.image, channels=3)
        _, runtime = opened(4, 2, image=image)
        session = runtime.session()
        assert session.generate("no", image=b"P6 2 2 255\n" + bytes(12)).text() == "yes"
        with pytest.raises(PictureError, match="4 bytes of pixels, the model takes 12") as error:
            session.generate("no", image=b"P5 2 2 255\n" + PICTURE)
        assert "2 x 2 pixels, channels: 3" in error.value.hint

    def test_it_says_how_many_bare_pixels_there_are(self) -> None:
        _, runtime = opened()
        with pytest.raises(PictureError, match="has 3 bytes, bare pixels have 4"):
            runtime.session().generate("no", image=bytes(3))

    @pytest.mark.parametrize(
        "data",
        [b"", b"\x89PNG\r\n", b"P5 2 2 255\n", b"P5 2 2 65535\n" + PICTURE, b"\x93NUMPY\x01"],
    )
    def test_it_refuses_what_is_none(self, data: bytes) -> None:
        _, runtime = opened()
        with pytest.raises(PictureError):
            runtime.session().generate("no", image=data)
        with pytest.raises(PictureError, match="sees no pictures"):
            opened(image=None)[1].session().generate("no", image=PICTURE)


class TestSampling:
    LOGITS = ProgramSpec(
        {"token_ids": Port(8, 1, "i32", True)}, {"logits": Port(1, 6, "f32", False)}
    )

    def subject(self) -> MoERuntime:
        class Runner(FakeRunner):
            def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
                self.says = [4]
                outputs = super().run(program, inputs)
                logits = np.array([-99, -99, 0, -99, 2, 1], "<f4")
                return {**outputs, "logits": memoryview(logits.tobytes())}

        programs = {**PIPELINE.programs, "step": self.LOGITS}
        bundle = LoadedBundle("a" * 64, Runner(), replace(PIPELINE, programs=programs), b"")
        return MoERuntime(Opening(lambda: bundle))

    def test_a_seed_gives_one_answer_and_frequencies_follow_the_logits(self) -> None:
        session = self.subject().session()
        drawn = [
            session.generate("no", temperature=1.0, seed=seed, max_tokens=1).words()
            for seed in range(600)
        ]
        assert drawn[:50] == [
            session.generate("no", temperature=1.0, seed=seed, max_tokens=1).words()
            for seed in range(50)
        ]
        found = [drawn.count(words) / len(drawn) for words in (("yes",), ("no",), ())]
        wanted = np.exp([2, 1, 0]) / np.exp([2, 1, 0]).sum()
        assert found == pytest.approx(wanted.tolist(), abs=0.06)

    def test_cold_is_greedy(self) -> None:
        session = self.subject().session()
        assert session.generate("no", temperature=0.01, max_tokens=3).text() == "yes yes yes"


@pytest.mark.parametrize("threads", [2.5, True, "2", None, -1, 65])
@pytest.mark.parametrize("door", [MoERuntime.open, MoERuntime.installed])
def test_threads_are_a_number_that_there_can_be(door: Any, threads: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"threads {threads!r}") as error:
        door(tmp_path, threads=threads)
    assert error.value.hint == "a whole number: 0, as many as help, to 64"


def test_a_rung_that_changes_no_answer_is_not_degraded() -> None:
    rungs, runner = (Rung.NORMAL, Rung.NO_PREFETCH), FakeRunner(4, 2)
    keeper = DegradeKeeper(DEFAULT_RULES, rungs, Ticks(), lambda: {"battery": 5.0})
    runtime = over(runner, rules=keeper)
    answer = runtime.session().generate("no")
    assert answer.text() == "yes"
    assert keeper.present is Rung.NO_PREFETCH
    assert not answer.stats.degraded


def test_rules_make_it_do_less_and_the_statistics_say_so() -> None:
    clock, bands, runner = Ticks(), test_runtime.TestDoingLess.bands(), BandedFake(entropy=0.9)
    keeper = DegradeKeeper(DEFAULT_RULES, rungs_of(bands), clock, lambda: {"temperature": 95.0})
    bundle = LoadedBundle("a" * 64, runner, PIPELINE, b"", bands=bands)
    runtime = MoERuntime(Opening(lambda: bundle, rules=keeper, monotonic=clock))
    session = runtime.session()
    degraded = []
    for at in range(12):
        clock.at = float(at)
        answer = session.generate("no")
        answer.text()
        degraded.append(answer.stats.degraded)
    assert degraded == [False] * 10 + [True] * 2
    assert set(runner.ran[-2:]) == {"step.band1"}
    assert runtime.facts["steps"] == {"step": 20, "step.band1": 4}
