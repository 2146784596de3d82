"""Choose how far pictures are pruned: the fewest tokens that cost at most so much accuracy.

    submission --lower, pack--> module --rule--> plan --native, over cards--> accuracy, rows kept

Plans of one submission differ in numbers of one call only, so lowering, packing and the C compiler
work once per kind of rule. Called by people and by the benchmark, not by `compile_model`: the
chosen rule is written into `pipeline.json` and compiled like any other. Runs native code in this
process. Cards for choosing and cards for judging should not be the same. Scales are not searched
here as a compilation does, so accuracies are near those of the compiled bundle, not equal to them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json, sha256_hex
from compiler.contract.native import NativePlan
from compiler.contract.pipeline import Pipeline
from compiler.contract.session import see
from compiler.driver.cache import StageCache
from compiler.driver.cards import Card, read_cards
from compiler.driver.evaluate import answer_cards, score
from compiler.driver.kernel_stage import kernels_for
from compiler.driver.options import Progress, no_progress
from compiler.driver.provenance import CALIBRATION
from compiler.driver.sections import pipeline_section
from compiler.emitters.plan import emit_plan
from compiler.errors import CompilerError, UserModelError
from compiler.frontend.importer import import_pipeline
from compiler.frontend.pipeline_json import MAX_VISUAL_TOKENS
from compiler.hardware.targets import Target
from compiler.kernels.program import Module, Op
from compiler.passes.pipeline import lower_pipeline
from compiler.passes.pipeline_spec import PruneSpec
from compiler.quant.module import PackedModule, PackedWeight, pack_module, pack_weight
from compiler.quant.record import InputSample
from compiler.quant.w4 import Floats, Grid

SHARES: Final = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
MERGES: Final = (0, 4)
MAX_LOSS: Final = 0.003
ALL: Final = PruneSpec(
    p=1.0, min_keep=MAX_VISUAL_TOKENS, max_keep=MAX_VISUAL_TOKENS, merge=0, score="row"
)
"""The rule that keeps every token: what losses are compared with."""


@dataclass(frozen=True, slots=True)
class PruneTrial:
    """What one rule does over a set of cards.

    Attributes:
        accuracy: Share of questions answered exactly as expected.
        mean_rows, least_rows, most_rows: Rows of a picture that go on, context tokens included.
    """

    rule: PruneSpec
    accuracy: float
    mean_rows: float
    least_rows: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class PruneChoice:
    """All trials, and the one to use.

    Attributes:
        unpruned: The trial of `ALL`.
        chosen: The trial of fewest mean rows within the loss; None if each loses more.
    """

    unpruned: PruneTrial
    trials: tuple[PruneTrial, ...]
    chosen: PruneTrial | None


class PrunablePlans:
    """Native plans of one submission under any rule. Weights are quantised once."""

    def __init__(self, directory: Path, target: Target, cache_dir: Path | None = None) -> None:
        """Import a submission; its own "prune" is ignored.

        Args:
            directory: The submission.
            target: What to build for; this machine must run it.
            cache_dir: Where kernel libraries are kept between runs.

        Raises:
            UserModelError: The submission is at fault, or sees no pictures.
        """
        self._imported = import_pipeline(directory)
        if self._imported.spec.image is None:
            raise UserModelError("a model that sees no pictures has nothing to prune")
        self._target = target
        self._cache = StageCache(cache_dir)
        self._modules: dict[tuple[int, int, str], tuple[Module, PackedModule]] = {}
        self._packed: dict[str, PackedWeight] = {}

    def cards(self, directory: Path, stem: str) -> tuple[Card, ...]:
        """Read a set of cards that fits the submission's pictures; see `read_cards` for errors."""
        image = self._imported.spec.image
        assert image is not None
        return read_cards(directory, stem, image.size)

    def sections(self, rule: PruneSpec) -> tuple[Pipeline, dict[str, bytes]]:
        """Return pipeline and sections, kernels included, of the plan that prunes by `rule`."""
        module, packed = self._module(rule)
        emitted = emit_plan(_with_rule(module, rule), weights_packed=packed.packed)
        plan = emitted.plan
        kernels = kernels_for(self._target, plan.ops, self._cache)
        sections = {**emitted.sections, "plan": emitted.plan_bytes, "kernels": kernels}
        return pipeline_section(self._imported.spec, plan), sections

    def _module(self, rule: PruneSpec) -> tuple[Module, PackedModule]:
        """Return the lowered module of a kind of rule: what decides shapes and operands."""
        kind = (rule.max_keep, rule.merge, rule.score)
        if kind not in self._modules:
            spec = replace(self._imported.spec, prune=replace(rule, min_keep=1))
            module = lower_pipeline(replace(self._imported, spec=spec)).module
            self._modules[kind] = module, pack_module(module, pack=self._pack)
        return self._modules[kind]

    def _pack(self, array: Floats, grid: Grid | None, sample: InputSample | None) -> PackedWeight:
        """Pack a weight once; other kinds of rule have the same ones. There are no grids here."""
        digest = sha256_hex(repr(array.shape).encode() + array.tobytes())
        if digest not in self._packed:
            self._packed[digest] = pack_weight(array, grid, sample)
        return self._packed[digest]


def choose_pruning(
    directory: Path,
    target: Target,
    *,
    stem: str = CALIBRATION,
    rules: Iterable[PruneSpec] = (),
    max_loss: float = MAX_LOSS,
    most_cards: int | None = None,
    cache_dir: Path | None = None,
    progress: Progress = no_progress,
) -> PruneChoice:
    """Try rules over the cards of a submission and choose one.

    Args:
        directory: The submission, with the set of cards.
        target: What to build for; this machine must run it.
        stem: Which cards; not those that the choice is judged by.
        rules: What to try; the sweep of `sweep()` if empty.
        max_loss: The most accuracy that may be lost against keeping all tokens, as a share.
        most_cards: Only the first so many cards.
        cache_dir: Where kernel libraries are kept between runs.
        progress: Called with a rule and the share of rules tried so far.

    Raises:
        UserModelError: The submission is at fault, or there is no pruning to adapt.
        CompilerError: `max_loss` is negative.
    """
    if max_loss < 0.0:
        raise CompilerError(f"a loss of {max_loss}", hint="state a share such as 0.003")
    plans = PrunablePlans(directory, target, cache_dir)
    cards = plans.cards(directory, stem)[:most_cards]
    tried = (ALL, *(rules or sweep()))
    found = []
    for at, rule in enumerate(tried):
        progress(f"pruning p {rule.p:g}, merge {rule.merge}", at / len(tried))
        found.append(try_rule(plans, rule, cards))
    unpruned, *trials = found
    return PruneChoice(unpruned, tuple(trials), fewest_rows(unpruned, trials, max_loss))


def sweep(
    shares: Sequence[float] = SHARES,
    merges: Sequence[int] = MERGES,
    min_keep: int = 8,
    score: str = "row",
) -> tuple[PruneSpec, ...]:
    """Return the rules of every pair of share and number of context tokens."""
    return tuple(
        PruneSpec(p, min_keep, MAX_VISUAL_TOKENS, merge, score) for merge in merges for p in shares
    )


def try_rule(plans: PrunablePlans, rule: PruneSpec, cards: Sequence[Card]) -> PruneTrial:
    """Ask every question of every card under a rule, natively."""
    pipeline, sections = plans.sections(rule)
    rows = []
    with NativePlan(sections["kernels"], sections["plan"], sections) as plan:
        for card in cards:
            plan.kv_length = 0
            see(plan, pipeline, card.image)
            rows.append(plan.kv_length)
        accuracy = score(answer_cards(plan, pipeline, cards)).accuracy
    return PruneTrial(rule, accuracy, sum(rows) / len(rows), min(rows), max(rows))


def fewest_rows(
    unpruned: PruneTrial, trials: Iterable[PruneTrial], max_loss: float
) -> PruneTrial | None:
    """Return the trial of fewest mean rows that loses at most `max_loss`, or None."""
    floor = unpruned.accuracy - max_loss
    within = [trial for trial in trials if trial.accuracy >= floor]
    return min(within, key=lambda trial: (trial.mean_rows, -trial.accuracy), default=None)


def rule_json(rule: PruneSpec) -> dict[str, Json]:
    """Return a rule as the value of "prune" in `pipeline.json`."""
    return {
        "mode": "top_p",
        "p": rule.p,
        "min_keep": rule.min_keep,
        "max_keep": rule.max_keep,
        "merge": rule.merge,
        "score": rule.score,
    }


def _with_rule(module: Module, rule: PruneSpec) -> Module:
    """Return the module with the numbers of a rule in its pruning call; shapes stay."""
    programs = []
    for program in module.programs:
        calls = list(program.calls)
        for at, call in enumerate(calls):
            if call.op is Op.PRUNE_TOP_P:
                tokens = module.buffers[call.inputs[0]].rows
                numbers: Mapping[str, int | float] = {
                    "p": rule.p,
                    "min_keep": min(rule.min_keep, tokens),
                }
                calls[at] = replace(call, params={**call.params, **numbers})
        programs.append(replace(program, calls=tuple(calls)))
    return replace(module, programs=tuple(programs))
