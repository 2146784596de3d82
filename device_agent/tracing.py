"""Trace an answer of the installed bundle from end to end, into a file that Perfetto opens.

Reads the state folder, changes nothing in it. A track of the file is a thread: the one that runs
has each answer, within it each native run, within those each operation by name, and what it stalled
for; others have the pieces that threads shared, and the experts that are read beside the runs.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from compiler.contract.errors import ContractError
from compiler.contract.native import NativePlan
from compiler.contract.native_trace import Event, Kind, traced
from compiler.contract.trace_files import TRACE_FORMATS
from device_agent.asking import answer_line
from device_agent.config import AgentConfig
from device_agent.errors import BundleError, ConfigurationError
from device_agent.ports import native_engine
from device_agent.runtime.answers import BundleAnswerer, Question
from device_agent.runtime.assembly import Assembly
from device_agent.runtime.bundle import installed_bundle, load_bundle


def trace_answers(
    config: AgentConfig, asked: Sequence[Question], out: Path, form: str
) -> Iterator[str]:
    """Ask as `ask` does and write the trace; yield one line per answer, then what was written.

    Args:
        config: Of the device.
        asked: The questions, in order; the first one also warms up, before the trace begins.
        out: Where the trace goes.
        form: Name of a format of `TRACE_FORMATS`.

    Raises:
        NoBundleError: Nothing is installed.
        BundleError: The bundle does not load, or its kernels have no trace points.
        AnswerError: The plan failed.
        ConfigurationError: The file cannot be written.
    """
    _require_writable(out)
    store, current = installed_bundle(config.state_dir)
    engine = native_engine(store, config)
    bundle = load_bundle(store, current, engine.weights)
    plan = bundle.runner
    assert isinstance(plan, NativePlan)
    spans: list[Event] = []
    try:
        engine.tune(bundle)
        answerer = BundleAnswerer(Assembly(bundle), config.answer_timeout_s)
        answer_line(answerer, asked[0])
        with traced(plan) as trace:
            for question in asked:
                start = time.perf_counter_ns()
                yield answer_line(answerer, question)
                spans.append(Event(Kind.ANSWER, "answer", start, time.perf_counter_ns()))
    except ContractError as error:
        raise BundleError(f"the bundle cannot be traced: {error}") from error
    finally:
        plan.close()
    events = trace.events()
    try:
        out.write_bytes(TRACE_FORMATS[form]([*spans, *events]))
    except OSError as error:
        raise _unwritable(out, error) from error
    yield f"{len(events)} events ({trace.lost} lost) written to {out}"


def _require_writable(out: Path) -> None:
    """Refuse a place for the trace before anything is asked; what stands there is kept."""
    if out.is_fifo() or out.is_char_device():  # who reads it would see an end
        return
    stood = out.exists()
    try:
        with out.open("ab"):
            pass
        if not stood:
            out.unlink()
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"--out: {out} cannot be written: {error.strerror or error}")
