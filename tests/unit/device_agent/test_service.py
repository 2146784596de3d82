"""The threads of an agent: they do not wait for each other, and they end when told to."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.contract.protocol import UpdateState
from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError, RefusedError
from device_agent.farm import farm_configs, run_agents
from device_agent.runtime.evaluation import SCHEMA
from tests.simulators.bundles import ToyBundle, ToySpec, toy_bundle
from tests.simulators.device import PATIENCE_S, toy_config, toy_ports
from tests.simulators.release_server import Fault, ReleaseServer


def wait_until(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    asked = {"kind": "x", "prompt": "question", "words": [], "answer": ["1"]}
    document = {
        "schema": SCHEMA,
        "images": "evaluation.npz",
        "cards": [{"image": 0, "questions": [asked]}],
    }
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps(document))
    np.savez(tmp_path / "evaluation.npz", images=np.zeros((1, 2, 2), np.uint8))
    return path


class Running:
    """Agents at work in a thread, as the command line runs them."""

    def __init__(self, *configs: AgentConfig) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(configs,))
        self.thread.start()

    def _run(self, configs: tuple[AgentConfig, ...]) -> None:
        try:
            run_agents(configs, toy_ports(), self.stop)
        except RefusedError as error:
            self.error = error

    def end(self) -> None:
        self.stop.set()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def run(
    server: ReleaseServer, tmp_path: Path, evaluation: Path
) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def run(*names: str, **changes: Any) -> Running:
        values = {
            "evaluation": str(evaluation),
            "questions_per_s": 200.0,
            "telemetry_s": 0.05,
            "probation_s": 0.1,
        }
        configs = [toy_config(server, tmp_path / name, **{**values, **changes}) for name in names]
        running.append(Running(*configs))
        return running[-1]

    yield run
    for agents in running:
        agents.end()


def answers(server: ReleaseServer, bundle: ToyBundle) -> int:
    batches = list(server.batches.values())
    return sum(batch.answers for batch in batches if batch.manifest_sha256 == bundle.sha256)


def answers_said(folder: Path) -> int:
    """Return how many answers an agent counts by itself."""
    path = folder / "run" / "status.json"
    return int(json.loads(path.read_text())["answers"]) if path.exists() else 0


def test_it_enrols_installs_answers_and_reports(
    server: ReleaseServer, run: Callable[..., Running], v1: ToyBundle, tmp_path: Path
) -> None:
    agents = run("one", "two")
    wait_until(lambda: len(server.keys) == 2)
    for device_id in list(server.keys):
        server.offer(v1, device_id)
    wait_until(lambda: answers(server, v1) > 50)
    wait_until(lambda: all(update.outcome for update in server.updates.values()))
    agents.end()
    outcomes = [update.outcome for update in server.updates.values()]
    assert outcomes == [UpdateState.SUCCEEDED] * 2
    assert all(batch.correct == batch.scored for batch in server.batches.values())
    live = json.loads((tmp_path / "one" / "run" / "status.json").read_text())
    assert live["running_manifest_sha256"] == v1.sha256
    assert answers_said(tmp_path / "one") > 0


def test_it_answers_while_it_downloads(
    server: ReleaseServer, run: Callable[..., Running], v1: ToyBundle, v2: ToyBundle
) -> None:
    run("one")
    wait_until(lambda: bool(server.keys))
    first = server.offer(v1)
    wait_until(lambda: answers(server, v1) > 10 and first.outcome is UpdateState.SUCCEEDED)
    server.fail("blob", *[Fault(rate=10_000)] * 20)
    goes_on = threading.Event()
    server.on_blob = lambda _sha256: goes_on.wait(PATIENCE_S)
    update = server.offer(v2)
    wait_until(lambda: UpdateState.DOWNLOADING in update.states)
    before = answers(server, v1)
    wait_until(lambda: answers(server, v1) > before + 20)
    assert update.outcome is None
    goes_on.set()
    wait_until(lambda: answers(server, v2) > 10 and update.outcome is UpdateState.SUCCEEDED)
    assert all(batch.failures == 0 for batch in server.batches.values())


def test_it_answers_on_while_the_server_is_away(
    server: ReleaseServer, run: Callable[..., Running], v1: ToyBundle, tmp_path: Path
) -> None:
    run("one")
    wait_until(lambda: bool(server.keys))
    first = server.offer(v1)
    wait_until(lambda: answers(server, v1) > 10 and first.outcome is UpdateState.SUCCEEDED)
    many = 100_000
    for kind in ("poll", "telemetry", "report"):
        server.fail(kind, *[Fault(drop=True)] * many)
    wait_until(lambda: server.faults_left("telemetry") < many)  # what was on its way is in
    before, said = answers(server, v1), answers_said(tmp_path / "one")
    wait_until(lambda: answers_said(tmp_path / "one") > said + 40)
    wait_until(lambda: server.faults_left("telemetry") < many - 3)
    assert answers(server, v1) == before
    server.heal()
    wait_until(lambda: answers(server, v1) > before + 40)


def test_it_returns_by_itself_from_a_bundle_that_fails(
    server: ReleaseServer, run: Callable[..., Running], v1: ToyBundle
) -> None:
    run("one", probation_s=20.0)
    wait_until(lambda: bool(server.keys))
    spec = ToySpec(version="2", release_seq=2, behaviour={"answer": "error"})
    bad = server.publish(toy_bundle(spec))
    update = server.offer(bad)
    wait_until(lambda: update.outcome is not None)
    assert update.outcome is UpdateState.ROLLED_BACK
    assert update.reports[-1].code == "agent.unfit"


def test_it_takes_over_from_an_answer_that_never_ends(
    server: ReleaseServer, run: Callable[..., Running], v1: ToyBundle
) -> None:
    run("one", answer_timeout_s=1.5, probation_s=0.2)
    wait_until(lambda: bool(server.keys))
    first = server.offer(v1)
    wait_until(lambda: first.outcome is UpdateState.SUCCEEDED)
    spec = ToySpec(version="2", release_seq=2, behaviour={"answer": "hang"})
    update = server.offer(server.publish(toy_bundle(spec)))
    wait_until(lambda: update.outcome is not None)
    assert update.outcome is UpdateState.ROLLED_BACK
    assert update.reports[-1].message == "an answer does not end"
    before = answers(server, v1)
    wait_until(lambda: answers(server, v1) > before + 20)


def test_it_stops_in_the_middle_of_a_download(
    server: ReleaseServer, run: Callable[..., Running], v1: ToyBundle
) -> None:
    agents = run("one")
    wait_until(lambda: bool(server.keys))
    server.fail("blob", *[Fault(rate=50)] * 20)  # 13 kB: four minutes
    update = server.offer(v1)
    wait_until(lambda: server.sent_bytes.get("blob", 0) > 5)
    agents.end()
    assert server.sent_bytes["blob"] < v1.manifest.total_bytes / 2
    server.heal()
    run("one")
    wait_until(lambda: update.outcome is UpdateState.SUCCEEDED)


def test_it_stops_all_when_one_is_refused(
    server: ReleaseServer, run: Callable[..., Running]
) -> None:
    agents = run("one", claim="wrong")
    agents.thread.join(PATIENCE_S)
    assert isinstance(agents.error, RefusedError)


def test_it_deals_out_names_folders_and_levels(tmp_path: Path) -> None:
    config = AgentConfig(state_dir=tmp_path, serial="lab", isa_limit="x86-64-v2")
    farm = farm_configs(config, 5, ("", "x86-64-v1"))
    assert [item.serial for item in farm] == [f"lab-00{number}" for number in range(1, 6)]
    assert len({item.state_dir for item in farm}) == 5
    assert [item.isa_limit for item in farm[:3]] == ["x86-64-v2", "x86-64-v1", "x86-64-v2"]
    for count in (0, 10_000):
        with pytest.raises(ConfigurationError):
            farm_configs(config, count)
    with pytest.raises(ConfigurationError):
        farm_configs(config, 2, ("x86-64-v9",))
    assert replace(config) == config
