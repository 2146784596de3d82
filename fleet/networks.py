"""What a device on a metered network may fetch: the rollout's policy, decided per question.

    any             -> everything
    delta_only      -> a delta that leads from what it runs; otherwise it waits
    wait_unmetered  -> nothing until the deadline of its update has passed, then everything

A policy binds installs on networks that the device calls metered. A way back never waits: it
fetches nothing where the older bundle is still there. Pure; called by
`fleet.services.assignments`.
"""

from typing import Final

from compiler.contract.protocol import Network, NetworkPolicy, OfferKind

DEFAULT_WAIT_S: Final = 7 * 24 * 3600.0
MAX_WAIT_S: Final = 365 * 24 * 3600.0


def policy_now(
    policy: NetworkPolicy, kind: OfferKind, *, waited_s: float, deadline_s: float
) -> NetworkPolicy:
    """Return the policy that binds an update now.

    Args:
        policy: The rollout's.
        kind: What the update asks for.
        waited_s: Time since the update was made, seconds.
        deadline_s: How long `wait_unmetered` may keep it waiting, seconds.
    """
    is_over = policy is NetworkPolicy.WAIT_UNMETERED and waited_s >= deadline_s
    return NetworkPolicy.ANY if is_over or kind is OfferKind.ROLLBACK else policy


def wait_reason(policy: NetworkPolicy, network: Network, *, has_delta: bool) -> str:
    """Return why an update has to wait on this network, empty if it may go on.

    Args:
        policy: As `policy_now` gives it.
        network: What the device says.
        has_delta: Whether there is a delta from what the device runs.
    """
    if network is not Network.METERED or policy is NetworkPolicy.ANY:
        return ""
    if policy is NetworkPolicy.WAIT_UNMETERED:
        return "the network is metered and the rollout waits for one that is not"
    if not has_delta:
        return "the network is metered, the rollout allows only deltas, and none is ready"
    return ""
