"""A timeline of `benchmarks.runtime`: `python -m benchmarks.runtime_timeline --out FOLDER`.

Tokens of the plan of 48 experts, a part of them in memory, experts read ahead, files forgotten
before each token or, with `--warm`, kept by the system, so that a read copies. Writes what the
runtime traced, in both formats that Perfetto opens, and a picture of those consecutive tokens that
read most: reads that compute hides apart from those that a run is stalled for. Prints how the
schedule compares with the one that was predicted (`runtime_schedule`).
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.runner import RESULTS
from benchmarks.runtime import STEP_TOKENS, WARM_UP, Setting, edgecard_steering
from benchmarks.runtime_memory import AHEAD, FULL, ColdFiles, Folder, Walker, open_experts
from benchmarks.runtime_model import runtime_shape, write_routed_plan
from benchmarks.runtime_schedule import TOLERANCE, Compared, compared
from benchmarks.runtime_trace import edgecard_trace
from benchmarks.timeline_picture import MS_NS, picture, reads_of
from compiler.contract.native_trace import READS, Event, Kind, traced
from compiler.contract.steering import Steering
from compiler.contract.trace_files import TRACE_FORMATS
from compiler.driver.native_check import host_target

TOKENS: Final = 100
SHOWN: Final = 5
SHARE: Final = 0.25
STEM: Final = "runtime-timeline"
SUFFIXES: Final = {"json": ".json", "perfetto": ".pftrace"}


def record(setting: Setting, way: str, share: float, tokens: int, *, is_warm: bool) -> list[Event]:
    """Return the events of so many tokens, after others that warm up.

    Raises:
        SystemExit: The ring of events was too small.
    """
    experts = open_experts(way, setting.folder, share, setting.steering)
    with closing(experts), closing(ColdFiles(setting.folder)) as cold:
        walker = Walker(experts, setting.steps)
        walker.walk(WARM_UP)
        with traced(experts.plan) as trace:
            walker.walk(tokens, None if is_warm else cold)
        if trace.lost:
            raise SystemExit(f"error: {trace.lost} events were lost: trace fewer tokens")
        return trace.events()


def busiest(events: Sequence[Event], shown: int) -> list[Event]:
    """Return what lies in the `shown` consecutive runs in which most experts are read.

    Raises:
        ValueError: There are fewer runs.
    """
    runs = sorted((e for e in events if e.kind is Kind.RUN), key=lambda e: e.start_ns)
    if len(runs) < shown:
        raise ValueError(f"{len(runs)} runs were traced, {shown} cannot be shown")
    windows = zip(runs, runs[shown - 1 :], strict=False)
    found = [_within(events, first.start_ns, last.end_ns) for first, last in windows]
    return max(found, key=lambda window: sum(e.kind in (*READS, Kind.LOAD) for e in window))


def _within(events: Sequence[Event], start_ns: int, end_ns: int) -> list[Event]:
    return [
        replace(e, start_ns=max(e.start_ns, start_ns), end_ns=min(e.end_ns, end_ns))
        for e in events
        if e.start_ns < end_ns and e.end_ns > start_ns
    ]


def write(events: Sequence[Event], title: str, shown: int, folder: Path) -> list[Path]:
    """Write traces and picture into a folder; return the files."""
    found = reads_of(events)
    hidden, beside, seen = (f"{ns / MS_NS:.0f} ms" for ns in found.ns.values())
    below = (
        f"All tokens: no run was stalled for {found.unseen} of {found.total} reads of experts. "
        f"Time of reads: {hidden} behind compute, {beside} while a run was stalled for another "
        f"expert, {seen} while one was stalled for this expert."
    )
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{STEM}{SUFFIXES[form]}": make for form, make in TRACE_FORMATS.items()}
    for path, make in files.items():
        path.write_bytes(make(events))
    drawn = folder / f"{STEM}.svg"
    drawn.write_text(picture(busiest(events, shown), title, below), encoding="utf-8")
    return [*files, drawn]


def named(folder: Folder, share: float) -> tuple[dict[str, int], dict[str, int]]:
    """Return layer and bytes of each expert by name; layers are numbered as calls of a run are."""
    experts = folder.layout(share).experts
    numbers = {layer: at for at, layer in enumerate(sorted({e.layer for e in experts}))}
    return {e.name: numbers[e.layer] for e in experts}, {e.name: e.length for e in experts}


def told(found: Compared) -> str:
    """Return what the comparison says, in one paragraph."""
    return (
        f"schedule, predicted by the costs of the first half of the tokens for the "
        f"{found.tokens} of the other, {found.reads} reads of experts: {found.within:.0%} of the "
        f"tokens take what was predicted within {TOLERANCE:.0%} (median error {found.error:.0%}); "
        f"time of reads behind compute {found.hidden:.0%}, predicted {found.hidden_predicted:.0%}; "
        f"{found.in_order:.0%} of the pairs of a read and a call begin in the order predicted"
    )


def main(arguments: Sequence[str]) -> int:
    """Trace and write; print the files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runtime_timeline")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for trace and picture")
    parser.add_argument("--share", type=float, default=SHARE, help="of the experts in memory")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens that are traced")
    parser.add_argument("--shown", type=int, default=SHOWN, help="tokens in the picture")
    parser.add_argument("--way", choices=(AHEAD, FULL), default=FULL, help="steered routers or not")
    parser.add_argument("--warm", action="store_true", help="files stay in the page cache")
    options = parser.parse_args(arguments)
    if not 0 < options.share <= 1 or not 1 <= options.shown <= options.tokens:
        parser.error("--share is more than 0 and at most 1, --shown at least 1, at most --tokens")
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    routes = edgecard_trace()
    steering = edgecard_steering() if options.way == FULL else Steering()
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name) / "plan", target.id)
        write_routed_plan(runtime_shape(routes), routes, target.id, STEP_TOKENS, folder.path)
        setting = Setting(folder, len(routes.own), steering)
        events = record(setting, options.way, options.share, options.tokens, is_warm=options.warm)
        schedule = compared(events, *named(folder, options.share))
    title = (
        f"{options.shown} of {options.tokens} tokens, those that read most; {options.share:.0%} "
    )
    title += f"of 48 experts of 6 MB in memory, files {'kept' if options.warm else 'forgotten'}"
    print(told(schedule))
    for path in write(events, title, options.shown, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
