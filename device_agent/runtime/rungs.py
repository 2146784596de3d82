"""Set a running bundle to a rung of its ladder: its variant, reading ahead, its routers.

Called before every answer by whoever holds the parts of a bundle; pure but for those parts. Which
rung it is says `degrade_keeper`.
"""

from compiler.contract.bands import BandedRunner
from compiler.contract.degrade import Rung
from compiler.contract.pager import PagerSwitch
from device_agent.runtime.faults import AS_ASKED, Way
from device_agent.runtime.residency import Residency
from device_agent.runtime.steering_keeper import SteeringKeeper


def take_rung(
    rung: Rung,
    banded: BandedRunner | None,
    pager: PagerSwitch | Residency | None,
    steering: SteeringKeeper | None,
    way: Way = AS_ASKED,
) -> None:
    """Have the next answer run on `rung`, or lower if `way` asks for that.

    Args:
        rung: That of the rules.
        banded: The variants of the bundle's step; None without any.
        pager: Where its experts come from; None if all are in memory.
        steering: Of its routers; None = they choose as the model says.
        way: How the attempt runs.
    """
    is_fewest = way.fewest or rung >= Rung.FEWER_EXPERTS
    if banded is not None:
        banded.fewest = is_fewest
    if isinstance(pager, Residency):
        pager.look()
    if steering is not None:
        steering.answers(fewer=is_fewest)
    if pager is not None:
        pager.is_fetching_ahead = way.prefetch and rung < Rung.NO_PREFETCH
