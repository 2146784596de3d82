"""The reference operations: numbers of their kinds and the layout of their geometry.

A reference operation computes on flat buffers; which element meets which is an i32 constant, its
*geometry*: named fields in a fixed order (`LAYOUTS`). A field that names a source holds the number
of an input (0, 1, ...) or minus the position of a weight (-1 = the weight after the geometry).
Strides and starts count elements. Sizes that are not used are 1.

The kernels check a geometry against the sizes of their operands on every call, before they touch
anything: a wrong one ends the run with `BAD_PLAN` and reaches no byte outside the operands.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Final

RANK: Final = 8
BATCH_RANK: Final = 6
MAX_SOURCES: Final = 64
MAX_PIECES: Final = 4096


class MapKind(IntEnum):
    """Functions of one to three elements; a number, once used, never changes its meaning.

    Names that end in `_I` take i32, the others f32; comparisons and casts say so themselves.
    """

    NEG = 0
    ABS = 1
    SQRT = 2
    RECIPROCAL = 3
    EXP = 4
    LOG = 5
    SIN = 6
    COS = 7
    TANH = 8
    SIGMOID = 9
    ERF = 10
    FLOOR = 11
    CEIL = 12
    ROUND = 13
    SIGN = 14
    RELU = 15
    SOFTPLUS = 16
    ELU = 17
    LEAKY_RELU = 18
    HARD_SIGMOID = 19
    HARD_SWISH = 20
    SOFTSIGN = 21
    GELU = 22
    GELU_TANH = 23
    MISH = 24
    TAN = 25
    ATAN = 26
    SINH = 27
    COSH = 28
    THRESHOLDED_RELU = 29
    SHRINK = 30
    SWISH = 31
    ASIN = 32
    ACOS = 33
    ASINH = 34
    ACOSH = 35
    ATANH = 36
    ADD = 40
    SUB = 41
    MUL = 42
    DIV = 43
    POW = 44
    MAX = 45
    MIN = 46
    FMOD = 47
    PRELU = 48
    CLIP = 50
    WHERE = 51
    EQUAL = 60
    LESS = 61
    LESS_EQUAL = 62
    IS_NAN = 63
    IS_INF = 64
    NEG_I = 80
    ABS_I = 81
    SIGN_I = 82
    NOT_I = 83
    ADD_I = 90
    SUB_I = 91
    MUL_I = 92
    DIV_I = 93
    MOD_I = 94
    FMOD_I = 95
    MAX_I = 96
    MIN_I = 97
    AND_I = 98
    OR_I = 99
    XOR_I = 100
    EQUAL_I = 101
    LESS_I = 102
    LESS_EQUAL_I = 103
    CLIP_I = 110
    WHERE_I = 111
    TO_INT = 120
    TO_FLOAT = 121
    TO_BOOL = 122
    TO_BOOL_I = 123
    WRAP_U8_I = 124
    WRAP_I8_I = 125
    QUANTISE = 130
    """round(a / b) + c, clipped to [alpha, beta]; half to even; a, b f32, c i32 -> i32."""
    DEQUANTISE = 131
    """(a - c) * b; a, c i32, b f32 -> f32."""


class ReduceKind(IntEnum):
    """How elements become one. f32 sums are taken in f64, in order, and rounded once."""

    SUM = 0
    MEAN = 1
    MAX = 2
    MIN = 3
    PROD = 4
    L1 = 5
    L2 = 6
    SUM_SQUARE = 7
    ARG_MAX = 8
    ARG_MIN = 9
    ARG_MAX_LAST = 10
    ARG_MIN_LAST = 11


class PoolKind(IntEnum):
    """`AVERAGE` divides by the elements of the image, `AVERAGE_PADDED` by those of the frame."""

    MAX = 0
    AVERAGE = 1
    AVERAGE_PADDED = 2


class ScatterKind(IntEnum):
    """What happens to the element that an update meets."""

    SET = 0
    ADD = 1
    MUL = 2
    MAX = 3
    MIN = 4


Layout = tuple[tuple[str, int], ...]


def _layout(text: str) -> Layout:
    fields = []
    for item in text.split():
        name, _, count = item.partition(":")
        fields.append((name, int(count or 1)))
    return tuple(fields)


LAYOUTS: Final[Mapping[str, Layout]] = MappingProxyType(
    {
        "REF_MOVE": _layout("x x_at y_at sizes:8 x_steps:8 y_steps:8"),
        "REF_MAP": _layout("sizes:8 a a_at a_steps:8 b b_at b_steps:8 c c_at c_steps:8"),
        "REF_REDUCE": _layout("x x_at sizes:8 x_steps:8 inner:8 inner_steps:8"),
        "REF_CONTRACT": _layout("a b sizes:6 m k n a_at a_steps:6 a_m a_k b_at b_steps:6 b_k b_n"),
        "REF_CONV": _layout(
            "x w has_bias bias batch channels height width filters groups kh kw step_h step_w"
            " gap_h gap_w top left out_h out_w"
        ),
        "REF_POOL": _layout(
            "x planes height width kh kw step_h step_w gap_h gap_w top left bottom right"
            " out_h out_w"
        ),
        "REF_RESAMPLE": _layout("x w index outer n inner m taps"),
        "REF_GATHER": _layout("x index limit step x_at i_at sizes:8 x_steps:8 i_steps:8"),
        "REF_SCATTER": _layout(
            "x index u limit step y_at i_at u_at sizes:8 y_steps:8 i_steps:8 u_steps:8"
        ),
        "REF_TOPK": _layout("x outer n inner k"),
        "REF_SCAN": _layout("x outer n inner"),
    }
)
"""Fields of one geometry row by operation; `REF_CONV_TRANSPOSE` has that of `REF_CONV`."""


def layout_of(op_name: str) -> Layout:
    """Return the fields of an operation's geometry."""
    return LAYOUTS[op_name.removesuffix("_TRANSPOSE")]


def geometry_length(op_name: str) -> int:
    """Return how many numbers one row of an operation's geometry has."""
    return sum(count for _, count in layout_of(op_name))


def pack_geometry(op_name: str, fields: Mapping[str, int | Sequence[int]]) -> list[int]:
    """Return one row of geometry; sizes are filled up in front with 1, strides with 0."""
    row: list[int] = []
    for name, count in layout_of(op_name):
        value = fields[name]
        items = [value] if isinstance(value, int) else list(value)
        fill = 0 if name.endswith("steps") else 1
        row += [fill] * (count - len(items)) + items
    return row


def unpack_geometry(op_name: str, row: Sequence[int]) -> dict[str, list[int]]:
    """Return the fields of one row of geometry, each as a list."""
    fields: dict[str, list[int]] = {}
    at = 0
    for name, count in layout_of(op_name):
        fields[name] = [int(item) for item in row[at : at + count]]
        at += count
    return fields
