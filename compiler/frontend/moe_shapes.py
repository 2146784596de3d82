"""Which mixtures of experts are read: shape of the export times kind of router.

A cell is legal if such a file can exist; every legal cell is raised to `moe.route` and
`moe.experts` and has a test. The others say why they cannot exist. Activations go with every shape
(`ACTS`), but for the contrib operators, which have their own list.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from compiler.dialects.moe import EXPERT_ACTS, ROUTE_ORDERS


@dataclass(frozen=True, slots=True)
class Shape:
    """One way in which exporters write a mixture.

    Attributes:
        family: Number in the literature of exports, O1 to O6.
        written: Who writes it so, and what it looks like.
        by: Where it is raised.
        illegal: Routers that it cannot have, and why.
    """

    family: str
    written: str
    by: str
    illegal: Mapping[str, str] = field(default_factory=dict)


_NO_TOPK_FIRST: Final = "softmax behind top-k is the same as normalised gates, which it writes"
_NO_SIGMOID: Final = "MoE takes logits through a softmax; sigmoid gates without a sum need QMoE"
_REPAIR: Final = "frontend.moe_repair, then passes.raise_moe_experts"
_EXPERTS: Final = "passes.raise_moe_experts"
_CONTRIB: Final = "passes.raise_moe_contrib"

SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        "moe": Shape(
            "O1",
            "ORT-GenAI builder: com.microsoft::MoE",
            _CONTRIB,
            MappingProxyType({"topk_softmax": _NO_TOPK_FIRST, "sigmoid_topk": _NO_SIGMOID}),
        ),
        "qmoe": Shape(
            "O1",
            "ORT-GenAI builder: com.microsoft::QMoE, 2, 4 or 8 bits",
            _CONTRIB,
            MappingProxyType(
                {
                    "topk_softmax": _NO_TOPK_FIRST,
                    "softmax_topk": "ONNX Runtime normalises the gates of every QMoE",
                }
            ),
        ),
        "gathered": Shape(
            "O2", "torch dynamo, batched_mm: matrices gathered by the chosen experts", _EXPERTS
        ),
        "traced": Shape(
            "O3", "TorchScript trace of the eager loop: one body per expert that was hit", _REPAIR
        ),
        "unrolled": Shape(
            "O4", "module lists, static loops: one body per expert, on its rows", _REPAIR
        ),
        "masked": Shape(
            "O4", "static loops without gathers: one body per expert, on all rows", _REPAIR
        ),
        "tiled": Shape("O5", "dense exports: all experts on all rows, gates scattered", _EXPERTS),
        "looped": Shape("O6", "Loop over all experts", _REPAIR),
        "looped_hits": Shape("O6", "Loop over the experts that were hit", _REPAIR),
        "branched": Shape("O6", "one If per expert", _REPAIR),
    }
)

ROUTERS: Final = ROUTE_ORDERS
ACTS: Final = EXPERT_ACTS

CONTRIB_ACTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gelu": "the operator's gelu is the tanh form",
        "reglu": "the operator gates with silu only",
    }
)
"""Activations that the contrib operators do not have, and why."""

UNREAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "gates on the way in": "Llama 4 multiplies the rows, not the results: that does not commute"
        " with the activation",
        "experts missing": "refused with MissingExpertsError: nothing can make up weights that are"
        " not in the file",
        "QMoE of 3 bits, fp4, fp8": "no weights of these kinds have been seen",
    }
)
"""What is not raised, and why."""


def legal_cells() -> tuple[tuple[str, str], ...]:
    """Return (shape, router) of all cells that can exist, in order."""
    return tuple(
        (name, router)
        for name, shape in SHAPES.items()
        for router in ROUTERS
        if router not in shape.illegal
    )
