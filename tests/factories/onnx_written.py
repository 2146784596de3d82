"""Cases of operators that become others, or numbers, while importing; see `onnx_operators`."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from tests.factories.onnx_operators import (
    IMAGE,
    Array,
    OperatorCase,
    X,
    case,
    f32,
    floats,
    i64,
    ints,
    truth,
    u8,
)


def joined(cases: Sequence[OperatorCase]) -> onnx.ModelProto:
    """Return one model with all cases of one operator set side by side, names prefixed `0/`."""
    whole = onnx.GraphProto(name="cases")
    for at, item in enumerate(cases):
        model = onnx.compose.add_prefix(item.model(), f"{at}/")
        for field_name in ("node", "input", "output", "initializer"):
            getattr(whole, field_name).extend(getattr(model.graph, field_name))
    opsets = [helper.make_opsetid("", cases[0].opset)]
    return helper.make_model(whole, opset_imports=opsets, ir_version=10)


def ints2(*values: int) -> Array:
    """Return one row of integers."""
    return np.array([values], np.int64)


def ints_scalar(value: int) -> Array:
    """Return an integer without axes."""
    return np.array(value, np.int64)


REGIONS = np.array([[0, 0, 15, 15], [3, 2, 9, 14], [-4, 5, 21, 6.5], [7, 7, 7.5, 7.2]], np.float32)
HEADS = f32(1, 4, 5, 8)
WRITTEN_OUT: Sequence[OperatorCase] = (
    *(
        case("Einsum", *parts, equation=text, label=text)
        for text, parts in (
            ("ij,jk->ik", (f32(3, 4), f32(4, 5))),
            ("bhqd,bhkd->bhqk", (f32(2, 3, 4, 5), f32(2, 3, 6, 5))),
            ("bhqk,bkhd->bqhd", (f32(2, 3, 4, 5), f32(2, 5, 3, 6))),
            ("bij,bjk,bk->bi", (f32(2, 3, 4), f32(2, 4, 5), f32(2, 5))),
            ("i,j->ij", (f32(3), f32(4))),
            ("bii->bi", (f32(2, 4, 4),)),
            ("ii", (f32(4, 4),)),
            ("bij->b", (f32(2, 3, 4),)),
            ("bij->jb", (f32(2, 3, 4),)),
            ("...ij,...jk->...ik", (f32(2, 3, 4, 5), f32(1, 3, 5, 6))),
            ("b...d,d...->...b", (f32(2, 3, 4), f32(4, 3))),
            ("ab,ab->ab", (f32(3, 4), f32(3, 4))),
            ("ab,ab", (f32(3, 4), f32(3, 4))),
            ("abcd,cde,dea->b", (f32(2, 3, 4, 5), f32(4, 5, 6), f32(5, 6, 2))),
            (" b n h , b m h -> n m ", (f32(2, 3, 4), f32(2, 5, 4))),
            ("ij,j->i", (f32(3, 4), floats(4))),
            ("nchw,cd->ndhw", (f32(2, 4, 3, 3), floats(4, 5))),
        )
    ),
    *(
        case(
            *("GridSample", f32(2, 3, 5, 6), f32(2, 4, 3, 2, low=-1.6, high=1.6)),
            mode=mode,
            padding_mode=padding,
            align_corners=aligned,
            opset=20,
            label=f"{mode}-{padding}-{aligned}",
        )
        for mode in ("nearest", "linear", "cubic")
        for padding in ("zeros", "border", "reflection")
        for aligned in (0, 1)
    ),
    case(
        *("GridSample", f32(1, 3, 5, 6), f32(1, 4, 3, 2, low=-1.2, high=1.2)),
        mode="bilinear",
        opset=16,
        label="old",
    ),
    *(
        case(
            *("GridSample", f32(2, 2, 3, 4, 5), f32(2, 3, 2, 4, 3, low=-1.3, high=1.3)),
            mode=mode,
            padding_mode=padding,
            opset=20,
            label=f"volume-{mode}-{padding}",
        )
        for mode, padding in (("nearest", "zeros"), ("linear", "border"), ("linear", "zeros"))
    ),
    case("AffineGrid", f32(2, 2, 3), ints(2, 3, 4, 5), opset=20),
    case("AffineGrid", f32(2, 2, 3), ints(2, 3, 4, 5), align_corners=1, opset=20, label="corners"),
    *(
        case(
            *("RoiAlign", f32(2, 3, 8, 9), REGIONS, ints(0, 1, 1, 0)),
            output_height=3,
            output_width=2,
            sampling_ratio=2,
            spatial_scale=0.5,
            coordinate_transformation_mode=mode,
            label=mode,
        )
        for mode in ("half_pixel", "output_half_pixel")
    ),
    case(
        *("RoiAlign", f32(1, 2, 8, 9), f32(3, 4, low=0.0, high=8.0), i64(3, low=0, high=0)),
        output_height=2,
        output_width=3,
        sampling_ratio=1,
        label="running",
    ),
    case("BitShift", u8(9), np.array(3, np.uint8), direction="LEFT"),
    case("BitShift", u8(9), np.array([1, 2, 3] * 3, np.uint8), direction="RIGHT", label="right"),
    case("BitwiseNot", i64(9)),
    case("BitwiseNot", u8(9), label="u8"),
    case("CenterCropPad", X, ints(4, 3), axes=[1, 2]),
    case("Col2Im", f32(1, 12, 12), ints(5, 4), ints(2, 2)),
    case(
        *("Col2Im", f32(2, 18, 12), ints(5, 5), ints(3, 3)),
        pads=[1, 1, 0, 1],
        strides=[1, 2],
        label="strides",
    ),
    case("Compress", X, np.array([True, False, True]), axis=1),
    case("Compress", X, np.array([False, True, True, False, True]), label="flat"),
    case("CumProd", X, np.array(1, np.int64), opset=26),
    case("CumProd", X, np.array(2, np.int64), exclusive=1, reverse=1, opset=26, label="reverse"),
    case("DFT", f32(1, 9, 1), opset=17, axis=1),
    case("DFT", f32(2, 8, 3, 2), None, np.array(1, np.int64), opset=20, label="complex"),
    case("DFT", f32(2, 8, 1), ints_scalar(10), opset=17, axis=1, onesided=1, label="onesided"),
    case("DFT", f32(2, 8, 2), opset=17, axis=1, inverse=1, label="inverse"),
    case("STFT", f32(2, 40, 1), ints_scalar(6), floats(8)),
    case("STFT", f32(1, 33, 1), ints_scalar(5), None, ints_scalar(9), label="length"),
    case("STFT", f32(1, 33, 1), ints_scalar(5), floats(9), onesided=0, label="whole"),
    *(case("Det", f32(2, n, n), label=str(n)) for n in (1, 2, 3, 4)),
    case("EyeLike", f32(3, 5), k=1),
    case("EyeLike", f32(3, 5), dtype=onnx.TensorProto.INT64, label="int"),
    case("GlobalLpPool", IMAGE),
    case("GlobalLpPool", IMAGE, p=3, label="three"),
    case("LpPool", IMAGE, kernel_shape=[3, 2], strides=[2, 2]),
    case("LpPool", IMAGE, kernel_shape=[3, 3], pads=[1, 1, 1, 1], p=1, label="one"),
    case("LpPool", IMAGE, kernel_shape=[2, 2], auto_pad="SAME_UPPER", p=3, label="three"),
    case(
        *("MaxUnpool", f32(1, 1, 2, 2), np.array([[[[5, 7], [13, 15]]]], np.int64)),
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    case("MeanVarianceNormalization", IMAGE),
    case("MeanVarianceNormalization", IMAGE, axes=[1, 2], label="axes"),
    case("TensorScatter", f32(2, 3, 6, 4), f32(2, 3, 2, 4), ints(1, 3), opset=24),
    case(
        *("TensorScatter", f32(2, 3, 6, 4), f32(2, 3, 2, 4), ints(5, 3)),
        mode="circular",
        opset=24,
        label="ring",
    ),
    case("TensorScatter", f32(2, 6, 4), f32(2, 3, 4), axis=1, opset=24, label="front"),
    case("CausalConvWithState", f32(2, 3, 6), floats(3, 1, 4), floats(3), opset=27, results=(2, 2)),
    case(
        *("CausalConvWithState", f32(2, 3, 6), floats(3, 1, 4), None, f32(2, 3, 3)),
        activation="silu",
        opset=27,
        results=(2, 2),
        label="state",
    ),
    *(
        case(
            *("LinearAttention", f32(1, 5, 8), f32(1, 5, 8), f32(1, 5, 8), f32(1, 2, 4, 4)),
            *((f32(1, 5, 8, high=0.0) if "gated" in rule else None),),
            *((f32(1, 5, 2, low=0.0, high=1.0),) if "delta" in rule else ()),
            q_num_heads=2,
            kv_num_heads=2,
            update_rule=rule,
            opset=27,
            results=(2, 2),
            label=rule,
        )
        for rule in ("linear", "gated", "delta", "gated_delta")
    ),
    case("RotaryEmbedding", HEADS, floats(9, 4), floats(9, 4), ints2(0, 2, 4, 6, 8), opset=23),
    case("RotaryEmbedding", HEADS, floats(1, 5, 4), floats(1, 5, 4), opset=23, label="tables"),
    case(
        *("RotaryEmbedding", f32(2, 3, 16), floats(2, 3, 4), floats(2, 3, 4)),
        num_heads=2,
        interleaved=1,
        opset=23,
        label="pairs",
    ),
    case(
        *("RotaryEmbedding", HEADS, floats(1, 5, 2), floats(1, 5, 2)),
        rotary_embedding_dim=4,
        opset=23,
        label="part",
    ),
    case("Attention", HEADS, HEADS, HEADS, opset=23),
    case("Attention", HEADS, f32(1, 2, 7, 8), f32(1, 2, 7, 6), opset=23, label="cross"),
    case("Attention", HEADS, HEADS, HEADS, is_causal=1, scale=0.7, opset=23, label="causal"),
    case(
        *("Attention", f32(2, 5, 32), f32(2, 7, 16), f32(2, 7, 16)),
        q_num_heads=4,
        kv_num_heads=2,
        softcap=2.0,
        opset=23,
        label="flat",
    ),
    case("Attention", HEADS, HEADS, HEADS, f32(5, 5), opset=23, label="mask"),
    case("Attention", HEADS, HEADS, HEADS, f32(1, 4, 5, 5), opset=24, label="mask4"),
    case("Attention", HEADS, HEADS, HEADS, truth(5, 5), opset=24, label="truth"),
    case(
        *("Attention", f32(1, 4, 2, 8), f32(1, 2, 2, 8), f32(1, 2, 2, 8), None),
        *(f32(1, 2, 3, 8), f32(1, 2, 3, 8)),
        is_causal=1,
        opset=23,
        results=(3, 3),
        label="cache",
    ),
    case(
        *("Attention", f32(2, 2, 3, 8), f32(2, 2, 6, 8), f32(2, 2, 6, 8), None, None, None),
        ints(4, 6),
        is_causal=1,
        opset=24,
        label="filled",
    ),
)
BY_THE_STANDARD: Sequence[OperatorCase] = (
    case("SwiGLU", X, X, opset=28),
    case("SwiGLU", X, X, alpha=1.7, opset=28, label="alpha"),
    case("Swish", X, alpha=0.7, opset=24),
)
"""Operators that ONNX Runtime does not have; the reference evaluator of ONNX judges them."""
FOLDED: Sequence[OperatorCase] = (
    case("Constant", value_floats=[1.0, 2.0]),
    case("ConstantOfShape", ints(2, 3)),
    case("Range", ints_scalar(2), ints_scalar(11), ints_scalar(3)),
    case("Shape", floats(2, 3)),
    case("Size", floats(2, 3)),
    case("NonZero", np.array([[1, 0, 2], [0, 0, 3]], np.float32)),
    case("Unique", np.array([3, 1, 3, 2], np.int64), results=(4, 1)),
    *(case(f"{kind}Window", ints_scalar(9)) for kind in ("Hann", "Hamming", "Blackman")),
    case(
        *("MelWeightMatrix", ints_scalar(8), ints_scalar(64), ints_scalar(8000)),
        *(np.array(0.0, np.float32), np.array(4000.0, np.float32)),
    ),
)
"""Operators whose operands are known at import; the test adds each result to an input."""
