"""Crossovers and errors of `benchmarks.policy`, on numbers whose answers are known."""

import pytest

from benchmarks.policy import crossing, error_claims, sharing_claims
from benchmarks.policy_products import ROWS, forced
from compiler.contract.policy import CELLS, LEGAL, CallKind, Cell, Variant, require_variants
from compiler.hardware.measured import MeasuredProduct
from compiler.kernels.policy_model import Product, target_model

TARGET = "x86-64-v3"


@pytest.mark.parametrize(
    ("points", "place"),
    [
        ([(0.5, 1.4), (0.8, 1.1), (0.9, 0.9)], pytest.approx(0.85)),
        ([(10.0, 0.5), (20.0, 1.5)], pytest.approx(15.0)),
        ([(0.5, 1.4), (0.9, 1.1)], None),
        ([(0.5, 1.0), (0.9, 1.0)], None),
        ([], None),
    ],
)
def test_it_finds_where_two_times_are_equal(points, place) -> None:
    assert crossing(points) == place


def test_it_forces_a_variant_wherever_it_is_legal() -> None:
    for variant in Variant:
        table = forced(variant)
        require_variants(table)
        assert all(
            (table[at] == variant) == (variant in LEGAL[Cell.at(at).kind] or variant == 0)
            for at in range(CELLS)
        )


def test_its_error_is_that_of_the_predictions() -> None:
    model = target_model(TARGET)
    assert model is not None
    product = Product(CallKind.LINEAR, 4, 640, 384, 1.0)
    times = {variant: spent / 1.1 for variant, spent in model.predict(product).items()}
    row = MeasuredProduct(CallKind.LINEAR, 4, 640, 384, 1.0, times)
    every, linear = error_claims(TARGET, [row])
    assert every.value == linear.value == pytest.approx(10.0)
    assert every.ok
    assert not error_claims(TARGET, [row, worse(row)])[0].ok
    assert model.host in every.note


def worse(row: MeasuredProduct) -> MeasuredProduct:
    times = {variant: spent / 2.0 for variant, spent in row.microseconds.items()}
    return MeasuredProduct(row.kind, row.rows, row.n, row.k, row.density, times)


def test_it_says_from_how_many_bytes_on_threads_help() -> None:
    times = {256: 0.5, 512: 1.5}
    found = [
        MeasuredProduct(
            CallKind.LINEAR,
            rows,
            n,
            1024,
            1.0,
            {Variant.SHARED: 9.0, Variant.ALONE: ratio, Variant.COARSE: 1.0},
        )
        for rows in ROWS
        for n, ratio in times.items()
    ]
    claims = sharing_claims(found)
    assert len(claims) == len(ROWS)
    assert all(claim.value == pytest.approx(384 * 1024 * 17 / 32 / 1024) for claim in claims)
