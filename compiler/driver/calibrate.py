"""Run calibration cards through the simulator, and keep what the compiler learns from them.

Called by the driver once per submission, before quantisation. A model without cards gives no
record. The record is a stage of its own in the cache: it depends on the submission alone, neither
on the target nor on an older bundle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from compiler.contract.canonical import Json
from compiler.contract.pipeline import SEE, Pipeline, Port, ProgramSpec
from compiler.contract.session import GREEDY, STEP, Manner, answering, seeing
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.cards import Card, Question, read_cards
from compiler.driver.provenance import CALIBRATION, compiler_digest
from compiler.driver.questions import LOGITS, QUESTIONS_PER_CARD, RightAnswer, chosen_cards
from compiler.driver.sections import image_spec, token_spec
from compiler.driver.stages import StageClock
from compiler.kernels.program import Module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.record import CalibrationRecord, Recorder
from compiler.simulator.lanes import Lane, LaneSimulator, hold_together

RECORD: Final = "record"
LANES_BYTES: Final = 32 * 1024 * 1024
"""Bytes that the caches of sessions side by side may take; one card goes alone if need be."""


def record_cached(
    directory: Path,
    spec: PipelineSpec,
    module: Module,
    files: Mapping[str, str],
    cache: StageCache,
    clock: StageClock,
    loss: str = "",
) -> CalibrationRecord | None:
    """Return the record of a submission's calibration set, from the cache if it was made before.

    Args:
        directory: The submission.
        spec: Its words and limits.
        module: What its files lowered to.
        files: SHA-256 of the files of model and calibration set, by name.
        cache: Where `record` entries are.
        clock: Shows progress.
        loss: Says what was removed from the files' model; empty for nothing.

    Raises:
        MalformedModelError: The set cannot be read.
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    size = image_spec(spec)
    if size is None:
        return None
    facts: dict[str, Json] = {"files": dict(files), "compiler": compiler_digest()}
    key = cache_key(RECORD, facts | ({"loss": loss} if loss else {}))
    stored = cache.get(RECORD, key)
    if stored is not None:
        return CalibrationRecord.from_bytes(stored[RECORD])
    cards = read_cards(directory, CALIBRATION, size)
    record = record_cards(module, spec, cards, clock.within("quantise"))
    if record is not None:
        cache.put(RECORD, key, {RECORD: record.to_bytes()})
    return record


def record_cards(
    module: Module,
    spec: PipelineSpec,
    cards: Sequence[Card],
    progress: Callable[[float], None] | None = None,
    recorder: Recorder | None = None,
) -> CalibrationRecord | None:
    """Answer questions about some of the cards in f64, and return what was seen.

    Which ones, `questions.chosen_cards` says. Beside what the model computes for its own answers,
    the record says how probable it finds the right ones.

    Args:
        module: The lowered module.
        spec: Its words and limits.
        cards: The calibration set.
        progress: Called with the share of the cards done.
        recorder: Who sees it all, if it is to see more than the record holds.

    Returns:
        The record, or None if there is nothing to record: no cards, or a model without words or
        pictures.

    Raises:
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    names = {program.name for program in module.programs}
    if not cards or spec.tokens is None or not {SEE, STEP} <= names:
        return None
    recorder = recorder or Recorder(module)
    simulator, pipeline = LaneSimulator(module, recorder), _pipeline(module, spec)
    chosen, answers = chosen_cards(cards), list[int]()
    sessions = 1 + QUESTIONS_PER_CARD
    at_once = max(1, LANES_BYTES // max(1, simulator.lane_bytes * sessions))
    for first in range(0, len(chosen), at_once):
        some = list(enumerate(chosen))[first : first + at_once]
        answers += _record_some(simulator, recorder, pipeline, some)
        if progress is not None:
            progress(min(1.0, (first + at_once) / len(chosen)))
    has_logits = LOGITS in pipeline.programs[STEP].outputs
    return replace(recorder.finish(), answers=tuple(answers) if has_logits else ())


def _record_some(
    simulator: LaneSimulator,
    recorder: Recorder,
    pipeline: Pipeline,
    cards: Sequence[tuple[int, tuple[Card, Sequence[Question]]]],
) -> list[int]:
    """See some cards side by side, then answer their questions side by side.

    Lanes are numbered as if one session saw card after card and answered question after question.
    Returns how probable the right answers are: those that were not given are said afterwards, with
    the recorder paused.
    """
    assert pipeline.tokens is not None
    seen = [simulator.new_lane(at * (1 + QUESTIONS_PER_CARD)) for at, _ in cards]
    hold_together(simulator, seen, [seeing(pipeline, card.image) for _, (card, _) in cards])
    asked: list[tuple[Lane, Question, RightAnswer]] = []
    lanes: list[Lane] = []
    for lane, (_, (_, questions)) in zip(seen, cards, strict=True):
        for turn, question in enumerate(questions, 1):
            asked.append((lane, question, RightAnswer(pipeline.tokens, question)))
            lanes.append(lane.branch(lane.number + turn))
    has_logits = LOGITS in pipeline.programs[STEP].outputs
    watched = [Manner(choose=right.watch) if has_logits else GREEDY for _, _, right in asked]
    _answer_all(simulator, pipeline, lanes, asked, watched)
    open_ = [row for row in asked if has_logits and not row[2].is_known]
    with recorder.paused():
        fresh = [lane.branch(lane.number) for lane, _, _ in open_]
        _answer_all(simulator, pipeline, fresh, open_, [right.forced() for _, _, right in open_])
    return [right.score for _, _, right in asked]


def _answer_all(
    simulator: LaneSimulator,
    pipeline: Pipeline,
    lanes: Sequence[Lane],
    asked: Sequence[tuple[Lane, Question, RightAnswer]],
    manners: Sequence[Manner],
) -> None:
    """Answer questions side by side, each in its lane and manner."""
    assert pipeline.tokens is not None
    dialogues = [
        answering(
            pipeline,
            pipeline.tokens.prompt(question.prompt, question.words),
            seen.kv_length,
            manner,
        )
        for (seen, question, _), manner in zip(asked, manners, strict=True)
    ]
    hold_together(simulator, lanes, dialogues)


def _pipeline(module: Module, spec: PipelineSpec) -> Pipeline:
    """Return what the `pipeline` section of the module's plan will say."""
    return Pipeline(
        family=spec.family,
        image=image_spec(spec),
        tokens=token_spec(spec),
        max_context=module.kv.capacity if module.kv else 0,
        max_step_tokens=module.max_tokens,
        programs={
            program.name: ProgramSpec(
                _ports(module, program.inputs), _ports(module, program.outputs)
            )
            for program in module.programs
        },
    )


def _ports(module: Module, buffers: Mapping[str, int]) -> dict[str, Port]:
    found = {role: module.buffers[at] for role, at in buffers.items()}
    return {
        role: Port(buffer.rows, buffer.cols, buffer.dtype, buffer.dynamic)
        for role, buffer in found.items()
    }
