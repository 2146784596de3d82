"""`kill -9` at random moments of real updates of EdgeCard while it answers: no answer is wrong.

Versions come and go all the time: one by delta, one whole, one by going back. What an agent says
between two kills is compared, word by word, with what each version says alone.
"""

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.protocol import DeltaOffer, OfferKind, UpdateState
from compiler.delta import EncodeOptions, encode_delta
from device_agent.ports import Ports
from device_agent.runtime.evaluation import load_evaluation
from device_agent.storage.journal import read_records
from tests.factories.bundles import compiled_here, submission
from tests.simulators.bundles import ToyBundle, released
from tests.simulators.device import Device, toy_config
from tests.simulators.release_server import ReleaseServer, Update

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = 12
SAMPLE, MOST = 10, 200
LONGEST_S = 2.5
"""From the first answer of an agent to its kill: longer than an update takes."""
WAIT_S = 300.0


@dataclass
class Ground:
    """The server, three versions, what each says to every question, and a device that runs one."""

    server: ReleaseServer
    folder: Path
    versions: dict[str, ToyBundle]
    delta: DeltaOffer
    evaluation: Path
    truth: dict[tuple[str, int], str] = field(default_factory=dict)
    offered: int = 0

    def next_offer(self) -> Update:
        """Offer the next version: by delta, whole, back to the one before, whole."""
        name, options = (
            ("v2", {"delta": self.delta}),
            ("v3-bad", {}),
            ("v2", {"kind": OfferKind.ROLLBACK}),
            ("v1", {}),
        )[self.offered % 4]
        self.offered += 1
        update = self.server.offer(self.versions[name], **options)
        update.retry_failed = True
        return update


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("kills")
    versions = {name: released(compiled_here(name, folder)) for name in ("v1", "v2", "v3-bad")}
    server = ReleaseServer().start()
    for bundle in versions.values():
        server.publish(bundle)
    old, new = versions["v1"], versions["v2"]
    options = EncodeOptions(try_bsdiff4=False)
    data = encode_delta(old.sections, new.sections, options).data
    server.blobs[sha256_hex(data)] = data
    delta = DeltaOffer(old.sha256, sha256_hex(data), len(data))
    evaluation = submission("v1", folder) / "evaluation.json"
    ground = Ground(server, folder, versions, delta, evaluation)
    config = toy_config(
        server, folder / "device", model="edgecard", serial="victim", steering="off"
    )
    device = Device.start(server, config, Ports())
    for bundle in (versions["v3-bad"], new, old):
        update = server.offer(bundle, device.agent.key.device_id)
        device.run(lambda update=update: update.outcome is not None, WAIT_S)
        for number, question in enumerate(load_evaluation(evaluation).questions[:QUESTIONS]):
            words = " ".join(device.agent.host.answer(question).words)
            ground.truth[bundle.sha256, number] = words
    device.stop()
    yield ground
    server.stop()


class Victim:
    """One life of an agent, and what it said."""

    def __init__(self, ground: Ground) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.simulators.answering_agent", ground.server.url),
                *(str(ground.folder / "device"), str(ground.evaluation), str(QUESTIONS)),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._first = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for_answer(self) -> None:
        assert self._first.wait(WAIT_S), "it does not answer after a start"
        assert self._process.poll() is None, "it ended by itself"

    def kill(self) -> list[str]:
        """Kill it and return its whole lines."""
        assert self._process.poll() is None, "it ended by itself"
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self.lines

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self.lines.append(line)
                self._first.set()
        self._first.set()


def state_of(folder: Path) -> str:
    """Return the state that the journal of a dead agent is in."""
    records = read_records((folder / "journal").read_bytes())[0]
    return str([record for record in records if record.get("t") == "state"][-1]["state"])


def campaign(ground: Ground, kills: int, seed: int) -> dict[str, Any]:
    """Kill so many times; return what came of it."""
    chance = random.Random(seed)
    said: Counter[str] = Counter()
    states: Counter[str] = Counter()
    wrong: list[str] = []
    ended: list[Update] = []
    update = ground.next_offer()
    for _ in range(kills):
        victim = Victim(ground)
        victim.wait_for_answer()
        end = time.monotonic() + chance.uniform(0.0, LONGEST_S)
        while time.monotonic() < end:
            if update.outcome is not None:
                ended.append(update)
                update = ground.next_offer()
            time.sleep(0.005)
        for line in victim.kill():
            manifest, _, rest = line.rstrip("\n").partition(" ")
            number, _, words = rest.partition(" ")
            said[manifest] += 1
            if not number or ground.truth.get((manifest, int(number))) != words:
                wrong.append(line)
        states[state_of(ground.folder / "device")] += 1
    last = finish(ground, update)
    return {"said": said, "states": states, "wrong": wrong, "ended": [*ended, last]}


def finish(ground: Ground, update: Update) -> Update:
    """Let the last agent live until its update has ended."""
    victim = Victim(ground)
    end = time.monotonic() + WAIT_S
    while update.outcome is None:
        assert time.monotonic() < end, "it does not come to an end by itself"
        time.sleep(0.02)
    victim.wait_for_answer()
    victim.kill()
    return update


def judge(ground: Ground, kills: int, seed: int, record_property: Any) -> None:
    found = campaign(ground, kills, seed)
    answers = sum(found["said"].values())
    for name, value in (("kills", kills), ("answers", answers), ("states", dict(found["states"]))):
        record_property(name, value)
    print(f"{kills} kills, {answers} answers, {len(found['ended'])} updates, {found['states']}")
    assert found["wrong"] == [], "an answer of no version: a mixture, or nobody"
    assert set(found["said"]) <= {bundle.sha256 for bundle in ground.versions.values()}
    outcomes = Counter(update.outcome for update in found["ended"])
    assert set(outcomes) == {UpdateState.SUCCEEDED}, outcomes
    assert answers > kills
    assert sum(found["states"].values()) == kills


def test_it_survives_sampled_kills(ground: Ground, record_property: Any) -> None:
    judge(ground, SAMPLE, 0, record_property)


@pytest.mark.full
def test_it_survives_two_hundred_kills(ground: Ground, record_property: Any) -> None:
    judge(ground, MOST, 1, record_property)
