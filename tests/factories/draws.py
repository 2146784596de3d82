"""A random call in the making: sizes, operands and what fills them.

Sizes are odd, values finite, with zeros, ties, tiny numbers and rows of zeros among them; where an
operation looks things up, now and then an index is out of range: then native code and simulator
must refuse alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from compiler.kernels.program import ABSENT, DENSE, Call, Module, Op
from tests.factories.modules import ModuleBuilder

Array = np.ndarray[Any, Any]
Fill = Callable[[np.random.Generator, int, int], Array]
Generator = Callable[["Draw"], None]
"""Adds the operands and the call of one operation."""
BAD_INDEX_SHARE: Final = 0.1
DENSITIES: Final = (0.0, 0.02, 0.1, 0.5, 0.9, 1.0)


def floats(rng: np.random.Generator, rows: int, cols: int) -> Array:
    """Return f32 rows of one of several kinds, each of some size between 1e-3 and 1e2."""
    x = rng.standard_normal((rows, cols)) * 10 ** rng.uniform(-3, 2)
    kind = rng.integers(6)
    if kind == 0:
        x *= rng.random((rows, cols)) < 0.5
    elif kind == 1:
        x *= rng.random((rows, 1)) < 0.5
    elif kind == 2:
        x *= 10 ** rng.uniform(-42, -30)
    elif kind == 3:
        x = rng.integers(-2, 3, (rows, cols)).astype(np.float64)
    return x.astype(np.float32)


def ints(low: int, high: int) -> Fill:
    """Return what fills i32 rows from [low, high)."""
    return lambda rng, rows, cols: rng.integers(low, high, (rows, cols)).astype(np.int32)


def positive(least: float = 1e-3) -> Fill:
    """Return what fills f32 rows with numbers of at least `least`."""
    return lambda rng, rows, cols: np.abs(floats(rng, rows, cols)) + np.float32(least)


class Draw(ModuleBuilder):
    """A module of one program `run` in the making; `rng` draws shapes and weights."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.rng = self.random
        self.max_tokens = int(self.rng.integers(1, 14))
        self.fills: dict[int, Fill] = {}
        self.results: list[int] = []

    def size(self, most: int = 70) -> int:
        """Return a size: small, anything, or next to a multiple of 8, 16 or 32."""
        step = int(self.rng.choice([1, 1, 8, 16, 32]))
        near = step * int(self.rng.integers(1, max(1, most // step) + 1)) + int(
            self.rng.integers(-1, 2)
        )
        return int(np.clip(near, 1, most))

    def chance(self, share: float = 0.5) -> bool:
        """Return whether something with this probability happens."""
        return bool(self.rng.random() < share)

    def pick(self, items: Any) -> Any:
        """Return one of some items."""
        return list(items)[int(self.rng.integers(len(list(items))))]

    def rows(self) -> int | None:
        """Return a number of rows, or None for as many as there are tokens."""
        return None if self.chance(0.6) else self.size(9)

    def x(self, rows: int | None, cols: int, dtype: str = "f32", fill: Fill | None = None) -> int:
        """Add an input port."""
        at = self.buffer(rows, cols, dtype)
        plain = {"f32": floats, "i32": ints(-(1 << 31), 1 << 31), "u8": bytes_of_pixels}
        self.fills[at] = fill or plain[dtype]
        return at

    def index(self, rows: int | None, limit: int) -> int:
        """Add an input port of one column of indices below `limit`, now and then one beyond."""
        high = limit + (1 if self.chance(BAD_INDEX_SHARE) else 0)
        return self.x(rows, 1, "i32", ints(0, high))

    def y(self, rows: int | None, cols: int, dtype: str = "f32") -> int:
        """Add an output port."""
        self.results.append(self.buffer(rows, cols, dtype))
        return self.results[-1]

    def step(
        self, op: Op, weights: list[int], inputs: tuple[int, ...] = (), **params: float
    ) -> None:
        """Add a call without results."""
        self.calls.append(Call(op, inputs, (), tuple(weights), params))

    def maybe(self, cols: int, share: float = 0.5) -> int:
        """Add a vector, or return that there is none."""
        return self.vector(cols) if self.chance(share) else ABSENT

    def sparse(self, n: int, k: int) -> Array:
        """Return an (n, k) matrix of some density, zero by element or by tile."""
        array, density = self.normal(n, k, scale=k**-0.5), self.pick(DENSITIES)
        if self.chance():
            return array * (self.rng.random((n, k)) < density)
        tiles = self.rng.random((-(-n // 16), -(-k // 32))) < density
        return array * np.kron(tiles, np.ones((16, 32), np.float32))[:n, :k]

    def product(self, n: int, k: int, layouts: tuple[str, ...] = (DENSE,), **where: str) -> int:
        """Add a W4 weight in one of some layouts."""
        at = self.weight(self.sparse(n, k), "w4", **where)
        self.weights[at] = replace(self.weights[at], layout=self.pick(layouts))
        return at

    def finish(self) -> "Drawn":
        """Return the module."""
        self.program(
            "run",
            {f"x{n}": at for n, at in enumerate(self.fills)},
            {f"y{n}": at for n, at in enumerate(self.results)},
        )
        return Drawn(self.module(), tuple(self.fills.values()))


def bytes_of_pixels(rng: np.random.Generator, rows: int, cols: int) -> Array:
    """Return u8 rows."""
    return rng.integers(0, 256, (rows, cols), np.uint8)


@dataclass(frozen=True)
class Drawn:
    """A module of one call, and what fills its inputs."""

    module: Module
    fills: tuple[Fill, ...]

    def values(self, tokens: int, seed: int) -> dict[str, Array]:
        """Return inputs of a run of `tokens` rows, by role."""
        rng, found = np.random.default_rng([seed, tokens]), {}
        for (role, at), fill in zip(
            self.module.programs[0].inputs.items(), self.fills, strict=True
        ):
            buffer = self.module.buffers[at]
            found[role] = fill(rng, tokens if buffer.dynamic else buffer.rows, buffer.cols)
        return found
