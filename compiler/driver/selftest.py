"""Choose self-test vectors and record what the simulator answers.

Vectors come from the calibration set (see a card, feed a question, feed the next tokens): a few
questions of each card, kinds mixed. The first ones make up the asked number; after that a vector is
added only if it reaches an expert that none before it did, then random prompts are tried. A bundle
whose vectors do not reach every expert is not released: an expert that nothing tests could be wrong
on every device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Final, Protocol

import numpy as np

from compiler.contract.pipeline import FAMILY_GRAPH, Pipeline, TokenSpec
from compiler.contract.selftest import SelfTest, SelfTestRun, SelfTestVector, output_digests
from compiler.contract.session import FORWARD, SEE, STEP, Buffer, PlanRunner, step_inputs
from compiler.driver.cards import Card
from compiler.driver.sections import expert_place
from compiler.errors import SelfTestError

STEPS_PER_VECTOR: Final = 4
QUESTIONS_PER_CARD: Final = 3
MAX_CANDIDATES: Final = 2_000
RANDOM_PROMPTS: Final = 256
RANDOM_PROMPT_TOKENS: Final = 12
GRAPH_ROWS: Final = (1, 2, 3, 5, 8, 13)
SEED: Final = 20_240


class TracedRunner(PlanRunner, Protocol):
    """The simulator, which also says which experts it went through."""

    def take_reached(self) -> frozenset[str]:
        """Return the sections of experts that ran for the first time since the last call."""
        ...


@dataclass(slots=True)
class _Recorder:
    """Runs programs and keeps inputs and output digests of the vector being made."""

    runner: TracedRunner
    runs: list[SelfTestRun] = field(default_factory=list)
    seen: tuple[SelfTestRun, int] | None = None

    def see(self, image: bytes) -> None:
        """Run `see`, or truncate the cache to what the same picture left there the last time."""
        if self.seen is not None and self.seen[0].inputs["image"] == image:
            run, self.runner.kv_length = self.seen
            self.runs.append(run)
            return
        self.runner.kv_length = 0
        self.run(SEE, {"image": image})
        self.seen = self.runs[-1], self.runner.kv_length

    def forget(self) -> None:
        """Empty the cache."""
        self.seen = None
        self.runner.kv_length = 0

    def run(self, program: str, inputs: Mapping[str, bytes]) -> Mapping[str, Buffer]:
        before = self.runner.kv_length
        outputs = self.runner.run(program, inputs)
        self.runs.append(SelfTestRun(program, before, inputs, output_digests(outputs)))
        return outputs

    def take(self, name: str) -> SelfTestVector:
        runs, self.runs = tuple(self.runs), []
        return SelfTestVector(name, runs)


def make_selftest(
    runner: TracedRunner,
    pipeline: Pipeline,
    cards: Sequence[Card],
    experts: Iterable[str],
    vectors: int,
) -> SelfTest:
    """Return at least `vectors` vectors that together reach all `experts`.

    Args:
        runner: The simulator, fresh: it has not run yet.
        pipeline: Programs, words and limits.
        cards: The calibration set; empty for a model without pictures.
        experts: Sections that must be reached, `expert.L<layer>.E<expert>`.
        vectors: The fewest vectors.

    Raises:
        SelfTestError: Some expert is not reached by any candidate; the message names it. Train it,
            prune it, or add a calibration card that uses it.
    """
    missing = set(experts)
    reached: set[str] = set()
    kept: list[SelfTestVector] = []
    recorder = _Recorder(runner)
    for name, record in _candidates(pipeline, cards):
        if len(kept) >= vectors and not missing:
            break
        record(recorder)
        vector, touched = recorder.take(name), runner.take_reached()
        if len(kept) < vectors or touched & missing:
            kept.append(vector)
            missing -= touched
            reached |= touched
    runner.kv_length = 0
    if missing:
        raise SelfTestError(
            "no self-test vector reaches " + ", ".join(sorted(missing, key=expert_place)),
            hint="add calibration cards that use these experts, or prune them",
        )
    if len(kept) < vectors:
        raise SelfTestError(f"only {len(kept)} self-test vectors, {vectors} are needed")
    return SelfTest(tuple(kept), _by_layer(reached))


class _Record(Protocol):
    def __call__(self, recorder: _Recorder) -> None: ...


def _candidates(pipeline: Pipeline, cards: Sequence[Card]) -> Iterator[tuple[str, _Record]]:
    if pipeline.family == FAMILY_GRAPH:
        yield from _graph_candidates(pipeline)
        return
    tokens = pipeline.tokens
    if tokens is None:
        raise SelfTestError("a model with words needs a vocabulary")
    for at, (card, question) in enumerate(_order(cards)):
        if at == MAX_CANDIDATES:
            break
        item = cards[card].questions[question]
        prompt = tokens.prompt(item.prompt, item.words)
        name = f"card {card} question {question} ({item.kind})"
        yield name, _question_record(pipeline, tokens, cards[card].image, prompt)
    random = np.random.default_rng(SEED)
    for at in range(RANDOM_PROMPTS):
        ids = random.integers(0, len(tokens.vocabulary), RANDOM_PROMPT_TOKENS)
        yield f"random prompt {at}", _prompt_record(pipeline, tokens, [int(item) for item in ids])


def _order(cards: Sequence[Card]) -> Iterator[tuple[int, int]]:
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


def _question_record(
    pipeline: Pipeline, tokens: TokenSpec, image: bytes, prompt: Sequence[int]
) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.see(image)
        _record_steps(recorder, pipeline, tokens, prompt)

    return record


def _prompt_record(pipeline: Pipeline, tokens: TokenSpec, prompt: Sequence[int]) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.forget()
        _record_steps(recorder, pipeline, tokens, prompt)

    return record


def _record_steps(
    recorder: _Recorder, pipeline: Pipeline, tokens: TokenSpec, prompt: Sequence[int]
) -> None:
    """Feed the prompt, then the answer's first tokens, as a device would."""
    feed: Sequence[int] = prompt[: pipeline.max_step_tokens]
    position = tokens.position_base
    for _ in range(STEPS_PER_VECTOR):
        outputs = recorder.run(STEP, step_inputs(feed, position))
        position += len(feed)
        token = int.from_bytes(bytes(outputs["token"][:4]), "little", signed=True)
        if token == tokens.eos:
            break
        feed = (token,)


def _graph_candidates(pipeline: Pipeline) -> Iterator[tuple[str, _Record]]:
    port = pipeline.programs[FORWARD].inputs["tensor"]
    random = np.random.default_rng(SEED)
    for at in range(MAX_CANDIDATES):
        rows = min(GRAPH_ROWS[at % len(GRAPH_ROWS)], port.rows) if port.dynamic else port.rows
        data = random.standard_normal((rows, port.cols)).astype("<f4").tobytes()
        yield f"random rows {at} ({rows})", _forward_record(data)


def _forward_record(data: bytes) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.forget()
        recorder.run(FORWARD, {"tensor": data})

    return record


def _by_layer(experts: Iterable[str]) -> dict[int, tuple[int, ...]]:
    layers: dict[int, list[int]] = {}
    for layer, expert in map(expert_place, experts):
        layers.setdefault(layer, []).append(expert)
    return {layer: tuple(sorted(ids)) for layer, ids in sorted(layers.items())}
