"""The routing trace of `benchmarks.runtime`: what EdgeCard's routers say, token by token.

    evaluation cards --f64 simulator--> logits of every router, for every token of text, in order

Of each token and layer twice: what the router said, and what it would have said where the compiled
tape asks it early (`compiler.emitters.foresight`). Questions follow one another as a user asks
them; a question's words and its answer's tokens are one token each. The last layer is left out: it
routes the last token of a run only, as no other is read. Called by the benchmark, which has a
larger model route by it.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.contract.operations import NormKind, Op
from compiler.contract.session import STEP
from compiler.driver.calibrate import record_cards
from compiler.driver.cards import EVALUATION, Card, read_cards
from compiler.driver.lowering import lower_submission
from compiler.driver.options import no_progress
from compiler.driver.questions import MAX_CARDS
from compiler.driver.sections import image_spec
from compiler.driver.stages import StageClock
from compiler.emitters.schedule import obey, schedule_ops
from compiler.frontend.pipeline_json import read_pipeline
from compiler.kernels.program import ABSENT, Call, Module, call_params
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.record import Recorder
from examples.edgecard.materialise import materialise

VERSION: Final = "v1"
Rows = NDArray[np.float32]
ROUTER_AT: Final = {Op.ROUTE: 0, Op.MOE_LAYER: 2, Op.EXPERT_FORESEE: 2}


@dataclass(frozen=True)
class Trace:
    """Logits of routers, token by token.

    Attributes:
        own: (tokens, layers, experts) f32, what each router said.
        early: The same, said early.
        k: Experts that a token takes.
    """

    own: Rows
    early: Rows
    k: int


def edgecard_trace() -> Trace:
    """Return the trace of all evaluation cards that a submission ships."""
    with tempfile.TemporaryDirectory() as name:
        submission = materialise(VERSION, Path(name))
        spec = read_pipeline(submission)
        lowered = lower_submission(submission, StageClock(no_progress)).module
        module = obey(lowered, schedule_ops(lowered, {}, foresee=True), {})
        size = image_spec(spec)
        assert size is not None
        cards = read_cards(submission, EVALUATION, size)
        parts = [
            _part(lowered, module, spec, cards[at : at + MAX_CARDS])
            for at in range(0, len(cards), MAX_CARDS)
        ]
    own, early = (np.concatenate(rows) for rows in zip(*parts, strict=True))
    return Trace(own, early, _experts_a_token(module))


def _part(
    lowered: Module, module: Module, spec: PipelineSpec, cards: tuple[Card, ...]
) -> tuple[Rows, Rows]:
    seen = _Routers(lowered)
    record_cards(module, spec, cards, recorder=seen)
    return seen.rows(is_early=False), seen.rows(is_early=True)


def _experts_a_token(module: Module) -> int:
    routed = (c for p in module.programs for c in p.calls if c.op in (Op.ROUTE, Op.MOE_LAYER))
    return int(call_params(next(routed))["k"])


class _Routers(Recorder):
    """A recorder that keeps all that routers say of text, early or not."""

    def __init__(self, module: Module) -> None:
        """Prepare for a module, whatever steps its tape has beside."""
        super().__init__(module)
        self._weights = module.weights
        self._found: dict[tuple[bool, int], list[tuple[Rows, Rows]]] = {}

    def call(
        self,
        program: str,
        call: Call,
        inputs: Sequence[Rows | None],
        outputs: Sequence[Rows],
        runs: Rows | None = None,
    ) -> None:
        """Keep the logits of a router's call, early or not."""
        super().call(program, call, inputs, outputs, runs)
        first = None if self._is_paused else ROUTER_AT.get(call.op)
        if program != STEP or first is None or inputs[0] is None or runs is None:
            return
        x = self._normed(call, inputs[0]) if first else inputs[0]
        matrix, bias, *_ = (*call.weights[first:], ABSENT)
        logits = x @ self._array(matrix).T
        if bias != ABSENT:
            logits = logits + self._array(bias)
        key = call.op is Op.EXPERT_FORESEE, matrix
        self._found.setdefault(key, []).append((logits.astype(np.float32), runs))

    def rows(self, *, is_early: bool) -> Rows:
        """Return (tokens, layers, experts), in the order of sessions and of tokens."""
        own = {
            at: sum(map(_height, rows)) for (early, at), rows in self._found.items() if not early
        }
        tokens = max(own.values())
        whole = [matrix for matrix, rows in own.items() if rows == tokens]
        return np.stack([_in_order(self._found[is_early, matrix]) for matrix in whole], axis=1)

    def _normed(self, call: Call, x: Rows) -> Rows:
        gamma, beta = call.weights[:2]
        if gamma == ABSENT:
            return x
        params = call_params(call)
        if params["kind"] == NormKind.LAYER:
            x = x - x.mean(axis=1, keepdims=True)
        scale = np.sqrt(np.square(x).mean(axis=1, keepdims=True) + params["eps"])
        y = x / scale * self._array(gamma)
        return np.asarray(y if beta == ABSENT else y + self._array(beta))

    def _array(self, weight: int) -> Rows:
        return np.atleast_2d(self._weights[weight].array)


def _height(part: tuple[Rows, Rows]) -> int:
    return len(part[0])


def _in_order(parts: Sequence[tuple[Rows, Rows]]) -> Rows:
    rows, runs = (np.concatenate(column) for column in zip(*parts, strict=True))
    return np.asarray(rows[np.argsort(runs, kind="stable")])
