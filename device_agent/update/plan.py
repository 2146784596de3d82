"""What has to be fetched for a bundle: nothing that is here, a delta if it is smaller, the rest.

On a metered network whose policy allows deltas only, the rest is not fetched. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass

from compiler.contract.manifest import ReleaseManifest, Section
from compiler.contract.protocol import DeltaOffer, Network, NetworkPolicy

Present = Callable[[str, int], bool]


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The decision.

    Attributes:
        missing: Sections that are not here, each content once, in order.
        delta: Fetch this and make the missing sections from it; None = fetch them whole.
    """

    missing: tuple[Section, ...]
    delta: DeltaOffer | None

    @property
    def missing_bytes(self) -> int:
        """Return the size of the missing sections."""
        return sum(section.size_bytes for section in self.missing)


def may_fetch(plan: FetchPlan, policy: NetworkPolicy, network: Network) -> bool:
    """Return whether a plan may be carried out over a network, whatever it costs elsewhere."""
    is_bound = network is Network.METERED and policy is not NetworkPolicy.ANY
    return not is_bound or plan.delta is not None or not plan.missing


def plan_fetch(
    manifest: ReleaseManifest, present: Present, delta: DeltaOffer | None, *, base_here: bool
) -> FetchPlan:
    """Decide what to fetch.

    Args:
        manifest: The bundle wanted.
        present: Whether an object of this digest and size is here.
        delta: What the director offers.
        base_here: Whether every section of the delta's base is here.
    """
    missing: dict[str, Section] = {}
    for section in manifest.sections:
        if not present(section.sha256, section.size_bytes):
            missing.setdefault(section.sha256, section)
    plan = FetchPlan(tuple(missing.values()), None)
    if delta is None or not base_here or delta.size_bytes >= plan.missing_bytes:
        return plan
    return FetchPlan(plan.missing, delta)
