"""What a calibration record says about routing: router grids, sections for the device, the report.

    CalibrationRecord -> rounded routers, `router_stats`, `expert_groups`

Called between recording and quantisation. Without a record, or without a router, nothing changes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from compiler.contract.canonical import Json
from compiler.kernels.program import Module
from compiler.quant.expert_groups import expert_steps, group_experts, grouping_report
from compiler.quant.record import CalibrationRecord
from compiler.quant.router_bits import RouterWidth, round_routers
from compiler.quant.router_stats import router_stats

ROUTER_STATS: Final = "router_stats"
EXPERT_GROUPS: Final = "expert_groups"


@dataclass(frozen=True, slots=True)
class Learned:
    """What a record says about routing.

    Attributes:
        module: The module, its router weights on the grids that calibration allows.
        sections: `router_stats` and `expert_groups`, if a router ran.
        facts: Rows of the report.
    """

    module: Module
    sections: Mapping[str, bytes]
    facts: Mapping[str, Json]


def learn_routing(
    module: Module, record: CalibrationRecord | None, base_widths: Mapping[int, int] | None = None
) -> Learned:
    """Round the routers of a module, and describe how they route.

    Args:
        module: The module that was recorded.
        record: What calibration saw.
        base_widths: Bits per code that an older bundle stores, by weight.
    """
    rounded = round_routers(module, record, base_widths)
    stats = None if record is None else router_stats(module, record, rounded.widths)
    if record is None or stats is None:
        return Learned(module, {}, {"routing": None})
    sizes, steps = expert_steps(module, record)
    groups = group_experts(sizes, steps)
    facts: dict[str, Json] = {
        "routing": {
            "router_bits": {f"L{width.layer}": _width_row(width) for width in rounded.widths},
            "bands": [asdict(band) for band in stats.bands],
            "groups": groups.count,
            "grouping": asdict(grouping_report(sizes, steps)),
        }
    }
    sections = {ROUTER_STATS: stats.to_bytes(), EXPERT_GROUPS: groups.to_bytes()}
    return Learned(rounded.module, sections, facts)


def _width_row(width: RouterWidth) -> Json:
    flips: dict[str, Json] = {str(bits): round(flip, 5) for bits, flip in width.flips.items()}
    return {"bits": width.bits, "flips": flips}
