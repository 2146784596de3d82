"""Talking to a decoder of `benchmarks.decode`: a prompt, then windows of greedy tokens."""

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.decode_candidates import PROMPT, PROMPT_IDS, Decoder
from benchmarks.priority import uninterrupted
from benchmarks.runner import interleaved

WINDOW: Final = 16
"""Tokens that are timed at once."""
PAUSE_S: Final = 0.02
"""Rest before a sample, so that the threads of the one before go to sleep."""
Run = Callable[[], None]
Seconds = Mapping[str, list[float]]


class Talk:
    """A decoder and the token that it said last."""

    def __init__(self, decoder: Decoder, prompt: int = PROMPT) -> None:
        self._decoder = decoder
        self._prompt = PROMPT_IDS[:prompt]
        self._token = 0

    def prompt(self) -> None:
        """Begin anew: feed the prompt, take the first token."""
        self._decoder.forget()
        self._token = self._decoder.step(self._prompt)

    def window(self) -> None:
        """Say the next tokens."""
        for _ in range(WINDOW):
            self._token = self._decoder.step([self._token])


def timed(runs: Mapping[str, Run], rounds: int, warm_up: int) -> Seconds:
    """Return seconds of every round of each, in turn, the cores to themselves."""
    return interleaved(runs, rounds, warm_up, PAUSE_S, uninterrupted)
