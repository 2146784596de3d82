"""Ports of a native plan: where the inputs of a program go, and where its outputs are.

    inputs by role -(fill)-> arena -> one native call -> (results) -> views of the arena

Used by `compiler.contract.native` alone. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from compiler.contract.native_errors import NativeError, TooManyTokensError
from compiler.contract.native_weights import Buffer
from compiler.contract.plan import Plan, PlanBuffer
from compiler.contract.plan_format import DTYPE_BYTES, Direction


@dataclass(frozen=True, slots=True)
class NativePort:
    """A port's bytes in the arena."""

    view: memoryview
    row_bytes: int
    dynamic: bool


class NativeProgram:
    """Number, ports and output views of one program."""

    def __init__(
        self, number: int, inputs: dict[str, NativePort], outputs: dict[str, NativePort]
    ) -> None:
        self.number = number
        self.inputs = inputs
        self.outputs = outputs
        self.fixed = MappingProxyType({role: port.view for role, port in outputs.items()})
        self.has_dynamic_outputs = any(port.dynamic for port in outputs.values())

    def results(self, tokens: int) -> Mapping[str, memoryview]:
        """Return the outputs by role, as many rows of dynamic ones as there were tokens."""
        if not self.has_dynamic_outputs:
            return self.fixed
        return {
            role: port.view[: tokens * port.row_bytes] if port.dynamic else port.view
            for role, port in self.outputs.items()
        }

    def fill(self, inputs: Mapping[str, Buffer], max_tokens: int) -> int:
        """Copy the inputs in; return T, the rows of dynamic ones, 0 if there are none.

        Raises:
            NativeError: One is missing or of a wrong size.
            TooManyTokensError: They have more rows than `max_tokens`.
        """
        if inputs.keys() != self.inputs.keys():
            raise NativeError(f"inputs must be {sorted(self.inputs)}, not {sorted(inputs)}")
        tokens = 0
        for role, port in self.inputs.items():
            data = memoryview(inputs[role]).cast("B")
            size = len(data)
            if port.dynamic:
                rows = size // port.row_bytes
                if rows * port.row_bytes != size or rows < 1 or tokens not in (0, rows):
                    raise NativeError(f"input {role!r} of {size} bytes does not fit the others")
                if size > len(port.view):
                    raise TooManyTokensError(f"{rows} tokens, at most {max_tokens}")
                tokens = rows
            elif size != len(port.view):
                raise NativeError(f"input {role!r} has {size} bytes, not {len(port.view)}")
            port.view[:size] = data
        return tokens


def native_programs(plan: Plan, arena: memoryview) -> dict[str, NativeProgram]:
    """Return the programs of a plan whose arena this is, by name."""
    programs = {}
    for number, program in enumerate(plan.programs):
        ports: dict[Direction, dict[str, NativePort]] = {Direction.INPUT: {}, Direction.OUTPUT: {}}
        for port in program.ports:
            ports[port.direction][port.role] = _port(plan.buffers[port.buffer], arena)
        programs[program.name] = NativeProgram(
            number, ports[Direction.INPUT], ports[Direction.OUTPUT]
        )
    return programs


def _port(buffer: PlanBuffer, arena: memoryview) -> NativePort:
    view = arena[buffer.offset : buffer.offset + buffer.length]
    return NativePort(view, buffer.cols * DTYPE_BYTES[buffer.dtype], buffer.dynamic)
