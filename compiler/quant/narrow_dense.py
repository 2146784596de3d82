"""Fit one narrow dense layer to what a layer of routed experts gives on calibration rows.

    rows h, gates g of the chosen experts   -> y = sum of g_e W_out_e act(W_in_e h), f64
    neurons of all experts, by sum over rows of g_e |a_ej| * |column j of W_out_e|  -> candidates
    orthogonal greedy choice among them     -> those that say most about y without any gate
    z = act(W_in h) of those                -> W_out, b: ridge regression of y on z

The sum is what a neuron adds where its expert is chosen; the greedy choice looks at all rows, at
what the neurons before it leave unsaid (orthogonal matching pursuit, a few a round). Neurons keep
the weights that they were trained with; only what becomes of them is fitted. Both
matrices are packed as all others are, and the second one is fitted to what the packed first one
gives, so that its rounding is made up for. Rows of text and of pictures weigh the same in all: a
picture has many rows, a question few. Called by the driver. Pure: the same rows, the same layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import GATED, ExpertAct
from compiler.kernels.constants import GELU
from compiler.quant.live_groups import quantised
from compiler.quant.module import PackedWeight
from compiler.quant.record import MAX_ROWS, InputSample
from compiler.quant.w4 import GROUP, Grid, PackedW4, dequantise_w4, unpack_w4

MOST_ROWS: Final = 2048
"""Rows that are fitted; of more, every second, third, ... one."""
RIDGE: Final = 1e-3
"""Of the mean of the diagonal of the normal equations."""
CANDIDATES: Final = 4
"""Neurons that are looked at, for each one that is kept."""
ROUNDS: Final = 8
HELD: Final = 1e-2
"""Of the mean energy of the candidates: a neuron that hardly ever speaks is no good witness."""
LEAST_GATE: Final = 1e-6
SHARE: Final = 0.5
"""Width of a narrow layer, of that of an expert."""

Array = NDArray[np.float64]
Pack = Callable[[NDArray[np.float32], Grid | None, InputSample | None], PackedWeight]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """One expert.

    Attributes:
        w_in: (F, D), or (2F, D) with gate rows and up rows.
        w_out: (D, F).
        b_in, b_out: As the rows of either; None without biases.
    """

    w_in: NDArray[np.float32]
    w_out: NDArray[np.float32]
    b_in: NDArray[np.float32] | None = None
    b_out: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRows:
    """What calibration saw of one layer.

    Attributes:
        inputs: (R, D) f32.
        index: (R, k) experts chosen.
        gate: (R, k) f64.
        vision: (R,) bool, rows of pictures.
    """

    inputs: NDArray[np.float32]
    index: NDArray[Any]
    gate: Array
    vision: NDArray[np.bool_]

    def thinned(self, most: int) -> "RoutedRows":
        """Return at most so many of the rows, evenly."""
        every = slice(None, None, max(1, -(-len(self.inputs) // most)))
        return RoutedRows(
            self.inputs[every], self.index[every], self.gate[every], self.vision[every]
        )

    def weights(self) -> Array:
        """Return (R,) what each row counts, 1 in the mean."""
        found = np.ones(len(self.vision))
        for kind in (self.vision, ~self.vision):
            if kind.any() and not kind.all():
                found[kind] = len(kind) / (2 * kind.sum())
        return found


@dataclass(frozen=True, slots=True, eq=False)
class NarrowLayer:
    """A narrow dense layer: out @ act(gate @ h + gate_bias) + out_bias, times up @ h if gated.

    Attributes:
        arrays: `gate`, [`gate_bias`], [`up`, [`up_bias`]], `out` and `out_bias`, f32.
        packed: Packed form of `gate`, `up` and `out`.
        error: Mean squared error of its result on the rows, of that of giving nothing.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    packed: Mapping[str, PackedW4]
    error: float

    @property
    def width(self) -> int:
        """Neurons."""
        return len(self.arrays["gate"])


def narrow_width(hidden: int) -> int:
    """Return the width for experts of `hidden` neurons: about half, whole groups, 0 if too few."""
    return int(hidden * SHARE) // GROUP * GROUP


def gate_biases(rows: RoutedRows, experts: int) -> NDArray[np.float32]:
    """Return (E,) b with sigmoid(b) the mean gate of each expert over the rows.

    An expert that was not chosen has a gate of 0 there; means are cut to `LEAST_GATE` from 0 and 1.
    """
    total = np.zeros(experts)
    np.add.at(total, rows.index.astype(np.int64), rows.gate * rows.weights()[:, None])
    mean = np.clip(total / max(1, len(rows.inputs)), LEAST_GATE, 1 - LEAST_GATE)
    return np.log(mean / (1 - mean)).astype(np.float32)


def fit_narrow(
    rows: RoutedRows, experts: Sequence[ExpertMatrices], act: ExpertAct, width: int, pack: Pack
) -> NarrowLayer:
    """Return the narrow layer for one layer of experts.

    Args:
        rows: At least one.
        experts: All of the layer, in order.
        act: One of `ACTS`.
        width: Neurons to keep, at most as many as there are.
        pack: Packs a matrix.
    """
    rows = rows.thinned(MOST_ROWS)
    weights, target = rows.weights(), np.zeros(rows.inputs.shape)
    scores = []
    for at, expert in enumerate(experts):
        chosen = np.flatnonzero((rows.index == at).any(axis=1))
        gate = (rows.gate * (rows.index == at)).sum(axis=1)[chosen]
        hidden = _hidden(expert, rows.inputs[chosen], act)
        w_out = expert.w_out.astype(np.float64)
        target[chosen] += gate[:, None] * (hidden @ w_out.T + _or_zero(expert.b_out))
        share = (gate * weights[chosen]) @ np.abs(hidden)
        scores.append(share * np.sqrt(np.square(w_out).sum(axis=0)))
    arrays = _neurons(
        experts, _best(rows, experts, act, np.concatenate(scores), target, width), act
    )
    sample = sample_of(rows.inputs)
    packed = {name: pack(arrays[name], None, sample).packed for name in arrays if "_" not in name}
    stored = {name: dequantise_w4(unpack_w4(one)) for name, one in packed.items()}
    z = _act(act, *_products({**arrays, **stored}, rows.inputs))
    w_out, bias = ridge(z, target, weights)
    out = w_out.astype(np.float32)
    packed["out"] = pack(out, None, sample_of(z)).packed
    given = z @ dequantise_w4(unpack_w4(packed["out"])).astype(np.float64).T + bias
    arrays |= {"out": out, "out_bias": bias.astype(np.float32)}
    error = _energy(target - given, weights) / max(_energy(target, weights), 1e-30)
    return NarrowLayer(arrays, packed, error)


def _best(
    rows: RoutedRows,
    experts: Sequence[ExpertMatrices],
    act: ExpertAct,
    scores: Array,
    target: Array,
    width: int,
) -> NDArray[np.int64]:
    """Return the neurons to keep, numbered through all experts, ascending."""
    candidates = np.sort(np.argsort(-scores, kind="stable")[: CANDIDATES * width])
    z = _act(act, *_products(_neurons(experts, candidates, act), rows.inputs))
    return np.asarray(candidates[greedy(z, target, rows.weights(), width)])


def greedy(z: Array, y: Array, weights: Array, count: int) -> NDArray[np.int64]:
    """Return the `count` columns of z that explain most of y, some in each of `ROUNDS`, ascending.

    Args:
        z: (R, N), N >= count.
        y: (R, D).
        weights: (R,), above 0.
        count: At least 1.
    """
    share = weights / weights.sum()
    root = np.sqrt(share)[:, None]
    columns, wanted = (z - share @ z) * root, (y - share @ y) * root
    energy = np.square(columns).sum(axis=0)
    energy += HELD * energy.mean() + 1e-30
    chosen = np.zeros(0, np.int64)
    left = wanted
    while len(chosen) < count:
        gains = np.square(columns.T @ left).sum(axis=1) / energy
        gains[chosen] = -1.0
        some = min(count - len(chosen), max(1, count // ROUNDS))
        chosen = np.concatenate([chosen, np.argsort(-gains, kind="stable")[:some]])
        basis = columns[:, chosen]
        moments = basis.T @ basis
        moments += (RIDGE * np.trace(moments) / len(moments) + 1e-12) * np.eye(len(moments))
        left = wanted - basis @ np.linalg.solve(moments, basis.T @ wanted)
    return np.sort(chosen)


def ridge(z: Array, y: Array, weights: Array) -> tuple[Array, Array]:
    """Return (D, W) and (D,) that minimise the weighted squares of z @ out.T + bias - y, in f64.

    The bias is not held back: it is what the means of y and z say.

    Args:
        z: (R, W).
        y: (R, D).
        weights: (R,), above 0.
    """
    share = weights / weights.sum()
    z_mean, y_mean = share @ z, share @ y
    centred, wanted = z - z_mean, y - y_mean
    moments = (centred * share[:, None]).T @ centred
    held = RIDGE * np.trace(moments) / len(moments) + 1e-12
    found = np.linalg.solve(
        moments + held * np.eye(len(moments)), (centred * share[:, None]).T @ wanted
    ).T
    return found, y_mean - found @ z_mean


def sample_of(rows: NDArray[Any]) -> InputSample:
    """Return rows as calibration keeps the inputs of a weight."""
    kept = rows[:: max(1, -(-len(rows) // MAX_ROWS))]
    codes, scales = quantised(kept)
    values = rows.astype(np.float64)
    return InputSample(
        codes, scales, len(rows), (values == 0).sum(axis=0), np.square(values).mean(axis=0)
    )


def _neurons(
    experts: Sequence[ExpertMatrices], best: NDArray[np.int64], act: ExpertAct
) -> dict[str, NDArray[np.float32]]:
    """Return the first matrices of the neurons `best`, numbered through all experts."""
    hidden = experts[0].w_out.shape[1]
    parts = ("gate", "up") if act in GATED else ("gate",)
    found = {}
    for part, name in enumerate(parts):
        places = [(int(at) // hidden, part * hidden + int(at) % hidden) for at in best]
        found[name] = np.stack([experts[e].w_in[row] for e, row in places]).astype(np.float32)
        if experts[0].b_in is not None:
            biases = [_or_zero(experts[e].b_in).reshape(-1)[row] for e, row in places]
            found[f"{name}_bias"] = np.asarray(biases, np.float32)
    return found


def _hidden(expert: ExpertMatrices, inputs: NDArray[np.float32], act: ExpertAct) -> Array:
    wide = inputs.astype(np.float64) @ expert.w_in.astype(np.float64).T + _or_zero(expert.b_in)
    halves = np.split(wide, 2, axis=1) if act in GATED else [wide]
    return _act(act, *halves)


def _products(
    arrays: Mapping[str, NDArray[np.float32]], inputs: NDArray[np.float32]
) -> Iterator[Array]:
    for name in ("gate", "up"):
        if name in arrays:
            weight = arrays[name].astype(np.float64)
            yield inputs.astype(np.float64) @ weight.T + _or_zero(arrays.get(f"{name}_bias"))


def _or_zero(bias: NDArray[np.float32] | None) -> Array:
    return np.zeros(1) if bias is None else bias.astype(np.float64).reshape(-1)


def _energy(values: Array, weights: Array) -> float:
    return float((np.square(values).sum(axis=1) * weights).sum())


def _act(act: ExpertAct, gate: Array, up: Array | None = None) -> Array:
    found = ACTS[act](gate)
    return found if up is None else found * up


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return np.asarray(x / (1 + np.exp(-x)))


def _gelu(x: Array) -> Array:
    z = x * GELU.inverse_root
    t = 1 / (1 + GELU.erf_p * np.abs(z))
    y = np.polyval(GELU.erf_terms, t) * t
    return np.asarray(x / 2 * (1 + np.copysign(1 - y * np.exp(-z * z), z)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(x / 2 * (1 + np.tanh(GELU.tanh_scale * (x + GELU.tanh_cube * x**3))))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


ACTS: Final[Mapping[ExpertAct, Callable[[Array], Array]]] = MappingProxyType(
    {
        ExpertAct.RELU: _relu,
        ExpertAct.SILU: _silu,
        ExpertAct.IDENTITY: lambda x: x,
        ExpertAct.GELU: _gelu,
        ExpertAct.GELU_TANH: _gelu_tanh,
        ExpertAct.SWIGLU: _silu,
        ExpertAct.REGLU: _relu,
    }
)
"""Activations that a narrow layer can have; of gated ones, that of the gate."""
