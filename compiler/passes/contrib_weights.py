"""Weights and activation of `com.microsoft::MoE` and `QMoE`, as `moe.experts` has them.

Stacks are (E, N, K). QMoE holds codes of 2, 3, 4 or 8 bits, element 0 in the low bits, with scales
per row (E, N) or per block (E, N, K / block) and zero points in the same shapes, packed along their
last axis; without zero points it is 2^(bits - 1). Three bits come in the one form that the schema
describes: interleaved swiglu in blocks of 32, 64 or 128 around 4. With `quant_type` fp8 a weight is
float8e4m3fn times a scale per square of `block_size`, or per expert without one. Layouts agree with
the CPU kernels of ONNX Runtime 1.32 and, where those are missing, with its schema.

Not read, because the schema does not say which half of a byte comes first: fp4, nvfp4, wfp4afp8;
nor weights that are already packed for another kernel.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from compiler.analysis.constants import Array, ConstantTable
from compiler.analysis.moe_meaning import Experts
from compiler.dialects.sp import OnnxOp
from compiler.passes.match import attr

ACTS: Final = {"relu": "relu", "gelu": "gelu_tanh", "silu": "silu", "identity": "identity"}
"""What the CPU kernels compute for each `activation_type` of one operand; gelu is the tanh form."""
BITS: Final = (2, 3, 4, 8)
ODD_BITS: Final = 3
BYTE: Final = 8
ODD_BLOCKS: Final = (32, 64, 128)
FLOAT8: Final = "fp8"
INTEGERS: Final = "int"
_GATES: Final = 14
SEPARATE, INTERLEAVED, CONCATENATED = 0, 1, 2


class _UnreadError(Exception):
    """Why experts cannot be read."""


@dataclass(frozen=True, slots=True)
class _Ports:
    """Operand numbers of one matrix: weight, bias, and what QMoE adds to them."""

    weight: int
    bias: int
    scales: int = -1
    zeros: int = -1
    whole: int = -1
    """One scale per expert."""


_PORTS: Final = {
    "com.microsoft::MoE": (_Ports(2, 3), _Ports(4, 5), _Ports(6, 7)),
    "com.microsoft::QMoE": (
        _Ports(2, 4, 3, 11, 15),
        _Ports(5, 7, 6, 12, 16),
        _Ports(8, 10, 9, 13),
    ),
}
CONTRIB_OPS: Final = tuple(_PORTS)


def read_experts(op: OnnxOp, constants: ConstantTable) -> Experts | str:
    """Return the experts of a contrib operation, or why they cannot be read."""
    unread = _unread(op)
    if unread:
        return unread
    try:
        first, last, up = (
            _matrix(op, ports, number, constants)
            for number, ports in enumerate(_PORTS[op.op.data], start=1)
        )
    except _UnreadError as error:
        return str(error)
    if first is None or last is None:
        return "it has no fc1 or no fc2"
    return _assembled(op, first, last, up)


def holds_bytes(op: OnnxOp) -> bool:
    """Return whether a matrix of a contrib operation is stored as integers of eight bits."""
    if _PORTS[op.op.data][0].scales < 0 or attr(op, "quant_type") == FLOAT8:
        return False
    given = ("expert_weight_bits", *(f"fc{number}_expert_weight_bits" for number in (1, 2, 3)))
    return BYTE in {attr(op, name) for name in given}


def _unread(op: OnnxOp) -> str:
    kind = attr(op, "quant_type")
    if kind not in (None, INTEGERS, FLOAT8):
        return f"quant_type {kind!r}: nothing says which half of a byte comes first"
    if attr(op, "use_sparse_mixer") and op.operand_at(_GATES) is not None:
        return "a sparse mixer makes its own gates, and operand 14 gives others"
    if attr(op, "weights_prepacked") == 1:
        return "its weights are packed for another kernel"
    if attr(op, "swiglu_limit_after_activation"):
        return "it clips behind the activation"
    if attr(op, "swiglu_limit") == 0.0:
        return "swiglu_limit 0"
    return ""


def _matrix(
    op: OnnxOp, ports: _Ports, number: int, constants: ConstantTable
) -> tuple[Array, Array | None] | None:
    """Return weight and bias of one matrix, None if the operation has none.

    Raises:
        _UnreadError: It is not constant, or in a form that is not read.
    """
    weight, bias = (_constant(op, at, constants) for at in (ports.weight, ports.bias))
    if weight is None:
        return None
    if weight.ndim != 3:
        raise _UnreadError(f"the weights of fc{number} have {weight.ndim} axes")
    if ports.scales < 0:
        return weight, bias
    scales, zeros = (_constant(op, at, constants) for at in (ports.scales, ports.zeros))
    if attr(op, "quant_type") == FLOAT8:
        if zeros is not None:
            raise _UnreadError("fp8 weights with zero points")
        whole = _constant(op, ports.whole, constants)
        return scaled(weight, scales, whole, _block(op)), bias
    bits = attr(op, f"fc{number}_expert_weight_bits") or attr(op, "expert_weight_bits") or 4
    if bits not in BITS:
        raise _UnreadError(f"codes of {bits} bits, read are {', '.join(map(str, BITS))}")
    assert isinstance(bits, int)
    if scales is None or weight.dtype != np.uint8:
        raise _UnreadError(f"fc{number} has no scales, or weights that are no bytes")
    if bits == ODD_BITS:
        _check_odd(op, weight, scales, zeros)
    return dequantised(weight, scales, zeros, bits), bias


def _constant(op: OnnxOp, at: int, constants: ConstantTable) -> Array | None:
    value = op.operand_at(at) if at >= 0 else None
    array = constants.get(value)
    if value is not None and array is None:
        raise _UnreadError(f"operand {at} is no constant")
    return array


def _block(op: OnnxOp) -> int:
    block = attr(op, "block_size")
    return block if isinstance(block, int) else 0


def _check_odd(op: OnnxOp, weight: Array, scales: Array, zeros: Array | None) -> None:
    """Refuse codes of three bits in any other form than the schema's one."""
    wanted = {"activation_type": "swiglu", "weights_prepacked": 0, "swiglu_fusion": INTERLEAVED}
    for name, value in wanted.items():
        if attr(op, name) != value:
            raise _UnreadError(f"codes of 3 bits ask for {name} = {value}, not {attr(op, name)}")
    block = _block(op)
    if block not in ODD_BLOCKS or scales.ndim != 3:
        raise _UnreadError(f"codes of 3 bits in blocks of {block}, not of 32, 64 or 128")
    cols = scales.shape[2] * block
    spare = unpacked(weight, 1)[..., cols * ODD_BITS :]
    if weight.shape[2] != -(-cols * ODD_BITS // 8) or spare.any():
        raise _UnreadError("rows of 3-bit codes have another length, or bits behind their end")
    points = None if zeros is None else unpacked(zeros, ODD_BITS)[..., : scales.shape[2]]
    if points is not None and (points != 1 << (ODD_BITS - 1)).any():
        raise _UnreadError("codes of 3 bits around another zero point than 4")
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        raise _UnreadError("scales of 3-bit codes that are negative or not finite")


def scaled(weight: Array, scales: Array | None, whole: Array | None, block: int) -> Array:
    """Return (E, N, K) f32 of float8 weights.

    Args:
        weight: (E, N, K), the numbers that the bytes stand for.
        scales: (E, ceil(N / block), ceil(K / block)) if block is positive.
        whole: (E) if it is not.
        block: Side of the squares that share a scale.

    Raises:
        _UnreadError: A scale is missing or has another shape.
    """
    experts, rows, cols = weight.shape
    if block <= 0:
        if whole is None or whole.shape != (experts,):
            raise _UnreadError("fp8 weights without a scale per expert")
        return (weight * whole[:, None, None]).astype(np.float32)
    squares = (experts, -(-rows // block), -(-cols // block))
    if scales is None or scales.shape != squares:
        raise _UnreadError(f"fp8 weights without scales of shape {squares}")
    spread = scales.astype(np.float32).repeat(block, axis=1).repeat(block, axis=2)
    return (weight * spread[:, :rows, :cols]).astype(np.float32)


def dequantised(weight: Array, scales: Array, zeros: Array | None, bits: int) -> Array:
    """Return (E, N, K) f32 of packed codes.

    Args:
        weight: (E, N, ceil(K * bits / 8)) uint8.
        scales: (E, N) or (E, N, K / block).
        zeros: Packed zero points, or None for 2^(bits - 1).
        bits: 2, 3, 4 or 8; three bits with scales per block of `ODD_BLOCKS`, which divide K.
    """
    codes = unpacked(weight, bits)
    if bits == ODD_BITS:
        codes = codes[..., : codes.shape[-1] // ODD_BLOCKS[0] * ODD_BLOCKS[0]]
    experts, rows, cols = codes.shape
    by_block = scales.reshape(experts, rows, -1)
    if zeros is None:
        points = np.full(by_block.shape, 1 << (bits - 1), np.float32)
    else:
        packed = unpacked(zeros, bits)
        points = packed[..., : scales.shape[-1]].reshape(by_block.shape).astype(np.float32)
    blocks = codes.reshape(experts, rows, by_block.shape[2], -1).astype(np.float32)
    values = (blocks - points[..., None]) * by_block[..., None]
    return values.reshape(experts, rows, cols).astype(np.float32)


def unpacked(packed: Array, bits: int) -> Array:
    """Return the codes of rows of bytes, the first in the low bits; what is left over is cut."""
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
        return np.asarray(codes.reshape(*packed.shape[:-1], -1))
    stream = unpacked(packed, 1)
    count = stream.shape[-1] // bits
    parts = stream[..., : count * bits].reshape(*packed.shape[:-1], count, bits)
    return np.asarray((parts << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8))


def _assembled(
    op: OnnxOp,
    first: tuple[Array, Array | None],
    last: tuple[Array, Array | None],
    up: tuple[Array, Array | None] | None,
) -> Experts | str:
    kind, fusion = attr(op, "activation_type"), attr(op, "swiglu_fusion")
    gated = kind == "swiglu" or (kind == "silu" and up is not None)
    (w_in, b_in), (w_out, b_out) = first, last
    if not gated:
        if kind not in ACTS or up is not None:
            return f"activation {kind!r}" + (" with a second input matrix" if up else "")
        return _complete(w_in, w_out, b_in, b_out, ACTS[str(kind)], {})
    if up is not None:
        w_in = np.concatenate([w_in, up[0]], axis=1)
        if (b_in is None) != (up[1] is None):
            return "one of the two input matrices has a bias"
        b_in = None if b_in is None or up[1] is None else np.concatenate([b_in, up[1]], axis=1)
    elif fusion == INTERLEAVED:
        rows = np.arange(w_in.shape[1])
        order = np.concatenate([rows[0::2], rows[1::2]])
        w_in, b_in = w_in[:, order], None if b_in is None else b_in[:, order]
    elif fusion != CONCATENATED:
        return "swiglu_fusion 0 without fc3"
    act, options = _gated_act(op, str(kind))
    return _complete(w_in, w_out, b_in, b_out, act, options)


def _gated_act(op: OnnxOp, kind: str) -> tuple[str, dict[str, float]]:
    if kind == "silu":
        return "swiglu", {}
    names = {"alpha": "activation_alpha", "shift": "activation_beta", "limit": "swiglu_limit"}
    options = {"alpha": 1.0, "shift": 0.0, "limit": 0.0}
    for name, source in names.items():
        value = attr(op, source)
        if isinstance(value, float):
            options[name] = value
    plain = options == {"alpha": 1.0, "shift": 0.0, "limit": 0.0}
    return ("swiglu", {}) if plain else ("swiglu_clipped", options)


def _complete(
    w_in: Array,
    w_out: Array,
    b_in: Array | None,
    b_out: Array | None,
    act: str,
    options: dict[str, float],
) -> Experts:
    if b_in is not None or b_out is not None:
        b_in = np.zeros(w_in.shape[:2], np.float32) if b_in is None else b_in
        b_out = np.zeros(w_out.shape[:2], np.float32) if b_out is None else b_out
    return Experts(np.ascontiguousarray(w_in), w_out, b_in, b_out, act, options)
