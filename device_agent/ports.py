"""What an agent touches the world with; tests and simulators put their own in."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from compiler.contract.degrade import Rule, parse_rules
from compiler.contract.errors import ContractError
from compiler.contract.fingerprint import Fingerprint
from device_agent.clock import Clock, SystemClock
from device_agent.config import AgentConfig
from device_agent.errors import ConfigurationError
from device_agent.probe.linux import probe
from device_agent.runtime.degrade_keeper import DEFAULT_RULES
from device_agent.runtime.energy import UNVERIFIED, configured
from device_agent.runtime.engine import Engine, NativeEngine
from device_agent.runtime.hotset import HOTSET_FILE, HotSetFile
from device_agent.runtime.rule_book import RuleBook
from device_agent.runtime.weights import WeightPool
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.update.patching import PatcherFactory, process_patcher

EngineFactory = Callable[[ObjectStore, AgentConfig], Engine]
Checkpoint = Callable[[str], None]


def native_engine(store: ObjectStore, config: AgentConfig) -> NativeEngine:
    """Return the engine that runs native code.

    Raises:
        ConfigurationError: The degrade rules cannot be read or do not parse.
    """
    hotset = HotSetFile(Disk(), config.state_dir / HOTSET_FILE)
    return NativeEngine(
        store,
        config.state_dir,
        config.self_test_timeout_s,
        config.answer_timeout_s,
        config.threads,
        config.cpus,
        weights=WeightPool(config.max_weight_bytes, hotset),
        rules=RuleBook(degrade_rules(config)),
        tdp_w=config.tdp_w,
        energy=configured(config.energy_model) if config.energy_model else UNVERIFIED,
        steers=config.steering != "off",
    )


def degrade_rules(config: AgentConfig) -> tuple[Rule, ...]:
    """Return the rules of the configured file, or those built in.

    Raises:
        ConfigurationError: It cannot be read or does not parse.
    """
    return read_rules(Path(config.degrade_rules)) if config.degrade_rules else DEFAULT_RULES


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Return the degrade rules of a file.

    Raises:
        ConfigurationError: It cannot be read or does not parse.
    """
    try:
        return parse_rules(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"no rules in {path}: {error.strerror or error}") from error
    except ContractError as error:
        told = f"degrade_rules: {path.name}: {error}"
        raise ConfigurationError(told, hint=error.hint) from error


def probe_this_machine(config: AgentConfig) -> Fingerprint:
    """Return the fingerprint of this machine, limited as configured."""
    return probe(device_class=config.device_class, isa_limit=config.isa_limit)


def no_checkpoint(_name: str) -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one agent.

    Attributes:
        transport: Of the HTTP client; None = the network.
        checkpoint: Called with a name before and after every step of an update, so that a test can
            end the process there.
    """

    clock: Clock = field(default_factory=SystemClock)
    disk: Disk = field(default_factory=Disk)
    transport: httpx.BaseTransport | None = None
    engine: EngineFactory = native_engine
    patcher: PatcherFactory = process_patcher
    fingerprint: Callable[[AgentConfig], Fingerprint] = probe_this_machine
    checkpoint: Checkpoint = no_checkpoint
