"""Choose which heads and channels go within an accuracy budget, and which zeros are rounded.

    cards  --even ones-->  record -> moves -> steps   bisected, then one by one  -> taken steps
           --odd ones--->  accuracy before and after, with the scales of a compilation -> verdict

Called by the driver if a compilation has an accuracy budget; without one nothing here runs. The
even cards of the calibration set choose: their rows rank the steps (`removal_steps`), their
questions say how many steps the budget allows. First the longest prefix of all steps is bisected,
then single steps behind it are tried, move by move, until each has failed once; then the greatest
loss of structure, for models with a pattern of zeros. The odd cards judge: what is chosen must keep
its accuracy there within the budget too. If it does not, half of the steps are judged, then a
quarter, then nothing is removed; the report says how often the judges were asked. The evaluation
set is never opened. The same submission and budget give the same choice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from compiler.contract.canonical import Json
from compiler.driver.calibrate import record_cards
from compiler.driver.cards import Card
from compiler.driver.removal_steps import (
    Move,
    moves_of,
    ranked_steps,
    removals_of,
    saved_parameters,
)
from compiler.driver.removal_trials import RemovalTrials
from compiler.errors import MalformedModelError
from compiler.kernels.program import Module
from compiler.passes.derive_structure import has_pattern
from compiler.passes.pipeline import LEAST_ZEROS, LOSSLESS, Loss
from compiler.passes.removable import removable_units
from compiler.quant.flops import count_flops
from compiler.quant.record import CalibrationRecord

MAX_TRIALS: Final = 40
STRUCTURE_LOSSES: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
JUDGED_SHARES: Final = (1, 2, 4)
"""The whole choice, a half, a quarter: what the judging cards are asked about, in turn."""
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class RemovalChoice:
    """What goes, and the rows of the report about it."""

    loss: Loss
    facts: dict[str, Json]


@dataclass(slots=True)
class _Search:
    """Trials on the choosing cards; every result is kept for the report."""

    trials: RemovalTrials
    moves: Sequence[Move]
    cards: Sequence[Card]
    budget: float
    progress: Progress
    rows: list[Json] = field(default_factory=list)
    floor: float = 0.0
    before: float = 0.0

    def start(self, module: Module) -> None:
        self.before = self.trials.accuracy(module, self.cards)
        self.floor = self.before - self.budget

    def holds(self, taken: Sequence[int], structure: float = 0.0) -> bool:
        """Return whether the budget allows these steps; False once all trials are used."""
        if len(self.rows) >= MAX_TRIALS:
            return False
        loss = Loss(removals_of(self.moves, taken), structure)
        accuracy = self.trials.accuracy(self.trials.module(loss), self.cards)
        is_kept = accuracy >= self.floor
        self.rows.append(
            {
                "steps": len(taken),
                "parameters": saved_parameters(self.moves, taken),
                "structure": structure,
                "accuracy": round(accuracy, 4),
                "within": is_kept,
            }
        )
        self.progress(len(self.rows) / MAX_TRIALS)
        return is_kept


def choose_removal(
    trials: RemovalTrials,
    cards: Sequence[Card],
    budget: float,
    record: Callable[[Module, Loss], CalibrationRecord | None],
    progress: Progress = lambda _share: None,
) -> RemovalChoice:
    """Return what goes within a budget.

    Args:
        trials: The submission.
        cards: Its calibration set, at least two cards with questions.
        budget: The most accuracy that may be lost, as a share of all questions; positive.
        record: Returns what a compilation records of a module with a loss.
        progress: Called with the share of the trials done.

    Raises:
        MalformedModelError: There are too few cards to choose and to judge by.
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    choosing, judging = cards[0::2], cards[1::2]
    if not all(any(card.questions for card in part) for part in (choosing, judging)):
        raise MalformedModelError(
            "an accuracy budget needs questions to choose by and others to judge by",
            hint="put at least two cards with questions into the calibration set",
        )
    whole = trials.module(LOSSLESS)
    seen = record_cards(whole, trials.spec, choosing)
    raised = trials.raised
    sites = removable_units(raised.module, raised.ctx)
    moves = moves_of(sites, raised.ctx.constants, whole, seen) if seen is not None else ()
    search = _Search(trials, moves, choosing, budget, progress)
    search.start(whole)
    taken = take_steps(search.holds, ranked_steps(moves))
    structure = _structure(search, taken)
    judge = _Judge(trials, judging, budget, record)
    loss, verdict = judge.verdict(moves, taken, structure)
    return RemovalChoice(loss, _facts(search, verdict, loss, whole))


def take_steps(holds: Callable[[Sequence[int]], bool], steps: Sequence[int]) -> list[int]:
    """Return the steps that are taken: a bisected prefix, then single ones behind it.

    Args:
        holds: Whether the budget allows a list of steps; need not be monotonous.
        steps: Moves by number, one entry per step, the cheapest first.
    """
    low, high = 0, len(steps) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(steps[:middle]):
            low = middle
        else:
            high = middle
    taken, failed = list(steps[:low]), set[int]()
    for number in steps[low:]:
        if number in failed:
            continue
        if holds([*taken, number]):
            taken.append(number)
        else:
            failed.add(number)
    return taken


def _structure(search: _Search, taken: Sequence[int]) -> float:
    """Return the greatest loss of structure within the budget; 0 without a pattern to round."""
    raised = search.trials.raised
    found = has_pattern(raised.module, raised.ctx, LEAST_ZEROS)
    low, high = -1, len(STRUCTURE_LOSSES) if found else 0
    while high - low > 1:
        middle = (low + high) // 2
        if search.holds(taken, STRUCTURE_LOSSES[middle]):
            low = middle
        else:
            high = middle
    return STRUCTURE_LOSSES[low] if low >= 0 else 0.0


@dataclass(slots=True)
class _Judge:
    """Accuracy on the judging cards, with the scales and routers of a compilation."""

    trials: RemovalTrials
    cards: Sequence[Card]
    budget: float
    record: Callable[[Module, Loss], CalibrationRecord | None]

    def verdict(
        self, moves: Sequence[Move], taken: Sequence[int], structure: float
    ) -> tuple[Loss, dict[str, Json]]:
        """Return the greatest part of the choice that the judging cards allow, and the report."""
        before, looks = self._accuracy(LOSSLESS), list[Json]()
        after, steps, loss = before, list[int](), LOSSLESS
        for share in JUDGED_SHARES if taken or structure else ():
            part = list(taken[: len(taken) // share])
            tried = Loss(removals_of(moves, part), structure if share == 1 else 0.0)
            if tried == LOSSLESS:
                break
            found = self._accuracy(tried)
            looks.append({"steps": len(part), "accuracy": round(found, 4)})
            if found >= before - self.budget:
                after, steps, loss = found, part, tried
                break
        counts = {number: steps.count(number) for number in range(len(moves))}
        return loss, {
            "judged_cards": len(self.cards),
            "judged_questions": sum(len(card.questions) for card in self.cards),
            "accuracy_before": round(before, 4),
            "accuracy_after": round(after, 4),
            "looks": looks,
            "sites": [
                ranked.to_json(counts[number])
                for number, move in enumerate(moves)
                for ranked in move.sites
            ],
        }

    def _accuracy(self, loss: Loss) -> float:
        module = self.trials.module(loss)
        return self.trials.accuracy(module, self.cards, self.record(module, loss))


def _facts(search: _Search, verdict: dict[str, Json], loss: Loss, whole: Module) -> dict[str, Json]:
    narrow = search.trials.module(loss)
    return {
        "accuracy_budget": search.budget,
        "chosen_by_cards": len(search.cards),
        "chosen_by_questions": sum(len(card.questions) for card in search.cards),
        "choosing_before": round(search.before, 4),
        "trials": search.rows,
        "structure_loss": loss.structure,
        **verdict,
        "parameters": [_parameters(whole), _parameters(narrow)],
        "weight_bytes": [search.trials.stored_bytes(one) for one in (whole, narrow)],
        "flops": {
            program.name: [count_flops(whole, program).counted, count_flops(narrow, other).counted]
            for program, other in zip(whole.programs, narrow.programs, strict=True)
        },
    }


def _parameters(module: Module) -> int:
    return sum(int(weight.array.size) for weight in module.weights)
