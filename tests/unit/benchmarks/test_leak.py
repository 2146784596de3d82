"""The leak test's arithmetic, by hand, and that its layer has the densities it says."""

import numpy as np
import pytest

from benchmarks.leak import DENSITIES, cropped, largest_t, layer, reproduced, tokens, welch
from compiler.kernels.program import DENSE
from compiler.quant.w4 import gemv_w4, unpack_w4


def test_welch_is_the_difference_in_standard_errors() -> None:
    a, b = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0, 8.0])
    assert welch(a, b) == pytest.approx((2.0 - 5.0) / np.sqrt(1.0 / 3 + (20 / 3) / 4))
    assert welch(a, a) == 0.0


def test_equal_times_are_not_told_apart_and_others_are() -> None:
    random = np.random.default_rng(2)
    equal = {("p", d): random.normal(10, 1, 2000) for d in DENSITIES}
    assert largest_t([equal], "p") < 4.5
    other = equal | {("p", DENSITIES[0]): random.normal(11, 1, 2000)}
    assert largest_t([other], "p") > 20


def test_what_sets_do_not_agree_about_does_not_count() -> None:
    assert reproduced([7.0, 5.0, 9.0]) == 5.0
    assert reproduced([-7.0, -5.0]) == 5.0
    assert reproduced([7.0, 5.0, -0.1]) == 0.0


def test_interruptions_are_cut_alike_for_all_densities() -> None:
    samples = {("p", d): np.arange(100.0) + (50 if at else 0) for at, d in enumerate(DENSITIES)}
    kept = cropped(samples, "p")
    assert max(map(max, kept.values())) < 145
    assert [len(kept[d]) for d in DENSITIES[1:]] == [len(kept[DENSITIES[1]])] * 2


def test_tokens_leave_as_many_gates_dead_as_they_say() -> None:
    module, packed = layer((DENSE, DENSE))
    hidden = module.weights[0].array.shape[0] // 2
    shares = []
    for one in tokens().values():
        x = np.frombuffer(one["x"], np.float32)
        q = np.rint(x * (127 / np.abs(x).max())).astype(np.int8)
        gates = gemv_w4(unpack_w4(packed[0]), q)[:hidden]
        shares.append(float((gates <= 0).mean()))
    assert shares == pytest.approx([0.1, 0.5, 0.9], abs=0.06)
