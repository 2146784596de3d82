"""A narrow layer fitted to a mixture: what it keeps of it, and what it is made of."""

from math import erf

import numpy as np
import pytest

from compiler.contract.operations import GATED, ExpertAct
from compiler.quant.module import pack_weight
from compiler.quant.narrow_dense import (
    ACTS,
    LEAST_GATE,
    ExpertMatrices,
    RoutedRows,
    fit_narrow,
    gate_biases,
    greedy,
    narrow_width,
    ridge,
)
from compiler.quant.w4 import dequantise_w4, unpack_w4

EXPERTS, D, F, ROWS = 4, 32, 64, 600


def mixture(act: ExpertAct, *, useful: int = F, biases: bool = False, seed: int = 3):
    """Return rows and experts of which only `useful` neurons of the first one do anything."""
    random = np.random.default_rng(seed)
    wide = 2 * F if act in GATED else F

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    experts = []
    for at in range(EXPERTS):
        w_out = normal(D, F)
        w_out[:, 0 if at else useful :] *= 1e-3
        bias = (normal(wide), normal(D)) if biases else (None, None)
        experts.append(ExpertMatrices(normal(wide, D), w_out, *bias))
    order = np.argsort(random.random((ROWS, EXPERTS)), axis=1)[:, :2]
    gate = random.random((ROWS, 2))
    rows = RoutedRows(normal(ROWS, D) * 6, order, gate, np.arange(ROWS) < 450)
    return rows, experts


@pytest.mark.parametrize("act", sorted(ACTS))
@pytest.mark.parametrize("biases", [False, True])
def test_every_activation_is_that_of_the_experts(act: ExpertAct, biases: bool) -> None:
    """With one expert chosen by all rows at gate 1, and all its neurons, nothing is lost but W4."""
    rows, experts = mixture(act, biases=biases)
    every = RoutedRows(rows.inputs, np.zeros((ROWS, 1), int), np.ones((ROWS, 1)), rows.vision)
    found = fit_narrow(every, experts[:1], act, F, pack_weight)
    assert found.width == F
    assert found.error < 0.05
    assert set(found.packed) == {"gate", "out"} | ({"up"} if act in GATED else set())
    assert ("gate_bias" in found.arrays) is biases


def test_neurons_that_do_something_are_the_ones_kept() -> None:
    rows, experts = mixture(ExpertAct.RELU, useful=8)
    found = fit_narrow(rows, experts, ExpertAct.RELU, 32, pack_weight)
    kept = {row.tobytes() for row in found.arrays["gate"]}
    assert {row.tobytes() for row in experts[0].w_in[:8]} <= kept


def test_a_wider_layer_keeps_more() -> None:
    rows, experts = mixture(ExpertAct.RELU)
    errors = [
        fit_narrow(rows, experts, ExpertAct.RELU, width, pack_weight).error
        for width in (32, 64, 128)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 1.0, "better than giving nothing"
    assert errors[-1] < 0.6 * errors[0] or errors[-1] < 0.5


def test_what_is_stored_is_what_was_fitted() -> None:
    """The error is that of the packed matrices over the mixture in f64."""
    rows, experts = mixture(ExpertAct.RELU)
    found = fit_narrow(rows, experts, ExpertAct.RELU, 64, pack_weight)
    stored = {
        name: dequantise_w4(unpack_w4(one)).astype(float) for name, one in found.packed.items()
    }
    h = rows.inputs.astype(float)
    y = np.zeros((ROWS, D))
    for slot in range(2):
        for at, expert in enumerate(experts):
            mine = rows.index[:, slot] == at
            hidden = np.maximum(h[mine] @ expert.w_in.T.astype(float), 0)
            y[mine] += rows.gate[mine, slot, None] * (hidden @ expert.w_out.T.astype(float))
    given = np.maximum(h @ stored["gate"].T, 0) @ stored["out"].T + found.arrays["out_bias"]
    weights = rows.weights()
    error = (weights @ np.square(y - given)).sum() / (weights @ np.square(y)).sum()
    assert error == pytest.approx(found.error, rel=1e-3)


def test_the_same_rows_give_the_same_layer() -> None:
    made = [
        fit_narrow(*mixture(ExpertAct.SWIGLU), ExpertAct.SWIGLU, 32, pack_weight) for _ in range(2)
    ]
    codes = [{name: one.codes + one.scales for name, one in m.packed.items()} for m in made]
    assert codes[0] == codes[1]
    assert all((made[0].arrays[name] == made[1].arrays[name]).all() for name in made[0].arrays)


def test_pictures_and_text_weigh_the_same() -> None:
    rows, _ = mixture(ExpertAct.RELU)
    weights = rows.weights()
    assert weights[rows.vision].sum() == pytest.approx(weights[~rows.vision].sum())
    assert weights.mean() == pytest.approx(1)
    alone = RoutedRows(rows.inputs, rows.index, rows.gate, np.ones(ROWS, bool))
    assert (alone.weights() == 1).all()


def test_the_greedy_choice_finds_the_columns_that_matter() -> None:
    """Two copies of one column say no more than one: the second leaves nothing unsaid."""
    random = np.random.default_rng(5)
    z = random.standard_normal((400, 40))
    z[:, 7] = z[:, 3]
    y = 3.0 * z[:, [3]] + z[:, [20]] + 0.5 * z[:, [31]]
    found = greedy(z, y, np.ones(400), 3).tolist()
    assert found in ([3, 20, 31], [7, 20, 31])
    assert greedy(z, y, np.ones(400), 40).tolist() == list(range(40))


def test_ridge_is_least_squares_where_rows_are_many() -> None:
    random = np.random.default_rng(0)
    z, w, b = random.standard_normal((5000, 6)), random.standard_normal((3, 6)), np.arange(3.0)
    out, bias = ridge(z, z @ w.T + b, random.random(5000) + 0.5)
    assert np.abs(out - w).max() < 0.01
    assert np.abs(bias - b).max() < 0.01
    flat, mean = ridge(np.ones((9, 6)), np.full((9, 3), 2.0), np.ones(9))
    assert np.abs(flat).max() < 1e-6, "what never moves explains nothing"
    assert mean == pytest.approx(np.full(3, 2.0))


def test_mean_gates_come_back_from_their_biases() -> None:
    rows, _ = mixture(ExpertAct.RELU)
    one = np.full((ROWS, 1), 0.25)
    found = gate_biases(RoutedRows(rows.inputs, np.zeros((ROWS, 1), int), one, rows.vision), 2)
    share = 1 / (1 + np.exp(-found.astype(float)))
    assert share == pytest.approx([0.25, LEAST_GATE], rel=1e-4)


def test_half_an_expert_in_whole_groups() -> None:
    assert [narrow_width(hidden) for hidden in (63, 64, 100, 128, 1408)] == [0, 32, 32, 64, 704]


def test_gelu_is_that_of_the_kernels() -> None:
    x = np.linspace(-5, 5, 201)
    expected = [value / 2 * (1 + erf(value / 2**0.5)) for value in x]
    assert ACTS[ExpertAct.GELU](x) == pytest.approx(expected, abs=1e-6)
