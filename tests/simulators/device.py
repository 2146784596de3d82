"""A device for tests: an agent with toy bundles, short limits, and everything in one place."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compiler.contract.fingerprint import Fingerprint
from device_agent.agent import Agent
from device_agent.config import AgentConfig
from device_agent.ports import Ports
from device_agent.runtime.answers import Question
from device_agent.states import State
from device_agent.update.patching import LocalPatcher
from tests.simulators.bundles import ToyBundle
from tests.simulators.disk import FastDisk
from tests.simulators.engine import toy_engine
from tests.simulators.release_server import ReleaseServer, Update

QUESTION = Question(image=b"", prompt="caption", words=(), expected=None)
PATIENCE_S = 60.0
"""Limits that no test means to reach, however busy the machine is; tests of limits set theirs."""
FINGERPRINT = Fingerprint(
    machine="x86_64",
    soc="toy",
    os="linux",
    isa_features=(),
    cores=1,
    l1d_kb=32,
    l2_kb=256,
    l3_kb=0,
    ram_bucket_mb=512,
    page_kb=4,
    accelerator="",
    driver="",
    device_class="pc",
    agent_abi=1,
)


def toy_config(server: ReleaseServer, state_dir: Path, **changes: Any) -> AgentConfig:
    values: dict[str, Any] = {
        "server_url": server.url,
        "state_dir": state_dir,
        "claim": "sfc_1_secret",
        "serial": state_dir.name,
        "model": "toy",
        "poll_s": 0.05,
        "probation_s": 0.0,
        "connect_timeout_s": PATIENCE_S,
        "read_timeout_s": PATIENCE_S,
        "request_deadline_s": PATIENCE_S,
        "download_deadline_s": PATIENCE_S,
        "update_deadline_s": PATIENCE_S,
        "retry_first_s": 0.01,
        "retry_most_s": 0.05,
        "reserve_bytes": 0,
    }
    return AgentConfig(**{**values, **changes})


def toy_ports(**changes: Any) -> Ports:
    ports = Ports(
        disk=FastDisk(),
        engine=toy_engine,
        patcher=lambda store, disk, config: LocalPatcher(store, disk, config.state_dir),
        fingerprint=lambda _config: FINGERPRINT,
    )
    return replace(ports, **changes)


@dataclass
class Device:
    """An agent that is enrolled and booted."""

    server: ReleaseServer
    agent: Agent

    @classmethod
    def start(
        cls, server: ReleaseServer, config: AgentConfig, ports: Ports | None = None
    ) -> "Device":
        agent = Agent(config, ports or toy_ports())
        try:
            if not (config.state_dir / "identity" / "enrolment.json").exists():
                agent.enrol()
            agent.boot()
        except BaseException:
            agent.close()
            raise
        return cls(server, agent)

    @property
    def state(self) -> State:
        assert self.agent.machine is not None
        return self.agent.machine.state

    @property
    def code(self) -> str:
        """Return the error code of the update in progress or the last one."""
        assert self.agent.machine is not None
        context = self.agent.machine.context
        return "" if context is None else context.code

    def run(self, until: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        """Turn the update loop until something holds."""
        assert self.agent.loop is not None
        end = time.monotonic() + timeout_s
        while not until():
            assert time.monotonic() < end, f"still {self.state} ({self.code})"
            time.sleep(min(self.agent.loop.turn(), 0.01))

    def take(self, update: Update) -> Update:
        """Turn until the server knows how the update ended."""
        self.run(lambda: update.outcome is not None and self.state is State.IDLE)
        return update

    def says(self) -> str:
        """Return the version that answers now."""
        return self.agent.host.answer(QUESTION).words[0]

    def install(self, bundle: ToyBundle) -> Update:
        """Take a bundle from the beginning to the end."""
        update = self.take(self.server.offer(bundle, self.agent.key.device_id))
        assert self.says() == bundle.manifest.version
        return update

    def stop(self) -> None:
        self.agent.close()
