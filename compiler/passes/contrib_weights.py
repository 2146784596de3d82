"""Weights and activation of `com.microsoft::MoE` and `QMoE`, as `moe.experts` has them.

Stacks are (E, N, K). QMoE holds codes of 2, 4 or 8 bits, element 0 in the low bits, with scales per
row (E, N) or per block (E, N, K / block) and zero points in the same shapes, packed along their
last axis; without zero points it is 2^(bits - 1). Not read: 3 bits, fp4 and fp8, weights that are
already packed for another kernel. Layouts agree with the CPU kernels of ONNX Runtime 1.32.
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
BITS: Final = (2, 4, 8)
SEPARATE, INTERLEAVED, CONCATENATED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class _Ports:
    """Operand numbers of one matrix: weight, bias, and for QMoE scales and zero points."""

    weight: int
    bias: int
    scales: int = -1
    zeros: int = -1


_PORTS: Final = {
    "com.microsoft::MoE": (_Ports(2, 3), _Ports(4, 5), _Ports(6, 7)),
    "com.microsoft::QMoE": (_Ports(2, 4, 3, 11), _Ports(5, 7, 6, 12), _Ports(8, 10, 9, 13)),
}
CONTRIB_OPS: Final = tuple(_PORTS)


def read_experts(op: OnnxOp, constants: ConstantTable) -> Experts | str:
    """Return the experts of a contrib operation, or why they cannot be read."""
    unread = _unread(op)
    if unread:
        return unread
    arrays: list[tuple[Array, Array | None] | None] = []
    for number, ports in enumerate(_PORTS[op.op.data], start=1):
        arrays.append(_matrix(op, ports, f"fc{number}_expert_weight_bits", constants))
    first, last, up = arrays
    if first is None or last is None:
        return "its weights are no constants of 2, 4, 8 or 32 bits"
    return _assembled(op, first, last, up)


def _unread(op: OnnxOp) -> str:
    if attr(op, "quant_type") not in (None, "int"):
        return f"quant_type {attr(op, 'quant_type')!r}"
    if attr(op, "weights_prepacked") == 1:
        return "its weights are packed for another kernel"
    if attr(op, "swiglu_limit_after_activation"):
        return "it clips behind the activation"
    if attr(op, "swiglu_limit") == 0.0:
        return "swiglu_limit 0"
    return ""


def _matrix(
    op: OnnxOp, ports: _Ports, bits_name: str, constants: ConstantTable
) -> tuple[Array, Array | None] | None:
    weight = constants.get(op.operand_at(ports.weight))
    bias = constants.get(op.operand_at(ports.bias))
    if weight is None or weight.ndim != 3:
        return None
    if ports.scales < 0:
        return weight, bias
    scales = constants.get(op.operand_at(ports.scales))
    bits = attr(op, bits_name) or attr(op, "expert_weight_bits") or 4
    if scales is None or bits not in BITS:
        return None
    assert isinstance(bits, int)
    zeros = constants.get(op.operand_at(ports.zeros))
    return dequantised(weight, scales, zeros, bits), bias


def dequantised(weight: Array, scales: Array, zeros: Array | None, bits: int) -> Array:
    """Return (E, N, K) f32 of packed codes.

    Args:
        weight: (E, N, K * bits / 8) uint8.
        scales: (E, N) or (E, N, K / block).
        zeros: Packed zero points, or None for 2^(bits - 1).
        bits: 2, 4 or 8.
    """
    codes = unpacked(weight, bits)
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
    """Return codes, `8 / bits` per byte, the first in the low bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)


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
