"""Choose self-test vectors and record what the simulator answers.

Vectors come from the calibration set (see a card, feed a question, feed the next tokens); a card's
questions are taken in turn so that kinds mix. The first ones make up the asked number; after that
a vector is added only if it reaches an expert that none before it did, then random prompts are
tried. A bundle whose vectors do not reach every expert is not released: an expert that nothing
tests could be wrong on every device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from compiler.contract.pipeline import FAMILY_GRAPH, Pipeline, TokenSpec
from compiler.contract.selftest import SelfTest, SelfTestRun, SelfTestVector, output_digests
from compiler.contract.session import FORWARD, SEE, STEP, Buffer, PlanRunner, step_inputs
from compiler.driver.cards import Card
from compiler.errors import SelfTestError

Expert = tuple[int, int]
"""(layer, expert id)."""

STEPS_PER_VECTOR: Final = 4
MAX_CANDIDATES: Final = 2_000
RANDOM_PROMPTS: Final = 256
RANDOM_PROMPT_TOKENS: Final = 12
GRAPH_ROWS: Final = (1, 2, 3, 5, 8, 13)
SEED: Final = 20_240


class TracedRunner(PlanRunner, Protocol):
    """The simulator, which also says which experts it went through."""

    def take_reached(self) -> set[Expert]:
        """Return the experts used since the last call, and start again."""
        ...


@dataclass(slots=True)
class _Recorder:
    """Runs programs and keeps inputs and output digests of the vector being made."""

    runner: TracedRunner
    runs: list[SelfTestRun] = field(default_factory=list)

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
    experts: Iterable[Expert],
    vectors: int,
) -> SelfTest:
    """Return at least `vectors` vectors that together reach all `experts`.

    Raises:
        SelfTestError: Some expert is not reached by any candidate; the message names it. Train it,
            prune it, or add a calibration card that uses it.
    """
    missing = set(experts)
    reached: set[Expert] = set()
    kept: list[SelfTestVector] = []
    recorder = _Recorder(runner)
    for name, record in _candidates(pipeline, cards):
        if len(kept) >= vectors and not missing:
            break
        runner.take_reached()
        record(recorder)
        vector, touched = recorder.take(name), runner.take_reached()
        if len(kept) < vectors or touched & missing:
            kept.append(vector)
            missing -= touched
            reached |= touched
    runner.kv_length = 0
    if missing:
        raise SelfTestError(
            f"no self-test vector reaches {_names(missing)}",
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
    """Yield (card, question): every card once with questions in turn, then with the next ones."""
    most = max((len(card.questions) for card in cards), default=0)
    for shift in range(most):
        for card, item in enumerate(cards):
            if shift < len(item.questions):
                yield card, (card + shift) % len(item.questions)


def _question_record(
    pipeline: Pipeline, tokens: TokenSpec, image: bytes, prompt: Sequence[int]
) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.runner.kv_length = 0
        recorder.run(SEE, {"image": image})
        _record_steps(recorder, pipeline, tokens, prompt)

    return record


def _prompt_record(pipeline: Pipeline, tokens: TokenSpec, prompt: Sequence[int]) -> _Record:
    def record(recorder: _Recorder) -> None:
        recorder.runner.kv_length = 0
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
        recorder.runner.kv_length = 0
        recorder.run(FORWARD, {"tensor": data})

    return record


def _by_layer(experts: Iterable[Expert]) -> dict[int, tuple[int, ...]]:
    layers: dict[int, list[int]] = {}
    for layer, expert in sorted(experts):
        layers.setdefault(layer, []).append(expert)
    return {layer: tuple(ids) for layer, ids in layers.items()}


def _names(experts: Iterable[Expert]) -> str:
    return ", ".join(f"expert.L{layer}.E{expert}" for layer, expert in sorted(experts))
