"""Steps before the switch: verify, download, apply, stage. The running bundle does not notice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from compiler.contract.manifest import ReleaseManifest
from compiler.contract.protocol import Network, NetworkPolicy
from device_agent.clock import Clock
from device_agent.config import AgentConfig
from device_agent.errors import (
    AgentError,
    BundleError,
    ContentError,
    DeltaUnusableError,
    DiskFullError,
    MeteredError,
    PostponedError,
)
from device_agent.http import RetryPolicy, with_retries
from device_agent.machine import StepResult
from device_agent.runtime.bundle import read_manifest
from device_agent.states import Event
from device_agent.storage.disk import Disk
from device_agent.storage.objects import ObjectStore
from device_agent.storage.slots import Pointer, Slots
from device_agent.update.apply import apply_offer
from device_agent.update.context import UpdateContext
from device_agent.update.fetch import Fetcher
from device_agent.update.opening import Opener
from device_agent.update.plan import FetchPlan, may_fetch, plan_fetch
from device_agent.update.verify import VerifiedRelease, Verifier

MAX_REPAIRS: Final = 2
VERIFY_REQUESTS: Final = 10  # deadline of a verification, in request deadlines


@dataclass(frozen=True, slots=True)
class InstallSteps:
    """What the steps work with.

    Attributes:
        require_wanted: Raises when the server withdrew the update.
    """

    config: AgentConfig
    clock: Clock
    disk: Disk
    store: ObjectStore
    slots: Slots
    verifier: Verifier
    fetcher: Fetcher
    opener: Opener
    require_wanted: Callable[[UpdateContext], None]

    def verify(self, context: UpdateContext) -> StepResult:
        """Verify the offer, keep the manifest, and decide what has to be fetched."""
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
        self.store.put(release.manifest_bytes, release.directive.sha256)
        self.store.sync()
        verified = self._planned(context, release)
        current = self.slots.table.current
        if current is not None and current.manifest_sha256 == context.manifest_sha256:
            return StepResult(Event.ALREADY_RUNNING, verified)
        return StepResult(Event.VERIFIED, verified)

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
            apply_offer(self.store, context.delta.opened, self._base(context), manifest)
        except (DeltaUnusableError, ContentError) as error:
            return StepResult(Event.DELTA_UNUSABLE, self._without_delta(context, manifest, error))
        return StepResult(Event.APPLIED, context)

    def stage(self, context: UpdateContext) -> StepResult:
        """Hash everything once more, then write the pointer of the other slot."""
        self.require_wanted(context)
        manifest = self._manifest(context)
        try:
            for section in manifest.sections:
                self.store.read_verified(section.sha256, section.size_bytes).release()
        except BundleError:
            if context.repairs >= MAX_REPAIRS:
                raise
            repaired = self._without_delta(context, manifest, None)
            return StepResult(Event.INCOMPLETE, replace(repaired, repairs=context.repairs + 1))
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

    def _planned(self, context: UpdateContext, release: VerifiedRelease) -> UpdateContext:
        assignment = release.directive.assignment
        delta = assignment.delta
        base = self._base_manifest("" if delta is None else delta.base_manifest_sha256)
        base_here = base is not None and all(
            self.store.has(section.sha256, section.size_bytes) for section in base.sections
        )
        plan = plan_fetch(release.manifest, self.store.has, delta, base_here=base_here)
        self._require_allowed(plan, assignment.network_policy)
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

    def _require_room(self, plan: FetchPlan, manifest: ReleaseManifest) -> None:
        if not plan.missing:
            return
        delta = plan.delta
        extra = 0 if delta is None else delta.size_bytes + delta.plain_bytes
        if delta is None and manifest.is_sealed:  # sealed and plain side by side, one at a time
            extra = max(section.travels.size_bytes for section in plan.missing)
        self.store.require_space(plan.missing_bytes + extra)
        free = self.disk.free_bytes(self.config.state_dir)
        if free < manifest.requires.free_bytes:
            raise DiskFullError(
                f"the bundle asks for {manifest.requires.free_bytes} free bytes, {free} are free"
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
            message=context.message if error is None else f"delta not used: {error}",
        )

    def _manifest(self, context: UpdateContext) -> ReleaseManifest:
        return read_manifest(self.store, context.manifest_sha256, context.manifest_size)

    def _base(self, context: UpdateContext) -> ReleaseManifest:
        base = self._base_manifest(context.base_sha256)
        if base is None:
            raise DeltaUnusableError("the base of the delta is not here any more")
        return base

    def _base_manifest(self, sha256: str) -> ReleaseManifest | None:
        table = self.slots.table
        for pointer in (table.current, table.other):
            if pointer is not None and pointer.manifest_sha256 == sha256:
                try:
                    return read_manifest(self.store, sha256, pointer.size_bytes)
                except BundleError:
                    return None
        return None


def pointer_of(context: UpdateContext, manifest: ReleaseManifest) -> Pointer:
    """Return the slot entry of the bundle of an update."""
    return Pointer(
        manifest_sha256=context.manifest_sha256,
        size_bytes=context.manifest_size,
        version=manifest.version,
        security_epoch=manifest.security_epoch,
        release_seq=manifest.release_seq,
    )
