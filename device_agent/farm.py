"""Run one agent or many in this process, each with its own folder, key and threads."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Final

from device_agent.agent import Agent
from device_agent.config import AgentConfig
from device_agent.enrolment import Enrolment
from device_agent.errors import AgentError, ConfigurationError, NotEnrolledError
from device_agent.machine import describe
from device_agent.ports import Ports
from device_agent.service import SUPERVISE_S, AgentService, StoppableClock

log = logging.getLogger("device_agent")

MAX_AGENTS: Final = 1_000
ENROL_RETRY_S: Final = 2.0


def farm_configs(
    config: AgentConfig, count: int, isa_limits: Sequence[str] = ("",)
) -> list[AgentConfig]:
    """Return the configurations of `count` agents that differ in folder, serial, name and ISA.

    Args:
        config: What they have in common.
        count: How many.
        isa_limits: Dealt out in turn; an empty one means that of `config`.

    Raises:
        ConfigurationError: `count` is out of range.
    """
    if not 1 <= count <= MAX_AGENTS:
        raise ConfigurationError(f"count must be in 1..{MAX_AGENTS}")
    configs = []
    for number in range(1, count + 1):
        label = f"{number:03d}"
        configs.append(
            replace(
                config,
                state_dir=config.state_dir / label,
                serial=f"{config.serial}-{label}",
                name=f"{config.display_name}-{label}",
                isa_limit=isa_limits[(number - 1) % len(isa_limits)] or config.isa_limit,
            )
        )
    return configs


def run_agents(configs: Sequence[AgentConfig], ports: Ports, stop: threading.Event) -> None:
    """Enrol where needed and run until `stop` is set.

    Raises:
        AgentError: An agent cannot start; the others are stopped.
    """
    stoppable = replace(ports, clock=StoppableClock(ports.clock, stop))
    services: list[AgentService] = []
    try:
        for config in configs:
            agent = Agent(config, stoppable)
            services.append(AgentService(agent, stop))
            enrol_patiently(agent, stop)
            services[-1].start()
        log.info("%d agent(s) at work", len(services))
        while not stop.wait(SUPERVISE_S):
            for service in services:
                service.supervise()
    finally:
        stop.set()
        for service in services:
            service.join()


def enrol_patiently(agent: Agent, stop: threading.Event) -> Enrolment | None:
    """Return the enrolment, enrolling first if needed and waiting for the server if it is away.

    Raises:
        AgentError: The server refuses this device.
    """
    try:
        return agent.enrolment()
    except NotEnrolledError:
        pass
    while not stop.is_set():
        try:
            return agent.enrol()
        except AgentError as error:
            if not error.retryable:
                raise
            log.warning("enrolment waits: %s", describe(error))
            stop.wait(ENROL_RETRY_S)
    return None


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before: list[tuple[int, Callable[[int, FrameType | None], object] | int | None]] = [
        (number, signal.signal(number, handle)) for number in (signal.SIGTERM, signal.SIGINT)
    ]
    try:
        yield stop
    finally:
        for number, handler in before:
            signal.signal(number, handler)
