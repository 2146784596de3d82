"""When there is no room for the new sections beside the old: what is patched in place, and how far.

Allowed by `patch_in_place` only, because the price is high: the bundle before the running one is
dropped, and the running one cannot be loaded again until it was patched or patched back. It goes on
answering from memory if it holds all its weights there; otherwise nobody answers. The decision is a
durable document in the folder of the slots, so that a start knows which bundle must not be loaded.

    patch (forward) -> committed: `keep`, the way back is gone
                    -> anything else: `restore` (backward), then the old bundle is loaded again
"""

import logging
from pathlib import Path
from typing import Final

from compiler.contract.errors import ContractError
from compiler.contract.manifest import ReleaseManifest
from compiler.delta import SLOT_BYTES
from device_agent.errors import DeltaUnusableError, PatchProcessError
from device_agent.storage.disk import Disk
from device_agent.storage.slots import Pointer
from device_agent.storage.twin import TwinDocument
from device_agent.update.in_place import PatchFolder, pairs_of
from device_agent.update.patching import Patcher, PatchJob, job_from_json
from device_agent.update.plan import FetchPlan

log = logging.getLogger("device_agent.update")

MAX_DEATHS: Final = 3


class LowSpace:
    """The job that patches in place, over restarts; belongs to one thread."""

    def __init__(self, disk: Disk, state_dir: Path, patcher: Patcher, *, is_allowed: bool) -> None:
        """Read whether something is patched.

        Args:
            disk: Where to.
            state_dir: The agent's folder.
            patcher: Does the work.
            is_allowed: Whether a new job may begin.
        """
        self._document = TwinDocument(disk, state_dir / "slots", "patching")
        self._folder = PatchFolder(disk, state_dir)
        self._patcher = patcher
        self.is_allowed: Final = is_allowed
        self._deaths = 0
        self._job = self._load()

    @property
    def job(self) -> PatchJob | None:
        """Return the job that began and was neither kept nor taken back."""
        return self._job

    def blocks(self, pointer: Pointer) -> bool:
        """Return whether a bundle must not be loaded because its objects are patched."""
        return self._job is not None and self._job.base_sha256 == pointer.manifest_sha256

    def patch(self, job: PatchJob) -> None:
        """Patch forward; go on if it was cut.

        Raises:
            DeltaUnusableError: It cannot be done; `restore`.
            DiskError: Call again, or `restore`.
        """
        if job != self._job:
            self._save(job)
        self._patcher.run(job)

    def restore(self) -> None:
        """Take back what was patched, if anything was; the base can be loaded again.

        A file that is neither the old nor the new one cannot be healed: it is dropped, and its
        bundle with it, which the server sees at the next poll.

        Raises:
            PatchProcessError, DiskError: Call again.
        """
        if self._job is None:
            return
        try:
            self._patcher.run(self._job.reversed())
        except DeltaUnusableError as error:
            self._deaths += 1
            if isinstance(error, PatchProcessError) and self._deaths < MAX_DEATHS:
                raise
            log.warning("what was patched in place is given up: %s", error)
        self.keep()

    def keep(self) -> None:
        """Forget the job: what lies in `objects` now is what there is."""
        if self._job is not None:
            self._save(None)
            self._folder.drop()
            self._deaths = 0

    def _load(self) -> PatchJob | None:
        document = self._document.load()
        job = None if document is None else document.get("job")
        try:
            return job_from_json(job) if isinstance(job, dict) else None
        except ContractError as error:
            log.warning("what is patched in place cannot be read: %s", error)
            return None

    def _save(self, job: PatchJob | None) -> None:
        self._document.save({"job": None if job is None else job.to_json()})
        self._job = job


def in_place_bytes(plan: FetchPlan, base: ReleaseManifest, new: ReleaseManifest) -> int | None:
    """Return the room that patching in place needs, or None when it cannot be done. Pure."""
    pairs = pairs_of(base, new)
    if not pairs or plan.delta is None:
        return None
    made = {pair.new_sha256 for pair in pairs}
    if not made <= {section.sha256 for section in plan.missing}:
        return None  # one is here already, beside the one that would become it
    whole = sum(one.size_bytes for one in plan.missing if one.sha256 not in made)
    journal = min(SLOT_BYTES, sum(pair.size_bytes for pair in pairs))
    return plan.delta.size_bytes + plan.delta.plain_bytes + whole + journal
