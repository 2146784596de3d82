"""Run calibration cards through the simulator, and keep what the compiler learns from them.

Called by the driver once per submission, before quantisation. A model without cards gives no
record. The record is a stage of its own in the cache: it depends on the submission alone, neither
on the target nor on an older bundle.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from compiler.contract.pipeline import SEE, Pipeline, Port, ProgramSpec
from compiler.contract.session import STEP, Session
from compiler.driver.cache import StageCache, cache_key
from compiler.driver.cards import Card, Question, read_cards
from compiler.driver.provenance import CALIBRATION, compiler_digest
from compiler.driver.sections import image_spec, token_spec
from compiler.driver.stages import StageClock
from compiler.kernels.program import Module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.record import CalibrationRecord, Recorder
from compiler.simulator import Simulator

RECORD: Final = "record"
MAX_CARDS: Final = 20
QUESTIONS_PER_CARD: Final = 3
Item = TypeVar("Item")


def record_cached(
    directory: Path,
    spec: PipelineSpec,
    module: Module,
    files: Mapping[str, str],
    cache: StageCache,
    clock: StageClock,
) -> CalibrationRecord | None:
    """Return the record of a submission's calibration set, from the cache if it was made before.

    Args:
        directory: The submission.
        spec: Its words and limits.
        module: What its files lowered to.
        files: SHA-256 of the files of model and calibration set, by name.
        cache: Where `record` entries are.
        clock: Shows progress.

    Raises:
        MalformedModelError: The set cannot be read.
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    size = image_spec(spec)
    if size is None:
        return None
    key = cache_key(RECORD, {"files": dict(files), "compiler": compiler_digest()})
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
) -> CalibrationRecord | None:
    """Answer questions about at most `MAX_CARDS` cards in f64, and return what was seen.

    Cards are taken evenly over the set, questions evenly over each card's.

    Args:
        module: The lowered module.
        spec: Its words and limits.
        cards: The calibration set.
        progress: Called with the share of the cards done.

    Returns:
        The record, or None if there is nothing to record: no cards, or a model without words or
        pictures.

    Raises:
        ContractError: A word is not in the vocabulary, or a picture has the wrong size.
    """
    names = {program.name for program in module.programs}
    if not cards or spec.tokens is None or not {SEE, STEP} <= names:
        return None
    recorder = Recorder(module)
    pipeline = _pipeline(module, spec)
    assert pipeline.tokens is not None
    session = Session(Simulator(module, mode="f64", observer=recorder), pipeline)
    chosen = _evenly(cards, MAX_CARDS)
    for at, card in enumerate(chosen):
        session.see(card.image)
        for question in _evenly(_rotated(card.questions, at), QUESTIONS_PER_CARD):
            session.answer(pipeline.tokens.prompt(question.prompt, question.words))
        if progress is not None:
            progress((at + 1) / len(chosen))
    return recorder.finish()


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


def _rotated(questions: tuple[Question, ...], by: int) -> tuple[Question, ...]:
    """Start each card at another question, so that all kinds are asked."""
    start = by % max(1, len(questions))
    return questions[start:] + questions[:start]


def _evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most `most` items, spread evenly."""
    step = max(1, -(-len(items) // most))
    return list(items[::step])[:most]
