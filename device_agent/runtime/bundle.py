"""Load an installed bundle: hash every section, start the plan.

What is hashed is what is used: sections are mapped once and hashed in that mapping, and the plan
copies them out of it (native code into a sealed memory file), so nothing can be swapped on disk
between the check and the load. Standard library and contract only: the self-test child starts fast.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final, Protocol

from compiler.contract.bands import Bands, parse_bands, verify_bands
from compiler.contract.errors import ContractError
from compiler.contract.manifest import ReleaseManifest, parse_manifest
from compiler.contract.native import NativePlan
from compiler.contract.native_policy import PolicySeat
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.plan import parse_plan
from compiler.contract.policy import PLAIN, Policy, parse_policy
from compiler.contract.schedule import parse_schedule
from compiler.contract.schedule_order import verify_schedule
from device_agent.errors import BundleError
from device_agent.runtime.threads import ThreadedRunner
from device_agent.runtime.weights import WeightPool
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer

PLAN: Final = "plan"
KERNELS: Final = "kernels"
PIPELINE: Final = "pipeline"
SELF_TEST: Final = "selftest"
SCHEDULE: Final = "schedule"
BANDS: Final = "bands"
POLICY: Final = "policy"
NEEDED: Final = frozenset((PLAN, KERNELS, PIPELINE, SELF_TEST))


class ClosableRunner(ThreadedRunner, Protocol):
    """A plan that holds native memory.

    Attributes:
        cpus: Where threads lent from now on run; empty for anywhere.
    """

    cpus: Set[int]

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""

    @property
    def huge_weight_bytes(self) -> int | None:
        """How many of them lie on huge pages; None if the system does not say."""

    @property
    def policy(self) -> PolicySeat:
        """Where its policy is swapped."""

    def close(self) -> None:
        """Free it."""


@dataclass(frozen=True, slots=True)
class LoadedBundle:
    """A bundle in memory.

    Attributes:
        manifest_sha256: Which.
        runner: The plan.
        pipeline: Words, pictures and limits.
        self_test: Bytes of the self-test section.
        policy: How its calls run; a bundle without one leaves nothing to choose.
        bands: Its variants of `step` and when they run; None if it has no variant.
    """

    manifest_sha256: str
    runner: ClosableRunner
    pipeline: Pipeline
    self_test: bytes
    policy: Policy = PLAIN
    bands: Bands | None = None


def read_manifest(store: ObjectStore, sha256: str, size_bytes: int) -> ReleaseManifest:
    """Return an installed release manifest.

    Raises:
        BundleError: It is missing or damaged.
    """
    try:
        return parse_manifest(bytes(store.read_verified(sha256, size_bytes)))
    except ContractError as error:
        raise BundleError(f"manifest {sha256[:16]}: {error}") from error


def load_bundle(
    store: ObjectStore, pointer: Pointer, pool: WeightPool | None = None
) -> LoadedBundle:
    """Verify and load a bundle; weights that `pool` knows are shared with the bundle that has them.

    Raises:
        BundleError: A section is missing or damaged, or the plan does not load.
    """
    manifest = read_manifest(store, pointer.manifest_sha256, pointer.size_bytes)
    views = {
        section.component: store.read_verified(section.sha256, section.size_bytes)
        for section in manifest.sections
    }
    missing = sorted(NEEDED - views.keys())
    if missing:
        raise BundleError(f"the bundle has no section {missing[0]!r}")
    try:
        pipeline = parse_pipeline(bytes(views[PIPELINE]))
        policy = parse_policy(bytes(views[POLICY])) if POLICY in views else PLAIN
        bands = parse_bands(bytes(views[BANDS])) if BANDS in views else None
        digests = {section.component: section.sha256 for section in manifest.sections}
        runner = _start(views, bands, digests, WeightPool() if pool is None else pool)
    except (ContractError, OSError) as error:
        raise BundleError(f"the plan does not load: {error}") from error
    self_test = bytes(views[SELF_TEST])
    return LoadedBundle(pointer.manifest_sha256, runner, pipeline, self_test, policy, bands)


def _start(
    views: Mapping[str, memoryview],
    bands: Bands | None,
    digests: Mapping[str, str],
    pool: WeightPool,
) -> ClosableRunner:
    plan = parse_plan(bytes(views[PLAN]))
    if SCHEDULE in views:
        verify_schedule(plan, parse_schedule(bytes(views[SCHEDULE])))
    if bands is not None:
        verify_bands(plan, bands)
    weights = pool.load(plan, digests, views)
    return NativePlan(bytes(views[KERNELS]), bytes(views[PLAN]), weights)
