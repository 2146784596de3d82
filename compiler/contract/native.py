"""Load kernels and a plan, and run programs: one native call per run.

    kernels (.so bytes) -> sealed memory file -> dlopen
    plan bytes          -> parse_plan (everything verified) -> sf_init
    sections            -> one anonymous mapping, which other plans may share

The caller must have verified the signature of all three: kernels are code. Standard library only.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from compiler.contract.expert_pages import PAGE_OPS
from compiler.contract.native_abi import SfArgs, SfSetup, SfSizeReport
from compiler.contract.native_errors import (
    NativeError,
    UnsupportedPlanError,
    raise_status,
)
from compiler.contract.native_hold import BUSY, Held
from compiler.contract.native_library import MAX_THREADS, KernelLibrary, Workers
from compiler.contract.native_memory import Memory
from compiler.contract.native_policy import PolicySeat
from compiler.contract.native_ports import NativeProgram, native_programs
from compiler.contract.native_steering import SteeringSeat
from compiler.contract.native_weights import Buffer, LoadedWeights
from compiler.contract.pager import Pager, PagerHook
from compiler.contract.plan import PlanCall, parse_plan
from compiler.contract.plan_format import (
    MAX_ARENA_BYTES,
    MAX_CONTEXT_BYTES,
    align,
)
from compiler.contract.pooled_weights import PooledWeights, Seat
from compiler.contract.storage_rules import NEURON_KINDS

_BUSY_TRACE: Final = "a trace cannot change while the plan is running or closed"


class NativePlan(Held):
    """A plan ready to run. Not for two threads at once; a second caller is refused.

    Any thread may close it: what runs then ends as it would, and nothing runs after it. Where it
    has lent threads or an expert pool, every call from a process forked later raises `NativeError`.
    """

    def __init__(
        self,
        kernels: bytes | Path,
        plan_bytes: bytes,
        sections: Mapping[str, Buffer] | LoadedWeights | PooledWeights,
        *,
        threads: int = 1,
    ) -> None:
        """Verify the plan, load kernels and weights, and build the runtime's context.

        Args:
            kernels: The shared library for this machine, as bytes or as a file.
            plan_bytes: A plan; verified here.
            sections: At least the weight sections that the plan names, or those of another plan,
                which are then shared.
            threads: Threads that a run may use, the caller's among them, 1 to 64. The results are
                the same bits with any number. Kernels built before threads use one.

        Raises:
            PlanError: The plan is malformed.
            NativeError: Kernels or sections do not fit it, or the number of threads is out of
                range.
        """
        _require_threads(threads)
        self.plan: Final = parse_plan(plan_bytes)
        self.cpus: Set[int] = frozenset()
        """Where threads lent from now on run; empty for anywhere."""
        self._traced_by: object | None = None
        self._pager: PagerHook | None = None
        self._workers: Workers | None = None
        self._seat: Seat | None = None
        self._policy: PolicySeat | None = None
        self._steering: SteeringSeat | None = None
        loaded = KernelLibrary(kernels)
        super().__init__(loaded)
        try:
            self._load(loaded, plan_bytes, sections)
            self.threads = threads
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        library: KernelLibrary,
        plan_bytes: bytes,
        sections: Mapping[str, Buffer] | LoadedWeights | PooledWeights,
    ) -> None:
        weights = (
            sections
            if isinstance(sections, (LoadedWeights, PooledWeights))
            else LoadedWeights(self.plan.sections, sections)
        )
        table = weights.table(self.plan.sections)
        plan = Memory(align(len(plan_bytes)))
        plan.view[: len(plan_bytes)] = plan_bytes
        report = SfSizeReport(struct_bytes=ctypes.sizeof(SfSizeReport))
        status = library.sizes(plan.address, len(plan_bytes), ctypes.addressof(report))
        if status:
            raise_status(status, "load")
        if report.context_bytes > MAX_CONTEXT_BYTES or report.arena_bytes > align(MAX_ARENA_BYTES):
            raise NativeError(f"the plan asks for {report.context_bytes} bytes of context")
        arena_at = align(report.context_bytes)
        memory = Memory(arena_at + report.arena_bytes)
        setup = SfSetup(
            struct_bytes=ctypes.sizeof(SfSetup),
            sections=len(self.plan.sections),
            context=memory.address,
            context_bytes=report.context_bytes,
            arena=memory.address + arena_at,
            arena_bytes=report.arena_bytes,
            plan=plan.address,
            plan_bytes=len(plan_bytes),
            section=ctypes.addressof(table),
        )
        status = weights.init(library, ctypes.addressof(setup))
        if status:
            raise_status(status, "load")
        self.weights, self._memory = weights, memory
        self._context = memory.address
        self._seat = weights.seat(library, memory.address, memory)
        self._policy = PolicySeat(library, memory.address, memory)
        weights_held = len(self.plan.weights)
        self._steering = SteeringSeat(library, memory.address, memory, weights_held)
        self._args = SfArgs(struct_bytes=ctypes.sizeof(SfArgs))
        self._args_address = ctypes.addressof(self._args)
        self._programs = native_programs(self.plan, memory.view[arena_at:])

    @property
    def threads(self) -> int:
        """Threads of a run, the caller's among them: at most what was asked for."""
        return 1 + (0 if self._workers is None else len(self._workers))

    @threads.setter
    def threads(self, threads: int) -> None:
        """Send the lent threads home and lend others.

        Raises:
            NativeError: The number is out of range, or the plan is running or closed.
        """
        _require_threads(threads)
        with self._held("threads cannot change while the plan is running or closed") as library:
            if self._workers is not None:
                self._workers.close()
            self._workers = Workers(library, self._context, self._memory, threads - 1, self.cpus)

    @property
    def lost_threads(self) -> int:
        """Lent threads that have ended by themselves; the same bits come without them, later."""
        return 0 if self._workers is None else self._workers.lost

    @contextmanager
    def tracing(self, *, ends: bool = False) -> Iterator[Callable[[int | None, object], None]]:
        """Hold the plan, and yield what has runs write events to an `SfTrace`; None for nowhere.

        It takes the record's address and who owns the memory, which is kept while runs may write
        there. To end a trace waits for the run of another thread. Callers use
        `compiler.contract.native_trace.traced`.

        Raises:
            NativeError: The plan is closed, or running; or it begins and is traced already.
            UnsupportedPlanError: The kernels were built before there were traces.
        """
        with self._held(_BUSY_TRACE, waits=ends) as library:
            if library.set_trace is None:
                raise UnsupportedPlanError("these kernels have no trace points: build them again")
            if self._traced_by is not None and not ends:
                raise NativeError("this plan is traced already: end that trace first")
            yield partial(self._set_trace, library)

    def _set_trace(self, library: KernelLibrary, address: int | None, owner: object) -> None:
        assert library.set_trace is not None
        status = library.set_trace(self._context, address)
        if status:
            raise_status(status, "trace")
        self._traced_by = None if address is None else owner

    @property
    def policy(self) -> PolicySeat:
        """Where the table that says how calls run is swapped, also while the plan runs.

        Raises:
            NativeError: The plan was never loaded, or this process is a fork.
        """
        self._require_here()
        if self._policy is None:
            raise NativeError("the plan is not loaded")
        return self._policy

    @property
    def steering(self) -> SteeringSeat:
        """Where what routers go by besides their logits is swapped, also while the plan runs.

        Raises:
            NativeError: The plan was never loaded, or this process is a fork.
        """
        self._require_here()
        if self._steering is None:
            raise NativeError("the plan is not loaded")
        return self._steering

    @property
    def epoch(self) -> int:
        """Epoch of the table that the last run followed; 0 for none."""
        return int(self._args.epoch)

    def policy_cell(self, program: str, call: int, tokens: int) -> int:
        """Return the cell that the runtime looks up for a call in a run of `tokens`.

        Raises:
            NativeError: There is no such call, the plan is closed or running, or too old.
        """
        with self._held() as library:
            chosen = self._programs.get(program)
            if chosen is None or library.policy_lookup is None or call < 0:
                raise NativeError(f"there is no call {call} of program {program!r} to look up")
            found = int(library.policy_lookup(self._context, chosen.number, call, tokens))
        if found < 0:
            raise NativeError(f"there is no call {call} of program {program!r}")
        return found

    @property
    def weight_bytes(self) -> int:
        """Bytes of the plan's weights in memory, at most."""
        return self.weights.size

    @property
    def huge_weight_bytes(self) -> int | None:
        """How many of them lie on huge pages; None if the system does not say. Reads a file.

        A pool of experts keeps more addresses than weights, and the system tells whole mappings:
        never more than `weight_bytes`.
        """
        found = self.weights.huge_bytes()
        return None if found is None else min(found, self.weight_bytes)

    def is_resident(self, weight: int) -> bool:
        """Return whether a weight, by its number in the plan, lies in memory now.

        Raises:
            NativeError: There is no such weight, or the plan is closed or running.
        """
        with self._held():
            if not 0 <= weight < len(self.plan.weights):
                raise NativeError(f"there is no weight {weight}")
            return self._seat is None or self._seat.is_resident(weight)

    @property
    def context_bytes(self) -> int:
        """Bytes of context and arena together: what the plan needs besides its weights."""
        return len(self._memory.view)

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program: copy the inputs in, make one native call.

        Args:
            program: Name of a program of the plan.
            inputs: Raw little-endian rows by role. The rows of dynamic inputs say T.

        Returns:
            Raw little-endian rows by role: views of the arena, valid until the next run.

        Raises:
            NativeError: An input is missing or of a wrong size, or a run-time error (see the
                subclasses). The cache is as before.
        """
        library = self._take(BUSY)
        try:
            chosen = self._chosen(program)
            tokens = chosen.fill(inputs, self.plan.max_tokens)
            self._args.tokens = tokens
            status = library.run(self._context, chosen.number, self._args_address)
            if self._pager is not None:
                self._pager.reraise()
            if status:
                raise_status(status, f"program {program!r} call {self._args.failed_call}")
            return chosen.results(tokens)
        finally:
            self._give()

    def run_calls(
        self, program: str, inputs: Mapping[str, Buffer] | None, first: int, count: int, tokens: int
    ) -> int:
        """Run some calls of a program, for a profiler; the cache keeps its length.

        Calls read what the calls before them left: run them in order, inputs with the first.

        Args:
            program: Name of a program of the plan.
            inputs: As for `run`, copied in first; None leaves the buffers as they are.
            first: The first call.
            count: How many calls; those beyond the program's end are left out.
            tokens: T, as an earlier call of this function returned it; ignored with `inputs`.

        Returns:
            T, the rows of dynamic buffers.

        Raises:
            NativeError: As `run`.
            UnsupportedPlanError: The kernels were built before this was possible.
        """
        with self._held() as library:
            chosen = self._chosen(program)
            if min(first, count) < 0:
                raise NativeError(f"there are no calls {first} to {first + count}")
            if library.run_calls is None:
                raise UnsupportedPlanError("these kernels run no single calls: build them again")
            self._args.tokens = (
                tokens if inputs is None else chosen.fill(inputs, self.plan.max_tokens)
            )
            status = library.run_calls(
                self._context, chosen.number, first, count, self._args_address
            )
            if status:
                raise_status(status, f"program {program!r} call {self._args.failed_call}")
            return int(self._args.tokens)

    def _chosen(self, program: str) -> NativeProgram:
        if program not in self._programs:
            raise NativeError(f"there is no program {program!r}")
        return self._programs[program]

    def check_counts(self, program: str) -> dict[int, tuple[int, int]]:
        """Return, by call with a run-time check, how often it held and how often it did not.

        Counted since the plan was loaded, single calls of `run_calls` included. Kernels built
        before there were checks count nothing.

        Raises:
            NativeError: There is no such program, or the plan is closed.
        """
        return self._counts(program, lambda call: bool(call.params.get("check")))

    def work_counts(self, program: str) -> dict[int, tuple[int, int]]:
        """Return, by call with weights stored neuron by neuron, how many were left out and read.

        An up row counts once per expert that ran, a column once per row of activations; counted
        since the plan was loaded.

        Raises:
            NativeError: There is no such program, or the plan is closed.
        """
        kinds = [weight.kind for weight in self.plan.weights]
        return self._counts(
            program,
            lambda call: (
                call.op not in PAGE_OPS
                and any(at >= 0 and kinds[at] in NEURON_KINDS for at in call.weights)
            ),
        )

    def _counts(
        self, program: str, counted: Callable[[PlanCall], bool]
    ) -> dict[int, tuple[int, int]]:
        with self._held() as library:
            chosen = self._chosen(program)
            if library.check_counts is None:
                return {}
            counts, found = (ctypes.c_uint64 * 2)(), {}
            address = ctypes.addressof(counts)
            for at, call in enumerate(self.plan.programs[chosen.number].calls):
                if counted(call):
                    status = library.check_counts(self._context, chosen.number, at, address)
                    if status:
                        raise_status(status, f"counts of program {program!r} call {at}")
                    found[at] = (int(counts[0]), int(counts[1]))
            return found

    def set_pager(self, pager: Pager) -> None:
        """Have `pager` told, within runs, which experts are prefetched, loaded and used.

        It is called on the thread that called `run`.

        Raises:
            NativeError: The plan is closed or running.
            UnsupportedPlanError: The kernels were built before this was possible.
        """
        with self._held() as library:
            if library.set_pager is None:
                raise UnsupportedPlanError("these kernels know no pager: build them again")
            hook = PagerHook(pager)
            library.set_pager(self._context, hook.function, None)
            self._pager = hook

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache; 0 of a closed plan.

        Raises:
            NativeError: The plan is running.
        """
        if self._library is None:
            return 0
        with self._held() as library:
            return int(library.kv_length(self._context))

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            NativeError: The cache holds fewer rows, or the plan is closed or running.
            ContextLostError: Rows that a window would show again were overwritten.
        """
        with self._held() as library:
            if not 0 <= length <= int(library.kv_length(self._context)):
                raise NativeError(f"cannot set the cache to {length} rows")
            status = library.set_kv_length(self._context, length)
            if status:
                raise_status(status, f"cache of {length} rows")

    def _is_bound(self) -> bool:
        return self._seat is not None or self.threads > 1

    def _unload(self, library: KernelLibrary) -> None:
        for swapped in (self._policy, self._steering):
            if swapped is not None:
                swapped.close()
        left = self._workers is None or self._workers.close()
        if self._seat is not None:
            self._seat.close()
        if left:
            library.close()


def _require_threads(threads: int) -> None:
    if not 1 <= threads <= MAX_THREADS:
        raise NativeError(f"{threads} threads are out of range: 1 to {MAX_THREADS}")
