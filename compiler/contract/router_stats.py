"""The `router_stats` section: how routers behaved on the calibration set, as data for a device.

Statistics choose what to prefetch and how wide; they never replace a router's choice, which the
plan computes for every token. Ratios are integers per mille, entropies thousandths of a nat.
Schema `sparsefleet.router-stats/1`, canonical JSON, unknown fields refused:

    {"schema", "steps", "rows",
     "layers": [{"layer", "experts", "top_k", "router_bits",
                 "usage_vision": [per mille per expert], "usage_text": [...],
                 "modality_bias": [-1000..1000 per expert],
                 "entropy_histogram": [counts over equal parts of 0..ln(experts)]}],
     "bands": [{"low", "high", "share", "expected_experts", "prefetch_width"}]}

A band is a range [low, high) of the mean routing entropy of a step; the last one includes its end.
Bands adjoin, and cover at least 950 per mille of the steps. Their fields parametrise a variant of
the plan's policy: how many distinct experts a layer is expected to use in a step, and how many of
the most probable ones to prefetch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object
from compiler.contract.errors import ContractError
from compiler.contract.fields import require_fields, require_integer, require_list

SCHEMA: Final = "sparsefleet.router-stats/1"
MAX_STATS_BYTES: Final = 4 * 1024 * 1024
MAX_LAYERS: Final = 1 << 12
MAX_EXPERTS: Final = 1 << 12
MAX_COUNT: Final = 1 << 40
MAX_ENTROPY: Final = 1 << 20
MAX_BANDS: Final = 5
HISTOGRAM_BINS: Final = 32
ROUTER_BITS: Final = (4, 6, 8, 16, 32)
PER_MILLE: Final = 1000
LEAST_COVER: Final = 950
_FIELDS: Final = frozenset(("schema", "steps", "rows", "layers", "bands"))
_BAND_FIELDS: Final = ("low", "high", "share", "expected_experts", "prefetch_width")
_LAYER_FIELDS: Final = (
    "layer",
    "experts",
    "top_k",
    "router_bits",
    "usage_vision",
    "usage_text",
    "modality_bias",
    "entropy_histogram",
)


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One router.

    Attributes:
        layer: Number of the expert layer.
        experts: Experts of the layer.
        top_k: Experts chosen per row.
        router_bits: Width of the grid that the router's weights lie on; 32 = as submitted.
        usage_vision, usage_text: Share of the choices of each expert, per mille; zeros if no row
            of that kind was seen.
        modality_bias: Usage by text minus usage by vision over their sum, per mille per expert.
        entropy_histogram: Rows by routing entropy, over equal parts of 0..ln(experts).
    """

    layer: int
    experts: int
    top_k: int
    router_bits: int
    usage_vision: tuple[int, ...]
    usage_text: tuple[int, ...]
    modality_bias: tuple[int, ...]
    entropy_histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EntropyBand:
    """A range of mean routing entropy, and the policy for steps in it.

    Attributes:
        low, high: Thousandths of a nat.
        share: Share of the calibration steps, per mille.
        expected_experts: Distinct experts per layer and step, rounded up.
        prefetch_width: The fewest of the band's most used experts that held 900 per mille of its
            choices in every layer.
    """

    low: int
    high: int
    share: int
    expected_experts: int
    prefetch_width: int


@dataclass(frozen=True, slots=True)
class RouterStats:
    """Everything that calibration learned about routing.

    Attributes:
        steps: Program runs that were seen.
        rows: Routed rows of the layer that routed most.
    """

    steps: int
    rows: int
    layers: tuple[LayerStats, ...]
    bands: tuple[EntropyBand, ...]

    def to_bytes(self) -> bytes:
        """Return the canonical bytes of the section."""
        layers: list[Json] = [
            {name: _listed(getattr(layer, name)) for name in _LAYER_FIELDS} for layer in self.layers
        ]
        bands: list[Json] = [
            {name: getattr(band, name) for name in _BAND_FIELDS} for band in self.bands
        ]
        document: dict[str, Json] = {
            "schema": SCHEMA,
            "steps": self.steps,
            "rows": self.rows,
            "layers": layers,
            "bands": bands,
        }
        return canonical_bytes(document)


def parse_router_stats(data: bytes) -> RouterStats:
    """Parse and check a `router_stats` section.

    Raises:
        LimitExceededError: Longer than `MAX_STATS_BYTES`, or a list beyond its limit.
        ContractError: Any field is missing, unknown, of the wrong type or out of range, bands do
            not adjoin or cover too little, or the bytes are not canonical.
    """
    document = require_fields(
        parse_object(data, limit_bytes=MAX_STATS_BYTES), _FIELDS, "router stats"
    )
    if document["schema"] != SCHEMA:
        raise ContractError(f"router stats schema {document['schema']!r}, expected {SCHEMA!r}")
    stats = RouterStats(
        steps=require_integer(document["steps"], "steps", 1, MAX_COUNT),
        rows=require_integer(document["rows"], "rows", 1, MAX_COUNT),
        layers=tuple(
            _layer(item) for item in require_list(document["layers"], "layers", MAX_LAYERS)
        ),
        bands=tuple(_band(item) for item in require_list(document["bands"], "bands", MAX_BANDS)),
    )
    numbers = [layer.layer for layer in stats.layers]
    if not numbers or sorted(set(numbers)) != numbers:
        raise ContractError("layers must ascend, and there must be one")
    _require_bands(stats.bands)
    if stats.to_bytes() != data:
        raise ContractError("router stats are not in canonical form")
    return stats


def _require_bands(bands: tuple[EntropyBand, ...]) -> None:
    if not bands or any(band.low >= band.high for band in bands):
        raise ContractError("there must be a band, and none may be empty")
    if any(before.high != after.low for before, after in pairwise(bands)):
        raise ContractError("entropy bands must adjoin")
    if not LEAST_COVER <= sum(band.share for band in bands) <= PER_MILLE:
        raise ContractError(f"entropy bands must cover {LEAST_COVER} to {PER_MILLE} per mille")


def _layer(value: Json) -> LayerStats:
    fields = require_fields(value, frozenset(_LAYER_FIELDS), "layer")
    experts = require_integer(fields["experts"], "experts", 1, MAX_EXPERTS)
    bits = require_integer(fields["router_bits"], "router_bits", 1, max(ROUTER_BITS))
    if bits not in ROUTER_BITS:
        raise ContractError(f"router_bits must be one of {ROUTER_BITS}")
    return LayerStats(
        layer=require_integer(fields["layer"], "layer", 0, MAX_LAYERS - 1),
        experts=experts,
        top_k=require_integer(fields["top_k"], "top_k", 1, experts),
        router_bits=bits,
        usage_vision=_numbers(fields, "usage_vision", experts, 0, PER_MILLE),
        usage_text=_numbers(fields, "usage_text", experts, 0, PER_MILLE),
        modality_bias=_numbers(fields, "modality_bias", experts, -PER_MILLE, PER_MILLE),
        entropy_histogram=_numbers(fields, "entropy_histogram", HISTOGRAM_BINS, 0, MAX_COUNT),
    )


def _band(value: Json) -> EntropyBand:
    fields = require_fields(value, frozenset(_BAND_FIELDS), "band")
    return EntropyBand(
        low=require_integer(fields["low"], "low", 0, MAX_ENTROPY),
        high=require_integer(fields["high"], "high", 0, MAX_ENTROPY),
        share=require_integer(fields["share"], "share", 0, PER_MILLE),
        expected_experts=require_integer(
            fields["expected_experts"], "expected_experts", 1, MAX_EXPERTS
        ),
        prefetch_width=require_integer(fields["prefetch_width"], "prefetch_width", 1, MAX_EXPERTS),
    )


def _numbers(
    fields: Mapping[str, Json], name: str, count: int, low: int, high: int
) -> tuple[int, ...]:
    items = require_list(fields[name], name, count)
    if len(items) != count:
        raise ContractError(f"{name} must have {count} numbers")
    return tuple(require_integer(item, name, low, high) for item in items)


def _listed(value: int | tuple[int, ...]) -> Json:
    return list(value) if isinstance(value, tuple) else value
