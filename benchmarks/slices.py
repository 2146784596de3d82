"""Slices of a picture: seen while the slice before is kept, against one after the other.

    python -m benchmarks.slices [--check]

Five cards stand for five slices; EdgeCard with adaptive pruning sees each and keeps its rows. Time
to the first token is all of that and the question's step. Candidates: one back end with one thread
and with two, and a spanned plan of two eyes and a voice, each with one thread, sharing weights. All
give the same bits. The timeline of the spanned plan is written beside the results, for
ui.perfetto.dev; the share of the keeping that it hides behind the seeing comes from it.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

from benchmarks.answer import build
from benchmarks.runner import RESULTS, Claim, interleaved, main
from compiler.contract.native_trace import Event, Kind, traced
from compiler.contract.pipeline import PREFILL, SEE, Pipeline, parse_pipeline
from compiler.contract.session import STEP, hold, seeing, step_inputs
from compiler.contract.trace_files import chrome_json
from compiler.driver.choose_pruning import rule_json, sweep
from compiler.driver.options import CompiledBundle
from compiler.frontend.pipeline_json import FILE_NAME
from device_agent.runtime.native_backend import NativeBackend
from device_agent.runtime.spanning import SpannedPlan
from examples.edgecard.materialise import materialise

SLICES: Final = 5
ROUNDS: Final = 101
BAR: Final = 1.25
TRACED: Final = 51
QUESTION: Final = (1, 30, 31, 3)
TIMELINE: Final = "slices-timeline.json"
LANES: Final = {0: "eye 1", 1: "eye 2", 2: "voice"}
_MS: Final = 1e3


def measure() -> list[Claim]:
    """Compile, run the candidates in turn, write the timeline, return the claims."""
    with tempfile.TemporaryDirectory() as folder:
        submission = materialise("v1", Path(folder))
        path = submission / FILE_NAME
        (rule,) = sweep(shares=(0.85,), merges=(4,))
        path.write_text(json.dumps(json.loads(path.read_text()) | {"prune": rule_json(rule)}))
        bundle = build(submission)
        images = np.load(submission / "evaluation.npz")["images"][:SLICES]
    return _claims(bundle, [image.tobytes() for image in images])


def _claims(bundle: CompiledBundle, slices: Sequence[bytes]) -> list[Claim]:
    pipeline = parse_pipeline(bundle.sections["pipeline"])
    with ExitStack() as stack:
        one = stack.enter_context(NativeBackend(bundle.sections))
        weights = one.plan.weights
        made = [NativeBackend(bundle.sections, weights, threads=n) for n in (2, 1, 1, 1)]
        two, *eyes, voice = (stack.enter_context(each) for each in made)
        plan = SpannedPlan(eyes, voice, pipeline)
        candidates = {
            "overlapped": lambda: _spanned(plan, slices),
            "serial, 1 thread": lambda: _serial(one, pipeline, slices),
            "serial, 2 threads": lambda: _serial(two, pipeline, slices),
        }
        assert len({run() for run in candidates.values()}) == 1, "the bits differ"
        seconds = {n: median(s) for n, s in interleaved(candidates, ROUNDS, warm_up=3).items()}
        hidden = _timeline((*eyes, voice), plan, slices)
    ours = seconds.pop("overlapped") * _MS
    note = f"{bundle.manifest.target}, {SLICES} slices; timeline: results/{TIMELINE}"
    rows = [
        _row(f"slices.edgecard.{name.replace(', ', '.').replace(' ', '_')}", ours, name, s * _MS)
        for name, s in seconds.items()
    ]
    best = [replace(rows[0], bar=BAR, note=note), *rows[1:]]
    return [*best, _row("slices.edgecard.hidden", hidden, "", None, "share of keeping")]


def _row(name: str, value: float, peer: str, theirs: float | None, unit: str = "ms") -> Claim:
    ratio = None if theirs is None else theirs / value
    return Claim(name, value, unit, peer, "ours", theirs, ratio, None, "host")


def _serial(backend: NativeBackend, pipeline: Pipeline, slices: Sequence[bytes]) -> bytes:
    backend.kv_length = 0
    for picture in slices:
        hold(backend, seeing(pipeline, picture))
    return bytes(backend.execute(STEP, step_inputs(QUESTION, 64))["logits"])


def _spanned(plan: SpannedPlan, slices: Sequence[bytes]) -> bytes:
    plan.kv_length = 0
    plan.see_slices(slices)
    return bytes(plan.run(STEP, step_inputs(QUESTION, 64))["logits"])


def _timeline(
    backends: Sequence[NativeBackend], plan: SpannedPlan, slices: Sequence[bytes]
) -> float:
    """Write the fastest run's timeline; return the share of keeping that seeing went on beside."""
    events = min((_traced(backends, plan, slices) for _ in range(TRACED)), key=_duration_ns)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / TIMELINE).write_text(chrome_json(events, names=LANES))
    runs = [event for event in events if event.kind is Kind.RUN]
    seen = [event for event in runs if event.program == SEE]
    kept = [event for event in runs if event.program == PREFILL]
    both = sum(_overlap(keep, see) for keep in kept for see in seen)
    return both / sum(keep.end_ns - keep.start_ns for keep in kept)


def _traced(
    backends: Sequence[NativeBackend], plan: SpannedPlan, slices: Sequence[bytes]
) -> list[Event]:
    """Return the events of one run, a lane for each back end."""
    with ExitStack() as stack:
        traces = [stack.enter_context(traced(backend.plan)) for backend in backends]
        _spanned(plan, slices)
    lanes = enumerate(trace.events() for trace in traces)
    return [replace(event, thread=lane) for lane, events in lanes for event in events]


def _duration_ns(events: Sequence[Event]) -> int:
    return max(e.end_ns for e in events) - min(e.start_ns for e in events)


def _overlap(one: Event, other: Event) -> int:
    return max(0, min(one.end_ns, other.end_ns) - max(one.start_ns, other.start_ns))


if __name__ == "__main__":
    main("slices", measure, sys.argv[1:])
