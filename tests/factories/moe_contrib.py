"""Mixtures as the contrib operators `MoE` and `QMoE`, with the routers that go with them."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.factories.moe_shapes import Array, Mix, Weights, logits_of
from tests.factories.onnx_blocks import CONTRIB, Block, GraphBuilder

ACTS: Final = {
    "relu": "relu",
    "silu": "silu",
    "gelu_tanh": "gelu",
    "identity": "identity",
    "swiglu": "swiglu",
    "swiglu_clipped": "swiglu",
}
ROUTERS: Final = (
    "softmax_topk_renorm",
    "softmax_topk",
    "sparsemixer",
    "sigmoid_topk",
    "sigmoid_topk_renorm",
)


@dataclass(frozen=True)
class Contrib:
    """How the operator is written.

    Attributes:
        bits: 32 for MoE, else QMoE.
        block: Elements per scale, 0 for one scale per row.
        zeros: Whether there are zero points.
        fusion: swiglu_fusion; 0 with a third matrix.
        normalize: The attribute; None as the router says.
    """

    bits: int = 32
    block: int = 0
    zeros: bool = False
    fusion: int = 1
    normalize: int | None = None


def contrib(mix: Mix, how: Contrib = Contrib()) -> Block:
    """Return x (1, s, width) -> y."""

    def build(b: GraphBuilder, x: str) -> str:
        rows = b.op("Reshape", x, b.ints(-1, mix.width))
        logits, gates = _scores(b, rows, mix)
        names, bits = _operands(b, mix, how)
        normalize = int(mix.router.endswith("renorm")) if how.normalize is None else how.normalize
        attrs: dict[str, Any] = {
            "k": mix.k,
            "activation_type": ACTS[mix.act],
            "normalize_routing_weights": normalize,
            "use_sparse_mixer": int(mix.router == "sparsemixer"),
            **bits,
        }
        if mix.gated:
            attrs["swiglu_fusion"] = how.fusion
        if mix.act == "swiglu_clipped":
            attrs |= {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.4}
        if gates is not None:
            names += [""] * (12 - len(names)) + [gates]
        kind = "MoE" if how.bits == 32 else "QMoE"
        y = b.op(kind, rows, logits, *names, domain=CONTRIB, **attrs)
        return b.op("Reshape", y, b.ints(1, -1, mix.width))

    return build


def _scores(b: GraphBuilder, rows: str, mix: Mix) -> tuple[str, str | None]:
    """Return router_probs, and for QMoE's sigmoid routers the gates of operand 14."""
    logits = b.op("Reshape", logits_of(b, rows, mix), b.ints(-1, mix.experts))
    if mix.router == "sigmoid_topk_renorm":
        groups = {"n_group": mix.groups, "topk_group": 2, "group_topk": 2}
        bias = b.weight(mix.experts, scale=0.1)
        router = b.op("MoEGroupRouter", logits, bias, domain=CONTRIB, top_k=mix.k, **groups)
        return router, None
    if mix.router == "sigmoid_topk":
        scores = b.op("Sigmoid", logits)
        return b.op("Add", scores, b.weight(mix.experts, scale=0.1)), scores
    return logits, None


def _operands(b: GraphBuilder, mix: Mix, how: Contrib) -> tuple[list[str], dict[str, Any]]:
    """Return operands 2 and up, and the attributes that describe them."""
    w = Weights.of(mix, b.rng)
    first, bias, third, third_bias = w.w_in, w.b_in, None, None
    half = mix.wide // 2
    if mix.gated and how.fusion == 1:
        order = np.arange(mix.wide).reshape(2, half).T.reshape(-1)
        first, bias = first[:, order], bias[:, order]
    if mix.gated and how.fusion == 0:
        first, third = first[:, :half], first[:, half:]
        bias, third_bias = bias[:, :half], bias[:, half:]
    matrices = [(first, bias), (w.w_out, w.b_out), (third, third_bias)]
    if how.bits == 32:
        names = []
        for matrix, vector in matrices:
            names.append("" if matrix is None else b.const(matrix))
            names.append(b.const(vector) if mix.biases and vector is not None else "")
        return _trimmed(names), {}
    names, zeros = [], []
    for matrix, vector in matrices:
        parts = ["", "", ""] if matrix is None else list(quantised(b, matrix, how))
        names += [*parts[:2], b.const(vector) if mix.biases and vector is not None else ""]
        zeros.append(parts[2])
    attrs = {"expert_weight_bits": how.bits, **({"block_size": how.block} if how.block else {})}
    return _trimmed([*names, *zeros]), attrs


def _trimmed(names: list[str]) -> list[str]:
    while not names[-1]:
        names = names[:-1]
    return names


def quantised(b: GraphBuilder, matrix: Array, how: Contrib) -> tuple[str, str, str]:
    """Return packed codes, scales and zero points ("" without) of (E, N, K)."""
    blocks = matrix.reshape(*matrix.shape[:2], -1, how.block or matrix.shape[2])
    top = 2**how.bits - 1
    if how.zeros:
        low, high = blocks.min(-1), blocks.max(-1)
        scales = (high - low) / top
        points = np.clip(np.rint(-low / scales), 0, top)
    else:
        scales = np.abs(blocks).max(-1) / max(2 ** (how.bits - 1) - 1, 1)
        points = np.full(scales.shape, 2.0 ** (how.bits - 1))
    codes = np.clip(np.rint(blocks / scales[..., None]) + points[..., None], 0, top)
    if not how.block:
        scales, points = scales[..., 0], points[..., 0]
    packed = packed_codes(codes.reshape(matrix.shape), how.bits)
    zeros = b.const(packed_codes(points, how.bits), "uint8") if how.zeros else ""
    return b.const(packed, "uint8"), b.const(scales), zeros


def packed_codes(codes: Array, bits: int) -> Array:
    """Pack codes along the last axis, first in the low bits, padded with zeros."""
    count = 8 // bits
    missing = -codes.shape[-1] % count
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]).astype(np.uint8)
    parts = padded.reshape(*codes.shape[:-1], -1, count)
    return np.bitwise_or.reduce(parts << np.arange(0, 8, bits, dtype=np.uint8), axis=-1)
