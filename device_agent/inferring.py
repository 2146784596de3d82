"""`infer`: answer one prompt with a bundle, from the command line, token by token.

The answer goes to stdout, progress to stderr. Ctrl-C ends the answer between two native calls and
prints what there is; a second one ends the program. Changes nothing on disk.
"""

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from device_agent.config import AgentConfig
from device_agent.ports import degrade_rules
from device_agent.runtime.generation import Generation, Reason, Stats, Token
from device_agent.runtime.moe_runtime import MoERuntime
from device_agent.runtime.weights import WeightPool
from device_agent.ui import EXIT_INTERRUPTED, EXIT_OK, note, result

EXIT_PARTIAL: Final = 3
"""The deadline ended the answer."""
_STATUS: Final = {Reason.DEADLINE: EXIT_PARTIAL, Reason.CANCELLED: EXIT_INTERRUPTED}


@dataclass(frozen=True, slots=True)
class Inference:
    """What `infer` was asked; see `Session.generate` for the fields that both have.

    Attributes:
        bundle: Directory of a bundle; None = the one that the agent runs.
        threads: Threads of the answer; None = as configured.
        is_streamed: Whether tokens are printed as they are made.
        is_json: Whether the output is JSON: one object, or one line per token and one more.
    """

    bundle: Path | None
    prompt: str
    template: str | None
    image: Path | None
    max_tokens: int | None
    deadline: float | None
    temperature: float
    seed: int
    threads: int | None
    is_streamed: bool
    is_json: bool


def infer(config: AgentConfig, asked: Inference) -> int:
    """Answer and print; return the exit status.

    Args:
        config: Where the installed bundle is, threads, cores and degrade rules.
        asked: What to answer and how to print it.

    Raises:
        BundleError: There is no bundle, or it does not load here.
        NoBundleError: Nothing is installed.
        RequestError: The bundle cannot be asked this.
        AnswerError: The plan failed.
    """
    with opened(config, asked) as runtime, runtime.session() as session:
        threads = runtime.facts.get("threads")
        note(f"bundle {runtime.manifest_sha256[:16]}, threads: {threads}")
        generation = session.generate(
            asked.prompt,
            template=asked.template,
            image=asked.image,
            max_tokens=asked.max_tokens,
            deadline=asked.deadline,
            temperature=asked.temperature,
            seed=asked.seed,
        )
        with _cancelled_by_ctrl_c(generation):
            _print(generation, runtime.manifest_sha256, asked)
        note(told(generation.stats, generation.reason))
        generation.require_answered()
    return _STATUS.get(generation.reason or Reason.ERROR, EXIT_OK)


def opened(config: AgentConfig, asked: Inference) -> MoERuntime:
    """Return the runtime of the bundle that was asked for.

    Raises:
        BundleError: There is no bundle, or it does not load here.
        NoBundleError: Nothing is installed.
    """
    threads = config.threads if asked.threads is None else asked.threads
    opened = MoERuntime.installed if asked.bundle is None else MoERuntime.open
    return opened(
        config.state_dir if asked.bundle is None else asked.bundle,
        threads=threads,
        cpus=config.cpus,
        rules=degrade_rules(config),
        pool=WeightPool(config.max_weight_bytes),
        steers=config.steering != "off",
        timeout_s=config.answer_timeout_s,
    )


def told(stats: Stats, reason: Reason | None) -> str:
    """Return one line about how an answer went."""
    parts = [f"{reason or 'unfinished'}: {stats.tokens} tokens in {stats.total_ms:.1f} ms"]
    if stats.first_token_ms is not None:
        parts.append(f"the first after {stats.first_token_ms:.1f} ms")
    if stats.tokens_per_s is not None:
        parts.append(f"then {stats.tokens_per_s:.0f} tokens/s")
    if stats.degraded:
        parts.append(f"degraded ({', '.join(stats.reasons)})")
    if stats.faults:
        parts.append(f"met on the way: {', '.join(stats.faults)}")
    return ", ".join(parts)


def _print(generation: Generation, manifest_sha256: str, asked: Inference) -> None:
    try:
        for at, token in enumerate(generation):
            if asked.is_streamed:
                _print_token(token, at, is_json=asked.is_json)
    finally:
        if asked.is_json:
            result(json.dumps(_document(generation, manifest_sha256)))
        else:
            result("" if asked.is_streamed else generation.text())


def _print_token(token: Token, at: int, *, is_json: bool) -> None:
    if is_json:
        result(json.dumps({"id": token.id, "text": token.text}))
    else:
        result(f" {token.text}" if at else token.text, end="")


def _document(generation: Generation, manifest_sha256: str) -> dict[str, object]:
    return {
        "bundle": manifest_sha256,
        "text": generation.text(),
        "ids": generation.ids,
        "reason": generation.reason,
        "stats": generation.stats.to_json(),
    }


@contextlib.contextmanager
def _cancelled_by_ctrl_c(generation: Generation) -> Iterator[None]:
    """End the answer on the first SIGINT; on the second one, as always."""
    before = signal.getsignal(signal.SIGINT)

    def cancel(_number: int, _frame: object) -> None:
        generation.cancel()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
