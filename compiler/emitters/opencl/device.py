"""One OpenCL device: memory, and launches of the kernels of one source.

pyopencl is loaded here, when a device is opened, and nowhere else: the compiler runs without it. A
device is used only if its single precision is IEEE's, rounds division and square root correctly and
keeps subnormals; another would give other bits.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from compiler.errors import CompilerError

OPTIONS: Final = ("-cl-std=CL1.2", "-cl-fp32-correctly-rounded-divide-sqrt")
Handle = Any
"""What pyopencl gives; it is not there when types are checked."""
_NEEDED: Final = ("CORRECTLY_ROUNDED_DIVIDE_SQRT", "DENORM", "INF_NAN", "ROUND_TO_NEAREST")


class OpenClError(CompilerError):
    """OpenCL kernels cannot be run here, or a device refused them."""

    code: ClassVar[str] = "build.app.opencl"


class NoDeviceError(OpenClError):
    """pyopencl is missing, or there is no device that gives our bits."""

    code: ClassVar[str] = "build.app.opencl_device"


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer, and the byte of it that an operand begins at."""

    buffer: Handle
    at: int = 0

    def after(self, bytes_: int) -> "Operand":
        """Return the operand that begins so many bytes later."""
        return Operand(self.buffer, self.at + bytes_)


@dataclass(frozen=True, slots=True)
class Local:
    """Local memory of a work group, in bytes."""

    bytes: int


@dataclass(frozen=True, slots=True)
class Long:
    """A whole number that a kernel takes in 64 bits."""

    value: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as an observer sees it: global and local size, bytes of local memory."""

    kernel: str
    size: tuple[int, ...]
    group: tuple[int, ...] | None
    local_bytes: int


Argument = Operand | Local | Long | int | float


class Device:
    """A device with the kernels of one source, and spaces that are used again.

    Attributes:
        name: What the device calls itself.
        observer: Told of every launch, unless it is None.
    """

    def __init__(self, source: str) -> None:
        """Open the first device that gives our bits and build `source` on it.

        Raises:
            NoDeviceError: pyopencl or a device is missing.
            OpenClError: The device refuses the source.
        """
        self._cl = _pyopencl()
        device = find_device(self._cl)
        self.name = str(device.name)
        self._context = self._cl.Context([device])
        self._queue = self._cl.CommandQueue(self._context)
        self._kernels: dict[str, Handle] = {}
        self._spaces: dict[str, Handle] = {}
        self.observer: Callable[[Launch], None] | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # remarks of the device's compiler
                program = self._cl.Program(self._context, source)
                self._program = program.build(options=list(OPTIONS), cache_dir=False)
        except self._cl.Error as error:
            raise OpenClError(f"{self.name} refuses the kernels: {error}") from error

    def upload(self, data: bytes | NDArray[Any]) -> Operand:
        """Return a new buffer that holds `data`; at least one byte long."""
        host = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        found = self._new(max(1, host.nbytes))
        if host.nbytes:
            self._cl.enqueue_copy(self._queue, found, np.ascontiguousarray(host))
        return Operand(found)

    def space(self, name: str, bytes_: int) -> Operand:
        """Return the space of that name, made larger if need be; its content is lost."""
        found = self._spaces.get(name)
        if found is None or found.size < bytes_:
            found = self._spaces[name] = self._new(max(64, bytes_))
        return Operand(found)

    def write(self, to: Operand, data: bytes | NDArray[Any]) -> None:
        """Copy `data` to the device."""
        host = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
        self._cl.enqueue_copy(self._queue, to.buffer, host, dst_offset=to.at)

    def read(self, source: Operand, bytes_: int) -> bytes:
        """Return bytes from the device, after all that was launched before."""
        host = np.empty(bytes_, np.uint8)
        self._cl.enqueue_copy(self._queue, host, source.buffer, src_offset=source.at)
        return host.tobytes()

    def launch(
        self,
        kernel: str,
        size: tuple[int, ...],
        *arguments: Argument,
        group: tuple[int, ...] | None = None,
    ) -> None:
        """Enqueue a kernel.

        Args:
            kernel: Name of a kernel of the source.
            size: Global size; nothing is launched if one of it is 0.
            arguments: In the kernel's order; an operand fills its two parameters.
            group: Local size; None leaves it to the device.
        """
        if 0 in size:
            return
        if kernel not in self._kernels:
            self._kernels[kernel] = self._cl.Kernel(self._program, kernel)
        values: list[Any] = []
        for argument in arguments:
            values += self._values(argument)
        if self.observer is not None:
            local = sum(item.bytes for item in arguments if isinstance(item, Local))
            self.observer(Launch(kernel, size, group, local))
        self._kernels[kernel](self._queue, size, group, *values)

    def _values(self, argument: Argument) -> list[Any]:
        if isinstance(argument, Operand):
            return [argument.buffer, np.uint64(argument.at)]
        if isinstance(argument, Local):
            return [self._cl.LocalMemory(argument.bytes)]
        if isinstance(argument, Long):
            return [np.uint64(argument.value)]
        if isinstance(argument, float):
            return [np.float32(argument)]
        return [np.int32(argument)]

    def _new(self, bytes_: int) -> Handle:
        return self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, bytes_)


def find_device(cl: Handle) -> Handle:
    """Return the first device that gives our bits.

    Raises:
        NoDeviceError: There is none; the message says what each lacks.
    """
    refused = []
    try:
        platforms = cl.get_platforms()
    except cl.Error:  # the loader found no platform
        platforms = []
    for platform in platforms:
        for device in platform.get_devices():
            lacks = [
                name
                for name in _NEEDED
                if not device.single_fp_config & getattr(cl.device_fp_config, name)
            ]
            if not lacks and device.available and device.compiler_available:
                return device
            refused.append(f"{device.name} lacks {', '.join(lacks) or 'a compiler'}")
    found = "; ".join(refused) or "no OpenCL device is installed"
    raise NoDeviceError(
        found, hint="install PoCL: pip install pyopencl[pocl], or your GPU's driver"
    )


def is_available() -> bool:
    """Return whether a device that gives our bits can be opened here."""
    try:
        find_device(_pyopencl())
    except NoDeviceError:
        return False
    return True


def _pyopencl() -> Handle:
    try:
        import pyopencl
    except ImportError as error:
        raise NoDeviceError(
            f"OpenCL cannot be run: {error}", hint="pip install pyopencl[pocl]"
        ) from error
    return pyopencl
