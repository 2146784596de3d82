"""The cost model of policies: recovers a known law, seeds tables, says what is a prior."""

import random
from dataclasses import replace

import pytest

from compiler.contract.policy import (
    CELLS,
    LEGAL,
    CallKind,
    Cell,
    Flags,
    Variant,
    cell_of,
    parse_policy,
)
from compiler.hardware.measured import (
    UNMEASURED,
    MeasuredProduct,
    MeasuredProductsError,
    MeasuredTarget,
    measured_label,
    measured_on,
    parse_products,
    products_text,
)
from compiler.hardware.targets import TARGETS
from compiler.kernels.policy_model import (
    Product,
    held_out_error,
    middle,
    model_of,
    pieces,
    seed_policy,
    target_model,
    terms,
)

SHAPES = tuple((n, k) for n in (64, 256, 512, 1024, 2048) for k in (128, 512, 1024))
WAKING_US = 5.0


def law(product: Product, variant: Variant) -> float:
    """Return microseconds: two threads halve the work and cost a wake-up."""
    read, live, _, _, _, one = terms(product, variant)
    work = read / 40_000 + live / 60_000 + one * 0.5
    return work / 2 + WAKING_US if pieces(product, variant) > 1 else work


def measured(noise: float = 0.0) -> list[MeasuredProduct]:
    source, found = random.Random(4), []
    for n, k in SHAPES:
        for rows in (1, 8, 64):
            product = Product(CallKind.LINEAR, rows, n, k, 1.0)
            times = {
                v: law(product, v) * source.lognormvariate(0.0, noise)
                for v in LEGAL[CallKind.LINEAR]
            }
            found.append(MeasuredProduct(CallKind.LINEAR, rows, n, k, 1.0, times))
    return found


def test_it_recovers_a_law_and_predicts_shapes_that_it_never_saw() -> None:
    assert held_out_error(measured()) < 0.02
    assert 0.02 < held_out_error(measured(0.1)) < 0.15


def test_its_coefficients_are_not_negative() -> None:
    model = model_of("here", measured(0.3))
    for fits in model.fits.values():
        for fit in fits.values():
            assert (fit.whole.coefficients >= 0.0).all()
            assert (fit.cut.coefficients >= 0.0).all()


def test_it_predicts_what_is_faster_on_each_side_of_a_crossover() -> None:
    model = model_of("here", measured())
    small = model.predict(Product(CallKind.LINEAR, 1, 400, 512, 1.0))
    large = model.predict(Product(CallKind.LINEAR, 32, 1500, 900, 1.0))
    assert small[Variant.ALONE] < small[Variant.SHARED]
    assert large[Variant.SHARED] < large[Variant.ALONE]
    assert model.predict(Product(CallKind.CONV, 1, 8, 8, 1.0)) == {}


@pytest.mark.parametrize("target", [target.id for target in TARGETS])
def test_every_target_gets_a_policy_that_a_device_accepts(target: str) -> None:
    policy = seed_policy(target)
    assert parse_policy(policy.to_bytes()) == policy
    is_measured = measured_on(target) is not None
    assert bool(policy.flags & Flags.MEASURED) == is_measured
    assert (policy.residual > 0) == is_measured
    assert not policy.is_fixed
    fixed = seed_policy(target, fixed=True)
    assert fixed.is_fixed
    assert not any(fixed.doubts)
    assert fixed.variants == policy.variants
    assert parse_policy(fixed.to_bytes()) == fixed


def test_a_target_without_measurements_gets_priors_and_doubts_everything() -> None:
    unmeasured = [target.id for target in TARGETS if measured_on(target.id) is None]
    assert "aarch64" in unmeasured
    assert measured_label("aarch64") == UNMEASURED
    assert target_model("aarch64") is None
    policy = seed_policy("aarch64")
    for index in range(CELLS):
        cell = Cell.at(index)
        known = LEGAL[cell.kind]
        assert policy.candidates(cell) == (tuple(sorted(known)) if len(known) > 1 else ())
    sparse = cell_of(CallKind.CHECKED, 1 << 18, 1, 500)
    dense = cell_of(CallKind.CHECKED, 1 << 18, 1, 950)
    assert policy.variant(sparse) is Variant.SHARED
    assert policy.variant(dense) is Variant.UNCHECKED


def test_a_measured_target_names_its_host_and_leaves_fewer_doubts() -> None:
    found = [target.id for target in TARGETS if measured_on(target.id) is not None]
    assert found
    for target in found:
        model = target_model(target)
        assert model is not None
        assert measured_label(target) == model.host
        assert sum(seed_policy(target).doubts) < sum(seed_policy("aarch64").doubts)
        assert max(model.errors.values()) <= 0.5


def test_the_middle_of_a_cell_lies_in_it() -> None:
    for index in range(CELLS):
        cell = Cell.at(index)
        if cell.kind not in (CallKind.LINEAR, CallKind.CHECKED, CallKind.LINEAR_F32):
            continue
        product = middle(cell)
        width = 4.0 if cell.kind is CallKind.LINEAR_F32 else 17 / 32
        stored = 1.0 if cell.kind is CallKind.CHECKED else product.density
        found = cell_of(
            cell.kind,
            round(product.n * product.k * width * stored),
            product.rows,
            round(1000 * product.density),
        )
        assert (found.rows, found.density) == (cell.rows, cell.density)
        assert abs(found.size - cell.size) <= (0 if stored == 1.0 else 1)


def test_it_writes_and_reads_measured_products() -> None:
    target = MeasuredTarget("a host", tuple(measured()))
    assert parse_products(products_text(target)) == target


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"n": -1},
        {"density": 0.0},
        {"density": 1.5},
        {"microseconds": {Variant.SHARED: 1.0}},
        {"microseconds": dict.fromkeys(LEGAL[CallKind.LINEAR], 0.0)},
    ],
)
def test_it_refuses_products_that_make_no_sense(change: dict[str, object]) -> None:
    wrong = MeasuredTarget("a host", (replace(measured()[0], **change),))
    with pytest.raises(MeasuredProductsError):
        parse_products(products_text(wrong))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"host": "", "products": []}', '{"host": 1}'])
def test_it_refuses_files_that_are_none(text: str) -> None:
    with pytest.raises(MeasuredProductsError):
        parse_products(text)
