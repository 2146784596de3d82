"""The routing trace of `benchmarks.runtime`: what EdgeCard's routers say, token by token.

    evaluation cards --f64 simulator--> logits of every router, for every token of text, in order

Questions follow one another as a user asks them; a question's words and its answer's tokens are
one token each. The last layer is left out: it routes the last token of a run only, as no other is
read. Called by the benchmark, which has a larger model route by it.
"""

import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from compiler.driver.calibrate import record_cards
from compiler.driver.cards import EVALUATION, Card, read_cards
from compiler.driver.lowering import lower_submission
from compiler.driver.options import no_progress
from compiler.driver.questions import MAX_CARDS
from compiler.driver.sections import image_spec
from compiler.driver.stages import StageClock
from compiler.frontend.pipeline_json import read_pipeline
from compiler.kernels.program import Module
from compiler.passes.pipeline_spec import PipelineSpec
from compiler.quant.record import RouterSample
from compiler.quant.router_bits import logits
from examples.edgecard.materialise import materialise

VERSION: Final = "v1"
Trace = NDArray[np.float32]
"""(tokens, layers, experts): logits of the routers."""


def edgecard_trace() -> Trace:
    """Return the trace of all evaluation cards that a submission ships."""
    with tempfile.TemporaryDirectory() as name:
        submission = materialise(VERSION, Path(name))
        spec = read_pipeline(submission)
        module = lower_submission(submission, StageClock(no_progress)).module
        size = image_spec(spec)
        assert size is not None
        cards = read_cards(submission, EVALUATION, size)
        parts = range(0, len(cards), MAX_CARDS)
        return np.concatenate([_part(module, spec, cards[at : at + MAX_CARDS]) for at in parts])


def _part(module: Module, spec: PipelineSpec, cards: tuple[Card, ...]) -> Trace:
    record = record_cards(module, spec, cards)
    assert record is not None
    layers = [_layer(module, router) for router in record.routers]
    tokens = max(len(layer) for layer in layers)
    return np.stack([layer for layer in layers if len(layer) == tokens], axis=1)


def _layer(module: Module, router: RouterSample) -> Trace:
    weights = module.weights
    bias = weights[router.bias].array if router.bias >= 0 else None
    order = np.argsort(router.run, kind="stable")
    text = order[~router.vision[order]]
    found = logits(weights[router.weight].array, bias, router.inputs[text])
    return np.asarray(found, np.float32)
