"""A plan runner: loads a bundle and runs its programs as it is asked to, over its pipes.

    python -m device_agent.runtime.plan_runner DIRECTORY [THREADS]
    python -m device_agent.runtime.plan_runner STATE_DIR MANIFEST_SHA256 MANIFEST_BYTES [THREADS]

Standard input holds requests, standard output replies; see `compiler.contract.runner_frames`. Ends
with 0 when the input ends, 2 if the bundle does not load, 6 on a request that is none.
`process_backend` starts these; native code that crashes ends this process and no other.
"""

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from compiler.contract.canonical import require_sha256
from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.native_errors import status_of
from compiler.contract.plan_format import Status
from compiler.contract.runner_frames import (
    COPY,
    MAX_COPIES,
    NONE,
    REPLY,
    REQUEST,
    REQUEST_MAGIC,
    Place,
    ProgramFrames,
    copies_of,
    frames_of,
    most_request_bytes,
)
from device_agent.errors import AgentError
from device_agent.runtime.bundle import LoadedBundle, load_bundle, load_directory
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

ENDED: Final = 0
BROKEN: Final = 2
BAD_REQUEST: Final = 6
Copies = list[tuple[int, int, int]]


class Served:
    """A loaded plan and the two pipes."""

    def __init__(self, plan: NativePlan, requests: BinaryIO, replies: BinaryIO) -> None:
        self._plan, self._requests, self._replies = plan, requests, replies
        self._most = most_request_bytes(plan.plan)
        self._programs = {each.number: (name, each) for name, each in frames_of(plan.plan).items()}

    def serve(self) -> int:
        """Answer until the input ends; return the exit status."""
        self._reply(Status.OK)
        while True:
            head = self._requests.read(REQUEST.size)
            if not head:
                return ENDED
            if len(head) < REQUEST.size:
                return BAD_REQUEST
            magic, number, _, keep, inputs, outputs, size = REQUEST.unpack(head)
            if magic != REQUEST_MAGIC or max(inputs, outputs) > MAX_COPIES or size > self._most:
                return BAD_REQUEST
            payload = self._requests.read(size)
            if len(payload) < size or size < (inputs + outputs) * COPY.size:
                return BAD_REQUEST
            copies = list(copies_of(payload, inputs + outputs))
            try:
                self._answer(number, keep, (copies[:inputs], copies[inputs:]), payload)
            except ContractError as error:
                self._reply(status_of(error))
            except (KeyError, ValueError):
                return BAD_REQUEST

    def _answer(
        self, number: int, keep: int, copies: tuple[Copies, Copies], payload: bytes
    ) -> None:
        if keep != NONE:
            self._plan.kv_length = keep
        if number == NONE:
            self._reply(Status.OK)
            return
        name, frames = self._programs[number]
        made = self._plan.run(name, _inputs(frames, copies[0], payload))
        places = _by_offset(frames.outputs)
        parts = [made[places[offset].role][:size] for offset, _, size in copies[1]]
        self._reply(Status.OK, b"".join(parts))

    def _reply(self, status: int, data: bytes = b"") -> None:
        head = REPLY.pack(status, NONE, self._plan.kv_length, 0, len(data))
        self._replies.write(head + data)
        self._replies.flush()


def _by_offset(places: tuple[Place, ...]) -> dict[int, Place]:
    return {place.offset: place for place in places}


def _inputs(frames: ProgramFrames, copies: Copies, payload: bytes) -> Mapping[str, memoryview]:
    places, view = _by_offset(frames.inputs), memoryview(payload)
    return {places[offset].role: view[at : at + size] for offset, at, size in copies}


def load(arguments: list[str]) -> tuple[LoadedBundle, int]:
    """Return the bundle that the command line names, and the threads of a run.

    Raises:
        AgentError: It does not load.
        ValueError: The command line is wrong.
    """
    threads = int(arguments.pop()) if len(arguments) in (2, 4) else 1
    if len(arguments) == 1:
        return load_directory(Path(arguments[0])), threads
    state_dir, sha256, size = arguments
    store = ObjectStore(Disk(), Path(state_dir), max_bytes=0, is_guest=True)
    return load_bundle(
        store, Pointer(require_sha256(sha256, "manifest"), int(size), "", 0)
    ), threads


def main(arguments: list[str]) -> int:
    """Load and serve; return the exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        bundle, threads = load(arguments)
        plan = bundle.runner
        assert isinstance(plan, NativePlan)
        plan.threads = threads
    except (ContractError, AgentError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BROKEN
    try:
        return Served(plan, sys.stdin.buffer, sys.stdout.buffer).serve()
    except (BrokenPipeError, KeyboardInterrupt):
        return ENDED
    finally:
        plan.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
