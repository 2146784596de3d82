"""The cost model of policies against fresh measurements, and measured crossovers.

    python -m benchmarks.policy [--check]             shapes that the model never saw, on this host
    python -m benchmarks.policy --measure TARGET ...  write what the model of a target is fitted to

Times are those of `benchmarks.policy_products`: hot weights, two threads lent, the VM's own meters.
A crossover is where two measured variants take equally long, interpolated between measured points.
"""

import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks import policy_products
from benchmarks.policy_products import HELD_OUT, SHAPES, THREADS, Made, linear
from benchmarks.runner import Claim, main
from compiler.contract.policy import CallKind, Variant
from compiler.driver.native_check import host_target
from compiler.hardware.measured import (
    FOLDER,
    MeasuredProduct,
    MeasuredTarget,
    products_text,
)
from compiler.kernels.policy_model import Product, target_model

MOST_ERROR: Final = 0.15
CROSSING_SHAPES: Final = ((256, 512), (1024, 1024))
CROSSING_DENSITIES: Final = (0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
Times = Mapping[Variant, float]


def measured(made: Iterable[Made], us_per_tick: float) -> list[MeasuredProduct]:
    """Measure products, closing their plans."""
    loaded = list(made)
    times = policy_products.measure_all(loaded, us_per_tick)
    found = []
    for one, microseconds in zip(loaded, times, strict=True):
        one.plan.close()
        product = one.product
        rounded = {variant: round(spent, 3) for variant, spent in microseconds.items()}
        place = product.kind, product.rows, product.n, product.k, round(product.density, 4)
        found.append(MeasuredProduct(*place, rounded))
        shown = "  ".join(f"{variant.name} {spent:.1f}" for variant, spent in rounded.items())
        print(f"{place[0].name} {place[1:]}: {shown} us", file=sys.stderr, flush=True)
    return found


def host_name() -> str:
    """Return the processor of this machine and how it was used."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    kinds = ("cpu family", "model\t")
    family = [line.split(":")[1].strip() for line in lines if line.startswith(kinds)]
    day = time.strftime("%Y-%m-%d", time.gmtime())
    place = f"{models[0]} (family {family[0]}, model {family[1]}), {len(models)} cores"
    return f"{place}, {THREADS} threads, {day}"


def error_claims(target: str, found: Sequence[MeasuredProduct]) -> list[Claim]:
    """Return how far predictions are from measurements, per kind and in all."""
    model = target_model(target)
    if model is None:
        raise SystemExit(f"error: {target} was never measured: --measure {target}")
    errors: dict[CallKind, list[float]] = {}
    for row in found:
        product = Product(row.kind, row.rows, row.n, row.k, row.density)
        for variant, predicted in model.predict(product).items():
            errors.setdefault(row.kind, []).append(abs(predicted / row.microseconds[variant] - 1))
    every = [error for kind in errors.values() for error in kind]
    note = f"fresh shapes, {len(found)} products, {target}; fitted on {model.host}"
    claims = [_error_claim("policy.error.all", every, MOST_ERROR, note)]
    for kind, some in errors.items():
        note = f"median {100 * statistics.median(some):.1f} %; left out when fitting: "
        note += f"{100 * model.errors[kind]:.1f} %"
        claims.append(_error_claim(f"policy.error.{kind.name.lower()}", some, None, note))
    return claims


def _error_claim(name: str, errors: Sequence[float], bar: float | None, note: str) -> Claim:
    error = statistics.mean(errors)
    ratio = None if bar is None else bar / error
    value = 100 * error
    return Claim(
        name, value, "%", "bar", "", None, ratio, None if bar is None else 1.0, "host", note
    )


def crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Return where the second of two times, as ratio to the first, comes down to 1; None if never.

    Args:
        points: Place and ratio, places ascending.
    """
    for (x0, y0), (x1, y1) in pairwise(points):
        if (y0 - 1.0) * (y1 - 1.0) <= 0 and y0 != y1:
            return x0 + (x1 - x0) * (y0 - 1.0) / (y0 - y1)
    return None


def density_claims(target: str, us_per_tick: float) -> list[Claim]:
    """Return the densities from which dense is as fast: of a zero check, and of stored tiles."""
    places = [(*shape, rows) for shape in CROSSING_SHAPES for rows in (1, 16)]
    made = [linear(target, CallKind.LINEAR, *place, 1.0) for place in places]
    for place in places:
        made += [linear(target, CallKind.CHECKED, *place, each) for each in CROSSING_DENSITIES]
        sparse = (each for each in CROSSING_DENSITIES if each < 1.0)
        made += [linear(target, CallKind.TILES, *place, each) for each in sparse]
    found = measured(made, us_per_tick)
    claims = []
    for n, k, rows in places:
        here = [row for row in found if (row.n, row.k, row.rows) == (n, k, rows)]
        dense = next(row for row in here if row.kind is CallKind.LINEAR)
        ratios = {"check": CallKind.CHECKED, "tiles": CallKind.TILES}
        for name, kind in ratios.items():
            points = sorted(
                (row.density, _dense_us(row, dense) / row.microseconds[Variant.ALONE])
                for row in here
                if row.kind is kind
            )
            at = crossing(points)
            note = f"{rows} x {n} x {k}, one thread; times as fast as dense: "
            note += "  ".join(f"{density:.2f} {ratio:.2f}" for density, ratio in points)
            value = 1.0 if at is None else at
            place = f"policy.crossover.{name}.{rows}x{n}x{k}"
            claims.append(Claim(place, value, "density", "", "", None, None, None, "host", note))
    return claims


def _dense_us(row: MeasuredProduct, dense: MeasuredProduct) -> float:
    is_checked = row.kind is CallKind.CHECKED
    return (row if is_checked else dense).microseconds[
        Variant.UNCHECKED_ALONE if is_checked else Variant.ALONE
    ]


def sharing_claims(found: Sequence[MeasuredProduct]) -> list[Claim]:
    """Return from how many bytes of weights on a second thread helps, by rows."""
    claims = []
    for rows in policy_products.ROWS:
        some = [row for row in found if row.kind is CallKind.LINEAR and row.rows == rows]
        points = sorted(
            (row.n * row.k * 17 / 32 / 1024, row.microseconds[Variant.ALONE] / _shared(row))
            for row in some
        )
        at = crossing(points)
        note = "  ".join(f"{size:.0f} KiB {ratio:.2f}" for size, ratio in points)
        value = points[0][0] if at is None else at
        name = f"policy.crossover.threads.{rows}rows"
        claims.append(Claim(name, value, "KiB", "", "", None, None, None, "host", note))
    return claims


def _shared(row: MeasuredProduct) -> float:
    return min(row.microseconds[Variant.SHARED], row.microseconds[Variant.COARSE])


def measure() -> list[Claim]:
    """Measure held-out shapes on this host; return the claims."""
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    us_per_tick = policy_products.tick_us()
    found = measured(policy_products.products(target.id, HELD_OUT), us_per_tick)
    return [
        *error_claims(target.id, found),
        *density_claims(target.id, us_per_tick),
        *sharing_claims(found),
    ]


def write_products(targets: Iterable[str]) -> None:
    """Measure what the models of targets are fitted to."""
    us_per_tick = policy_products.tick_us()
    for target in targets:
        found = measured(policy_products.products(target, SHAPES), us_per_tick)
        FOLDER.mkdir(exist_ok=True)
        text = products_text(MeasuredTarget(host_name(), tuple(found)))
        (FOLDER / f"{target}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        write_products(sys.argv[2:])
    else:
        sys.exit(main("policy", measure, sys.argv[1:]))
