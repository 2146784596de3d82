"""Set a running bundle to a rung of its ladder: its variant, reading ahead, its routers.

Called before every answer by whoever holds the parts of a bundle; pure but for those parts. Which
rung it is says `degrade_keeper`.
"""

from collections.abc import Mapping

from compiler.contract.bands import BandedRunner
from compiler.contract.degrade import Rung
from compiler.contract.pager import PagerSwitch
from compiler.contract.session import PlanRunner
from compiler.contract.substitutes import BY_RUNG, Substitute, SubstituteRunner, Substitutes
from device_agent.runtime.bundle import LoadedBundle
from device_agent.runtime.faults import AS_ASKED, Way
from device_agent.runtime.residency import Residency
from device_agent.runtime.steering_keeper import SteeringKeeper


class Standing:
    """What stands in for the routed layers of a running bundle."""

    def __init__(
        self,
        runner: SubstituteRunner,
        found: Substitutes,
        sizes: Mapping[Substitute, int],
        most: int,
    ) -> None:
        """Begin with the routed layers.

        Args:
            runner: Takes a substitute.
            found: Those of the bundle, and what they cost in answers.
            sizes: What a step needs of weights with each, bytes.
            most: Bytes that weights may take; 0 = any.
        """
        self.runner = runner
        self._sizes = sizes
        self.fallback = fallback_of(found, sizes, most)

    @property
    def is_full(self) -> bool:
        """Whether routers are those that take all experts: nothing may steer them."""
        return self.runner.taken is Substitute.FULL_DENSE

    def facts(self) -> dict[str, object]:
        """Return what `status` shows: what there is, what routers in trouble lead to, runs."""
        return {
            "there": {kind.value: size for kind, size in sorted(self._sizes.items())},
            "fallback": None if self.fallback is None else self.fallback.value,
            "ran": dict(self.runner.ran),
        }

    def take(self, rung: Rung, way: Way) -> None:
        """Take what a rung or a way asks for."""
        self.runner.taken = self.fallback if way.dense else BY_RUNG.get(rung)


def fallback_of(
    found: Substitutes, sizes: Mapping[Substitute, int], most_bytes: int
) -> Substitute | None:
    """Return what a device without usable routers takes: what answers best of all that fits.

    Args:
        found: The substitutes of a bundle.
        sizes: What a step needs of weights with each, bytes.
        most_bytes: That weights may take; 0 = any.
    """
    fitting = [row for row in found.rows if not most_bytes or sizes[row.kind] <= most_bytes]
    best = min(fitting, key=lambda row: (row.worse - row.better, -sizes[row.kind]), default=None)
    return None if best is None else best.kind


def standing_of(runner: PlanRunner, bundle: LoadedBundle) -> Standing | None:
    """Return what may stand in for the routed layers of a bundle; None if nothing.

    Args:
        runner: What runs its programs, bands at work.
        bundle: Loaded.
    """
    found = bundle.substitutes
    if found is None:
        return None
    substituted = SubstituteRunner(runner, found.kinds, bundle.pipeline.programs)
    most = bundle.budget.get("max_weight_bytes", 0)
    return Standing(substituted, found, bundle.substitute_bytes, most)


def take_rung(
    rung: Rung,
    banded: BandedRunner | None,
    pager: PagerSwitch | Residency | None,
    steering: SteeringKeeper | None,
    way: Way = AS_ASKED,
    standing: Standing | None = None,
) -> None:
    """Have the next answer run on `rung`, or lower if `way` asks for that.

    Args:
        rung: That of the rules.
        banded: The variants of the bundle's step; None without any.
        pager: Where its experts come from; None if all are in memory.
        steering: Of its routers; None = they choose as the model says.
        way: How the attempt runs.
        standing: What may stand in for routed layers; None if nothing.
    """
    is_fewest = way.fewest or rung >= Rung.FEWER_EXPERTS
    if banded is not None:
        banded.fewest = is_fewest
    if isinstance(pager, Residency):
        pager.look()
    if standing is not None:
        standing.take(rung, way)
    if steering is not None:
        steering.answers(fewer=is_fewest, rests=standing is not None and standing.is_full)
    if pager is not None:
        pager.is_fetching_ahead = way.prefetch and rung < Rung.NO_PREFETCH
