"""The template dialect that every back end renders, and the values that all of them share."""

from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import jinja2

from compiler.contract import policy
from compiler.contract.operations import (
    Act,
    ExpertAct,
    ExpertEvent,
    NormKind,
    Op,
    PackedKind,
    RecurrentKind,
    RouteOrder,
    UnaryKind,
)
from compiler.contract.plan_format import Kind, KvKind, Status
from compiler.contract.pool_abi import (
    BuddyStatus,
    Eviction,
    ExpertState,
    PoolKnob,
    TraceOutcome,
    TracePoint,
)
from compiler.contract.reference import MapKind, PoolKind, ReduceKind, ScatterKind
from compiler.kernels import constants, reference, registry

_ROOT: Final = Path(registry.__file__).parent
_ENUMS: Final[tuple[type[IntEnum], ...]] = (
    Status,
    Kind,
    KvKind,
    Op,
    Act,
    NormKind,
    PackedKind,
    UnaryKind,
    RecurrentKind,
    RouteOrder,
    ExpertAct,
    ExpertEvent,
    ExpertState,
    PoolKnob,
    Eviction,
    BuddyStatus,
    TracePoint,
    TraceOutcome,
    MapKind,
    ReduceKind,
    PoolKind,
    ScatterKind,
    policy.Variant,
    policy.CallKind,
)


def _packed_lanes(bits: int) -> tuple[list[int], list[int]]:
    """Return, by which of eight lanes are kept, each lane's place among them and the kept ones."""
    places = [(bits & ((1 << lane) - 1)).bit_count() for lane in range(8)]
    kept = [lane for lane in range(8) if bits >> lane & 1]
    return [min(place, 7) for place in places], kept + [0] * (8 - len(kept))


SHARED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "binary": registry.BINARY_SIGNS,
        "double": constants.DOUBLE,
        "enums": {e.__name__: {m.name: int(m) for m in e} for e in _ENUMS},
        "exp": constants.EXP,
        "gelu": constants.GELU,
        "kv_limit": constants.KV_LIMIT,
        "layouts": reference.LAYOUT_OFFSETS,
        "log": constants.LOG,
        "maps": reference.MAPS,
        "packed_lanes": tuple(_packed_lanes(bits) for bits in range(256)),
        "query_limit": constants.QUERY_LIMIT,
        "smallest_amax": constants.SMALLEST_AMAX,
    }
)
"""Template parameters that depend on neither the target nor the operations."""


def render(template: str, context: Mapping[str, object]) -> str:
    """Return one rendered template under `compiler/kernels`, headed by its name."""
    text = _environment().get_template(template).render(context)
    return f"/* ======== {template} ======== */\n{text.strip()}\n"


@cache
def _environment() -> jinja2.Environment:
    """The template dialect: `$ ` statements, `$#` comments, `${...}` holes."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ROOT),
        line_statement_prefix="$ ",
        line_comment_prefix="$#",
        variable_start_string="${",
        variable_end_string="}",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - the output is C, not HTML
    )
