"""How the next token is chosen when an answer is not greedy: by chance, from the logits.

    logits / temperature -> softmax in f64 -> cumulated -> one draw of a seeded generator

One seed gives one answer on one build of the libraries; only greedy answers have the same bits
everywhere.
"""

import random
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from compiler.contract.pipeline import Pipeline
from compiler.contract.session import STEP, Buffer, greedy
from device_agent.errors import RequestError
from device_agent.runtime.limits import is_number

LOGITS: Final = "logits"
MAX_TEMPERATURE: Final = 100.0
Chooser = Callable[[Mapping[str, Buffer]], int]


def chooser(pipeline: Pipeline, temperature: float, seed: int) -> Chooser:
    """Return what chooses the next token from the outputs of a step.

    Args:
        pipeline: Of the bundle.
        temperature: 0 = the most probable one; above, chance has as much more say.
        seed: Of the draws.

    Raises:
        RequestError: A setting is no number or out of range, or the plan gives no logits.
    """
    _require_settings(temperature, seed)
    if temperature == 0:
        return greedy
    steps = [name for name in pipeline.programs if name.partition(".")[0] == STEP]
    if any(LOGITS not in pipeline.programs[name].outputs for name in steps):
        raise RequestError("this bundle gives no logits", hint="leave temperature at 0, greedy")
    draws = random.Random(seed)  # noqa: S311 -- an answer, not a secret

    def choose(outputs: Mapping[str, Buffer]) -> int:
        logits = np.frombuffer(outputs[LOGITS], "<f4").astype(np.float64)
        weights = np.cumsum(np.exp((logits - logits.max()) / temperature))
        return int(np.searchsorted(weights, draws.random() * weights[-1], side="right"))

    return choose


def _require_settings(temperature: object, seed: object) -> None:
    if not is_number(seed) or isinstance(seed, float):
        raise RequestError(f"seed {seed!r}", hint="a whole number")
    if not is_number(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise RequestError(f"temperature {temperature!r}: 0, greedy, to {MAX_TEMPERATURE:g}")
