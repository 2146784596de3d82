"""The kernels of one target, loaded from a sealed memory file, and the threads lent to them.

    kernels (.so bytes) -> sealed memory file -> dlopen

The caller must have verified the signature: kernels are code. Standard library only.
"""

import _ctypes
import contextlib
import ctypes
import fcntl
import os
import platform
import threading
import weakref
from collections.abc import Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Final

from compiler.contract.native_errors import NativeError, UnsupportedPlanError
from compiler.contract.native_fork import finalize_here
from compiler.contract.pager import C_PAGER
from compiler.contract.plan_format import ABI_VERSION

MAX_KERNELS_BYTES: Final = 64 * 1024 * 1024
MAX_THREADS: Final = 64
_ELF: Final = b"\x7fELF"
_MACHINES: Final[Mapping[int, str]] = MappingProxyType(
    {62: "x86_64", 183: "aarch64", 243: "riscv64"}
)
_MFD_EXEC: Final = 0x10
_JOIN_S: Final = 1.0
"""How often a thread that is waited for is looked at, seconds."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


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
            _require_machine(data)
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
        self.run_calls = self._bind_newer("sf_run_calls", pointer, u32, u32, u32, pointer)
        self.set_pager = self._bind_newer("sf_set_pager", pointer, C_PAGER, pointer)
        self.lend = self._bind_newer("sf_lend", pointer)
        self.work = self._bind_newer("sf_work", pointer)
        self.release = self._bind_newer("sf_release", pointer)
        self.check_counts = self._bind_newer("sf_check_counts", pointer, u32, u32, pointer)
        self.set_trace = self._bind_newer("sf_set_trace", pointer, pointer)
        self.set_policy = self._bind_newer("sf_set_policy", pointer, pointer)
        self.policy_busy = self._bind_newer("sf_policy_busy", pointer, pointer)
        self.set_steering = self._bind_newer("sf_set_steering", pointer, pointer)
        self.steering_busy = self._bind_newer("sf_steering_busy", pointer, pointer)
        self.steering_counts = self._bind_newer("sf_steering_counts", pointer, pointer)
        self.policy_lookup = self._bind_newer("sf_policy_lookup", pointer, u32, u32, u32)

    def _bind_newer(self, name: str, *arguments: type) -> "ctypes._FuncPointer | None":
        return self.bind(name, ctypes.c_int32, arguments)

    def bind(
        self, name: str, result: type, arguments: tuple[type, ...]
    ) -> "ctypes._FuncPointer | None":
        """Return a call of the library; None if the kernels were built before there was one."""
        function = getattr(self._lib, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
        return function

    abi_version: "ctypes._FuncPointer"
    sizes: "ctypes._FuncPointer"
    init: "ctypes._FuncPointer"
    run: "ctypes._FuncPointer"
    kv_length: "ctypes._FuncPointer"
    set_kv_length: "ctypes._FuncPointer"
    run_calls: "ctypes._FuncPointer | None"
    set_pager: "ctypes._FuncPointer | None"
    lend: "ctypes._FuncPointer | None"
    work: "ctypes._FuncPointer | None"
    release: "ctypes._FuncPointer | None"
    check_counts: "ctypes._FuncPointer | None"
    set_trace: "ctypes._FuncPointer | None"
    set_policy: "ctypes._FuncPointer | None"
    policy_busy: "ctypes._FuncPointer | None"
    set_steering: "ctypes._FuncPointer | None"
    steering_busy: "ctypes._FuncPointer | None"
    steering_counts: "ctypes._FuncPointer | None"
    policy_lookup: "ctypes._FuncPointer | None"

    def close(self) -> None:
        """Unload the library; nothing of it may be called afterwards."""
        self._unload()


def _require_machine(data: bytes) -> None:
    """Refuse what is no shared library, or one for another processor, before the loader sees it.

    Raises:
        NativeError: It is not for this machine. Format: System V ABI, ELF header.
    """
    here = platform.machine()
    if data[:4] != _ELF:
        raise NativeError(
            "these kernels are no native library",
            hint="they are for another kind of processor; the simulator runs any bundle",
        )
    machine = int.from_bytes(data[18:20], "little")
    name = _MACHINES.get(machine, f"machine {machine}")
    if here in _MACHINES.values() and name != here:
        raise NativeError(
            f"these kernels are for {name}, this machine is {here}",
            hint="use such a machine; the simulator runs any bundle",
        )


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


class Workers:
    """Threads that help with every run of one context until they are sent home.

    They spin for about 0.3 ms after the last piece of work, then sleep. They hold the library and
    the context's memory, so neither can go while one of them is inside.
    """

    def __init__(
        self,
        library: KernelLibrary,
        context: int,
        keeps: object,
        count: int,
        cpus: Set[int] = frozenset(),
    ) -> None:
        """Start `count` threads; none if the kernels were built before threads.

        Args:
            library: The kernels.
            context: Address of a context of theirs.
            keeps: Owner of the context's memory.
            count: How many threads to lend besides the caller's.
            cpus: Where they run; empty for anywhere. Where the system refuses, anywhere.
        """
        self._dismiss: weakref.finalize[..., object] | None = None
        self._count = 0
        self._threads: list[threading.Thread] = []
        lend, work, release = library.lend, library.work, library.release
        if not count or lend is None or work is None or release is None or lend(context):
            return
        held = (library, keeps)
        threads: list[threading.Thread] = []
        for number in range(1, count + 1):
            name = f"sparsefleet-kernels-{number}"
            thread = threading.Thread(
                target=_lend, args=(work, context, held, cpus), name=name, daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system gives no more; fewer are slower, not wrong
                break
            threads.append(thread)
        self._count, self._threads = len(threads), threads
        self._dismiss = finalize_here(self, _dismiss, release, context, threads, held)

    def __len__(self) -> int:
        """Return how many threads there are."""
        return self._count

    @property
    def lost(self) -> int:
        """How many threads have ended without being sent home; runs go on without them."""
        return sum(not _is_there(thread) for thread in self._threads)

    def close(self) -> bool:
        """Send the threads home and wait for them.

        Returns:
            Whether nobody is inside: a damaged context refuses, and its threads stay for ever.
        """
        self._count, self._threads = 0, []
        dismiss, self._dismiss = self._dismiss, None
        return dismiss is None or dismiss() is not False


def _lend(work: "ctypes._FuncPointer", context: int, _keeps: object, cpus: Set[int]) -> None:
    if cpus:
        with contextlib.suppress(OSError):  # a core was taken away; slower, not wrong
            os.sched_setaffinity(0, cpus)
    work(context)


def _dismiss(
    release: "ctypes._FuncPointer", context: int, threads: list[threading.Thread], _keeps: object
) -> bool:
    if release(context):
        return False
    for thread in threads:
        while _is_there(thread):
            thread.join(_JOIN_S)
    return True


def _is_there(thread: threading.Thread) -> bool:
    """Return whether the system still has a thread: one that died in native code never says so."""
    if not thread.is_alive():
        return False
    return thread.native_id is None or Path(f"/proc/self/task/{thread.native_id}").exists()
