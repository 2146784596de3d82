"""What a device says about itself to the person in front of it; reads, never writes.

Works beside a running agent: every file it reads is replaced whole or appended to.
"""

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from compiler.contract.errors import ContractError
from device_agent.clock import SystemClock
from device_agent.config import AgentConfig
from device_agent.enrolment import load_enrolment
from device_agent.errors import AgentError
from device_agent.states import State
from device_agent.storage.denied import DenyList
from device_agent.storage.disk import Disk
from device_agent.storage.floors import FloorStore
from device_agent.storage.journal import MAX_JOURNAL_BYTES, read_records
from device_agent.storage.slots import Pointer, Slots
from device_agent.update.context import UpdateContext, context_from_json

LIVE_FILE: Final = "run/status.json"
MAX_LIVE_BYTES: Final = 64 * 1024
SHORT_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Status:
    """Everything `status` prints."""

    document: dict[str, Any]

    def to_json(self) -> str:
        """Return it for machines."""
        return json.dumps(self.document, indent=2, sort_keys=True)

    def to_text(self) -> str:
        """Return it for people: one `name: value` line per fact."""
        return "\n".join(f"{name}: {value}" for name, value in _flat(self.document))


def read_status(config: AgentConfig) -> Status:
    """Collect what the state folder says."""
    folder, disk = config.state_dir, Disk()
    document: dict[str, Any] = {"state_dir": str(folder), **_identity(disk, folder)}
    slots = Slots(disk, folder / "slots")
    table = slots.load()
    document["running"] = _bundle(table.current)
    document["on_trial"] = table.on_trial
    document["other_slot"] = _bundle(table.other)
    document["update"] = _update(disk, folder / "journal")
    document["floors"] = _floors(disk, folder / "trust", is_enrolled=document["enrolled"])
    document["denied"] = _denied(config)
    document["live"] = live = _live(disk, folder / LIVE_FILE)
    document["answering"] = _answering(table.current, live)
    return Status(document)


def write_live(config: AgentConfig, facts: dict[str, Any]) -> None:
    """Leave counters of the running agent for `status`; not durable, and not needed to be."""
    path = config.state_dir / LIVE_FILE
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"pid": os.getpid(), **facts}), encoding="utf-8")
    temporary.replace(path)


def _identity(disk: Disk, folder: Path) -> dict[str, Any]:
    try:
        enrolment = load_enrolment(disk, folder / "identity")
    except AgentError as error:
        return {"enrolled": False, "reason": str(error)}
    return {
        "enrolled": True,
        "device_id": enrolment.device_id,
        "enrolment_state": enrolment.state,
        "server_url": enrolment.server_url,
    }


def _bundle(pointer: Pointer | None) -> dict[str, Any] | None:
    if pointer is None:
        return None
    return {
        "version": pointer.version,
        "manifest_sha256": pointer.manifest_sha256,
        "committed": pointer.committed,
    }


def _update(disk: Disk, path: Path) -> dict[str, Any]:
    state, context = State.IDLE.value, None
    try:
        for record in read_records(disk.read_bytes(path, MAX_JOURNAL_BYTES))[0]:
            found = record.get("context")
            if record.get("t") == "state" and isinstance(found, dict):
                state, context = str(record.get("state")), context_from_json(found)
    except (AgentError, ContractError):
        return {"state": "unknown"}
    return {"state": state, **({} if context is None else _context(context))}


def _context(context: UpdateContext) -> dict[str, Any]:
    return {
        "update_id": context.update_id,
        "attempt": context.attempt,
        "kind": context.kind.value,
        "version": context.version,
        "outcome": None if context.outcome is None else context.outcome.value,
        "code": context.code,
        "message": context.message,
    }


def _floors(disk: Disk, folder: Path, *, is_enrolled: bool) -> dict[str, Any]:
    store = FloorStore(disk, folder)
    if not is_enrolled and not store.exists:
        return {"readable": False, "reason": "none yet: this device is not enrolled"}
    try:
        floors = store.load()
    except AgentError as error:
        return {"readable": False, "reason": str(error)}
    return {
        "readable": True,
        "assignment_seq": floors.assignment_seq,
        "security_floor": floors.security_floor,
        "release_seq_high": floors.release_seq_high,
    }


def _denied(config: AgentConfig) -> dict[str, Any]:
    """Return the bundles that failed here and are not tried, by the first digits of their names."""
    folder, disk = config.state_dir / "trust", Disk()
    floors = FloorStore(disk, folder)
    listed = DenyList(
        disk, folder, config.denied_s, lambda: int(floors.time(SystemClock().now()).timestamp())
    )
    return {
        entry.manifest_sha256[:SHORT_DIGITS]: {
            "version": entry.version,
            "code": entry.code,
            "message": entry.message,
            "count": entry.count,
            "assignment_seq": entry.assignment_seq,
            "until": datetime.fromtimestamp(entry.until_s, UTC).isoformat(),
        }
        for entry in listed.entries
    }


def _live(disk: Disk, path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(disk.read_bytes(path, MAX_LIVE_BYTES))
    except (AgentError, ValueError):
        return None
    if not isinstance(document, dict):
        return None
    return {"running": _is_alive(document.get("pid")), **document}


def _answering(current: Pointer | None, live: dict[str, Any] | None) -> str:
    """Return whether the bundle that should run answers, in words."""
    if live is None or not live["running"]:
        return "no: the agent does not run"
    if current is None:
        return "no: nothing is installed"
    if live.get("running_manifest_sha256") == current.manifest_sha256:
        return "yes"
    return "no: the bundle does not load, see the log; it is mended with the next offer"


def _is_alive(pid: object) -> bool:
    """Return whether the agent that left the counters still runs."""
    return isinstance(pid, int) and Path(f"/proc/{pid}").exists()


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    lines: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            lines += _flat(value, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", "-" if value is None else value))
    return lines
