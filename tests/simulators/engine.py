"""An engine that runs toy bundles: it does what the pipeline section of the bundle says.

self_test  "pass" (default), "fail", "hang"      load  "ok" (default), "fail"
answer     "ok" (default), "error", "cut_off", "timeout", "hang"
"""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from compiler.contract.errors import ContractError
from device_agent.config import AgentConfig
from device_agent.errors import BundleError, SelfTestFailedError
from device_agent.runtime.answers import AnswerRecord, Outcome, Question
from device_agent.runtime.bundle import read_manifest
from device_agent.runtime.rule_book import RuleBook
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

OUTCOMES = {
    "ok": Outcome.ENDED,
    "error": Outcome.ERROR,
    "cut_off": Outcome.CUT_OFF,
    "timeout": Outcome.TIMEOUT,
    "hang": Outcome.TIMEOUT,
}


@dataclass
class ToyAnswerer:
    """Answers with the version of its bundle."""

    manifest_sha256: str
    behaviour: dict[str, Any]
    never: threading.Event = field(default_factory=threading.Event)
    closed: bool = False

    @property
    def facts(self) -> dict[str, object]:
        return {"version": self.behaviour["version"]}

    def understands(self, question: Question) -> bool:
        return True

    def answer(self, question: Question) -> AnswerRecord:
        assert not self.closed, "a closed bundle was asked"
        mode = self.behaviour.get("answer", "ok")
        if mode == "hang":
            self.never.wait()
        words = (str(self.behaviour["version"]),)
        correct = None if question.expected is None else words == question.expected
        return AnswerRecord(self.manifest_sha256, words, OUTCOMES[mode], correct, 1.0)

    def close(self) -> None:
        self.closed = True


@dataclass
class ToyEngine:
    """The engine port over toy bundles; every section is verified as the real one does."""

    store: ObjectStore
    started: list[str] = field(default_factory=list)
    rules: RuleBook = field(default_factory=RuleBook)
    keeps_in_memory: bool = True

    def self_test(self, pointer: Pointer) -> None:
        behaviour = self._load(pointer)
        if behaviour.get("self_test", "pass") != "pass":
            raise SelfTestFailedError(f"the self-test of {pointer.version} did not pass")

    def start(self, pointer: Pointer) -> ToyAnswerer:
        behaviour = self._load(pointer)
        if behaviour.get("load") == "fail":
            raise BundleError(f"{pointer.version} does not load")
        self.started.append(pointer.version)
        return ToyAnswerer(pointer.manifest_sha256, behaviour)

    def _load(self, pointer: Pointer) -> dict[str, Any]:
        try:
            manifest = read_manifest(self.store, pointer.manifest_sha256, pointer.size_bytes)
            sections = {
                section.component: bytes(
                    self.store.read_verified(section.sha256, section.size_bytes)
                )
                for section in manifest.sections
            }
            loaded: dict[str, Any] = json.loads(sections["pipeline"])
        except (ContractError, KeyError, ValueError) as error:
            raise BundleError(str(error)) from error
        return loaded


def toy_engine(store: ObjectStore, _config: AgentConfig) -> ToyEngine:
    return ToyEngine(store)
