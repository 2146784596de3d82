"""The demo's devices: three agents in processes of their own, further ones sharing a process."""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboards.demo.processes import ProcessGroup

QUESTIONS_PER_S: Final = 4.0
FARM_PER_LEVEL: Final = 4
FARM: Final = "lab"
LADDER: Final = ("x86-64-v4-vnni", "x86-64-v3", "x86-64-v2", "x86-64-v1")


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction-set level of the demo's fleet.

    Attributes:
        limit: What the agent's probe is restricted to; empty for all this machine has.
        target: The target that follows from it.
    """

    limit: str
    target: str


def levels(host_target: str) -> tuple[Level, ...]:
    """Return three levels with three targets: this host's best, x86-64-v3 or the next lower, v1.

    Args:
        host_target: Best target of this machine.
    """
    middle = "x86-64-v3" if LADDER.index(host_target) < LADDER.index("x86-64-v3") else "x86-64-v2"
    if host_target in {"x86-64-v2", "x86-64-v1"}:
        middle = host_target
    return (Level("", host_target), Level(middle, middle), Level("x86-64-v1", "x86-64-v1"))


def start_agent(
    group: ProcessGroup,
    *,
    name: str,
    level: Level,
    settings: Mapping[str, str | float],
    folder: Path,
) -> None:
    """Start one agent in a process of its own.

    Args:
        group: Where the process belongs.
        name: Serial number and display name.
        level: What its probe may report.
        settings: Settings shared by all agents of the demo.
        folder: Parent of its state folder.
    """
    config = _configure(folder / name, name, {**settings, "isa_limit": level.limit})
    group.start(name, [sys.executable, "-m", "device_agent", "run", "--config", config])


def start_farm(
    group: ProcessGroup,
    *,
    levels: Sequence[Level],
    per_level: int,
    settings: Mapping[str, str | float],
    folder: Path,
) -> int:
    """Start further agents that share one process; return how many."""
    count = per_level * len(levels)
    config = _configure(folder / FARM, FARM, settings)
    limits = ",".join(level.limit for level in levels)
    group.start(
        FARM,
        [
            *(sys.executable, "-m", "device_agent", "farm", "--config", config),
            *("--count", str(count), f"--isa-limits={limits}"),
        ],
    )
    return count


def _configure(home: Path, name: str, settings: Mapping[str, str | float]) -> Path:
    home.mkdir(parents=True)
    values = {**settings, "state_dir": str(home / "state"), "serial": name, "name": name}
    path = home / "agent.toml"
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in values.items()))
    return path


def agent_settings(
    *, server_url: str, claim: str, model: str, evaluation: Path, probation_s: float
) -> Mapping[str, str | float]:
    """Return the settings that all agents of the demo share."""
    return {
        "server_url": server_url,
        "claim": claim,
        "model": model,
        "device_class": "pc",
        "evaluation": str(evaluation),
        "questions_per_s": QUESTIONS_PER_S,
        "telemetry_s": 1.0,
        "probation_s": probation_s,
    }


def host_target(group: ProcessGroup) -> str:
    """Return the best target of this machine, as an agent's own probe sees it."""
    code = (
        "from compiler.contract.fingerprint import target_of\n"
        "from device_agent.probe.linux import probe\n"
        "print(target_of(probe(device_class='pc')))"
    )
    return group.run([sys.executable, "-c", code]).strip()


def require_x86() -> None:
    """Say plainly that the demo's fleet needs an x86-64 machine.

    Raises:
        SystemExit: The machine is of another kind.
    """
    if platform.machine() != "x86_64":
        raise SystemExit(
            f"error: the demo's three agents are levels of x86-64; this is {platform.machine()}"
        )


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
