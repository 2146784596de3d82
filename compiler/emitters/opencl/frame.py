"""What the launches of one plan share: its weights and operands in device memory, and the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.native_errors import (
    ContextFullError,
    ContextLostError,
    NativeError,
    UnsupportedPlanError,
)
from compiler.contract.operations import Op
from compiler.contract.plan import Plan, PlanCall, PlanWeight
from compiler.contract.plan_format import DTYPE_BYTES, Kind, KvKind, align, weight_parts
from compiler.contract.tiles import GROUP, PANEL, TILE_BYTES
from compiler.emitters.opencl.device import Device, Operand
from compiler.emitters.opencl.lists import UNIT, StoredTiles, WorkList
from compiler.emitters.plan import read_packed
from compiler.emitters.tiles import live_mask
from compiler.quant.row_codes import I8, read_codes
from compiler.quant.w4 import PackedW4

_MAX_WINDOWED: Final = 0x7FFFFFFF
_DECODED: Final = (Op.EMBED, Op.LINEAR_F32)


@dataclass(frozen=True, slots=True)
class Listed:
    """A list on the device: of work, of runs, and of the quantised row of each activation row."""

    sizes: WorkList
    work: Operand
    runs: Operand
    pick: Operand


@dataclass(frozen=True, slots=True)
class View:
    """An operand of a call, with the rows that this run has."""

    at: Operand
    rows: int
    cols: int


class DeviceWeights:
    """All weights of a plan in one buffer; of W4 only the live tiles, however they are stored.

    Codes of products and tables are decoded, those of routers stay codes. Integers (geometries of
    reference operations among them) stay at hand, because launches follow from them.
    """

    def __init__(self, device: Device, plan: Plan, sections: Mapping[str, bytes]) -> None:
        """Copy the weights to the device."""
        packed = read_packed(plan, sections)
        products = {
            call.weights[0]
            for program in plan.programs
            for call in program.calls
            if call.op in _DECODED
        }
        self._data = bytearray()
        self.offsets: dict[int, int] = {}
        self.tiles: dict[int, StoredTiles] = {}
        self.integers: dict[int, NDArray[np.int32]] = {}
        for number, weight in enumerate(plan.weights):
            if number in packed:
                self.tiles[number] = self._add_tiles(packed[number])
                continue
            section = sections[plan.sections[weight.section].name]
            stored = section[weight.offset : weight.offset + weight.length]
            if number in products and weight.kind is Kind.I8_ROWS:
                stored = _decoded(weight, stored)
            if weight.kind is Kind.I32:
                whole = np.frombuffer(stored, "<i4").reshape(weight.rows, weight.cols)
                self.integers[number] = whole
            self.offsets[number] = self._add(stored)
        self.buffer = device.upload(bytes(self._data))
        self._data.clear()

    def _add(self, stored: bytes) -> int:
        start = len(self._data)
        self._data += stored + bytes(align(len(stored)) - len(stored))
        return start

    def _add_tiles(self, packed: PackedW4) -> StoredTiles:
        live = live_mask(packed)
        panels, groups = live.shape
        codes = np.frombuffer(packed.codes, np.uint8).reshape(panels, groups, TILE_BYTES)[live]
        scales = np.frombuffer(packed.scales, np.uint8).reshape(panels, groups, PANEL)[live]
        first = np.concatenate([[0], np.cumsum(live.sum(axis=1))])
        return StoredTiles(
            packed.n,
            packed.k,
            self._add(codes.tobytes()) // UNIT,
            self._add(scales.tobytes()) // UNIT,
            self._add(packed.rows) // UNIT,
            first,
            np.nonzero(live)[1],
        )


class Cache:
    """The key/value cache: rows of the device's memory, and how many are filled.

    A layer holds keys, then values: rows of f32, or of int8 with an f32 scale per row and head.
    """

    def __init__(self, device: Device, plan: Plan) -> None:
        """Make room for every layer."""
        kv = plan.kv
        heads, width = (kv.heads, kv.head_dim) if kv else (0, 0)
        self.capacity = kv.capacity if kv else 0
        self.is_coded = kv is not None and kv.kind is KvKind.I8
        self._half_bytes = (1 if self.is_coded else 4) * heads * width * self.capacity
        self._scale_bytes = 4 * heads * self.capacity if self.is_coded else 0
        halves = 2 * kv.layers if kv else 0
        self._rows = device.upload(bytes(halves * self._half_bytes))
        self._scales = device.upload(bytes(halves * self._scale_bytes))
        self.length = self._high = 0
        cached = [
            call.params
            for program in plan.programs
            for call in program.calls
            if call.op is Op.ATTENTION and call.params["kv_layer"] >= 0
        ]
        self.window = max((int(params["window"]) for params in cached), default=0)
        self.sink = max((int(params["sink"]) for params in cached), default=0)

    def half(self, layer: int, which: int) -> tuple[Operand, Operand]:
        """Return the keys (0) or values (1) of a layer, and their scales, to ignore for f32."""
        at = 2 * layer + which
        return self._rows.after(at * self._half_bytes), self._scales.after(at * self._scale_bytes)

    def reserve(self, rows: int) -> None:
        """Note that a run writes so many rows.

        Raises:
            ContextFullError: There is no room for them.
        """
        capacity = _MAX_WINDOWED if self.window else self.capacity
        if rows > capacity - self.length:
            raise ContextFullError(f"{self.length} rows and {rows} more do not fit the cache")
        self._high = max(self._high, self.length + rows)

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on.

        Raises:
            NativeError: The cache holds fewer rows.
            ContextLostError: Rows that the window would show again were overwritten.
        """
        if not 0 <= length <= self.length:
            raise NativeError(f"cannot set the cache to {length} rows")
        wrapped = self._high > self.capacity
        if self.window and length > self.sink and wrapped:
            oldest = self._high - (self.capacity - self.sink)
            beyond = length > self.sink + self.window
            if (length - self.window if beyond else self.sink) < oldest:
                raise ContextLostError(f"rows before {length} were overwritten")
        self.length = length
        if length <= self.sink or not wrapped:
            self._high = length


class Frame:
    """One plan on one device, during a run of `tokens` rows."""

    def __init__(self, device: Device, plan: Plan, sections: Mapping[str, bytes]) -> None:
        """Put weights, arena and cache into device memory."""
        self.device, self.plan = device, plan
        self.weights = DeviceWeights(device, plan, sections)
        self.cache = Cache(device, plan)
        self.arena = device.upload(bytes(plan.arena_bytes))
        self.status = device.upload(bytes(4))
        self.none = device.upload(bytes(4))
        self.tokens = 0
        self.lists: dict[tuple[int, int], Listed] = {}

    def view(self, buffer: int) -> View:
        """Return a buffer of the plan as this run has it."""
        found = self.plan.buffers[buffer]
        rows = self.tokens if found.dynamic else found.rows
        return View(self.arena.after(found.offset), rows, found.cols)

    def input(self, call: PlanCall, at: int) -> View | None:
        """Return an input of a call; None if it is absent."""
        present = at < len(call.inputs) and call.inputs[at] >= 0
        return self.view(call.inputs[at]) if present else None

    def required(self, call: PlanCall, at: int) -> View:
        """Return an input that the rules of the plan ask for."""
        return self.view(call.inputs[at])

    def output(self, call: PlanCall, at: int = 0) -> View:
        """Return an output of a call."""
        return self.view(call.outputs[at])

    def weight(self, call: PlanCall, at: int) -> int | None:
        """Return the number of a weight of a call; None if it is absent."""
        present = at < len(call.weights) and call.weights[at] >= 0
        return call.weights[at] if present else None

    def constant(self, number: int | None) -> Operand:
        """Return where a weight lies that is no W4; an operand to ignore for None."""
        if number is None:
            return self.none
        return self.weights.buffer.after(self.weights.offsets[number])

    def tiles(self, number: int) -> StoredTiles:
        """Return where the tiles of a weight lie.

        Raises:
            UnsupportedPlanError: It is stored in a kind that has no OpenCL kernel.
        """
        found = self.weights.tiles.get(number)
        if found is None:
            kind = self.plan.weights[number].kind.name
            raise UnsupportedPlanError(f"the opencl back end has no kernel for weights {kind}")
        return found

    def steps(self, number: int) -> Operand:
        """Return the steps of rows of codes; an operand to ignore for other kinds."""
        weight = self.plan.weights[number]
        if weight.kind not in (Kind.I8_ROWS, Kind.I16_ROWS):
            return self.none
        return self.part(number, 1)

    def part(self, number: int, at: int) -> Operand:
        """Return one of the stored arrays of a weight that is no W4."""
        weight = self.plan.weights[number]
        return self.constant(number).after(
            weight_parts(weight.kind, weight.rows, weight.cols)[at][0]
        )

    def bytes_of(self, buffer: int) -> int:
        """Return how many bytes of a buffer this run fills."""
        found, view = self.plan.buffers[buffer], self.view(buffer)
        return view.rows * view.cols * DTYPE_BYTES[found.dtype]


def _decoded(weight: PlanWeight, stored: bytes) -> bytes:
    """Return the f32 matrix that rows of codes stand for, row-major."""
    (at, codes), (steps_at, steps) = weight_parts(weight.kind, weight.rows, weight.cols)
    parts = stored[at : at + codes], stored[steps_at : steps_at + steps]
    return read_codes(parts[0], I8, weight.rows, parts[1]).values().astype("<f4").tobytes()


def groups_of(cols: int) -> int:
    """Return how many groups of 32 columns there are."""
    return -(-cols // GROUP)
