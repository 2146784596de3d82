"""One suite for every back end: what a caller may rely on, whoever runs the plan."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.backend import (
    Backend,
    BackendAbsentError,
    BackendCrashedError,
    BackendError,
    CustomOp,
    NameClashError,
)
from compiler.contract.errors import ContractError
from compiler.contract.native_errors import BadTokenError, TooManyTokensError
from compiler.contract.pipeline import Pipeline, Port, ProgramSpec, parse_pipeline
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.plan_format import Status
from compiler.contract.runner_frames import (
    NONE,
    REPLY,
    REQUEST,
    REQUEST_MAGIC,
    encode_script,
    frames_of,
    keep_request,
)
from compiler.contract.session import Buffer, Session, step_inputs
from compiler.driver.bundle_files import write_bundle
from compiler.driver.native_check import host_target
from compiler.driver.onnx_backend import OnnxBackend
from compiler.emitters.runner import build_runner
from compiler.hardware.targets import find_target
from device_agent.runtime.native_backend import NativeBackend
from device_agent.runtime.process_backend import ProcessBackend
from tests.factories.bundles import compiled, submission
from tests.factories.kernels import CACHE, raw

ROOT = Path(__file__).resolve().parents[2]
ANSWERS = {
    ("what", "at", "top", "left"): ("e", "a", "s", "t"),
    ("what", "at", "top", "right"): ("4", "1"),
    ("what", "at", "bottom", "left"): ("c", "a", "r"),
}
EXACT = ("native", "process", "plan-runner", "plan-runner aarch64")
NAMES = (*EXACT, "onnxruntime")
DOUBLED = ProgramSpec({"x": Port(4, 2, "f32", True)}, {"y": Port(4, 2, "f32", True)})


@dataclass(frozen=True)
class Card:
    """EdgeCard compiled for this machine, and its first picture."""

    folder: Path
    sections: Mapping[str, bytes]
    plan: Plan
    pipeline: Pipeline
    image: bytes

    def script(self) -> bytes:
        return encode_script(self.plan, self.sections["plan"], self.sections)


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> Card:
    target = host_target()
    if target is None:
        pytest.skip("this machine can run no target")
    folder = tmp_path_factory.mktemp("backends")
    bundle = compiled("v1", target.id, folder)
    write_bundle(bundle, folder / "bundle")
    images = np.load(submission("v1", folder) / "evaluation.npz")["images"]
    sections = bundle.sections
    pipeline = parse_pipeline(sections["pipeline"])
    return Card(folder, sections, parse_plan(sections["plan"]), pipeline, images[0].tobytes())


def runner_command(card: Card, target: str, emulator: tuple[str, ...]) -> list[str]:
    if emulator and shutil.which(emulator[0]) is None:
        pytest.skip(f"{emulator[0]} is not installed: apt-get install qemu-user")
    path = card.folder / f"runner-{target}"
    if not path.exists():
        path.write_bytes(build_runner(find_target(target), card.plan.ops, CACHE))
        path.chmod(0o700)
    return [*emulator, str(path)]


def plan_runner(card: Card, **settings: float) -> ProcessBackend:
    module = ["-m", "device_agent.runtime.plan_runner"]
    command = [sys.executable, *module, str(card.folder / "bundle"), "2"]
    return ProcessBackend(command, card.plan, **settings)


def made(name: str, card: Card) -> Backend:
    if name == "native":
        return NativeBackend(card.sections)
    if name == "process":
        return plan_runner(card)
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime")
        return OnnxBackend(submission("v1", card.folder))
    emulator = ("qemu-aarch64",) if name.endswith("aarch64") else ()
    target = "aarch64" if emulator else "x86-64-v1"
    return ProcessBackend(runner_command(card, target, emulator), card.plan, card.script)


@pytest.fixture(params=NAMES)
def subject(request: pytest.FixtureRequest, card: Card) -> Iterator[Backend]:
    backend = made(request.param, card)
    yield backend
    backend.close()


def ask_all(backend: Backend, card: Card) -> None:
    session = Session(backend, card.pipeline)
    session.see(card.image)
    for words, answer in ANSWERS.items():
        assert session.ask("question", words) == answer


class TestEveryBackEnd:
    def test_it_answers_and_answers_again_after_being_closed(
        self, subject: Backend, card: Card
    ) -> None:
        with pytest.raises(BackendError, match="not initialised"):
            subject.execute("step", {})
        assert subject.kv_length == 0
        ask_all(subject.init(), card)
        subject.init()
        assert subject.kv_length > 32
        subject.close()
        subject.close()
        with pytest.raises(BackendError, match="not initialised"):
            subject.execute("see", {"image": card.image})
        ask_all(subject.init(), card)

    def test_it_says_what_it_has_and_refuses_the_rest(self, subject: Backend, card: Card) -> None:
        subject.init()
        assert {"see", "step"} <= subject.programs.keys()
        step = step_inputs([1, 2], 64)
        for program, inputs, message in (
            ("absent", {}, "no program 'absent'"),
            ("see", {}, "inputs must be"),
            ("see", {"image": card.image, "more": b""}, "inputs must be"),
            ("see", {"image": card.image[:-1]}, "4095 bytes, not 4096"),
            ("step", {**step, "positions": step["positions"][:4]}, "does not fit"),
            ("step", {**step, "token_ids": b"123"}, "does not fit"),
            ("step", {"token_ids": b"", "positions": b""}, "does not fit"),
        ):
            with pytest.raises(BackendError, match=message):
                subject.execute(program, inputs)
        with pytest.raises(TooManyTokensError):
            subject.execute("step", step_inputs([1] * 65, 64))
        ask_all(subject, card)

    def test_its_cache_goes_back_and_not_forward(self, subject: Backend, card: Card) -> None:
        subject.init()
        session = Session(subject, card.pipeline)
        session.see(card.image)
        seen = subject.kv_length
        first = raw(subject.execute("step", step_inputs([1, 5], 64)))
        assert subject.kv_length == seen + 2
        subject.kv_length = seen
        assert raw(subject.execute("step", step_inputs([1, 5], 64))) == first
        for length in (seen + 3, -1):
            with pytest.raises(ContractError):
                subject.kv_length = length
        assert subject.kv_length == seen + 2

    def test_ops_of_the_host_run_beside_its_own(self, subject: Backend, card: Card) -> None:
        def double(inputs: Mapping[str, Buffer]) -> dict[str, Buffer]:
            return {"y": (np.frombuffer(inputs["x"], "<f4") * 2).tobytes()}

        subject.register_custom_op(CustomOp("custom_test_double", DOUBLED, double))
        subject.init()
        subject.register_custom_op(
            CustomOp("custom_test_short", DOUBLED, lambda inputs: {"y": bytes(4)})
        )
        subject.register_custom_op(CustomOp("custom_test_none", DOUBLED, lambda inputs: {}))
        subject.register_custom_op(
            CustomOp("custom_test_broken", DOUBLED, lambda inputs: {"y": inputs["z"]})
        )
        assert subject.programs["custom_test_double"] == DOUBLED
        x = np.arange(6, dtype="<f4")
        out = subject.execute("custom_test_double", {"x": x.tobytes()})
        assert np.frombuffer(out["y"], "<f4").tolist() == [0, 2, 4, 6, 8, 10]
        for name, message in (
            ("short", "4 bytes, not 24"),
            ("none", r"gave \[\], not"),
            ("broken", "KeyError: 'z'"),
        ):
            with pytest.raises(BackendError, match=message):
                subject.execute(f"custom_test_{name}", {"x": x.tobytes()})
        with pytest.raises(TooManyTokensError):
            subject.execute("custom_test_double", {"x": bytes(8 * 5)})
        ask_all(subject, card)

    @pytest.mark.parametrize("name", ["see", "double", "custom_double", "custom_A_b", "custom_a_"])
    def test_names_outside_the_rule_are_refused(self, subject: Backend, name: str) -> None:
        with pytest.raises(NameClashError) as error:
            subject.register_custom_op(CustomOp(name, DOUBLED, dict))
        assert "custom_<owner>_<op>" in error.value.hint

    def test_who_comes_second_is_refused(self, subject: Backend) -> None:
        subject.register_custom_op(CustomOp("custom_moe_fused", DOUBLED, dict))
        with pytest.raises(NameClashError, match="already"):
            subject.register_custom_op(CustomOp("custom_moe_fused", DOUBLED, dict))
        subject.register_custom_op(CustomOp("custom_other_fused", DOUBLED, dict))


def outputs(backend: Backend, card: Card) -> list[dict[str, bytes]]:
    with backend:
        runs = [("see", {"image": card.image}), ("step", step_inputs([1, 30, 31, 3], 64))]
        return [raw(backend.execute(*run)) for run in [*runs, ("step", step_inputs([9], 68))]]


def test_back_ends_of_one_plan_give_the_same_bits(card: Card) -> None:
    wanted = outputs(made("native", card), card)
    assert len(wanted[1]["logits"]) == 4 * len(card.pipeline.tokens.vocabulary)
    for name in ("process", "plan-runner"):
        assert outputs(made(name, card), card) == wanted


def test_another_instruction_set_gives_the_same_bits(card: Card) -> None:
    assert outputs(made("plan-runner aarch64", card), card) == outputs(made("native", card), card)


def test_onnx_runtime_says_nearly_the_same(card: Card) -> None:
    wanted, found = (outputs(made(name, card), card) for name in ("native", "onnxruntime"))
    for ours, theirs in zip(wanted[1:], found[1:], strict=True):
        x, y = (np.frombuffer(each["logits"], "<f4") for each in (ours, theirs))
        assert np.corrcoef(x, y)[0, 1] > 0.99


def test_without_onnx_runtime_it_says_how_to_get_it(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendAbsentError, match="not here") as error:
        OnnxBackend(submission("v1", card.folder)).init()
    assert error.value.hint == "pip install onnxruntime"


class Reserved(NativeBackend):
    """A plan whose maker did not know the rule."""

    def _load(self) -> Mapping[str, ProgramSpec]:
        return {"custom_moe_fused": DOUBLED, **super()._load()}


def test_no_plan_may_take_the_names_of_custom_ops(card: Card) -> None:
    backend = Reserved(card.sections)
    with pytest.raises(NameClashError, match="program 'custom_moe_fused'"):
        backend.init()
    with pytest.raises(BackendError, match="not initialised"):
        backend.execute("see", {"image": card.image})


class TestProcesses:
    @pytest.fixture(params=["process", "plan-runner"])
    def running(self, request: pytest.FixtureRequest, card: Card) -> Iterator[ProcessBackend]:
        backend = made(request.param, card)
        assert isinstance(backend, ProcessBackend)
        with backend:
            yield backend

    def test_a_killed_process_is_an_error_and_then_a_new_one(
        self, running: ProcessBackend, card: Card
    ) -> None:
        session = Session(running, card.pipeline)
        session.see(card.image)
        question = next(iter(ANSWERS))
        assert session.ask("question", question) == ANSWERS[question]
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(BackendCrashedError, match="SIGKILL") as error:
            session.ask("question", question)
        assert error.value.retryable
        assert "another one" in error.value.hint
        assert (running.kv_length, running.pid) == (0, None)
        assert session.ask("question", question) == ANSWERS[question]
        assert running.starts == 2

    def test_errors_of_the_plan_cross_the_pipe_with_their_type(
        self, running: ProcessBackend
    ) -> None:
        with pytest.raises(BadTokenError, match="program 'step'"):
            running.execute("step", step_inputs([10_000], 64))
        assert running.execute("step", step_inputs([1], 64))["token"]
        assert running.starts == 1

    @pytest.mark.parametrize(
        "head",
        [
            (1, 0, 1, NONE, 0, 0, 0),
            (REQUEST_MAGIC, 0, 1, NONE, 65, 0, 0),
            (REQUEST_MAGIC, 0, 1, NONE, 0, 0, 1 << 40),
            (REQUEST_MAGIC, 0, 1, NONE, 1, 0, 0),
        ],
        ids=["magic", "copies", "size", "table"],
    )
    def test_a_request_that_is_none_ends_it(
        self, running: ProcessBackend, head: tuple[int, ...]
    ) -> None:
        with pytest.raises(BackendCrashedError, match="exit status 6"):
            running._ask(REQUEST.pack(*head), 0, "nothing")

    def test_copies_outside_the_arena_end_it(self, running: ProcessBackend, card: Card) -> None:
        request = bytearray(frames_of(card.plan)["see"].request({"image": card.image}, 0))
        request[REQUEST.size : REQUEST.size + 8] = (1 << 62).to_bytes(8, "little")
        with pytest.raises(BackendCrashedError, match="exit status 6"):
            running._ask(bytes(request), 0, "see")
        assert running.execute("step", step_inputs([1], 64))["token"]

    def test_a_process_that_hangs_is_ended(self, card: Card) -> None:
        with plan_runner(card, timeout_s=0.2) as backend:
            assert backend.pid is not None
            pid = backend.pid
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(BackendCrashedError, match="in time"):
                backend.execute("see", {"image": card.image})
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    @pytest.mark.parametrize(
        ("command", "kind", "message"),
        [
            (["/absent/runner"], BackendAbsentError, "cannot be started"),
            (["/bin/false"], BackendCrashedError, "does not load the plan"),
            (["/bin/echo", "x" * 100], BackendCrashedError, "which is none"),
            (
                [sys.executable, "-m", "device_agent.runtime.plan_runner", "/absent"],
                BackendCrashedError,
                "exit status 2; error: no bundle in /absent",
            ),
            (
                [sys.executable, "-m", "device_agent.runtime.plan_runner"],
                BackendCrashedError,
                "exit status 2",
            ),
        ],
    )
    def test_what_is_no_runner_is_told_so(
        self, card: Card, command: list[str], kind: type[BackendError], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            ProcessBackend(command, card.plan).init()

    @pytest.mark.parametrize(
        ("number", "message"), [(signal.SIGTERM, "by SIGTERM"), (40, "by signal 40")]
    )
    def test_any_signal_that_ends_it_is_told(self, card: Card, number: int, message: str) -> None:
        script = f"import os; os.kill(os.getpid(), {number})"
        with pytest.raises(BackendCrashedError, match=message):
            ProcessBackend([sys.executable, "-c", script], card.plan).init()

    def test_a_runner_that_refuses_the_plan_is_not_asked(self, card: Card) -> None:
        reply = REPLY.pack(Status.BAD_PLAN, NONE, 0, 0, 0)
        script = f"import sys; sys.stdout.buffer.write({reply!r}); sys.stdout.flush(); input()"
        backend = ProcessBackend([sys.executable, "-c", script], card.plan)
        with pytest.raises(BackendCrashedError, match="does not load the plan: status"):
            backend.init()
        assert backend.pid is None

    @pytest.mark.parametrize(
        ("reply", "message"),
        [
            ((77, NONE, 0, 0, 0), "status 77, which is none"),
            ((-1, NONE, 0, 0, 0), "status -1, which is none"),
            ((Status.OK, NONE, 3, 0, 0), "its cache has 3 rows"),
            ((Status.BAD_TOKEN, NONE, 1, 0, 0), "its cache has 1 rows"),
            ((Status.BAD_TOKEN, NONE, 0, 0, 8), "announced 8 bytes"),
        ],
    )
    def test_a_reply_that_is_none_ends_it(
        self, card: Card, reply: tuple[int, ...], message: str
    ) -> None:
        heads = [REPLY.pack(Status.OK, NONE, 0, 0, 0), REPLY.pack(*reply)]
        script = "; ".join(
            ["import os", *(f"os.write(1, {head!r}); os.read(0, 1 << 16)" for head in heads)]
        )
        backend = ProcessBackend([sys.executable, "-c", script], card.plan, lambda: b"script")
        backend.init()
        assert backend.pid is not None
        with pytest.raises(BackendCrashedError, match=message):
            backend._ask(keep_request(2), 0, "cache of 2 rows", range(2, 3))
        assert (backend.pid, backend.kv_length) == (None, 0)

    def test_of_an_endless_stderr_the_beginning_is_kept(self, card: Card) -> None:
        """It is read as it comes: the reply that comes after a megabyte of it arrives."""
        head = REPLY.pack(Status.OK, NONE, 0, 0, 0)
        script = (
            "import os, sys; print('it begins', file=sys.stderr, flush=True)\n"
            "for _ in range(64): os.write(2, b'x' * (1 << 14))\n"
            f"os.write(1, {head!r}); os.read(0, 1 << 16)\n"
            "while True: os.write(2, b'x' * (1 << 14))"
        )
        backend = ProcessBackend([sys.executable, "-c", script], card.plan, timeout_s=0.2)
        backend.init()
        with pytest.raises(BackendCrashedError, match="in time; it begins") as error:
            backend.execute("see", {"image": card.image})
        assert len(str(error.value)) < 400
        assert backend.pid is None

    def test_an_interrupted_start_leaves_no_process(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend, started = ProcessBackend(["/bin/cat"], card.plan), []

        def interrupt(*_: object) -> None:
            started.append(backend.pid)
            raise KeyboardInterrupt

        monkeypatch.setattr(backend, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            backend.init()
        assert (len(started), backend.pid) == (1, None)
        with pytest.raises(ProcessLookupError):
            os.kill(started[0], 0)

    def test_no_more_open_files_is_a_typed_error(
        self, card: Card, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(subprocess, "Popen", full)
        with pytest.raises(BackendAbsentError, match="Too many open files"):
            ProcessBackend(["/bin/cat"], card.plan).init()

    def test_it_goes_with_its_parent(self, card: Card) -> None:
        module = ["-m", "device_agent.runtime.plan_runner", str(card.folder / "bundle")]
        done = subprocess.run(
            [sys.executable, *module], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")
