"""What a compilation with an accuracy budget removes: a stage of its own in the cache.

Called by `portable_stage` before anything is lowered for good. The choice depends on the model's
files, the calibration set, the budget and the compiler's sources, and on nothing else: neither the
target nor an older bundle nor this machine.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, canonical_bytes, parse_object, sha256_hex
from compiler.contract.plan_format import KvKind
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.calibrate import record_cached
from compiler.driver.cards import read_cards
from compiler.driver.lowering import raise_submission
from compiler.driver.provenance import CALIBRATION, compiler_digest
from compiler.driver.records import RECORD, from_parts, to_parts
from compiler.driver.removal_trials import Pack, RemovalTrials
from compiler.driver.sections import image_spec
from compiler.driver.stages import StageClock
from compiler.frontend.limits import ImportLimits
from compiler.kernels.program import Module
from compiler.passes.pipeline import LOSSLESS, Loss
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.record import CalibrationRecord

REMOVAL: Final = "removal"
Record = Callable[[Module, Loss], CalibrationRecord | None]


@dataclass(frozen=True, slots=True)
class Removed:
    """What goes, and the report about it.

    Attributes:
        facts: Canonical JSON of the report; empty if there was no budget.
    """

    loss: Loss = LOSSLESS
    facts: str = ""

    @property
    def digest(self) -> str:
        """A name of the loss in cache keys; empty for none."""
        return "" if self.loss == LOSSLESS else sha256_hex(to_parts(self.loss)[RECORD])

    def report(self) -> dict[str, Json]:
        """Return `removal`, the report; nothing if there was no budget."""
        return {REMOVAL: parse_object(self.facts.encode())} if self.facts else {}


NOTHING_REMOVED: Final = Removed()


def choose_cached(
    directory: Path,
    spec: PipelineSpec,
    files: Mapping[str, str],
    lossy: tuple[float, KvKind],
    limits: ImportLimits,
    pack: Pack,
    cache: StageCache,
    clock: StageClock,
) -> Removed:
    """Return what goes within a budget, from the cache if it was chosen before.

    Args:
        directory: The submission.
        spec: Its words and limits; it sees pictures and answers in words.
        files: SHA-256 of the files of model and calibration set, by name.
        lossy: The budget of `choose_removal`, 0 removes nothing; how keys and values are stored,
            which is part of the loss that is returned.
        limits: What importing it may cost.
        pack: Packs one weight.
        cache: Where `removal` entries are.
        clock: Shows progress.

    Raises:
        UserModelError: The submission is at fault, or has too few cards.
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    budget, kv = lossy
    if not budget:
        return Removed(Loss(kv=kv))
    facts: dict[str, Json] = {
        "files": dict(files),
        "budget": budget,
        "compiler": compiler_digest(),
    }
    key = cache_key(REMOVAL, facts | ({"kv": kv.name} if kv else {}))
    stored = cache.get(REMOVAL, key)
    if stored is not None:
        return from_parts(Removed, stored)
    raised = raise_submission(directory, clock, limits)
    trials = RemovalTrials.of(raised, pack, cache, kv)

    def record(module: Module, loss: Loss) -> CalibrationRecord | None:
        name = Removed(loss).digest
        return record_cached(directory, spec, module, files, cache, clock, name)

    removed = _chosen(directory, trials, budget, record, clock)
    cache.put(REMOVAL, key, to_parts(removed))
    return removed


def _chosen(
    directory: Path, trials: RemovalTrials, budget: float, record: Record, clock: StageClock
) -> Removed:
    from compiler.driver.choose_removal import choose_removal

    size = image_spec(trials.spec)
    assert size is not None
    cards = read_cards(directory, CALIBRATION, size)
    with clock.stage("quantise"):
        found = choose_removal(trials, cards, budget, record, clock.within("quantise"))
    return Removed(replace(found.loss, kv=trials.kv), canonical_bytes(found.facts).decode())
