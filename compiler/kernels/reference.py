"""Tables behind the reference kernels: the C of each elementwise function, and geometry offsets.

The meaning of each function over numpy arrays is in `compiler.simulator.reference_maps`; a test
holds the two tables to the same keys, and native bits to the simulator's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compiler.contract.reference import LAYOUTS, MapKind


@dataclass(frozen=True, slots=True)
class MapRow:
    """One elementwise function.

    Attributes:
        takes: Element types of its operands, `f` or `i` each.
        gives: Element type of its result.
        c: C expression over `a`, `b`, `c` (float or int32_t) and `alpha`, `beta` (float).
    """

    kind: MapKind
    takes: str
    gives: str
    c: str


_K: Final = MapKind
_ROWS: Final = (
    MapRow(_K.NEG, "f", "f", "-a"),
    MapRow(_K.ABS, "f", "f", "sf_ref_abs(a)"),
    MapRow(_K.SQRT, "f", "f", "sf_sqrt(a)"),
    MapRow(_K.RECIPROCAL, "f", "f", "1.0f / a"),
    MapRow(_K.EXP, "f", "f", "(float)sf_dexp(a)"),
    MapRow(_K.LOG, "f", "f", "(float)sf_dlog(a)"),
    MapRow(_K.SIN, "f", "f", "(float)sf_dsin(a, 0)"),
    MapRow(_K.COS, "f", "f", "(float)sf_dsin(a, 1)"),
    MapRow(_K.TANH, "f", "f", "(float)sf_dtanh(a)"),
    MapRow(_K.SIGMOID, "f", "f", "(float)sf_dsigmoid(a)"),
    MapRow(_K.ERF, "f", "f", "(float)sf_derf(a)"),
    MapRow(_K.FLOOR, "f", "f", "(float)sf_dfloor(a)"),
    MapRow(_K.CEIL, "f", "f", "(float)-sf_dfloor(-(double)a)"),
    MapRow(_K.ROUND, "f", "f", "(float)sf_dround(a)"),
    MapRow(_K.SIGN, "f", "f", "a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : a"),
    MapRow(_K.RELU, "f", "f", "a < 0.0f ? 0.0f : a"),
    MapRow(_K.SOFTPLUS, "f", "f", "(float)sf_dsoftplus(a)"),
    MapRow(_K.ELU, "f", "f", "a < 0.0f ? (float)((double)alpha * (sf_dexp(a) - 1.0)) : a"),
    MapRow(_K.LEAKY_RELU, "f", "f", "a < 0.0f ? alpha * a : a"),
    MapRow(_K.HARD_SIGMOID, "f", "f", "sf_ref_clip(alpha * a + beta, 0.0f, 1.0f)"),
    MapRow(_K.HARD_SWISH, "f", "f", "a * sf_ref_clip(alpha * a + beta, 0.0f, 1.0f)"),
    MapRow(_K.SOFTSIGN, "f", "f", "a / (1.0f + sf_ref_abs(a))"),
    MapRow(_K.GELU, "f", "f", "(float)(0.5 * a * (1.0 + sf_derf(a * 0.7071067811865476)))"),
    MapRow(
        _K.GELU_TANH,
        "f",
        "f",
        "(float)(0.5 * a * (1.0 + sf_dtanh(0.7978845608028654 * (a + 0.044715 * a * a * a))))",
    ),
    MapRow(_K.MISH, "f", "f", "(float)(a * sf_dtanh(sf_dsoftplus(a)))"),
    MapRow(_K.TAN, "f", "f", "(float)(sf_dsin(a, 0) / sf_dsin(a, 1))"),
    MapRow(_K.ATAN, "f", "f", "(float)sf_datan(a)"),
    MapRow(_K.SINH, "f", "f", "(float)((sf_dexp(a) - sf_dexp(-(double)a)) * 0.5)"),
    MapRow(_K.COSH, "f", "f", "(float)((sf_dexp(a) + sf_dexp(-(double)a)) * 0.5)"),
    MapRow(_K.THRESHOLDED_RELU, "f", "f", "a > alpha ? a : 0.0f"),
    MapRow(_K.SHRINK, "f", "f", "a < -alpha ? a + beta : a > alpha ? a - beta : 0.0f"),
    MapRow(_K.SWISH, "f", "f", "(float)(a * sf_dsigmoid((double)alpha * a))"),
    MapRow(_K.ASIN, "f", "f", "(float)sf_dasin(a)"),
    MapRow(_K.ACOS, "f", "f", "(float)sf_dacos(a)"),
    MapRow(_K.ASINH, "f", "f", "(float)sf_dasinh(a)"),
    MapRow(_K.ACOSH, "f", "f", "(float)sf_dacosh(a)"),
    MapRow(_K.ATANH, "f", "f", "(float)sf_datanh(a)"),
    MapRow(_K.ADD, "ff", "f", "a + b"),
    MapRow(_K.SUB, "ff", "f", "a - b"),
    MapRow(_K.MUL, "ff", "f", "a * b"),
    MapRow(_K.DIV, "ff", "f", "a / b"),
    MapRow(_K.POW, "ff", "f", "(float)sf_dpow(a, b)"),
    MapRow(_K.MAX, "ff", "f", "a > b ? a : b"),
    MapRow(_K.MIN, "ff", "f", "a < b ? a : b"),
    MapRow(_K.FMOD, "ff", "f", "(float)sf_dfmod(a, b)"),
    MapRow(_K.PRELU, "ff", "f", "a < 0.0f ? a * b : a"),
    MapRow(_K.CLIP, "fff", "f", "sf_ref_clip(a, b, c)"),
    MapRow(_K.WHERE, "iff", "f", "a ? b : c"),
    MapRow(_K.EQUAL, "ff", "i", "a == b"),
    MapRow(_K.LESS, "ff", "i", "a < b"),
    MapRow(_K.LESS_EQUAL, "ff", "i", "a <= b"),
    MapRow(_K.IS_NAN, "f", "i", "a != a"),
    MapRow(_K.IS_INF, "f", "i", "sf_ref_abs(a) > 3.40282346638528859812e38f"),
    MapRow(_K.NEG_I, "i", "i", "sf_wrap(0u - (uint32_t)a)"),
    MapRow(_K.ABS_I, "i", "i", "a < 0 ? sf_wrap(0u - (uint32_t)a) : a"),
    MapRow(_K.SIGN_I, "i", "i", "(a > 0) - (a < 0)"),
    MapRow(_K.NOT_I, "i", "i", "a == 0"),
    MapRow(_K.ADD_I, "ii", "i", "sf_wrap((uint32_t)a + (uint32_t)b)"),
    MapRow(_K.SUB_I, "ii", "i", "sf_wrap((uint32_t)a - (uint32_t)b)"),
    MapRow(_K.MUL_I, "ii", "i", "sf_wrap((uint32_t)a * (uint32_t)b)"),
    MapRow(_K.DIV_I, "ii", "i", "sf_ref_divide(a, b)"),
    MapRow(_K.MOD_I, "ii", "i", "sf_ref_modulo(a, b)"),
    MapRow(_K.FMOD_I, "ii", "i", "sf_ref_remainder(a, b)"),
    MapRow(_K.MAX_I, "ii", "i", "a > b ? a : b"),
    MapRow(_K.MIN_I, "ii", "i", "a < b ? a : b"),
    MapRow(_K.AND_I, "ii", "i", "a & b"),
    MapRow(_K.OR_I, "ii", "i", "a | b"),
    MapRow(_K.XOR_I, "ii", "i", "a ^ b"),
    MapRow(_K.EQUAL_I, "ii", "i", "a == b"),
    MapRow(_K.LESS_I, "ii", "i", "a < b"),
    MapRow(_K.LESS_EQUAL_I, "ii", "i", "a <= b"),
    MapRow(_K.CLIP_I, "iii", "i", "(a < b ? b : a) > c ? c : (a < b ? b : a)"),
    MapRow(_K.WHERE_I, "iii", "i", "a ? b : c"),
    MapRow(_K.TO_INT, "f", "i", "sf_ref_to_int(a)"),
    MapRow(_K.TO_FLOAT, "i", "f", "(float)a"),
    MapRow(_K.TO_BOOL, "f", "i", "a != 0.0f"),
    MapRow(_K.TO_BOOL_I, "i", "i", "a != 0"),
    MapRow(_K.WRAP_U8_I, "i", "i", "a & 255"),
    MapRow(_K.WRAP_I8_I, "i", "i", "((a & 255) ^ 128) - 128"),
    MapRow(_K.QUANTISE, "ffi", "i", "sf_ref_quantise(a, b, c, alpha, beta)"),
    MapRow(_K.DEQUANTISE, "ifi", "f", "(float)sf_wrap((uint32_t)a - (uint32_t)c) * b"),
)

MAPS: Final[Mapping[MapKind, MapRow]] = MappingProxyType({row.kind: row for row in _ROWS})


def _offsets() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for op, fields in LAYOUTS.items():
        at = 0
        row = found[op.removeprefix("REF_").lower()] = {}
        for name, count in fields:
            row[name] = at
            at += count
        row["length"] = at
    return found


LAYOUT_OFFSETS: Final[Mapping[str, Mapping[str, int]]] = MappingProxyType(_offsets())
"""Where each field of a geometry row starts, and how long the row is, by lower-case operation."""
