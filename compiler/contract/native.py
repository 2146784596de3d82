"""Load kernels and a plan, and run programs: one native call per run.

    kernels (.so bytes) -> sealed memory file -> dlopen
    plan bytes          -> parse_plan (everything verified) -> sf_init
    sections            -> one anonymous mapping, 2 MB aligned, huge pages advised

The caller must have verified the signature of all three: kernels are code. Standard library only.
"""

import _ctypes
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, NoReturn, Self

from compiler.contract.errors import ContractError
from compiler.contract.native_abi import SfArgs, SfSection, SfSetup, SfSizeReport
from compiler.contract.plan import Plan, PlanBuffer, parse_plan
from compiler.contract.plan_format import (
    ABI_VERSION,
    DTYPE_BYTES,
    MAX_ARENA_BYTES,
    MAX_CONTEXT_BYTES,
    Direction,
    Status,
    align,
)

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
MAX_KERNELS_BYTES: Final = 64 * 1024 * 1024
Buffer = bytes | bytearray | memoryview | mmap.mmap
_MFD_EXEC: Final = 0x10
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class NativeError(ContractError):
    """The native plan could not be loaded or refused an argument."""

    code: ClassVar[str] = "contract.native"


class UnsupportedPlanError(NativeError):
    """The kernels do not offer an operation of the plan, or speak another ABI."""

    code: ClassVar[str] = "contract.native.unsupported"


class TooManyTokensError(NativeError):
    """More tokens than one run takes: feed them in several runs."""

    code: ClassVar[str] = "contract.native.too_many_tokens"


class ContextFullError(NativeError):
    """The key/value cache has no room: truncate it or start again."""

    code: ClassVar[str] = "contract.native.context_full"


class ContextLostError(NativeError):
    """The rows to go back to were overwritten by later ones: start again from length 0."""

    code: ClassVar[str] = "contract.native.context_lost"


class BadTokenError(NativeError):
    """A token id is not in the vocabulary."""

    code: ClassVar[str] = "contract.native.bad_token"


class BadPositionError(NativeError):
    """A position is beyond the model's table."""

    code: ClassVar[str] = "contract.native.bad_position"


class BadIndexError(NativeError):
    """An index computed by the model points nowhere."""

    code: ClassVar[str] = "contract.native.bad_index"


class NotFiniteError(NativeError):
    """An activation became infinite or NaN; there is no answer."""

    code: ClassVar[str] = "contract.native.not_finite"


_ERRORS: Final[Mapping[Status, tuple[type[NativeError], str]]] = MappingProxyType(
    {
        Status.BAD_PLAN: (NativeError, "the runtime refuses the plan"),
        Status.UNSUPPORTED_OP: (UnsupportedPlanError, "the kernels lack an operation of the plan"),
        Status.TOO_SMALL: (NativeError, "the memory given to the runtime is too small"),
        Status.BAD_ARGUMENT: (NativeError, "the runtime refuses an argument"),
        Status.TOO_MANY_TOKENS: (TooManyTokensError, "too many tokens in one run"),
        Status.CONTEXT_LOST: (ContextLostError, "the context's older rows were overwritten"),
        Status.CONTEXT_FULL: (ContextFullError, "the context is full"),
        Status.BAD_TOKEN: (BadTokenError, "a token id is outside the vocabulary"),
        Status.BAD_POSITION: (BadPositionError, "a position is outside the model's table"),
        Status.BAD_INDEX: (BadIndexError, "an index points outside its operand"),
        Status.NOT_FINITE: (NotFiniteError, "an activation is infinite or NaN"),
    }
)


def raise_status(status: int, where: str) -> NoReturn:
    """Raise the typed error of a status that is not OK."""
    try:
        kind, message = _ERRORS[Status(status)]
    except (KeyError, ValueError):
        raise NativeError(f"{where}: unknown status {status}") from None
    raise kind(f"{where}: {message}")


class KernelLibrary:
    """The kernels of one target, loaded from a sealed memory file.

    The file stays open while the library is loaded: the loader knows it by the number of its
    descriptor, which must not be reused before.
    """

    def __init__(self, kernels: bytes | Path) -> None:
        """Load the library.

        Raises:
            NativeError: It is no library of this machine, too large, or the file cannot be read.
            UnsupportedPlanError: It speaks another ABI.
        """
        try:
            data = kernels.read_bytes() if isinstance(kernels, Path) else kernels
            if not 0 < len(data) <= MAX_KERNELS_BYTES:
                raise NativeError(f"kernels of {len(data)} bytes are out of range")
            fd = _sealed_file(data)
        except OSError as error:
            raise NativeError(f"kernels cannot be read: {error}") from error
        try:
            self._lib = ctypes.CDLL(f"/proc/self/fd/{fd}")
        except OSError as error:
            os.close(fd)
            raise NativeError(f"kernels cannot be loaded: {error}") from error
        self._unload = weakref.finalize(self, _unload, self._lib._handle, fd)
        self._unload.atexit = False
        try:
            self._bind()
        except AttributeError as error:
            self.close()
            raise NativeError(f"kernels cannot be loaded: {error}") from error
        found = self.abi_version()
        if found != ABI_VERSION:
            self.close()
            raise UnsupportedPlanError(f"kernels of ABI {found}, expected {ABI_VERSION}")

    def _bind(self) -> None:
        u32, i32, u64, pointer = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p
        for name, result, arguments in (
            ("sf_abi_version", u32, ()),
            ("sf_sizes", i32, (pointer, u64, pointer)),
            ("sf_init", i32, (pointer,)),
            ("sf_run", i32, (pointer, u32, pointer)),
            ("sf_kv_length", u32, (pointer,)),
            ("sf_set_kv_length", i32, (pointer, u32)),
        ):
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("sf_"), function)
        self.run_calls = getattr(self._lib, "sf_run_calls", None)
        if self.run_calls is not None:  # kernels built before it have none
            self.run_calls.restype, self.run_calls.argtypes = i32, (pointer, u32, u32, u32, pointer)

    abi_version: "ctypes._FuncPointer"
    sizes: "ctypes._FuncPointer"
    init: "ctypes._FuncPointer"
    run: "ctypes._FuncPointer"
    kv_length: "ctypes._FuncPointer"
    set_kv_length: "ctypes._FuncPointer"
    run_calls: "ctypes._FuncPointer | None"

    def close(self) -> None:
        """Unload the library; nothing of it may be called afterwards."""
        self._unload()


def _unload(handle: int, fd: int) -> None:
    """Unload first: a library that stays loaded must keep its descriptor's number."""
    _ctypes.dlclose(handle)
    os.close(fd)


def _sealed_file(data: bytes) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create("sparsefleet-kernels", flags | _MFD_EXEC)
    except OSError:  # a kernel before 6.3 does not know the flag and needs none
        fd = os.memfd_create("sparsefleet-kernels", flags)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class Memory:
    """One anonymous mapping, its start aligned to a huge page, huge pages advised."""

    def __init__(self, size: int) -> None:
        """Map `size` bytes of zeros.

        Raises:
            NativeError: There is no memory.
        """
        try:
            self._map = mmap.mmap(-1, size + HUGE_PAGE_BYTES)
        except (OSError, ValueError, OverflowError) as error:
            raise NativeError(f"cannot map {size} bytes: {error}") from error
        anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(anchor)
        del anchor
        skip = -base % HUGE_PAGE_BYTES
        self.address: Final = base + skip
        self.view: Final = memoryview(self._map)[skip : skip + size]
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, skip, align(size, mmap.PAGESIZE))
            except OSError:  # a kernel without huge pages; slower, not wrong
                return


@dataclass(frozen=True, slots=True)
class _Port:
    """A port's bytes in the arena."""

    view: memoryview
    row_bytes: int
    dynamic: bool


class _Program:
    """Number, ports and output views of one program."""

    def __init__(self, number: int, inputs: dict[str, _Port], outputs: dict[str, _Port]) -> None:
        self.number = number
        self.inputs = inputs
        self.outputs = outputs
        self.fixed = MappingProxyType({role: port.view for role, port in outputs.items()})
        self.has_dynamic_outputs = any(port.dynamic for port in outputs.values())

    def results(self, tokens: int) -> Mapping[str, memoryview]:
        if not self.has_dynamic_outputs:
            return self.fixed
        return {
            role: port.view[: tokens * port.row_bytes] if port.dynamic else port.view
            for role, port in self.outputs.items()
        }


class NativePlan:
    """A plan ready to run. Not for two threads at once; a second caller is refused."""

    def __init__(
        self,
        kernels: bytes | Path,
        plan_bytes: bytes,
        sections: Mapping[str, Buffer],
    ) -> None:
        """Verify the plan, load kernels and weights, and build the runtime's context.

        Args:
            kernels: The shared library for this machine, as bytes or as a file.
            plan_bytes: A plan; verified here.
            sections: At least the weight sections that the plan names.

        Raises:
            PlanError: The plan is malformed.
            NativeError: Kernels or sections do not fit it.
        """
        self.plan: Final = parse_plan(plan_bytes)
        self._lock = threading.Lock()
        self._library: KernelLibrary | None = KernelLibrary(kernels)
        try:
            self._load(self._library, plan_bytes, sections)
        except BaseException:
            self.close()
            raise

    def _load(
        self, library: KernelLibrary, plan_bytes: bytes, sections: Mapping[str, Buffer]
    ) -> None:
        weights, table = _load_sections(self.plan, sections)
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
        status = library.init(ctypes.addressof(setup))
        if status:
            raise_status(status, "load")
        self._weights, self._memory = weights, memory
        self._context = memory.address
        self._args = SfArgs(struct_bytes=ctypes.sizeof(SfArgs))
        self._args_address = ctypes.addressof(self._args)
        self._programs = _programs(self.plan, memory.view[arena_at:])

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
        library = self._library
        chosen = self._programs.get(program) if library is not None else None
        if library is None or chosen is None:
            raise NativeError(f"there is no program {program!r}, or the plan is closed")
        if not self._lock.acquire(blocking=False):
            raise NativeError("the plan is already running in another thread")
        try:
            tokens = self._fill(chosen, inputs)
            self._args.tokens = tokens
            status = library.run(self._context, chosen.number, self._args_address)
            if status:
                raise_status(status, f"program {program!r} call {self._args.failed_call}")
            return chosen.results(tokens)
        finally:
            self._lock.release()

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
        library = self._library
        chosen = self._programs.get(program) if library is not None else None
        if library is None or chosen is None or min(first, count) < 0:
            raise NativeError(f"there is no program {program!r}, or the plan is closed")
        if library.run_calls is None:
            raise UnsupportedPlanError("these kernels cannot run single calls: build them again")
        if not self._lock.acquire(blocking=False):
            raise NativeError("the plan is already running in another thread")
        try:
            self._args.tokens = tokens if inputs is None else self._fill(chosen, inputs)
            status = library.run_calls(
                self._context, chosen.number, first, count, self._args_address
            )
            if status:
                raise_status(status, f"program {program!r} call {self._args.failed_call}")
            return int(self._args.tokens)
        finally:
            self._lock.release()

    def _fill(self, program: _Program, inputs: Mapping[str, Buffer]) -> int:
        if inputs.keys() != program.inputs.keys():
            raise NativeError(f"inputs must be {sorted(program.inputs)}, not {sorted(inputs)}")
        tokens = 0
        for role, port in program.inputs.items():
            data = memoryview(inputs[role]).cast("B")
            size = len(data)
            if port.dynamic:
                rows = size // port.row_bytes
                if rows * port.row_bytes != size or rows < 1 or tokens not in (0, rows):
                    raise NativeError(f"input {role!r} of {size} bytes does not fit the others")
                if size > len(port.view):
                    raise TooManyTokensError(f"{rows} tokens, at most {self.plan.max_tokens}")
                tokens = rows
            elif size != len(port.view):
                raise NativeError(f"input {role!r} has {size} bytes, not {len(port.view)}")
            port.view[:size] = data
        return tokens

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return 0 if self._library is None else int(self._library.kv_length(self._context))

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            NativeError: The cache holds fewer rows.
            ContextLostError: Rows that a window would show again were overwritten.
        """
        if self._library is None or not 0 <= length <= self.kv_length:
            raise NativeError(f"cannot set the cache to {length} rows")
        status = self._library.set_kv_length(self._context, length)
        if status:
            raise_status(status, f"cache of {length} rows")

    def close(self) -> None:
        """Unload the kernels. Memory goes when the last result view goes."""
        library, self._library = self._library, None
        if library is not None:
            library.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _load_sections(
    plan: Plan, sections: Mapping[str, Buffer]
) -> tuple[Memory, "ctypes.Array[SfSection]"]:
    """Copy the plan's sections into one mapping; return it and the table for `sf_init`."""
    memory = Memory(sum(align(section.length) for section in plan.sections))
    table = (SfSection * max(1, len(plan.sections)))()
    at = 0
    for entry, section in zip(table, plan.sections, strict=False):
        if section.name not in sections:
            raise NativeError(f"section {section.name!r} is missing")
        data = memoryview(sections[section.name]).cast("B")
        if len(data) != section.length:
            raise NativeError(
                f"section {section.name!r} has {len(data)} bytes, not {section.length}"
            )
        memory.view[at : at + section.length] = data
        entry.data, entry.bytes = memory.address + at, section.length
        at += align(section.length)
    return memory, table


def _programs(plan: Plan, arena: memoryview) -> dict[str, _Program]:
    programs = {}
    for number, program in enumerate(plan.programs):
        ports: dict[Direction, dict[str, _Port]] = {Direction.INPUT: {}, Direction.OUTPUT: {}}
        for port in program.ports:
            ports[port.direction][port.role] = _port(plan.buffers[port.buffer], arena)
        programs[program.name] = _Program(number, ports[Direction.INPUT], ports[Direction.OUTPUT])
    return programs


def _port(buffer: PlanBuffer, arena: memoryview) -> _Port:
    view = arena[buffer.offset : buffer.offset + buffer.length]
    return _Port(view, buffer.cols * DTYPE_BYTES[buffer.dtype], buffer.dynamic)
