"""f64 functions of reference kernels, line by line those of `templates/ref_functions.c.in`.

Arrays are f64; the results have the bits of the C functions.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.kernels.constants import DOUBLE

Doubles = NDArray[Any]

_WHOLE: Final = 2251799813685248.0
"""From 2^51 on every f64 of interest is an integer."""


def rint(x: Doubles) -> Doubles:
    """Return the nearest integer, ties to even, of |x| < 2^51."""
    return np.asarray((x + DOUBLE.magic) - DOUBLE.magic)


def rounded(x: Doubles) -> Doubles:
    """Return the nearest integer, ties to even."""
    return np.where((x < _WHOLE) & (x > -_WHOLE), rint(x), x)


def floor(x: Doubles) -> Doubles:
    """Return the greatest integer that is not above x."""
    r = rounded(x)
    return np.where(r > x, r - 1.0, r)


def _horner(coefficients: tuple[float, ...], x: Doubles) -> Doubles:
    y = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        y = y * x + coefficient
    return y


def exp(x: Doubles) -> Doubles:
    """Return e^x; beyond +-700 that of the bound."""
    c = np.clip(np.where(np.isnan(x), 0.0, x), -DOUBLE.limit, DOUBLE.limit)
    n = rint(c * DOUBLE.log2e)
    r = c - n * DOUBLE.ln2_high
    r = r - n * DOUBLE.ln2_low
    power = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return np.where(np.isnan(x), x, _horner(DOUBLE.exp, r) * power)


def log(x: Doubles) -> Doubles:
    """Return ln x of 0 or a normal number."""
    inside = np.where((x > 0.0) & np.isfinite(x), x, 1.0)
    bits = inside.view(np.int64)
    e = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    upper = m > 1.4142135623730951
    m = np.where(upper, m * 0.5, m)
    e = np.where(upper, e + 1, e).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    y = _horner(DOUBLE.log, s * s)
    y = e * DOUBLE.ln2_high + (s * y + e * DOUBLE.ln2_low)
    y = np.where(x == 0.0, -np.inf, np.where(np.isposinf(x), np.inf, y))
    return np.where(np.isnan(x) | (x < 0.0), np.nan, y)


def sine(x: Doubles, quarters: int) -> Doubles:
    """Return sin(x + quarters * pi / 2) for |x| < 1e9."""
    valid = (x < 1e9) & (x > -1e9)
    inside = np.where(valid, x, 0.0)
    n = rint(inside * 0.6366197723675814)
    r = inside - n * DOUBLE.half_pi_high
    r = r - n * DOUBLE.half_pi_low
    t = r * r
    s = _horner(DOUBLE.sin, t) * r
    c = _horner(DOUBLE.cos, t)
    q = n.astype(np.int64) + quarters
    y = np.where(q & 1, c, s)
    return np.where(valid, np.where(q & 2, -y, y), np.nan)


def erf(x: Doubles) -> Doubles:
    """Return the error function."""
    u = x * x * 0.125 - 1.0
    y = x * _horner(DOUBLE.erf, u)
    return np.where(x > 4.0, 1.0, np.where(x < -4.0, -1.0, y))


def atan(x: Doubles) -> Doubles:
    """Return the arc tangent."""
    size = np.where(x < 0.0, -x, x)
    z = np.where(size > 1.0, 1.0 / size, size)
    y = z * _horner(DOUBLE.atan, z * z * 2.0 - 1.0)
    y = np.where(size > 1.0, 1.5707963267948966 - y, y)
    return np.where(x < 0.0, -y, y)


def asin(x: Doubles) -> Doubles:
    """Return the arc sine; NaN outside [-1, 1]."""
    valid = (x >= -1.0) & (x <= 1.0)
    inside = np.where(valid, x, 0.0)
    return np.where(valid, atan(inside / np.sqrt((1.0 - inside) * (1.0 + inside))), np.nan)


def acos(x: Doubles) -> Doubles:
    """Return the arc cosine; NaN outside [-1, 1]."""
    valid = (x >= -1.0) & (x <= 1.0)
    inside = np.where(valid, x, 0.0)
    return np.where(valid, 2.0 * atan(np.sqrt((1.0 - inside) / (1.0 + inside))), np.nan)


def asinh(x: Doubles) -> Doubles:
    """Return the inverse hyperbolic sine."""
    size = np.where(x < 0.0, -x, x)
    y = log(size + np.sqrt(size * size + 1.0))
    return np.where(x < 0.0, -y, y)


def acosh(x: Doubles) -> Doubles:
    """Return the inverse hyperbolic cosine; NaN below 1."""
    inside = np.where(x >= 1.0, x, 1.0)
    return np.where(x >= 1.0, log(inside + np.sqrt((inside - 1.0) * (inside + 1.0))), np.nan)


def atanh(x: Doubles) -> Doubles:
    """Return the inverse hyperbolic tangent; NaN outside [-1, 1]."""
    valid = (x >= -1.0) & (x <= 1.0)
    inside = np.where(valid, x, 0.0)
    return np.where(valid, 0.5 * log((1.0 + inside) / (1.0 - inside)), np.nan)


def tanh(x: Doubles) -> Doubles:
    """Return the hyperbolic tangent."""
    t = exp(np.where(x < 0.0, x, -x) * 2.0)
    y = (1.0 - t) / (1.0 + t)
    return np.where(x < 0.0, -y, y)


def sigmoid(x: Doubles) -> Doubles:
    """Return 1 / (1 + e^-x)."""
    return np.asarray(1.0 / (1.0 + exp(-x)))


def softplus(x: Doubles) -> Doubles:
    """Return ln(1 + e^x)."""
    return np.where(x > 40.0, x, log(1.0 + exp(x)))


def power(a: Doubles, b: Doubles) -> Doubles:
    """Return a^b."""
    whole = rounded(b) == b
    odd = whole & (rounded(b * 0.5) != b * 0.5)
    size = np.where(a < 0.0, -a, a)
    y = exp(b * log(size))
    y = np.where((a < 0.0) & odd, -y, y)
    at_zero = np.where(b > 0.0, np.where(odd, a, 0.0), np.inf)
    y = np.where(size == 0.0, at_zero, y)
    y = np.where((a < 0.0) & ~whole, np.nan, y)
    return np.where((b == 0.0) | (a == 1.0), 1.0, y)


def fmod(a: Doubles, b: Doubles) -> Doubles:
    """Return a - b * trunc(a / b)."""
    q = a / b
    return np.asarray(a - b * np.where(q < 0.0, -floor(-q), floor(q)))
