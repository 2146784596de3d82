"""The protocol of a plan runner: a process that maps a plan and runs it, asked over pipes.

    parent -(script: plan, sections)-> runner        only where the runner has no bundle of its own
    parent <-(empty reply)- runner                   the plan is loaded
    parent -(request)-> runner -(one native call)-> (reply) -> parent    until the pipe is closed

Parties: the *parent* (`device_agent.runtime.process_backend`, `compiler.emitters.runner`) and the
*runner*, of which there are two: `device_agent.runtime.plan_runner` loads a bundle's own kernels;
the freestanding program of `compiler/kernels/runtime/runner.c.in` holds the kernels of a target
that this machine may not be, for an emulator. Little-endian throughout.

    request  <6IQ>  magic, program, tokens, keep, copies in, copies out; bytes that follow
    copy     <3Q>   arena offset, data offset (from the first copy), bytes
    reply    <i3IQ> status, failed call, cache rows, 0; bytes that follow

`keep` truncates the cache first; `NONE` leaves it. Program `NONE` does no more. Failed call `NONE`
is not known. Every length is
bounded by the plan: a request by its arena and `MAX_COPIES`, a reply by the outputs asked for.
A status is one of `Status`, and the rows of an OK reply are those before and what one run can
append. Whoever reads a frame that breaks a bound ends the process. Standard library only.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from compiler.contract.backend import BackendError, check_inputs
from compiler.contract.native_steering import steering_record
from compiler.contract.pipeline import Port, ProgramSpec
from compiler.contract.plan import Plan, PlanProgram
from compiler.contract.plan_format import DTYPE_NAMES, Direction, Status, align
from compiler.contract.session import Buffer
from compiler.contract.steering import Residency, Steering

MAGIC: Final = int.from_bytes(b"SFRUN003", "little")
REQUEST_MAGIC: Final = int.from_bytes(b"SFRQ", "little")
NONE: Final = 0xFFFFFFFF
MAX_COPIES: Final = 64
HEAD: Final = struct.Struct("<8Q")
REQUEST: Final = struct.Struct("<6IQ")
COPY: Final = struct.Struct("<3Q")
REPLY: Final = struct.Struct("<i3IQ")


class Reply(NamedTuple):
    """The head of a reply."""

    status: int
    failed_call: int
    kv_length: int
    reserved: int
    size_bytes: int


def read_reply(head: bytes, reply_bytes: int) -> Reply:
    """Return the head of a reply to a request whose outputs are so many bytes.

    Raises:
        ValueError: The status is none, or another number of bytes is announced.
    """
    reply = Reply(*REPLY.unpack(head))
    if reply.status not in tuple(Status):
        raise ValueError(f"it answered with status {reply.status}, which is none")
    wanted = reply_bytes if reply.status == Status.OK else 0
    if reply.size_bytes != wanted:
        raise ValueError(f"it announced {reply.size_bytes} bytes, not {wanted}")
    return reply


def most_appended_rows(plan: Plan) -> int:
    """Return the most rows that one run may append to the cache."""
    if plan.kv is None:
        return 0
    return max([plan.max_tokens, *(buffer.rows for buffer in plan.buffers)])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a port lies in the arena."""

    role: str
    offset: int
    port: Port

    def size_bytes(self, tokens: int) -> int:
        """Return its bytes in a run of so many tokens."""
        return self.port.row_bytes * (tokens if self.port.dynamic else self.port.rows)


@dataclass(frozen=True, slots=True)
class ProgramFrames:
    """One program: its number, and where its ports lie."""

    number: int
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]

    @property
    def spec(self) -> ProgramSpec:
        """Its ports by role."""
        return ProgramSpec(
            {place.role: place.port for place in self.inputs},
            {place.role: place.port for place in self.outputs},
        )

    def tokens(self, inputs: Mapping[str, Buffer]) -> int:
        """Return T, the rows of dynamic inputs; 0 if there are none.

        Raises:
            BackendError: An input is missing, too many, or of a wrong size.
        """
        return check_inputs(self.spec, inputs)

    def request(self, inputs: Mapping[str, Buffer], tokens: int, keep: int | None = None) -> bytes:
        """Return the request that runs it."""
        copies, data = [], []
        at = COPY.size * (len(self.inputs) + len(self.outputs))
        for place in self.inputs:
            blob = bytes(inputs[place.role])
            copies.append(COPY.pack(place.offset, at, len(blob)))
            data.append(blob)
            at += len(blob)
        copies += [COPY.pack(p.offset, 0, p.size_bytes(tokens)) for p in self.outputs]
        counts = (len(self.inputs), len(self.outputs))
        kept = NONE if keep is None else keep
        head = REQUEST.pack(REQUEST_MAGIC, self.number, tokens, kept, *counts, at)
        return b"".join((head, *copies, *data))

    def reply_bytes(self, tokens: int) -> int:
        """Return how many bytes follow the head of an OK reply."""
        return sum(place.size_bytes(tokens) for place in self.outputs)

    def outputs_of(self, data: Buffer, tokens: int) -> dict[str, memoryview]:
        """Return the outputs by role from what followed the head of an OK reply."""
        view, at, found = memoryview(data), 0, {}
        for place in self.outputs:
            found[place.role] = view[at : at + place.size_bytes(tokens)]
            at += place.size_bytes(tokens)
        return found


def keep_request(rows: int) -> bytes:
    """Return the request that truncates the cache and does nothing else."""
    return REQUEST.pack(REQUEST_MAGIC, NONE, 0, rows, 0, 0, 0)


def frames_of(plan: Plan) -> dict[str, ProgramFrames]:
    """Return the frames of every program of a plan.

    Raises:
        BackendError: A program has more ports than the protocol knows.
    """
    return {
        program.name: _frames(number, plan, program) for number, program in enumerate(plan.programs)
    }


def most_request_bytes(plan: Plan) -> int:
    """Return the most bytes that may follow the head of a request."""
    ends = [buffer.offset + buffer.length for buffer in plan.buffers]
    return align(max(ends, default=0)) + 2 * MAX_COPIES * COPY.size


def encode_script(
    plan: Plan,
    plan_bytes: bytes,
    sections: Mapping[str, Buffer],
    threads: int = 1,
    steering: Steering | None = None,
    residency: Residency | None = None,
) -> bytes:
    """Return the script that gives a freestanding runner its plan.

    Args:
        plan: Names the sections.
        plan_bytes: The plan itself.
        sections: At least those.
        threads: Threads of a run, 1 to 64.
        steering: What its routers are steered by; pointers of the record are offsets here.
        residency: Which experts are in memory; None = all.

    Raises:
        SteeringError: The steering does not fit the plan.
    """
    data = bytearray(align(HEAD.size))

    def put(blob: Buffer) -> int:
        at = len(data)
        data.extend(blob)
        data.extend(bytes(align(len(data)) - len(data)))
        return at

    plan_at = put(plan_bytes)
    placed = [(put(sections[each.name]), each.length) for each in plan.sections]
    table = put(b"".join(struct.pack("<2Q", *row) for row in placed))
    record_at = 0
    if steering is not None:
        weights = len(plan.weights)
        record = steering_record(steering, weights)
        if residency is not None:
            record.resident = put(bytes(residency[each] for each in range(weights)))
        if steering.bias:
            record.bias = put(struct.pack(f"<{weights}f", *steering.bias))
        record_at = put(bytes(record))
    counts = (plan_at, len(plan_bytes), len(plan.sections), table, threads, record_at)
    data[: HEAD.size] = HEAD.pack(MAGIC, len(data), *counts)
    return bytes(data)


def _frames(number: int, plan: Plan, program: PlanProgram) -> ProgramFrames:
    places: dict[Direction, list[Place]] = {Direction.INPUT: [], Direction.OUTPUT: []}
    for port in program.ports:
        buffer = plan.buffers[port.buffer]
        shape = Port(buffer.rows, buffer.cols, DTYPE_NAMES[buffer.dtype], buffer.dynamic)
        places[port.direction].append(Place(port.role, buffer.offset, shape))
    if max(map(len, places.values())) > MAX_COPIES:
        raise BackendError(f"program {program.name!r} has more than {MAX_COPIES} ports")
    inputs, outputs = places[Direction.INPUT], places[Direction.OUTPUT]
    return ProgramFrames(number, tuple(inputs), tuple(outputs))


def copies_of(payload: Buffer, count: int) -> Sequence[tuple[int, int, int]]:
    """Return the copies at the front of a request's payload: arena offset, data offset, bytes."""
    return [COPY.unpack_from(payload, at * COPY.size) for at in range(count)]
