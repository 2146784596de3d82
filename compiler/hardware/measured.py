"""Products measured on a target, as data: what the cost model of its policy is fitted to.

    products/<target>.json -> measured_on(target) -> host, products

One file per measured target, written by `benchmarks.policy --measure`, with the host named.
A target without a file is *unmeasured*: its policies are priors, and lists and pages say so.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from compiler.contract.policy import LEGAL, CallKind, Variant
from compiler.errors import CompilerError

FOLDER: Final = Path(__file__).with_name("products")
UNMEASURED: Final = "unmeasured"


class MeasuredProductsError(CompilerError):
    """A file of measured products makes no sense."""

    code: ClassVar[str] = "build.app.measured_products"


@dataclass(frozen=True, slots=True)
class MeasuredProduct:
    """One call, measured in every variant that its kind knows.

    Attributes:
        kind: What ran.
        rows: Activation rows.
        n, k: Rows and columns of the weight; of an expert's first matrix.
        density: Of the stored weights or, for CHECKED, of the live activations.
        microseconds: By variant.
    """

    kind: CallKind
    rows: int
    n: int
    k: int
    density: float
    microseconds: Mapping[Variant, float]


@dataclass(frozen=True, slots=True)
class MeasuredTarget:
    """What was measured on one target.

    Attributes:
        host: Machine, threads and day.
        products: In the order of measuring.
    """

    host: str
    products: tuple[MeasuredProduct, ...]


@cache
def measured_on(target_id: str) -> MeasuredTarget | None:
    """Return what was measured on a target, None if nothing was.

    Raises:
        MeasuredProductsError: The file is damaged.
    """
    path = FOLDER / f"{target_id}.json"
    if not path.is_file():
        return None
    return parse_products(path.read_text(encoding="utf-8"))


def measured_label(target_id: str) -> str:
    """Return the host that a target was measured on, or `unmeasured`."""
    found = measured_on(target_id)
    return UNMEASURED if found is None else found.host


def parse_products(text: str) -> MeasuredTarget:
    """Return the contents of a file.

    Raises:
        MeasuredProductsError: It is damaged.
    """
    try:
        document = json.loads(text)
        products = tuple(_product(*row) for row in document["products"])
        host = document["host"]
    except (ValueError, KeyError, TypeError) as error:
        raise MeasuredProductsError(f"measured products: {error}") from error
    if not isinstance(host, str) or not host or not products:
        raise MeasuredProductsError("measured products name no host, or there are none")
    return MeasuredTarget(host, products)


def products_text(measured: MeasuredTarget) -> str:
    """Return the text of a file, a product a line."""
    rows = (
        json.dumps([p.kind.name, p.rows, p.n, p.k, p.density, list(p.microseconds.values())])
        for p in measured.products
    )
    lines = ",\n  ".join(rows)
    return f'{{"host": {json.dumps(measured.host)},\n "products": [\n  {lines}\n ]}}\n'


def _product(
    kind: str, rows: int, n: int, k: int, density: float, times: list[float]
) -> MeasuredProduct:
    known = CallKind[kind]
    microseconds = dict(zip(LEGAL[known], times, strict=True))
    if min(rows, n, k) < 1 or not 0.0 < density <= 1.0 or min(times) <= 0.0:
        raise ValueError(f"a product of {rows} x {n} x {k}, density {density}, {times} us")
    return MeasuredProduct(known, rows, n, k, density, microseconds)
