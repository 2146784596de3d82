"""Steps before the switch: verify, download, apply, stage. The running bundle does not notice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from compiler.contract.manifest import ReleaseManifest
from compiler.contract.protocol import DeltaOffer, Network, NetworkPolicy
from device_agent.clock import Clock
from device_agent.config import AgentConfig
from device_agent.errors import (
    AgentError,
    BundleError,
    ContentError,
    DeltaUnusableError,
    DeniedError,
    DiskFullError,
    MeteredError,
    PostponedError,
)
from device_agent.http import RetryPolicy, with_retries
from device_agent.machine import StepResult
from device_agent.runtime.bundle import read_manifest
from device_agent.states import Event
from device_agent.storage.denied import DenyList
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer, Slots
from device_agent.update.context import UpdateContext
from device_agent.update.fetch import Fetcher
from device_agent.update.low_space import LowSpace, in_place_bytes
from device_agent.update.opening import Opener
from device_agent.update.patching import Patcher, PatchJob
from device_agent.update.plan import FetchPlan, may_fetch, plan_fetch
from device_agent.update.verify import VerifiedRelease, Verifier

MAX_REPAIRS: Final = 2
VERIFY_REQUESTS: Final = 10  # deadline of a verification, in request deadlines


@dataclass(frozen=True, slots=True)
class InstallSteps:
    """What the steps work with.

    Attributes:
        patcher: Applies deltas.
        keeps_in_memory: Whether the running bundle needs its objects no more.
        answering: Returns the manifest of the bundle that answers, or an empty string.
        stop_answering: Ends the running bundle.
        require_wanted: Raises when the server withdrew the update.
    """

    config: AgentConfig
    clock: Clock
    disk: Disk
    store: ObjectStore
    slots: Slots
    denied: DenyList
    verifier: Verifier
    fetcher: Fetcher
    opener: Opener
    patcher: Patcher
    low_space: LowSpace
    keeps_in_memory: bool
    answering: Callable[[], str]
    stop_answering: Callable[[], None]
    require_wanted: Callable[[UpdateContext], None]

    def verify(self, context: UpdateContext) -> StepResult:
        """Verify the offer, keep the manifest, and decide what has to be fetched.

        The bundle that should run already is mended like one that is new, if it does not answer or
        a section of it is gone.
        """
        config = self.config
        policy = RetryPolicy(
            config.retry_first_s,
            config.retry_most_s,
            min(config.update_deadline_s, VERIFY_REQUESTS * config.request_deadline_s),
        )
        try:
            release = with_retries(
                lambda: self.verifier.verify(context),
                policy,
                self.clock,
                before_wait=lambda _error: self.require_wanted(context),
            )
        except PostponedError as error:
            return StepResult(Event.POSTPONED, replace(context, message=str(error)))
        is_current = self.slots.table.runs(context.manifest_sha256)
        if not is_current:
            self._require_not_denied(release)
        self.store.put(release.manifest_bytes, release.directive.sha256)
        self.store.sync()
        verified = self._planned(context, release)
        answers = is_current and self.answering() == context.manifest_sha256
        is_whole = answers and not verified.needed_bytes
        return StepResult(Event.ALREADY_RUNNING if is_whole else Event.VERIFIED, verified)

    def download(self, context: UpdateContext) -> StepResult:
        """Fetch the delta, or every section that is not here; open what came sealed."""
        update_id = context.update_id

        def require_wanted() -> None:
            self.require_wanted(context)

        if context.delta is not None:
            delta = context.delta
            self.fetcher.fetch(delta.sha256, delta.size_bytes, update_id, require_wanted)
        else:
            manifest = self._manifest(context)
            missing = plan_fetch(manifest, self.store.has, None, base_here=False).missing
            key = self.opener.content_key(context) if missing and manifest.is_sealed else b""
            for section in missing:
                travels = section.travels
                self.fetcher.fetch(travels.sha256, travels.size_bytes, update_id, require_wanted)
                if section.sealed is not None:
                    self.opener.open_section(key, section)
        self.store.sync()
        return StepResult(Event.DOWNLOADED, context)

    def apply(self, context: UpdateContext) -> StepResult:
        """Make the missing sections from the delta."""
        if context.delta is None:
            return StepResult(Event.APPLIED, context)
        self.require_wanted(context)
        manifest = self._manifest(context)
        try:
            if context.delta.plain_sha256:
                self.opener.open_delta(self.opener.content_key(context), context.delta)
            self._patch(self._job(context, context.delta.opened))
        except (DeltaUnusableError, ContentError) as error:
            if context.in_place:  # there is no room for whole sections
                raise
            return StepResult(Event.DELTA_UNUSABLE, self._without_delta(context, manifest, error))
        return StepResult(Event.APPLIED, context)

    def stage(self, context: UpdateContext) -> StepResult:
        """Hash everything once more, then write the pointer of the other slot."""
        self.require_wanted(context)
        manifest = self._manifest(context)
        try:
            for section in manifest.sections:
                self.store.verify(section.sha256, section.size_bytes).close()
        except BundleError:
            if context.repairs >= MAX_REPAIRS:
                raise
            repaired = self._without_delta(context, manifest, None)
            return StepResult(Event.INCOMPLETE, replace(repaired, repairs=context.repairs + 1))
        if not self.slots.table.runs(context.manifest_sha256):
            self.slots.stage(pointer_of(context, manifest))
        return StepResult(Event.STAGED, context)

    def fetched_bytes(self, context: UpdateContext) -> int:
        """Return the payload bytes of the update that are here; what was sent twice counts once."""
        if not context.manifest_size:
            return 0
        if context.delta is not None:
            whole = self.store.has(context.delta.sha256, context.delta.size_bytes)
            partial = self.store.partial_bytes(context.delta.sha256)
            return context.fetched_before + (context.delta.size_bytes if whole else partial)
        try:
            manifest = self._manifest(context)
        except BundleError:
            return context.fetched_before
        plan = plan_fetch(manifest, self.store.has, None, base_here=False)
        partial = sum(self.store.partial_bytes(item.travels.sha256) for item in plan.missing)
        here = max(0, context.needed_bytes - plan.missing_bytes)
        return context.fetched_before + here + partial

    def _patch(self, job: PatchJob) -> None:
        if not job.in_place:
            self.patcher.run(job)
            return
        if not self.keeps_in_memory:
            self.stop_answering()
        self.low_space.patch(job)

    def _require_not_denied(self, release: VerifiedRelease) -> None:
        directive = release.directive
        denial = self.denied.find(directive.sha256)
        if denial is None:
            return
        order = directive.assignment
        if not (order.retry_failed and order.assignment_seq > denial.assignment_seq):
            raise DeniedError(
                f"version {denial.version} failed here {denial.count} times, the last time with "
                f"{denial.code}: {denial.message}",
                hint="retry the rollout on the platform, or wait until the entry expires",
            )

    def _planned(self, context: UpdateContext, release: VerifiedRelease) -> UpdateContext:
        assignment = release.directive.assignment
        delta = assignment.delta
        base = self._base_manifest("" if delta is None else delta.base_manifest_sha256)
        base_here = base is not None and all(
            self.store.has(section.sha256, section.size_bytes) for section in base.sections
        )
        plan = plan_fetch(release.manifest, self.store.has, delta, base_here=base_here)
        notes: list[str] = []
        in_place = base is not None and self._must_patch_in_place(plan, release, base, notes)
        if notes:
            plan = plan_fetch(release.manifest, self.store.has, delta, base_here=base_here)
        self._require_allowed(plan, assignment.network_policy)
        if not in_place:
            self._require_room(plan, release.manifest)
        context = replace(context, content_key=assignment.content_key)
        if plan.missing and release.manifest.is_sealed:
            self.opener.content_key(context)
        return replace(
            context,
            network_policy=assignment.network_policy,
            version=release.manifest.version,
            manifest_size=len(release.manifest_bytes),
            assignment_seq=assignment.assignment_seq,
            security_floor=assignment.security_floor,
            in_place=in_place,
            note="; ".join(notes),
            confirm_deadline=assignment.confirm_deadline,
            delta=plan.delta,
            base_sha256="" if plan.delta is None else plan.delta.base_manifest_sha256,
            needed_bytes=plan.missing_bytes,
        )

    def _require_allowed(self, plan: FetchPlan, policy: NetworkPolicy) -> None:
        """Check that the network may carry the plan.

        Raises:
            MeteredError: It needs whole sections, and only deltas may be fetched here.
        """
        if not may_fetch(plan, policy, Network(self.config.network)):
            raise MeteredError(
                f"{plan.missing_bytes} bytes of whole sections are needed, and over a metered "
                f"network the rollout says {policy.value}"
            )

    def _must_patch_in_place(
        self, plan: FetchPlan, release: VerifiedRelease, base: ReleaseManifest, notes: list[str]
    ) -> bool:
        """Return whether there is room for nothing else; drop the bundle before for it first.

        Raises:
            DiskFullError: Not even that is possible.
        """
        is_base = self.slots.table.runs(base.sha256)
        if not (self.low_space.is_allowed and is_base and plan.delta):
            return False
        if self._has_room(plan, release.manifest):
            return False
        other = self.slots.table.other
        if other is not None and other.manifest_sha256 != release.directive.sha256:
            self._drop_other(base, release)
            notes.append(f"space is short: version {other.version} was dropped")
            plan = plan_fetch(release.manifest, self.store.has, plan.delta, base_here=True)
            if self._has_room(plan, release.manifest):
                return False
        needed = in_place_bytes(plan, base, release.manifest)
        if needed is None:
            return False
        self.store.require_space(needed)
        meanwhile = "it answers from memory" if self.keeps_in_memory else "nothing answers"
        notes.append(f"the files of the running bundle are patched in place; {meanwhile} meanwhile")
        return True

    def _drop_other(self, base: ReleaseManifest, release: VerifiedRelease) -> None:
        """Give up the way back that is there, for the room it takes."""
        self.slots.drop_other()
        keep = {base.sha256, release.directive.sha256}
        self.store.collect(keep | {section.sha256 for section in base.sections})

    def _has_room(self, plan: FetchPlan, manifest: ReleaseManifest) -> bool:
        try:
            self.store.require_space(_room(plan, manifest))
        except DiskFullError:
            return False
        return True

    def _require_room(self, plan: FetchPlan, manifest: ReleaseManifest) -> None:
        if not plan.missing:
            return
        self.store.require_space(_room(plan, manifest))
        # What it asks for is room for two bundles; who may patch in place does with less.
        storage = self.disk.free_bytes(self.config.state_dir) + self.store.used_bytes()
        if storage < manifest.requires.free_bytes and not self.low_space.is_allowed:
            raise DiskFullError(
                f"the bundle asks for {manifest.requires.free_bytes} bytes of storage, there are "
                f"{storage}",
                hint="free some space, or set patch_in_place",
            )

    def _without_delta(
        self, context: UpdateContext, manifest: ReleaseManifest, error: AgentError | None
    ) -> UpdateContext:
        """Return the context in which the missing sections are fetched whole."""
        plan = plan_fetch(manifest, self.store.has, None, base_here=False)
        self._require_allowed(plan, context.network_policy)
        return replace(
            context,
            delta=None,
            base_sha256="",
            fetched_before=self.fetched_bytes(context),
            needed_bytes=plan.missing_bytes,
            fallbacks=context.fallbacks + (error is not None),
            message=context.message if error is None else f"delta not used: {error}",
        )

    def _manifest(self, context: UpdateContext) -> ReleaseManifest:
        return read_manifest(self.store, context.manifest_sha256, context.manifest_size)

    def _job(self, context: UpdateContext, delta: DeltaOffer) -> PatchJob:
        named = [one for one in self._installed() if one.manifest_sha256 == context.base_sha256]
        if not named:
            raise DeltaUnusableError("the base of the delta is not here any more")
        return PatchJob(
            delta.sha256,
            delta.size_bytes,
            named[0].manifest_sha256,
            named[0].size_bytes,
            context.manifest_sha256,
            context.manifest_size,
            in_place=context.in_place,
        )

    def _installed(self) -> tuple[Pointer, ...]:
        table = self.slots.table
        return tuple(filter(None, (table.current, table.other)))

    def _base_manifest(self, sha256: str) -> ReleaseManifest | None:
        for pointer in self._installed():
            if pointer.manifest_sha256 == sha256:
                try:
                    return read_manifest(self.store, sha256, pointer.size_bytes)
                except BundleError:
                    return None
        return None


def _room(plan: FetchPlan, manifest: ReleaseManifest) -> int:
    """Return the bytes that a fetch needs on the disk."""
    delta = plan.delta
    if delta is not None:
        return plan.missing_bytes + delta.size_bytes + delta.plain_bytes
    if not manifest.is_sealed:
        return plan.missing_bytes
    # Sealed and plain side by side, one at a time.
    return plan.missing_bytes + max((one.travels.size_bytes for one in plan.missing), default=0)


def pointer_of(context: UpdateContext, manifest: ReleaseManifest) -> Pointer:
    """Return the slot entry of the bundle of an update."""
    return Pointer(
        manifest_sha256=context.manifest_sha256,
        size_bytes=context.manifest_size,
        version=manifest.version,
        security_epoch=manifest.security_epoch,
        release_seq=manifest.release_seq,
    )
