"""Who applies a delta: a process of its own with limits, or this one in tests.

A delta is data from outside that makes native code work hard. So a child with limits of memory, CPU
time, file size and open files does it, is the first that the system kills when memory ends, and is
killed when it hangs. Whatever happens to it is a typed error, and the sections are fetched whole.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from compiler.contract.canonical import Json, require_sha256
from compiler.contract.protocol import DeltaOffer, integer
from device_agent.config import AgentConfig
from device_agent.errors import (
    AgentError,
    DeltaUnusableError,
    DiskFullError,
    PatchProcessError,
)
from device_agent.runtime.bundle import read_manifest
from device_agent.runtime.children import run_module
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.update.apply import apply_offer
from device_agent.update.in_place import PatchFolder, patch_objects

_PROCESS: Final = "device_agent.update.patch_process"
MAX_OUTPUT_SHOWN: Final = 300
# Exit status of the child -> what is raised here. 0 is success; any other means that it died.
STATUSES: Final[Mapping[int, type[AgentError]]] = {3: DeltaUnusableError, 4: DiskFullError}
DIED: Final = 1


@dataclass(frozen=True, slots=True)
class PatchJob:
    """What to make of what.

    Attributes:
        delta_sha256, delta_bytes: The delta file, in the object store.
        base_sha256, base_bytes: Release manifest that it starts from.
        new_sha256, new_bytes: Release manifest that it leads to.
        in_place: Whether the objects of the base become those of the new bundle, see `in_place`.
        reverse: With `in_place`: back.
    """

    delta_sha256: str
    delta_bytes: int
    base_sha256: str
    base_bytes: int
    new_sha256: str
    new_bytes: int
    in_place: bool = False
    reverse: bool = False

    @property
    def offer(self) -> DeltaOffer:
        """Return the delta as it was signed for."""
        return DeltaOffer(self.base_sha256, self.delta_sha256, self.delta_bytes)

    def reversed(self) -> "PatchJob":
        """Return the way back of a job in place."""
        return replace(self, reverse=not self.reverse)

    def to_json(self) -> dict[str, Json]:
        """Return the JSON form."""
        return dict(asdict(self))


def job_from_json(document: Mapping[str, Json]) -> PatchJob:
    """Parse a job.

    Raises:
        ContractError: A field is missing or wrong.
    """
    return PatchJob(
        require_sha256(document.get("delta_sha256"), "delta"),
        integer(document, "delta_bytes"),
        require_sha256(document.get("base_sha256"), "base"),
        integer(document, "base_bytes"),
        require_sha256(document.get("new_sha256"), "new"),
        integer(document, "new_bytes"),
        in_place=document.get("in_place") is True,
        reverse=document.get("reverse") is True,
    )


class Patcher(Protocol):
    """Does a job; may be interrupted anywhere and asked again."""

    def run(self, job: PatchJob) -> None:
        """Make the objects.

        Raises:
            DeltaUnusableError: The delta, its base or its result is not what it should be, or who
                applied it died.
            DiskFullError: No space is left.
        """


PatcherFactory = Callable[[ObjectStore, Disk, AgentConfig], Patcher]


@dataclass(frozen=True, slots=True)
class LocalPatcher:
    """Works in this process."""

    store: ObjectStore
    disk: Disk
    state_dir: Path

    def run(self, job: PatchJob) -> None:
        """Make the objects; see `Patcher`."""
        base = read_manifest(self.store, job.base_sha256, job.base_bytes)
        new = read_manifest(self.store, job.new_sha256, job.new_bytes)
        if job.in_place:
            folder = PatchFolder(self.disk, self.state_dir)
            patch_objects(self.store, folder, job.offer, base, new, reverse=job.reverse)
        else:
            apply_offer(self.store, job.offer, base, new)


@dataclass(frozen=True, slots=True)
class ProcessPatcher:
    """Has a child work, within limits.

    Attributes:
        store: As the child sees it below `state_dir`.
        timeout_s: The child is killed after this; also its limit of CPU time.
        memory_bytes: What it may allocate beyond what it has when it begins.
    """

    store: ObjectStore
    state_dir: Path
    timeout_s: float
    memory_bytes: int

    def run(self, job: PatchJob) -> None:
        """Make the objects; see `Patcher`."""
        limits = {"cpu_s": max(1, round(self.timeout_s)), "memory_bytes": self.memory_bytes}
        quota = {"max_bytes": self.store.max_bytes, "reserve_bytes": self.store.reserve_bytes}
        order = json.dumps({"job": job.to_json(), "parent": os.getpid(), **limits, **quota})
        try:
            done = run_module(_PROCESS, [str(self.state_dir.resolve()), order], self.timeout_s)
        except subprocess.TimeoutExpired:
            self._dead(job, f"the delta was not applied after {self.timeout_s:g} s")
        except OSError as error:
            self._dead(job, f"the delta cannot be applied: {error}")
        else:
            self._judge(job, done)

    def _judge(self, job: PatchJob, done: "subprocess.CompletedProcess[bytes]") -> None:
        if done.returncode == 0:
            return
        shown = done.stderr.decode("utf-8", "replace").strip()[-MAX_OUTPUT_SHOWN:]
        if done.returncode in STATUSES:
            raise STATUSES[done.returncode](shown)
        if done.returncode < 0:
            self._dead(job, f"the process was ended by {_signal_name(-done.returncode)}")
        self._dead(job, f"the process ended with status {done.returncode}: {shown}")

    def _dead(self, job: PatchJob, reason: str) -> None:
        """Drop what the child left half written, and say what happened."""
        if not job.in_place:
            self.store.drop_partials()
        raise PatchProcessError(reason)


def process_patcher(store: ObjectStore, _disk: Disk, config: AgentConfig) -> ProcessPatcher:
    """Return the patcher of a device."""
    return ProcessPatcher(
        store, config.state_dir, config.patch_timeout_s, config.patch_memory_bytes
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failure_status(error: AgentError) -> int:
    """Return the exit status that stands for an error."""
    return next((status for status, kind in STATUSES.items() if isinstance(error, kind)), DIED)
