"""Load a bundle, installed or in a directory: hash every section, start the plan.

What is hashed is what is used: sections are mapped once and hashed in that mapping, and the plan
copies them out of it (native code into a sealed memory file), so nothing can be swapped on disk
between the check and the load. Experts beyond the budget are hashed in memory (`residency`).
Standard library and contract only: the self-test child starts fast.
"""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from compiler.contract.bands import Bands, parse_bands, verify_bands
from compiler.contract.canonical import sha256_hex
from compiler.contract.degrade import Rung
from compiler.contract.errors import ContractError
from compiler.contract.ladder import (
    ProgramWork,
    program_work,
    require_ladder,
    substitute_bytes,
)
from compiler.contract.manifest import (
    MAX_MANIFEST_BYTES,
    ReleaseManifest,
    Section,
    parse_manifest,
)
from compiler.contract.native import NativePlan
from compiler.contract.native_policy import PolicySeat
from compiler.contract.native_steering import SteeringSeat
from compiler.contract.native_weights import LoadedWeights
from compiler.contract.pipeline import Pipeline, parse_pipeline
from compiler.contract.plan import Plan, parse_plan
from compiler.contract.planes import MAX_SECTION_BYTES
from compiler.contract.policy import PLAIN, Policy, parse_policy
from compiler.contract.router_stats import parse_router_stats
from compiler.contract.schedule import parse_schedule
from compiler.contract.schedule_order import verify_schedule
from compiler.contract.steering_points import (
    MILLI,
    SECTION,
    SteeringPoints,
    modality_bias,
    parse_steering_points,
)
from compiler.contract.substitutes import SECTION as SUBSTITUTES
from compiler.contract.substitutes import (
    Substitute,
    Substitutes,
    parse_substitutes,
    verify_substitutes,
)
from device_agent.errors import BundleError, NoBundleError
from device_agent.runtime.residency import SectionSource, pooled_weights
from device_agent.runtime.threads import ThreadedRunner
from device_agent.runtime.weights import Lent, WeightPool, Weights
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer, Slots

PLAN: Final = "plan"
KERNELS: Final = "kernels"
PIPELINE: Final = "pipeline"
SELF_TEST: Final = "selftest"
SCHEDULE: Final = "schedule"
BANDS: Final = "bands"
POLICY: Final = "policy"
ROUTER_STATS: Final = "router_stats"
NEEDED: Final = frozenset((PLAN, KERNELS, PIPELINE, SELF_TEST))
MANIFEST_FILE: Final = "manifest.json"
SECTIONS_FOLDER: Final = "sections"
_NO_BUNDLE_HINT: Final = "a bundle is what `python -m compiler compile --out DIR` writes"


def _steering(views: Mapping[str, memoryview]) -> tuple[SteeringPoints | None, tuple[float, ...]]:
    """Return the coefficients of a bundle, and the bias of those in use as memory gets short.

    Raises:
        ContractError: A section does not parse.
    """
    if SECTION not in views:
        return None, ()
    points = parse_steering_points(bytes(views[SECTION]))
    lean = points.points[points.pressed].lean
    if not lean or ROUTER_STATS not in views:
        return points, ()
    plan, stats = (bytes(views[name]) for name in (PLAN, ROUTER_STATS))
    found = parse_plan(plan)
    bias = modality_bias(parse_router_stats(stats), found.sections, found.weights, lean / MILLI)
    return points, bias


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
    def weights(self) -> Weights:
        """Its weights in memory."""

    @property
    def lost_threads(self) -> int:
        """Lent threads that have ended by themselves."""

    @property
    def policy(self) -> PolicySeat:
        """Where its policy is swapped."""

    @property
    def steering(self) -> SteeringSeat:
        """Where what its routers go by is swapped."""

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
        substitutes: What may stand in for its routed layers; None for nothing.
        substitute_bytes: What a step needs of weights with each of them.
        sections: SHA-256 and length of every section, as the manifest signs for them.
        ladder: What a step needs of weights on each rung, bytes.
        work: What one run of each program needs.
        steering: Coefficients of its routers; None if nothing was judged.
        bias: By weight, what its routers lean by; empty for nothing.
        budget: What its weights may take, and the least it runs in, bytes; empty for no budget.
        read: Returns the bytes of one of its `sections` as they lie on disk, verified.
    """

    manifest_sha256: str
    runner: ClosableRunner
    pipeline: Pipeline
    self_test: bytes
    policy: Policy = PLAIN
    bands: Bands | None = None
    substitutes: Substitutes | None = None
    substitute_bytes: Mapping[Substitute, int] = field(default_factory=dict)
    sections: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    ladder: Mapping[Rung, int] = field(default_factory=dict)
    work: Mapping[str, ProgramWork] = field(default_factory=dict)
    steering: SteeringPoints | None = None
    bias: tuple[float, ...] = ()
    budget: Mapping[str, int] = field(default_factory=dict)
    read: Callable[[str], memoryview] = lambda name: _unread(name)


def read_manifest(store: ObjectStore, sha256: str, size_bytes: int) -> ReleaseManifest:
    """Return an installed release manifest.

    Raises:
        BundleError: It is missing or damaged.
    """
    try:
        return parse_manifest(bytes(store.read_verified(sha256, size_bytes)))
    except ContractError as error:
        raise BundleError(f"manifest {sha256[:16]}: {error}") from error


def installed_bundle(state_dir: Path) -> tuple[ObjectStore, Pointer]:
    """Return the sections in an agent's folder and which bundle runs; to be read only.

    Raises:
        NoBundleError: There is no such folder, or nothing is installed in it.
    """
    if not state_dir.is_dir():
        raise NoBundleError(
            f"there is no folder {state_dir}", hint="state_dir is the folder of a device's agent"
        )
    current = Slots(Disk(), state_dir / "slots").load().current
    if current is None:
        raise NoBundleError("no bundle is installed", hint="run the agent until it has one")
    return ObjectStore(Disk(), state_dir, max_bytes=0, is_guest=True), current


def load_bundle(
    store: ObjectStore, pointer: Pointer, pool: WeightPool | None = None
) -> LoadedBundle:
    """Verify and load a bundle; weights that `pool` knows are shared with the bundle that has them.

    Raises:
        BundleError: A section is missing or damaged, or the plan does not load.
    """
    manifest = read_manifest(store, pointer.manifest_sha256, pointer.size_bytes)
    source = SectionSource(
        read=lambda item: store.read_verified(item.sha256, item.size_bytes),
        open=lambda item: store.open(item.sha256, item.size_bytes),
        forget=lambda item: store.forget(item.sha256),
    )
    return _load(pointer.manifest_sha256, manifest, source, pool)


def load_directory(directory: Path, pool: WeightPool | None = None) -> LoadedBundle:
    """Load a bundle from a directory as the compiler writes it.

    Digests are checked, signatures are not: there are none in a directory. Kernels are code, so
    load what you compiled or trust.

    Args:
        directory: Holds `manifest.json` and `sections/`; the manifest itself will do.
        pool: As for `load_bundle`.

    Raises:
        BundleError: There is no whole bundle, a section is damaged, or the plan does not load.
    """
    directory = directory.parent if directory.name == MANIFEST_FILE else directory
    try:
        data = bytes(_mapped(directory / MANIFEST_FILE, MAX_MANIFEST_BYTES))
        manifest = parse_manifest(data)
        source = SectionSource(
            read=lambda item: _section(directory, item.component, item.sha256),
            open=lambda item: _opened(directory / SECTIONS_FOLDER / item.component, item),
            forget=lambda _: None,
        )
        return _load(sha256_hex(data), manifest, source, pool)
    except OSError as error:
        reason = f"no bundle in {directory}: {error.strerror or error}"
        raise BundleError(reason, hint=_NO_BUNDLE_HINT) from error
    except ContractError as error:
        raise BundleError(f"the bundle in {directory}: {error}", hint=error.hint) from error


def _section(directory: Path, component: str, sha256: str) -> memoryview:
    view = _mapped(directory / SECTIONS_FOLDER / component, MAX_SECTION_BYTES)
    if sha256_hex(view) != sha256:
        raise BundleError(f"section {component} is not the one that the manifest names")
    return view


def _mapped(path: Path, most: int) -> memoryview:
    """Return a file's bytes: mapped once, so that what is hashed is what is used.

    Raises:
        OSError: It cannot be opened or is no regular file.
        BundleError: It is too large.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size > most:
            raise BundleError(f"{path.name} is larger than {most} bytes")
        if not size:  # an empty file cannot be mapped
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _opened(path: Path, section: Section) -> int:
    """Return a file of the signed length; its bytes are verified where they are read to.

    Raises:
        BundleError: It has another length.
        OSError: It cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if os.fstat(fd).st_size != section.size_bytes:
        os.close(fd)
        raise BundleError(f"section {section.component} has another length than signed for")
    return fd


def _load(
    sha256: str, manifest: ReleaseManifest, source: SectionSource, pool: WeightPool | None
) -> LoadedBundle:
    """Verify and start a bundle; experts that come as they are needed are verified in memory."""
    named = {item.component: item for item in manifest.sections}
    if missing := sorted(NEEDED - named.keys()):
        raise BundleError(f"the bundle has no section {missing[0]!r}")
    pool = WeightPool() if pool is None else pool
    plan_view = source.read(named[PLAN])
    with _errors_of_the_plan():
        plan = parse_plan(bytes(plan_view))
        layout = pool.layout(plan)
    paged = frozenset(expert.name for expert in layout.experts) if layout else frozenset()
    views = {name: source.read(item) for name, item in named.items() if name not in paged}
    with _errors_of_the_plan():
        pipeline = parse_pipeline(bytes(views[PIPELINE]))
        policy = parse_policy(bytes(views[POLICY])) if POLICY in views else PLAIN
        bands = parse_bands(bytes(views[BANDS])) if BANDS in views else None
        stand_ins = _substitutes(plan, views)
        steering, bias = _steering(views)
        sections = {item.component: (item.sha256, item.size_bytes) for item in manifest.sections}
        digests = {name: item.sha256 for name, item in named.items()}
        kernels = bytes(views[KERNELS])

        def make(lent: Lent) -> Weights:
            if layout is None:
                return LoadedWeights(plan.sections, views, lent)
            return pooled_weights(kernels, layout, views, named, source, pool.hotset)

        _verify(plan, views, bands)
        ladder = require_ladder(plan, bands)
        weights = pool.load(plan, digests, kernels, make)
        runner = NativePlan(kernels, bytes(views[PLAN]), weights)
    return LoadedBundle(
        manifest_sha256=sha256,
        runner=runner,
        pipeline=pipeline,
        self_test=bytes(views[SELF_TEST]),
        policy=policy,
        bands=bands,
        substitutes=stand_ins,
        substitute_bytes=substitute_bytes(plan),
        sections=sections,
        ladder=ladder,
        work=program_work(plan),
        steering=steering,
        bias=bias,
        budget=pool.facts(plan),
        read=lambda name: source.read(named[name]),
    )


def _unread(name: str) -> memoryview:
    raise BundleError(f"section {name} cannot be read again")


@contextlib.contextmanager
def _errors_of_the_plan() -> Iterator[None]:
    try:
        yield
    except (ContractError, OSError) as error:
        hint = error.hint if isinstance(error, ContractError) else ""
        raise BundleError(f"the plan does not load: {error}", hint=hint) from error


def _substitutes(plan: Plan, views: Mapping[str, memoryview]) -> Substitutes | None:
    """Return what may stand in for routed layers, checked against the plan.

    Raises:
        ContractError: The section does not parse, or the plan says something else.
    """
    found = parse_substitutes(bytes(views[SUBSTITUTES])) if SUBSTITUTES in views else None
    verify_substitutes(plan, found)
    return found


def _verify(plan: Plan, views: Mapping[str, memoryview], bands: Bands | None) -> None:
    """Check what stands beside a plan against it.

    Raises:
        ContractError: It says something else.
    """
    if SCHEDULE in views:
        verify_schedule(plan, parse_schedule(bytes(views[SCHEDULE])))
    if bands is not None:
        verify_bands(plan, bands)
