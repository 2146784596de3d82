"""The operators that are written out in others while a graph is evaluated (`evaluate`)."""

from types import MappingProxyType
from typing import Final

from compiler.frontend import expand_plain as p
from compiler.frontend.expand_attention import (
    expand_attention,
    expand_multi_head_attention,
    expand_rotary_embedding,
)
from compiler.frontend.expand_einsum import expand_einsum
from compiler.frontend.expand_function import expand_function
from compiler.frontend.expand_sample import expand_grid_sample, expand_roi_align
from compiler.frontend.weight_only import expand_packed_product
from compiler.frontend.writer import Expansions

BY_THE_STANDARD: Final = (
    *("AffineGrid", "CausalConvWithState", "CenterCropPad", "LinearAttention"),
    *("MeanVarianceNormalization", "SwiGLU"),
)
"""Operators whose body in the ONNX standard is what is compiled."""

EXPANSIONS: Final[Expansions] = MappingProxyType(
    {
        **dict.fromkeys(BY_THE_STANDARD, expand_function),
        "Attention": expand_attention,
        "BitShift": p.bit_shift,
        "BitwiseNot": p.bitwise_not,
        "Col2Im": p.col2im,
        "Compress": p.compress,
        "CumProd": p.cum_prod,
        "DFT": p.fourier,
        "Det": p.determinant,
        "Einsum": expand_einsum,
        "EyeLike": p.eye_like,
        "GlobalLpPool": p.global_lp_pool,
        "GridSample": expand_grid_sample,
        "LpPool": p.lp_pool,
        "MaxUnpool": p.max_unpool,
        "RoiAlign": expand_roi_align,
        "RotaryEmbedding": expand_rotary_embedding,
        "STFT": p.short_time_fourier,
        "TensorScatter": p.tensor_scatter,
        "com.microsoft::MatMulNBits": expand_packed_product,
        "com.microsoft::MultiHeadAttention": expand_multi_head_attention,
    }
)
