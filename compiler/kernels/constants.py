"""Numbers that the C kernels and the numpy simulator must share, each written once."""

from dataclasses import dataclass
from math import factorial
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class ExpConstants:
    """Constants of our e^x, each exactly an f32. Polynomial: Cephes expf (highest power first).

    Attributes:
        low: Below this the result is 0 (2^n would be subnormal).
        high: Above this the result is infinity (n would be 128).
        magic: 1.5 * 2^23: adding it rounds to the nearest integer, ties to even.
    """

    low: float
    high: float
    magic: float
    log2e: float
    ln2_high: float
    ln2_low: float
    polynomial: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LogConstants:
    """Constants of our ln x, each exactly an f32: x = m * 2^n, s = (m - 1) / (m + 1).

    ln m = s * (2 + 2/3 s^2 + 2/5 s^4 + ...), the series of 2 artanh(s); the next term is below
    3e-9 of it.

    Attributes:
        least: The least x, 2^-126: anything smaller counts as zero.
        half: Bits of sqrt(1/2), so that m lies in [sqrt(1/2), sqrt(2)).
        series: Factors of the even powers of s, highest first.
    """

    least: float
    half: int
    series: tuple[float, ...]


def _f32(value: float) -> float:
    return float(np.float32(value))


EXP: Final = ExpConstants(
    low=_f32(-87.3),
    high=_f32(88.3),
    magic=12582912.0,
    log2e=_f32(1.4426950408889634),
    ln2_high=0.693359375,
    ln2_low=_f32(-2.12194440e-4),
    polynomial=tuple(
        _f32(c)
        for c in (
            1.9875691500e-4,
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        )
    ),
)


LOG: Final = LogConstants(
    least=2.0**-126,
    half=0x3F3504F3,
    series=tuple(_f32(2.0 / odd) for odd in (9, 7, 5, 3, 1)),
)


@dataclass(frozen=True, slots=True)
class GeluConstants:
    """Constants of both forms of GELU, each exactly an f32.

    Attributes:
        inverse_root: 1 / sqrt(2).
        erf_p: p of Abramowitz and Stegun 7.1.26.
        erf_terms: a5 to a1 of the same formula.
        tanh_scale: sqrt(2 / pi).
        tanh_cube: Factor of the cube.
    """

    inverse_root: float
    erf_p: float
    erf_terms: tuple[float, ...]
    tanh_scale: float
    tanh_cube: float


GELU: Final = GeluConstants(
    inverse_root=_f32(0.7071067811865476),
    erf_p=_f32(0.3275911),
    erf_terms=tuple(
        _f32(a) for a in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    ),
    tanh_scale=_f32(0.7978845608028654),
    tanh_cube=_f32(0.044715),
)

SMALLEST_AMAX: Final = float(np.float32(2.0**-100))
"""A row whose largest magnitude is below this counts as zero when quantised to int8."""

KV_LIMIT: Final = 127
"""Largest code of a cached key or value."""
QUERY_LIMIT: Final = 16383
"""Largest code of a query against cached codes: 1024 products with them fit 31 bits."""

MIN_PIECE_BYTES: Final = 32 * 1024
"""Weights that one ticket of shared work reads at least: about 1 us, against 0.4 us to share it."""


@dataclass(frozen=True, slots=True)
class DoubleConstants:
    """Constants of the f64 functions behind reference kernels; polynomials highest power first.

    Attributes:
        magic: 1.5 * 2^52: adding it rounds to the nearest integer, ties to even.
        limit: e^x is taken at no more than this and no less than its negative.
        ln2_high, ln2_low: ln 2 in two parts; the first has 33 bits.
        half_pi_high, half_pi_low: pi / 2 in two parts; the first has 33 bits.
        exp: Taylor series on |x| <= ln 2 / 2.
        log: log m = s * P(s^2), s = (m - 1) / (m + 1), 1/sqrt 2 <= m <= sqrt 2.
        sin, cos: Taylor series in x^2 on |x| <= pi / 4; sin without its factor x.
        erf: erf x = x * P(x^2 / 8 - 1) for |x| <= 4, Chebyshev fit, 4e-13 relative.
        atan: atan x = x * P(2 x^2 - 1) for |x| <= 1, Chebyshev fit, 1e-10 relative.
    """

    magic: float
    limit: float
    log2e: float
    ln2_high: float
    ln2_low: float
    half_pi_high: float
    half_pi_low: float
    exp: tuple[float, ...]
    log: tuple[float, ...]
    sin: tuple[float, ...]
    cos: tuple[float, ...]
    erf: tuple[float, ...]
    atan: tuple[float, ...]


def _taylor(*factorials: int, alternating: bool) -> tuple[float, ...]:
    signs = [(-1) ** (at if alternating else 0) for at in range(len(factorials))]
    terms = [sign / factorial(n) for sign, n in zip(signs, factorials, strict=True)]
    return tuple(reversed(terms))


DOUBLE: Final = DoubleConstants(
    magic=6755399441055744.0,
    limit=700.0,
    log2e=1.4426950408889634,
    ln2_high=0.6931471803691238,
    ln2_low=1.9082149292705877e-10,
    half_pi_high=1.5707963267341256,
    half_pi_low=6.077100506506192e-11,
    exp=_taylor(*range(13), alternating=False),
    log=tuple(2.0 / n for n in range(17, 0, -2)),
    sin=_taylor(*range(1, 16, 2), alternating=True),
    cos=_taylor(*range(0, 17, 2), alternating=True),
    erf=(
        *(1.5259134794467599e-06, -4.589215576391878e-06, 4.863021919198398e-06),
        *(-1.2620733845879259e-05, 5.100653177410462e-05, -0.00012652689100743666),
        *(0.00027243000259556574, -0.000604822073744604, 0.0012946166769389976),
        *(-0.0025830607023578918, 0.004852694472201705, -0.00860434446987765),
        *(0.01434983902285419, -0.022474034150849122, 0.033060590141597464),
        *(-0.04576503997868964, 0.05988690942113488, -0.07472787165485795),
        *(0.09020899387295432, -0.10771044230000626, 0.13167511689974368),
        *(-0.17657623330398142, 0.3535309956433875),
    ),
    atan=(
        *(-3.3227400147010456e-07, 1.0590749595418212e-06, -2.4919127842632185e-06),
        *(8.422876269038928e-06, -2.9725795819477064e-05, 0.0001024487701625504),
        *(-0.000360959547444023, 0.0013155448319648873, -0.005030866515598943),
        *(0.02085185477565575, -0.10187654224725755, 0.8704197513170947),
    ),
)
