"""Numbers that the C kernels and the numpy simulator must share, each written once."""

from dataclasses import dataclass
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
