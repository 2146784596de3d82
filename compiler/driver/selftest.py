"""Choose self-test vectors and record what the simulator answers.

Vectors come from the calibration set (see a card, feed a question, feed the next tokens): a few
questions of each card, kinds mixed. The first ones make up the asked number; after that a vector is
added only if it reaches an expert that none before it did. Rare experts are found by hints (see
`compiler.driver.scout`), because the simulator is too slow to try thousands of questions; without
hints, or where they do not suffice, questions and then random prompts are tried in order. A bundle
whose vectors do not reach every expert is not released: an expert that nothing tests could be wrong
on every device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import gcd
from typing import Final, Protocol

import numpy as np

from compiler.contract.pipeline import FAMILY_GRAPH, PREFILL, SEE, Pipeline, TokenSpec
from compiler.contract.selftest import SelfTest, SelfTestRun, SelfTestVector, output_digests
from compiler.contract.session import (
    FORWARD,
    STEP,
    Buffer,
    PlanRunner,
    Runs,
    see,
    step_inputs,
)
from compiler.driver.cards import Card
from compiler.driver.plan_facts import expert_place
from compiler.errors import SelfTestError

STEPS_PER_VECTOR: Final = 4
QUESTIONS_PER_CARD: Final = 4
MAX_CANDIDATES: Final = 400
RANDOM_PROMPTS: Final = 64
GRAPH_ROWS: Final = (1, 2, 3, 5, 8, 13)
SEED: Final = 20_240
NAMED: Final = 12
"""Experts that an error lists; a router may have a thousand."""
_INTEGERS: Final = {"i32": "<i4", "u8": "u1"}


class TracedRunner(PlanRunner, Protocol):
    """The simulator, which also says which experts it went through."""

    def take_reached(self) -> frozenset[str]:
        """Return the sections of experts that ran for the first time since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """A question that is said to reach some experts.

    Attributes:
        card, question: Places in the calibration set.
        experts: Sections of the experts.
    """

    card: int
    question: int
    experts: frozenset[str]


@dataclass(slots=True)
class _Recorder:
    """Runs programs and keeps inputs and output digests of the vector being made."""

    runner: TracedRunner
    runs: list[SelfTestRun] = field(default_factory=list)
    seen: tuple[tuple[SelfTestRun, ...], int] | None = None

    def see(self, pipeline: Pipeline, image: bytes) -> None:
        """See a picture, or truncate the cache to what the same one left there the last time."""
        if self.seen is not None and self.seen[0][0].inputs["image"] == image:
            runs, self.runner.kv_length = self.seen
            self.runs += runs
            return
        self.runner.kv_length = 0
        before = len(self.runs)
        see(self, pipeline, image)
        self.seen = tuple(self.runs[before:]), self.runner.kv_length

    def see_by(self, pipeline: Pipeline, image: bytes, suffix: str) -> None:
        """See a picture by the variants of programs that have one of that suffix."""
        self.forget()
        see(_Variants(self, pipeline, suffix), pipeline, image)

    def forget(self) -> None:
        """Empty the cache."""
        self.seen = None
        self.runner.kv_length = 0

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
        before = self.runner.kv_length
        given = {role: bytes(data) for role, data in inputs.items()}
        outputs = self.runner.run(program, given)
        self.runs.append(SelfTestRun(program, before, given, output_digests(outputs)))
        return outputs

    def take(self, name: str) -> SelfTestVector:
        runs, self.runs = tuple(self.runs), []
        return SelfTestVector(name, runs)


@dataclass(frozen=True, slots=True)
class _Variants:
    """Runs the variants of programs that have one."""

    recorder: _Recorder
    pipeline: Pipeline
    suffix: str

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
        variant = program + self.suffix
        known = self.pipeline.programs
        return self.recorder.run(variant if variant in known else program, inputs)


def make_selftest(
    runner: TracedRunner,
    pipeline: Pipeline,
    cards: Sequence[Card],
    experts: Iterable[str],
    vectors: int,
    hints: Callable[[], Sequence[Hint]] = tuple,
) -> SelfTest:
    """Return at least `vectors` vectors that together reach all `experts`.

    Args:
        runner: The simulator, fresh: it has not run yet.
        pipeline: Programs, words and limits.
        cards: The calibration set; empty for a model without pictures.
        experts: Sections that must be reached, `expert.L<layer>.E<expert>`.
        vectors: The fewest vectors.
        hints: Returns where rare experts may be found; asked only if some are missing. Only what
            the simulator then reaches counts.

    Raises:
        SelfTestError: Some expert is not reached by any candidate; the message names it. Train it,
            prune it, or add a calibration card that uses it.
    """
    missing = set(experts)
    reached: set[str] = set()
    kept: list[SelfTestVector] = []
    recorder = _Recorder(runner)
    ordered = _candidates(pipeline, cards)
    hinted = _hinted_candidates(pipeline, cards, hints, missing)
    for name, record in chain(islice(ordered, vectors), hinted, ordered):
        if len(kept) >= vectors and not missing:
            break
        record(recorder)
        vector, touched = recorder.take(name), runner.take_reached()
        if len(kept) < vectors or touched & missing:
            kept.append(vector)
            missing -= touched
            reached |= touched
    for name, record in _variant_candidates(pipeline, cards):
        record(recorder)
        kept.append(recorder.take(name))
    runner.kv_length = 0
    if missing:
        raise SelfTestError(
            "no self-test vector reaches " + _listed(sorted(missing, key=expert_place)),
            hint="add calibration cards that use these experts, or prune them",
        )
    if len(kept) < vectors:
        raise SelfTestError(f"only {len(kept)} self-test vectors, {vectors} are needed")
    return SelfTest(tuple(kept), _by_layer(reached))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


class _Record(Protocol):
    def __call__(self, recorder: _Recorder) -> None: ...


Candidate = tuple[str, _Record]


def _candidates(pipeline: Pipeline, cards: Sequence[Card]) -> Iterator[Candidate]:
    if pipeline.family == FAMILY_GRAPH:
        yield from _graph_candidates(pipeline)
        return
    tokens = _words_of(pipeline)
    for card, question in islice(card_order(cards), MAX_CANDIDATES):
        yield _card_candidate(pipeline, cards, card, question)
    random = np.random.default_rng(SEED)
    for at in range(RANDOM_PROMPTS):
        ids = random.integers(0, len(tokens.vocabulary), pipeline.max_step_tokens)
        yield f"random prompt {at}", _prompt_record(pipeline, [int(item) for item in ids])


def _hinted_candidates(
    pipeline: Pipeline,
    cards: Sequence[Card],
    hints: Callable[[], Sequence[Hint]],
    missing: set[str],
) -> Iterator[Candidate]:
    """Yield the question that reaches most of what is missing, again and again."""
    left = list(hints()) if missing else []
    while missing and left:
        best = max(left, key=lambda hint: len(hint.experts & missing))
        if not best.experts & missing:
            return
        left.remove(best)
        yield _card_candidate(pipeline, cards, best.card, best.question)


def _variant_candidates(pipeline: Pipeline, cards: Sequence[Card]) -> Iterator[Candidate]:
    """Yield a question for every variant of `step`, so that each one's bits are compared.

    A substitute sees the picture by its own variants too.
    """
    variants = sorted(name for name in pipeline.programs if name.startswith(f"{STEP}."))
    for variant, (card, question) in zip(variants, card_order(cards), strict=False):
        yield _card_candidate(pipeline, cards, card, question, variant)


def _card_candidate(
    pipeline: Pipeline, cards: Sequence[Card], card: int, question: int, program: str = STEP
) -> Candidate:
    item = cards[card].questions[question]
    prompt = _words_of(pipeline).prompt(item.prompt, item.words)

    suffix = program.removeprefix(STEP)
    is_substitute = any(f"{name}{suffix}" in pipeline.programs for name in (SEE, PREFILL))

    def record(recorder: _Recorder) -> None:
        if suffix and is_substitute:
            recorder.see_by(pipeline, cards[card].image, suffix)
        else:
            recorder.see(pipeline, cards[card].image)
        _record_steps(recorder, pipeline, prompt, program)

    variant = "" if program == STEP else f" by {program}"
    return f"card {card} question {question} ({item.kind}){variant}", record


def _prompt_record(pipeline: Pipeline, prompt: Sequence[int]) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.forget()
        _record_steps(recorder, pipeline, prompt)

    return record


def _record_steps(
    recorder: _Recorder, pipeline: Pipeline, prompt: Sequence[int], program: str = STEP
) -> None:
    """Feed the prompt, then the answer's first tokens, as a device would."""
    for _ in feed_steps(recorder, pipeline, prompt, program):
        pass


def feed_steps(
    runner: Runs, pipeline: Pipeline, prompt: Sequence[int], program: str = STEP
) -> Iterator[Mapping[str, Buffer]]:
    """Feed a prompt and the first tokens of the answer; yield the outputs of each step.

    `program` is `step` or a variant of it.
    """
    tokens = _words_of(pipeline)
    feed: Sequence[int] = prompt[: pipeline.max_step_tokens]
    position = tokens.position_base
    for _ in range(STEPS_PER_VECTOR):
        outputs = runner.run(program, step_inputs(feed, position))
        token = int.from_bytes(bytes(outputs["token"][:4]), "little", signed=True)
        position += len(feed)
        feed = (token,)
        yield outputs
        if token == tokens.eos:
            return


def _words_of(pipeline: Pipeline) -> TokenSpec:
    if pipeline.tokens is None:
        raise SelfTestError("a model with words needs a vocabulary")
    return pipeline.tokens


def card_order(cards: Sequence[Card]) -> Iterator[tuple[int, int]]:
    """Yield (card, question): a few questions of every card, then the next few, until all came."""
    most = max((len(card.questions) for card in cards), default=0)
    for start in range(0, most, QUESTIONS_PER_CARD):
        for card, item in enumerate(cards):
            count = len(item.questions)
            for turn in range(start, min(start + QUESTIONS_PER_CARD, count)):
                yield card, (turn * _stride(count) + card) % count


def _stride(count: int) -> int:
    """Return a step that visits all of `count` questions and mixes neighbours of one kind."""
    return next(step for step in (5, 3, 2, 1) if step < max(count, 2) and gcd(step, count) == 1)


def _graph_candidates(pipeline: Pipeline) -> Iterator[Candidate]:
    """Yield random inputs; integers are 0 or 1, which are ids, masks and counts everywhere."""
    ports = pipeline.programs[FORWARD].inputs
    random = np.random.default_rng(SEED)
    for at in range(MAX_CANDIDATES):
        tokens = GRAPH_ROWS[at % len(GRAPH_ROWS)]
        inputs = {}
        for role, port in ports.items():
            rows = min(tokens, port.rows) if port.dynamic else port.rows
            if port.dtype == "f32":
                data = random.standard_normal((rows, port.cols)).astype("<f4")
            else:
                data = random.integers(0, 2, (rows, port.cols)).astype(_INTEGERS[port.dtype])
            inputs[role] = data.tobytes()
        yield f"random rows {at} ({tokens})", _forward_record(inputs)


def _forward_record(inputs: Mapping[str, bytes]) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.forget()
        recorder.run(FORWARD, inputs)

    return record


def _by_layer(experts: Iterable[str]) -> dict[int, tuple[int, ...]]:
    layers: dict[int, list[int]] = {}
    for layer, expert in map(expert_place, experts):
        layers.setdefault(layer, []).append(expert)
    return {layer: tuple(sorted(ids)) for layer, ids in sorted(layers.items())}
