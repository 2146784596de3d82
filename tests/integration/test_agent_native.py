"""The agent with real bundles: EdgeCard compiled for this machine, its self-test, its answers."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.fingerprint import target_of
from compiler.contract.protocol import DeltaOffer, OfferKind, UpdateState
from compiler.delta import EncodeOptions, SectionBytes, encode_delta
from compiler.driver.compile import compile_model
from compiler.driver.options import CompileOptions
from compiler.emitters.toolchain import compile_shared
from compiler.hardware.targets import find_target
from device_agent.cli import main
from device_agent.farm import run_agents
from device_agent.ports import Ports
from device_agent.probe.linux import probe
from device_agent.runtime.evaluation import EvaluationSet, load_evaluation
from examples.edgecard.materialise import materialise
from tests.factories.trace_files import read_chrome, read_perfetto
from tests.simulators.bundles import ToyBundle, released
from tests.simulators.device import Device, toy_config
from tests.simulators.release_server import ReleaseServer

CARDS = 6
WAIT_S = 300.0
"""Nothing here takes as long, on a machine however busy."""


def with_section(bundle: ToyBundle, name: str, data: bytes, release_seq: int) -> ToyBundle:
    """Return the bundle with other bytes in one section, as a builder gone wrong signs it."""
    sections = {**bundle.sections, name: SectionBytes(data, bundle.sections[name].planes)}
    entries = tuple(
        replace(section, sha256=sections[section.component].sha256, size_bytes=len(data))
        if section.component == name
        else section
        for section in bundle.manifest.sections
    )
    manifest = replace(
        bundle.manifest, sections=entries, release_seq=release_seq, version=f"bad-{release_seq}"
    )
    return ToyBundle(manifest, sections)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("edgecard")


@pytest.fixture(scope="module")
def v1(folder: Path) -> ToyBundle:
    materialise("v1", folder / "v1")
    target = target_of(probe(device_class="pc"))
    options = CompileOptions(target=target, model="edgecard", version="1", release_seq=1)
    return released(compile_model(folder / "v1", options))


@pytest.fixture(scope="module")
def v2(folder: Path, v1: ToyBundle) -> ToyBundle:
    materialise("v2", folder / "v2")
    base = {name: section.data for name, section in v1.sections.items()}
    planes = {name: section.planes for name, section in v1.sections.items() if section.planes}
    options = CompileOptions(
        target=v1.manifest.target,
        model="edgecard",
        version="2",
        release_seq=2,
        base_sections={
            name: data for name, data in base.items() if name in planes or name == "plan"
        },
        base_planes=planes,
    )
    return released(compile_model(folder / "v2", options))


@pytest.fixture(scope="module")
def questions(folder: Path, v1: ToyBundle) -> EvaluationSet:
    return load_evaluation(folder / "v1" / "evaluation.json")


@pytest.fixture
def server(v1: ToyBundle) -> Iterator[ReleaseServer]:
    server = ReleaseServer().start()
    server.publish(v1)
    yield server
    server.stop()


@pytest.fixture
def start(server: ReleaseServer, tmp_path: Path) -> Iterator[Callable[..., Device]]:
    running: list[Device] = []

    def start(**changes: Any) -> Device:
        config = toy_config(server, tmp_path / "device", model="edgecard", **changes)
        running.append(Device.start(server, config, Ports()))
        return running[-1]

    yield start
    for device in running:
        device.stop()


def score(device: Device, questions: EvaluationSet) -> float:
    """Return the share of right answers on the first cards."""
    asked = [question for card in questions.cards[:CARDS] for question in card]
    records = [device.agent.host.answer(question) for question in asked]
    assert {record.manifest_sha256 for record in records} == {device.agent.host.manifest_sha256}
    facts = device.agent.host.facts
    assert 1 <= facts["threads"] <= (os.cpu_count() or 1)
    assert facts["weight_bytes"] > 1_000_000
    return sum(record.correct is True for record in records) / len(records)


def take(device: Device, bundle: ToyBundle, **offer: Any) -> UpdateState | None:
    update = device.server.offer(bundle, device.agent.key.device_id, **offer)
    device.run(lambda: update.outcome is not None, WAIT_S)
    return update.outcome


def test_it_runs_a_model_from_the_first_byte_to_a_delta_and_back(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    v2: ToyBundle,
    questions: EvaluationSet,
) -> None:
    device = start()
    assert take(device, v1) is UpdateState.SUCCEEDED
    first = score(device, questions)
    assert first > 0.7

    server.publish(v2)
    data = delta_of(v1, v2)
    server.blobs[sha256_hex(data)] = data
    offer = DeltaOffer(v1.sha256, sha256_hex(data), len(data))
    assert offer.size_bytes < v2.manifest.total_bytes / 4
    server.sent_bytes.clear()
    failures, answers = answer_during(
        device, questions, lambda: take(device, v2, delta=offer) is UpdateState.SUCCEEDED
    )
    assert failures == 0
    assert answers > 10
    assert server.sent_bytes["blob"] == offer.size_bytes
    assert device.agent.host.manifest_sha256 == v2.sha256
    assert score(device, questions) > 0.6

    server.sent_bytes.clear()
    assert take(device, v1, kind=OfferKind.ROLLBACK) is UpdateState.SUCCEEDED
    assert "blob" not in server.sent_bytes
    assert score(device, questions) == first


def delta_of(old: ToyBundle, new: ToyBundle) -> bytes:
    return encode_delta(old.sections, new.sections, EncodeOptions(try_bsdiff4=False)).data


def answer_during(
    device: Device, questions: EvaluationSet, work: Callable[[], bool]
) -> tuple[int, int]:
    """Ask all the time while `work` is done; return (failures, answers)."""
    stop = threading.Event()
    counts = [0, 0]

    def ask() -> None:
        while not stop.is_set():
            for question in questions.questions[:40]:
                record = device.agent.host.answer(question)
                counts[0] += record.failed
                counts[1] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert work()
    finally:
        stop.set()
        thread.join()
    return counts[0], counts[1]


@pytest.mark.parametrize("component", ["weights.shared", "kernels", "plan", "selftest", "pipeline"])
def test_it_never_activates_what_computes_something_else(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    questions: EvaluationSet,
    component: str,
) -> None:
    """One flipped bit, signed by the right keys: the self-test or the loader refuses it."""
    device = start()
    assert take(device, v1) is UpdateState.SUCCEEDED
    data = bytearray(v1.sections[component].data)
    data[len(data) // 2 if component != "kernels" else 4] ^= 0x40
    bad = server.publish(with_section(v1, component, bytes(data), 9))
    assert take(device, bad) is UpdateState.FAILED
    assert device.code in ("agent.self_test", "agent.bundle")
    assert device.agent.host.manifest_sha256 == v1.sha256
    assert not device.agent.host.answer(questions.questions[0]).failed


def test_it_survives_native_code_that_crashes_or_hangs(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    questions: EvaluationSet,
    tmp_path: Path,
) -> None:
    """Code that runs when a library is loaded does its harm in the child, never in the agent."""
    device = start()
    assert take(device, v1) is UpdateState.SUCCEEDED
    harms = [
        ("__builtin_trap();", "ended by signal", WAIT_S),
        ("for (;;) { busy++; }", "not finished", 3.0),
    ]
    for number, (harm, message, limit_s) in enumerate(harms, start=20):
        object.__setattr__(device.agent.engine, "self_test_timeout_s", limit_s)
        source = (
            "static volatile unsigned busy;\n"
            f"__attribute__((constructor)) static void harm(void) {{ {harm} }}\n"
            "unsigned sf_abi_version(void) { return busy; }\n"
        )
        kernels = compile_shared(source, find_target(v1.manifest.target), tmp_path / "cache")
        bad = server.publish(with_section(v1, "kernels", kernels, number))
        assert take(device, bad) is UpdateState.FAILED
        assert device.code == "agent.self_test"
        context = device.agent.machine.context if device.agent.machine else None
        assert context is not None
        assert message in context.message
        assert not device.agent.host.answer(questions.questions[0]).failed


def test_it_is_asked_from_the_command_line(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = start()
    assert take(device, v1) is UpdateState.SUCCEEDED
    state = str(device.agent.config.state_dir)
    evaluation = str(folder / "v1" / "evaluation.json")
    assert main(["ask", "--state-dir", state, "--evaluation", evaluation, "--card", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert sum(" right" in line for line in lines) > len(lines) / 2
    assert main(["ask", "--state-dir", state, "unheard-of"]) == 1
    assert "unknown word 'unheard-of'" in capsys.readouterr().err


def test_it_traces_an_answer_from_the_command_line(
    server: ReleaseServer,
    start: Callable[..., Device],
    v1: ToyBundle,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = start()
    assert take(device, v1) is UpdateState.SUCCEEDED
    state, out = str(device.agent.config.state_dir), tmp_path / "trace.json"
    evaluation = ["--evaluation", str(folder / "v1" / "evaluation.json"), "--card", "0"]
    command = ["trace", "--state-dir", state, *evaluation, "--out"]
    assert main([*command, str(out)]) == 0
    *answers, last = capsys.readouterr().out.splitlines()
    assert last.endswith(f"(0 lost) written to {out}")
    assert "runs" in read_chrome(out.read_text())
    rows = [row for row in json.loads(out.read_text())["traceEvents"] if row["ph"] == "X"]
    spans = {
        kind: [row for row in rows if row["cat"] == kind] for kind in ("answer", "run", "call")
    }
    assert len(spans["answer"]) == len(answers)
    assert {row["name"] for row in spans["run"]} >= {"see", "step"}
    assert {row["name"] for row in spans["call"]} >= {"LINEAR", "ATTENTION"}
    for outer, inner in (("answer", "run"), ("run", "call")):
        for row in spans[inner]:
            inside = (s["ts"] <= row["ts"] <= s["ts"] + s["dur"] for s in spans[outer])
            assert any(inside), row
    packed = tmp_path / "trace.pftrace"
    assert main([*command, str(packed), "--format", "perfetto"]) == 0
    capsys.readouterr()
    depths = {s.category: s.depth for s in read_perfetto(packed.read_bytes())["runs"]}
    assert depths.items() >= {"answer": 0, "run": 1, "call": 2}.items()
    assert main([*command, str(tmp_path / "absent" / "trace.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_it_runs_a_farm_that_answers_and_reports(
    server: ReleaseServer, v1: ToyBundle, folder: Path, tmp_path: Path
) -> None:
    server.arm = (7, 0, "treatment")
    configs = [
        toy_config(
            server,
            tmp_path / name,
            model="edgecard",
            evaluation=str(folder / "v1" / "evaluation.json"),
            questions_per_s=20.0,
            telemetry_s=0.2,
            probation_s=0.5,
        )
        for name in ("one", "two")
    ]
    stop = threading.Event()
    thread = threading.Thread(target=run_agents, args=(configs, Ports(), stop))
    thread.start()
    try:
        wait_until(lambda: len(server.keys) == 2)
        updates = [server.offer(v1, device_id) for device_id in list(server.keys)]
        wait_until(lambda: all(update.outcome is not None for update in updates))
        wait_until(lambda: sum(batch.answers for batch in server.batches.values()) >= 20)
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert [update.outcome for update in updates] == [UpdateState.SUCCEEDED] * 2
    for batch in server.batches.values():
        assert (batch.rollout_id, batch.arm, batch.manifest_sha256) == (7, "treatment", v1.sha256)
    answers = sum(batch.answers for batch in server.batches.values())
    correct = sum(batch.correct for batch in server.batches.values())
    assert correct / answers > 0.6
    assert len({device_id for device_id, _, _ in server.batches}) == 2


def wait_until(holds: Callable[[], bool]) -> None:
    end = threading.Event()
    for _ in range(int(WAIT_S / 0.1)):
        if holds():
            return
        end.wait(0.1)
    pytest.fail("it did not happen in time")
