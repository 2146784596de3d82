"""Apply a delta in a process of its own.

    python -B -m device_agent.update.patch_process STATE_DIR ORDER

ORDER is a JSON object: the job, CPU seconds, bytes of memory, and the quota of the store. Exit
status 0: done; those of `patching.STATUSES`: an error, told on stderr. The process may open no
network, start no program and write nowhere but below `objects`, `partial` and `patching`; it ends
with its parent, and is the first to go when memory ends.
"""

import ctypes
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.protocol import integer
from compiler.delta import SLOT_BYTES
from device_agent.errors import AgentError
from device_agent.runtime.bundle import read_manifest
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.update.in_place import FOLDER
from device_agent.update.patching import (
    DIED,
    LocalPatcher,
    PatchJob,
    failure_status,
    job_from_json,
)

MAX_ORDER_BYTES: Final = 16 * 1024
MAX_FILES_BESIDE: Final = 64
PR_SET_PDEATHSIG: Final = 1
_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN: Final = re.compile(r"socket\.|subprocess\.|os\.(exec|fork|posix_spawn|system)|ctypes\.")
_WRITING: Final = frozenset(("os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink"))
_WRITABLE: Final = ("objects", "partial", FOLDER)


class Guard:
    """An audit hook that refuses what applying a delta does not need."""

    def __init__(self, state_dir: Path) -> None:
        self._roots = tuple(f"{state_dir / name}{os.sep}" for name in _WRITABLE)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """Look at what is about to happen.

        Raises:
            PermissionError: It must not.
        """
        if _FORBIDDEN.match(event):
            raise PermissionError(f"{event} is not for this process")
        if event == "open":
            path, mode, flags = (*arguments, None, None, None)[:3]
            writes = isinstance(flags, int) and flags & _WRITES
            if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
                self._require_own(path)
        elif event in _WRITING:
            for path in arguments[: 2 if event == "os.rename" else 1]:
                self._require_own(path)

    def _require_own(self, path: object) -> None:
        if isinstance(path, int):
            return  # a descriptor, which was opened before
        whole = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]  # noqa: PTH100 -- no file is touched
        if not f"{whole}{os.sep}".startswith(self._roots):
            raise PermissionError(f"{path!r} is not for this process")


def main(state_dir: Path, order: bytes) -> int:
    """Do the job of an order and return the exit status."""
    try:
        document = parse_object(order, limit_bytes=MAX_ORDER_BYTES)
        follow_parent(integer(document, "parent"))
        job = _job(document)
        store = ObjectStore(
            Disk(),
            state_dir,
            max_bytes=integer(document, "max_bytes"),
            reserve_bytes=integer(document, "reserve_bytes"),
        )
        _limit(store, job, document)
        sys.addaudithook(Guard(state_dir))
        LocalPatcher(store, Disk(), state_dir).run(job)
    except (AgentError, ContractError) as error:
        sys.stderr.write(f"{error} [{error.code}]\n")
        return failure_status(error) if isinstance(error, AgentError) else DIED
    return 0


def follow_parent(parent: int) -> None:
    """End when the parent does, so that no two ever write; be the first to go without memory."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    except OSError:
        return  # a system without it


def _limit(store: ObjectStore, job: PatchJob, document: dict[str, Json]) -> None:
    """Limit what the job may take, from what its signed manifests say."""
    base = read_manifest(store, job.base_sha256, job.base_bytes)
    new = read_manifest(store, job.new_sha256, job.new_bytes)
    sections = (*base.sections, *new.sections)
    largest = max((section.size_bytes for section in sections), default=0)
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: integer(document, "cpu_s"),
        resource.RLIMIT_FSIZE: max(largest, SLOT_BYTES),
        resource.RLIMIT_NOFILE: MAX_FILES_BESIDE + len(sections),
        resource.RLIMIT_DATA: data_bytes() + integer(document, "memory_bytes"),
    }
    for name, limit in wanted.items():
        _, hard = resource.getrlimit(name)
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(name, (value, value))


def data_bytes() -> int:
    """Return the private writable memory of this process, bytes; what RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def _job(document: dict[str, Json]) -> PatchJob:
    job = document.get("job")
    if not isinstance(job, dict):
        raise ContractError("job must be an object")
    return job_from_json(job)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].encode()))
