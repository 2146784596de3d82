"""Weight-only quantised products (`com.microsoft::MatMulNBits`) as products with f32 matrices.

    B u8 (N, blocks, block * bits / 8), scales (N, blocks), zero points   ->   W f32 (K, N)

Packed values stand from the low bits of a byte up. Without zero points the middle of the range,
2^(bits - 1), is zero. The arithmetic is `(value - zero) * scale` in f32, as at accuracy level 0.
"""

from typing import Final

import numpy as np

from compiler.frontend.values import Array
from compiler.frontend.writer import Writer

BITS: Final = frozenset({2, 4, 8})


def expand_packed_product(w: Writer) -> None:
    """Write a product with a packed matrix as one with what the matrix stands for."""
    attrs = w.attrs(bits=4)
    x, packed, scales, zeros, order, bias, *_ = w.inputs
    w.need(not order, "its groups are in another order", "export again without a group index")
    bits = int(attrs["bits"])
    w.need(
        bits in BITS,
        f"codes of {bits} bits",
        "quantise to 2, 4 or 8 bits: the schema describes no other packing",
    )
    size = (int(attrs["K"]), int(attrs["N"]))
    matrix = dequantised(
        w.stored(packed, "the packed matrix"),
        w.stored(scales, "the scales"),
        w.stored(zeros, "the zero points") if zeros else None,
        size=size,
        bits=bits,
        block=int(attrs["block_size"]),
    )
    product = w.op("MatMul", x, w.store(matrix), out="" if bias else w.outputs[0])
    if bias:
        w.op("Add", product, bias, out=w.outputs[0])


def unpack(data: Array, bits: int) -> Array:
    """Return the values packed along the last axis of u8 bytes, lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    apart = (data[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.asarray(apart.reshape(*data.shape[:-1], -1))


def dequantised(
    packed: Array,
    scales: Array,
    zeros: Array | None,
    *,
    size: tuple[int, int],
    bits: int,
    block: int,
) -> Array:
    """Return the matrix (K, N) f32 behind a weight.

    Args:
        packed: u8, N * blocks * (block * bits / 8) bytes.
        scales: N * blocks numbers.
        zeros: u8 packed per row like the weight, or one number per block, or None.
        size: (K, N).
        bits: Bits per value, one of `BITS`.
        block: Values along K that share a scale.

    Raises:
        ValueError: The arrays do not have the sizes that follow from the attributes.
    """
    k, n = size
    if bits not in BITS or block < 1:
        raise ValueError(f"{bits} bits in blocks of {block}")
    blocks = -(-k // block)
    values = unpack(packed.reshape(n, blocks, -1), bits)
    if values.shape[2] != block or scales.size != n * blocks:
        raise ValueError(f"weight of {packed.size} bytes does not hold {n} x {k} values")
    if zeros is None:
        zero = np.full((n, blocks), 1 << (bits - 1), np.float32)
    elif zeros.dtype == np.uint8:
        zero = unpack(zeros.reshape(n, -1), bits)[:, :blocks].astype(np.float32)
    else:
        zero = zeros.reshape(n, blocks).astype(np.float32)
    scale = scales.reshape(n, blocks, 1).astype(np.float32)
    rows = (values.astype(np.float32) - zero[:, :, None]) * scale
    return np.ascontiguousarray(rows.reshape(n, -1)[:, :k].T)
