"""See a picture, answer a question: the greedy loop over a plan, one native call per token.

The loop is the same on a device, in the simulator, in the evaluation and in the benchmark, because
all of them run this module over something that satisfies `PlanRunner`. What to run next is said by
a generator (`Dialogue`): `hold` runs one to its end, and who has many runs them side by side.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Final, Protocol, TypeVar

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.native_errors import ContextLostError
from compiler.contract.pipeline import COUNT, PREFILL, SEE, Pipeline, TokenSpec

Buffer = bytes | bytearray | memoryview
Request = tuple[str, Mapping[str, "Buffer"]]
"""A program and its inputs by role."""
Result = TypeVar("Result")
Dialogue = Generator[Request, Mapping[str, "Buffer"], Result]
"""Yields what to run, is sent the outputs, and returns its result."""
STEP: Final = "step"
FORWARD: Final = "forward"


class PlanRunner(Protocol):
    """A loaded plan: the native one, or the simulator."""

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        """Forget every row from `length` on."""

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, memoryview]:
        """Run one program. Inputs and outputs are raw little-endian rows, by role."""


class RunnerBefore:
    """A runner that stands before another one and shares its cache; a subclass adds to it."""

    def __init__(self, runner: PlanRunner) -> None:
        """Stand before `runner`."""
        self._runner = runner

    @property
    def kv_length(self) -> int:
        """Rows in the key/value cache."""
        return self._runner.kv_length

    @kv_length.setter
    def kv_length(self, length: int) -> None:
        self._runner.kv_length = length


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said.

    Attributes:
        tokens: Ids before the end token.
        stopped: Whether the model ended the answer by itself; otherwise it was cut off.
        calls: Native calls made, one per token and one per further chunk of the prompt.
    """

    tokens: tuple[int, ...]
    stopped: bool
    calls: int


def greedy(outputs: Mapping[str, Buffer]) -> int:
    """Return the most probable next token, as the plan itself chose it."""
    return int.from_bytes(outputs["token"][:4], "little", signed=True)


def untold(_token: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How to answer.

    Attributes:
        most: Tokens at most, at least 1; None = as the bundle says.
        choose: Returns the next token, given the outputs of `step`.
        tell: Told each token of the answer as soon as it is known, before the next one is asked
            for.
    """

    most: int | None = None
    choose: Callable[[Mapping[str, Buffer]], int] = greedy
    tell: Callable[[int], None] = untold


GREEDY: Final = Manner()


class Session:
    """One picture in view, any number of questions about it.

    Not safe for two threads: the plan has one cache.
    """

    def __init__(self, runner: PlanRunner, pipeline: Pipeline) -> None:
        """Start with nothing in view.

        Raises:
            ContractError: The bundle does not answer in words.
        """
        if pipeline.tokens is None or STEP not in pipeline.programs:
            raise ContractError("this bundle does not answer in words")
        self._runner = runner
        self._pipeline = pipeline
        self._tokens: TokenSpec = pipeline.tokens
        self._image: bytes | None = None
        self._seen: int | None = 0
        """Rows that the picture takes; None while they are not all in the cache."""
        runner.kv_length = 0

    @property
    def seen(self) -> int:
        """Rows that the picture in view takes in the cache; 0 for none."""
        return self._seen or 0

    def see(self, image: Buffer) -> None:
        """Put a picture in view, replacing the last one.

        Args:
            image: u8 pixels, `pipeline.image.size_bytes` long.

        Raises:
            ContractError: The model sees no pictures, or the picture has the wrong size.
        """
        self.keep(image)
        hold(self._runner, self._showing())

    def keep(self, image: Buffer) -> None:
        """Put a picture in view that the next question begins with looking at.

        Raises:
            ContractError: As `see`.
        """
        spec = self._pipeline.image
        if spec is None or SEE not in self._pipeline.programs:
            raise ContractError("this bundle sees no pictures")
        if len(image) != spec.size_bytes:
            raise ContractError(f"picture of {len(image)} bytes, expected {spec.size_bytes}")
        self._seen, self._image = None, bytes(image)

    def _showing(self) -> Dialogue[None]:
        self._seen = None
        self._runner.kv_length = 0
        yield from seeing(self._pipeline, self._image or b"")
        self._seen = self._runner.kv_length
        self._runner.kv_length = self._seen  # a cut: steered routers begin each answer alike

    def look_again(self) -> None:
        """Have the next question begin with looking at the picture in view, if there is one."""
        self._seen = self._seen if self._image is None else None

    def forget(self) -> None:
        """Have nothing in view."""
        self._seen, self._image = 0, None

    def ask(self, prompt: str, words: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the answer, in words, to the prompt of that name around `words`."""
        answer = self.answer(self._tokens.prompt(prompt, words))
        return tuple(self._tokens.words(answer.tokens))

    def answer(self, prompt: Sequence[int], manner: Manner = GREEDY) -> Answer:
        """Answer about the picture in view.

        Args:
            prompt: Token ids; see `TokenSpec.prompt`.
            manner: How.

        Raises:
            ContractError: The prompt is empty.
            LimitExceededError: The prompt leaves no room for an answer.
        """
        return hold(self._runner, self.answers(prompt, manner))

    def answers(self, prompt: Sequence[int], manner: Manner = GREEDY) -> Dialogue[Answer]:
        """Return the dialogue of `answer`.

        It looks at the picture first if that is not in the cache: a long answer went over its rows,
        or looking was given up half way.

        Raises:
            ContractError: As `answer`.
            LimitExceededError: As `answer`.
        """
        if self._seen is not None:
            ready = answering(self._pipeline, prompt, self._seen, manner)
            try:
                self._runner.kv_length = self._seen
            except ContextLostError:
                if self._image is None:
                    raise
            else:
                return ready
        return self._answers_after_looking(prompt, manner)

    def _answers_after_looking(self, prompt: Sequence[int], manner: Manner) -> Dialogue[Answer]:
        yield from self._showing()
        return (yield from answering(self._pipeline, prompt, self.seen, manner))


def answering(
    pipeline: Pipeline, prompt: Sequence[int], seen: int, manner: Manner = GREEDY
) -> Dialogue[Answer]:
    """Return the dialogue that answers behind the first `seen` rows of the cache.

    Raises:
        ContractError: The prompt is empty, or the bundle does not answer in words.
        LimitExceededError: The prompt leaves no room for an answer.
    """
    if pipeline.tokens is None:
        raise ContractError("this bundle does not answer in words")
    room = require_room(pipeline, prompt, seen)
    return _answering(pipeline, pipeline.tokens, prompt, room, manner)


def require_room(pipeline: Pipeline, prompt: Sequence[int], seen: int) -> int:
    """Return how many rows there are behind the first `seen` ones of the cache.

    Raises:
        ContractError: The prompt is empty.
        LimitExceededError: The prompt leaves no room for an answer.
    """
    if not prompt:
        raise ContractError("an empty prompt has no answer")
    room = pipeline.max_context - seen
    if len(prompt) > room:
        raise LimitExceededError(f"prompt of {len(prompt)} tokens, room for {room}")
    return room


def _answering(
    pipeline: Pipeline, tokens: TokenSpec, prompt: Sequence[int], room: int, manner: Manner
) -> Dialogue[Answer]:
    most = tokens.max_answer_tokens if manner.most is None else manner.most
    outputs, calls = yield from _feeding(pipeline, tokens, prompt, 0)
    token = manner.choose(outputs)
    position = len(prompt)
    out: list[int] = []
    while token != tokens.eos and len(out) < most:
        out.append(token)
        manner.tell(token)
        if position >= room or len(out) == most:
            break
        outputs, made = yield from _feeding(pipeline, tokens, (token,), position)
        token = manner.choose(outputs)
        calls += made
        position += 1
    return Answer(tuple(out), token == tokens.eos, calls)


def _feeding(
    pipeline: Pipeline, tokens: TokenSpec, ids: Sequence[int], offset: int
) -> Dialogue[tuple[Mapping[str, Buffer], int]]:
    """Feed `ids`, the first at text position `offset`; return the last outputs and the calls."""
    most = pipeline.max_step_tokens
    calls = 0
    outputs: Mapping[str, Buffer] = {}
    for start in range(0, len(ids), most):
        chunk = ids[start : start + most]
        outputs = yield STEP, step_inputs(chunk, tokens.position_base + offset + start)
        calls += 1
    return outputs, calls


class Runs(Protocol):
    """Something that runs programs."""

    def run(self, program: str, inputs: Mapping[str, Buffer]) -> Mapping[str, Buffer]:
        """Run one program. Inputs and outputs are raw little-endian rows, by role."""


def hold(runner: Runs, dialogue: Dialogue[Result]) -> Result:
    """Run what a dialogue asks for until it ends; return its result."""
    try:
        request = next(dialogue)
        while True:
            request = dialogue.send(runner.run(*request))
    except StopIteration as end:
        result: Result = end.value
        return result


def see(runner: Runs, pipeline: Pipeline, image: Buffer) -> None:
    """Put the tokens of a picture in the cache; see `seeing`."""
    hold(runner, seeing(pipeline, image))


def seeing(pipeline: Pipeline, image: Buffer) -> Dialogue[None]:
    """Put the tokens of a picture in the cache.

    If `see` leaves that to `prefill`, only the rows that it kept go there, each at its position:
    a simple picture takes fewer rows and less time than a full one.

    Raises:
        ContractError: The plan counts more rows than it has, or none.
    """
    outputs = yield SEE, see_inputs(pipeline, image)
    if PREFILL not in pipeline.programs:
        return
    count = int.from_bytes(bytes(outputs[COUNT][:4]), "little", signed=True)
    ports = pipeline.programs[PREFILL].inputs
    rows = {role: _rows(outputs[role], port.row_bytes) for role, port in ports.items()}
    if not 1 <= count <= min(len(items) for items in rows.values()):
        raise ContractError(f"a picture of {count} tokens")
    for start in range(0, count, pipeline.max_step_tokens):
        chunk = slice(start, min(count, start + pipeline.max_step_tokens))
        yield PREFILL, {role: b"".join(items[chunk]) for role, items in rows.items()}


def _rows(data: Buffer, row_bytes: int) -> list[bytes]:
    """Return copies of the rows: the arena changes with the next run."""
    whole = bytes(data)
    return [whole[at : at + row_bytes] for at in range(0, len(whole), row_bytes)]


def see_inputs(pipeline: Pipeline, image: Buffer) -> dict[str, Buffer]:
    """Return the inputs of program `see`: the picture and, where it asks, its tokens' positions.

    A program that keeps every token of the picture is told where they stand: at the front, one
    after the other or, if it tells height and width apart, in the picture's grid at time 0.

    Raises:
        ContractError: The picture's grid has another number of tokens.
    """
    ports = pipeline.programs[SEE].inputs
    inputs: dict[str, Buffer] = {"image": image}
    if "positions" not in ports:
        return inputs
    count = ports["positions"].rows
    rows = {"positions": list(range(count))}
    if "positions_height" in ports:
        grid = pipeline.image.grid if pipeline.image is not None else None
        height, width = grid or (isqrt(count), isqrt(count))
        if height * width != count:
            raise ContractError(f"a picture of {count} tokens in a grid of {height} x {width}")
        rows = {
            "positions": [0] * count,
            "positions_height": [at // width for at in range(count)],
            "positions_width": [at % width for at in range(count)],
        }
    return inputs | {role: pack_i32(values) for role, values in rows.items()}


def step_inputs(ids: Sequence[int], first_position: int) -> dict[str, bytes]:
    """Return the inputs of program `step` for `ids` at consecutive positions."""
    positions = range(first_position, first_position + len(ids))
    return {"token_ids": pack_i32(ids), "positions": pack_i32(positions)}


def pack_i32(values: Sequence[int]) -> bytes:
    """Return `values` as little-endian i32.

    Raises:
        ContractError: A value does not fit.
    """
    try:
        return b"".join(value.to_bytes(4, "little", signed=True) for value in values)
    except OverflowError as error:
        raise ContractError(f"not a 32-bit value: {error}") from error
