"""Run a plan with OpenCL kernels, call by call, with the interface of the native plan.

    plan bytes + sections + source -> device memory -> one or more launches per call -> outputs

What is checked on it is the bits: the same plan gives the same outputs as native code and as the
simulator. Devices do not run plans this way; their agent has no OpenCL host.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from compiler.contract.native_errors import NativeError, TooManyTokensError, raise_status
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanProgram, parse_plan
from compiler.contract.plan_format import DTYPE_BYTES, Direction
from compiler.contract.session import Buffer
from compiler.emitters.opencl import (
    attention,
    elementwise,
    moves,
    products,
    prune,
    recurrent,
    reference,
    routed,
)
from compiler.emitters.opencl.device import Device
from compiler.emitters.opencl.frame import Frame

Launcher = Callable[[Frame, PlanCall], None]


def _nothing(f: Frame, call: PlanCall) -> None:
    """Launch nothing: every expert is in device memory."""


LAUNCHERS: Final[Mapping[Op, Launcher]] = MappingProxyType(
    {
        Op.LINEAR: products.linear,
        Op.LINEAR_F32: products.linear_f32,
        Op.LINEAR_W8: products.linear_w8,
        **dict.fromkeys((Op.RECURRENT, Op.RECURRENT_F32), recurrent.recurrent),
        Op.ROUTE: routed.route,
        Op.EXPERTS: routed.experts,
        Op.MOE_LAYER: routed.moe_layer,
        **dict.fromkeys((Op.EXPERT_PREFETCH, Op.EXPERT_LOAD, Op.EXPERT_FORESEE), _nothing),
        **dict.fromkeys(elementwise.BINARY, elementwise.binary),
        Op.UNARY: elementwise.unary,
        Op.SOFTMAX: elementwise.softmax,
        Op.NORM: elementwise.norm,
        Op.ROPE: elementwise.rope,
        Op.ATTENTION: attention.attention,
        Op.ARGMAX: elementwise.argmax,
        Op.IMAGE_U8: elementwise.image,
        Op.PRUNE: prune.prune,
        Op.PRUNE_TOP_P: prune.prune_top_p,
        Op.ATTENTION_ROW: prune.attention_row,
        Op.ATTENTION_SCORE: prune.attention_score,
        Op.CONV2D: elementwise.conv2d,
        Op.CONV_DEPTHWISE: elementwise.conv_depthwise,
        Op.SPARSE_CONV: elementwise.sparse_conv,
        Op.EMBED: moves.embed,
        Op.GATHER_ROWS: moves.gather_rows,
        Op.ROWS_CONCAT: moves.rows_concat,
        Op.ROWS_SLICE: moves.rows_slice,
        Op.COLS_CONCAT: moves.cols_concat,
        Op.COLS_SLICE: moves.cols_slice,
        **reference.LAUNCHERS,
    }
)


class OpenClPlan:
    """A loaded plan; a `compiler.contract.session.PlanRunner`. Not safe for two threads."""

    def __init__(
        self,
        device: Device,
        plan_bytes: bytes,
        sections: Mapping[str, bytes],
    ) -> None:
        """Copy the weights to the device.

        Args:
            device: A device with kernels for the plan's operations; its plans run one at a time.
            plan_bytes: A plan.
            sections: Its weight sections.

        Raises:
            PlanError: The plan breaks its format.
        """
        self._plan: Plan = parse_plan(plan_bytes)
        self._frame = Frame(device, self._plan, sections)
        self._programs = {program.name: program for program in self._plan.programs}

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return self._frame.cache.length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            NativeError: The cache holds fewer rows, or rows that it needs are overwritten.
        """
        self._frame.cache.truncate(length)

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program on raw little-endian rows by role.

        Raises:
            NativeError: As `compiler.contract.native.NativePlan.run`.
        """
        chosen, f = self._programs.get(program), self._frame
        if chosen is None:
            raise NativeError(f"there is no program {program!r}")
        f.tokens = self._fill(chosen, inputs)
        appended = self._appended(chosen)
        f.cache.reserve(appended)
        f.device.write(f.status, bytes(4))
        for call in chosen.calls:
            LAUNCHERS[call.op](f, call)
        status = int.from_bytes(f.device.read(f.status, 4), "little")
        if status:
            raise_status(status, f"program {program!r}")
        f.cache.length += appended
        return {
            port.role: memoryview(f.device.read(f.view(port.buffer).at, f.bytes_of(port.buffer)))
            for port in chosen.ports
            if port.direction is Direction.OUTPUT
        }

    def _fill(self, program: PlanProgram, inputs: Mapping[str, Buffer]) -> int:
        """Copy the inputs to the device; return the rows of the dynamic ones."""
        ports = {port.role: port for port in program.ports if port.direction is Direction.INPUT}
        if inputs.keys() != ports.keys():
            raise NativeError(f"inputs must be {sorted(ports)}, not {sorted(inputs)}")
        tokens = 0
        for role, port in ports.items():
            buffer, data = self._plan.buffers[port.buffer], memoryview(inputs[role]).cast("B")
            row = buffer.cols * DTYPE_BYTES[buffer.dtype]
            rows = len(data) // row
            fits = rows * row == len(data) and rows >= 1
            if not fits or (tokens not in (0, rows) if buffer.dynamic else rows != buffer.rows):
                raise NativeError(f"input {role!r} of {len(data)} bytes does not fit")
            if buffer.dynamic and rows > self._plan.max_tokens:
                raise TooManyTokensError(f"{rows} tokens, at most {self._plan.max_tokens}")
            tokens = rows if buffer.dynamic else tokens
            self._frame.device.write(self._frame.arena.after(buffer.offset), bytes(data))
        return tokens

    def _appended(self, program: PlanProgram) -> int:
        """Return the cache rows that a run of a program appends."""
        for call in program.calls:
            if call.op is Op.ATTENTION and call.params["kv_layer"] >= 0:
                return self._frame.view(call.inputs[0]).rows
        return 0
