"""How exporters write GELU where an operator set has none: a product of five to nine nodes.

    x / 2 * (1 + erf(x / sqrt 2))                              GELU
    x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))    "gelu_new", FastGelu

The factors stand in any order and grouping; the constants must be those, rounded to f32, nothing
near them: another constant is another function. `raise-elementwise` reads these patterns.
"""

import math
from typing import Final

import numpy as np

from compiler.passes.match import Bind, OneOf, Pattern, Scalar, node


def _number(value: float) -> Scalar:
    """Return the constant as an exporter stores it: rounded to f32."""
    return Scalar(f"{value}", float(np.float32(value)))


def _any(*alternatives: Pattern) -> OneOf:
    return OneOf(alternatives)


_X: Final = Bind("x")
_HALF, _ONE = _number(0.5), _number(1.0)
_SCALED: Final = _any(
    node("Div", _X, _number(math.sqrt(2))), node("Mul", _X, _number(1 / math.sqrt(2)))
)
_CUBE: Final = _any(
    node("Pow", _X, _number(3.0)),
    node("Mul", _X, node("Mul", _X, _X)),
)
_INNER: Final = node(
    "Mul",
    _number(math.sqrt(2 / math.pi)),
    node("Add", _X, node("Mul", _number(0.044715), _CUBE)),
)


def _half_of_x_times(sigmoid: Pattern) -> Pattern:
    """Return x, one half and `sigmoid` multiplied, however they are grouped."""
    factors = (_X, _HALF, sigmoid)
    return _any(
        *(
            node("Mul", factors[alone], node("Mul", *factors[:alone], *factors[alone + 1 :]))
            for alone in range(len(factors))
        )
    )


GELU: Final = _half_of_x_times(node("Add", node("Erf", _SCALED), _ONE))
GELU_TANH: Final = _half_of_x_times(node("Add", node("Tanh", _INNER), _ONE))
