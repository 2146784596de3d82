"""An agent in a process of its own that kills itself, with SIGKILL, at a named checkpoint.

    python -m tests.simulators.victim SERVER_URL STATE_DIR UPDATE CHECKPOINT COUNT

Runs the update loop and an answering thread on toy bundles until update UPDATE has ended, or until
it came to CHECKPOINT for the COUNT-th time. Prints `answered <version>` when another version
answers, and `outcome <outcome>` at the end.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from device_agent.agent import Agent
from device_agent.config import AgentConfig
from device_agent.errors import NoBundleError
from device_agent.states import State
from device_agent.storage.disk import Disk
from tests.simulators.device import QUESTION, toy_ports

LIMIT_S = 240.0


class KillingDisk(Disk):
    """Comes to a checkpoint before each rename, which is where facts are made."""

    def __init__(self, checkpoint) -> None:
        self._checkpoint = checkpoint

    def rename(self, source: Path, target: Path) -> None:
        self._checkpoint(f"rename:{target.parent.name}")
        super().rename(source, target)

    def write(self, file, offset, data) -> None:
        super().write(file, offset, data)
        kind = "journal" if file.path.name == "journal" else file.path.parent.name
        self._checkpoint(f"write:{kind}")


class Killer:
    """Counts checkpoints and ends the process at the one it was told."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._left = count

    def __call__(self, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def answer(agent: Agent) -> None:
    last = ""
    while True:
        try:
            said = agent.host.answer(QUESTION).words[0]
        except NoBundleError:
            said = "nothing"
        if said != last:
            print(f"answered {said}", flush=True)
            last = said
        time.sleep(0.005)


def main(server_url: str, state_dir: Path, update_id: int, checkpoint: str, count: int) -> None:
    killer = Killer(checkpoint, count)
    config = AgentConfig(
        server_url=server_url,
        state_dir=state_dir,
        serial="victim",
        model="toy",
        poll_s=0.05,
        probation_s=0.05,
        retry_first_s=0.01,
        retry_most_s=0.05,
        update_deadline_s=LIMIT_S,
        reserve_bytes=0,
    )
    agent = Agent(config, toy_ports(disk=KillingDisk(killer), checkpoint=killer))
    loop = agent.boot()
    machine = agent.machine
    assert machine is not None
    threading.Thread(target=answer, args=(agent,), daemon=True).start()
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        time.sleep(min(loop.turn(), 0.02))
        context = machine.context
        ended = machine.state is State.IDLE and not machine.pending
        if ended and context is not None and context.update_id == update_id:
            print(f"outcome {context.outcome}", flush=True)
            break
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
