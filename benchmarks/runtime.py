"""A model larger than its memory: misses, time, first token: `python -m benchmarks.runtime`.

A decoder of 48 experts of 6 MB routes as EdgeCard did on its evaluation cards (`runtime_model`),
with a quarter, half and three quarters of its experts in memory. Ways of holding experts
(`runtime_memory`) take turns in windows of tokens in one process; before every token the system
forgets the files, so that a miss reads storage. The baseline has the same kernels, files and
budget: LRU, loads when needed, glibc's malloc. The steering is EdgeCard's own, found on its
calibration cards (`make bench-routing` judges what it costs in answers). One thread computes; where
experts are read ahead a second one reads.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.answer import build
from benchmarks.decode_plan import FIRST_POSITION
from benchmarks.runner import Claim, main
from benchmarks.runtime_calls import calls_claims
from benchmarks.runtime_memory import (
    AHEAD,
    FULL,
    LRU,
    PARTS,
    WAYS,
    CachedExperts,
    ColdFiles,
    Folder,
    Loads,
    PooledExperts,
    Walker,
    open_experts,
)
from benchmarks.runtime_model import runtime_shape, write_routed_plan
from benchmarks.runtime_native import native_claims
from benchmarks.runtime_trace import edgecard_trace
from compiler.contract.pool_plan import internal
from compiler.contract.session import STEP, step_inputs
from compiler.contract.steering import Steering
from compiler.contract.steering_points import SECTION, parse_steering_points
from compiler.driver.native_check import host_target
from examples.edgecard.materialise import materialise

SHARES: Final = (0.25, 0.5, 0.75)
WINDOW: Final = 20
WINDOWS: Final = 30
WARM_UP: Final = 100
STEP_TOKENS: Final = 32
PROMPT: Final = 8
TOKENS_SEEN: Final = 400
FIRST_ROUNDS: Final = 7
FEWER_MISSES: Final = 2.0
LEAST_MISSES: Final = 1e-3
PARTS_SHARE: Final = 0.5
MEMORY_SHARE: Final = 0.75
BARS: Final = {"memory": 1 / 0.81, "cold": 1.3, "static": 1 / 0.71}
MOST_WASTE: Final = 0.04
LEAST_WASTE: Final = 1e-4
MILLISECONDS: Final = 1e3
MEGABYTE: Final = 1e6
BASELINE: Final = "LRU, malloc"


@dataclass(frozen=True)
class Setting:
    """What all rows share.

    Attributes:
        folder: The plan.
        steps: Tokens of the trace.
        steering: Coefficients under full pressure.
    """

    folder: Folder
    steps: int
    steering: Steering


@dataclass(frozen=True)
class Walked:
    """What a way of holding experts took.

    Attributes:
        ms: Milliseconds per token, by window.
        loads: Over all windows.
    """

    ms: Sequence[float]
    loads: Loads

    @property
    def misses(self) -> float:
        """Experts per token that had to be waited for."""
        return (self.loads.misses + self.loads.late) / (WINDOW * WINDOWS)


def measure() -> list[Claim]:
    """Write the plan, measure every row, return the claims."""
    target = host_target()
    if target is None:
        raise SystemExit("error: no target runs on this machine")
    trace = edgecard_trace()
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name) / "plan", target.id)
        write_routed_plan(runtime_shape(trace), trace, target.id, STEP_TOKENS, folder.path)
        setting = Setting(folder, len(trace.own), edgecard_steering())
        claims = [claim for share in SHARES for claim in share_claims(setting, share)]
        claims += part_claims(setting)
        claims += first_token_claims(setting)
        claims += memory_claims(setting)
        claims += calls_claims(folder, setting.steps, setting.steering)
    claims += native_claims(target.id)
    return claims


def edgecard_steering() -> Steering:
    """Return what EdgeCard's bundle tells a device to do when memory is short."""
    with tempfile.TemporaryDirectory() as name:
        sections = build(materialise("v1", Path(name))).sections
    found = parse_steering_points(sections[SECTION])
    return found.points[found.pressed].steering()


def walk_all(setting: Setting, share: float, ways: Sequence[str] = WAYS) -> dict[str, Walked]:
    """Have all ways walk the trace in turn."""
    opened = {way: open_experts(way, setting.folder, share, setting.steering) for way in ways}
    walkers = {way: Walker(experts, setting.steps) for way, experts in opened.items()}
    spent: dict[str, list[float]] = {way: [] for way in ways}
    with closing(ColdFiles(setting.folder)) as cold:
        for way, walker in walkers.items():
            walker.walk(WARM_UP)
            opened[way].loads()
        for at in range(WINDOWS):
            for way in list(ways)[:: 1 if at % 2 else -1]:
                spent[way].append(walkers[way].walk(WINDOW, cold) / WINDOW * MILLISECONDS)
    found = {way: Walked(spent[way], experts.loads()) for way, experts in opened.items()}
    for experts in opened.values():
        experts.close()
    return found


def share_claims(setting: Setting, share: float) -> list[Claim]:
    """Return misses and time with a share of the experts in memory, and what reading ahead hid."""
    walked = walk_all(setting, share)
    base = walked[LRU]
    area = f"runtime.{round(100 * share)}"
    claims = []
    for way in WAYS[1:]:
        found = walked[way]
        bar = FEWER_MISSES if way == FULL else None
        ratio = base.misses / max(found.misses, LEAST_MISSES)
        name = f"{area}.misses.{way}"
        claims.append(_claim(name, found.misses, "a token", base.misses, ratio, bar))
        ms, base_ms = statistics.median(found.ms), statistics.median(base.ms)
        claims.append(_claim(f"{area}.token.{way}", ms, "ms", base_ms, base_ms / ms, None))
    for way in (AHEAD, FULL):
        claims += _ahead_claims(area, walked[way].loads, way)
    return claims


def part_claims(setting: Setting) -> list[Claim]:
    """Return time and misses of the product without one of its parts, half of the experts fit."""
    walked = walk_all(setting, PARTS_SHARE, tuple(PARTS))
    whole = walked[FULL]
    ms = statistics.median(whole.ms)
    claims = []
    for way, what in PARTS.items():
        found = walked[way]
        own = statistics.median(found.ms)
        note = f"{what}: {found.misses:.2f} misses a token against {whole.misses:.2f}"
        name = f"runtime.part.{way}"
        claims.append(_claim(name, own, "ms a token", ms, own / ms, None, note, "full system"))
    return claims


def _ahead_claims(area: str, loads: Loads, way: str) -> list[Claim]:
    moved = loads.hidden + loads.late + loads.misses
    hits, uses = loads.uses - loads.late - loads.misses, max(1, loads.uses)
    levels = f"{loads.cached / uses:.1%} of a cache's size, {1 - hits / uses:.1%} from storage"
    read_ns, megabytes = max(1, loads.read_ns), loads.loaded_bytes / MEGABYTE
    rows = {
        "hidden": (loads.hidden / max(1, moved), "of loads", f"{moved} loads"),
        "overlap": (
            max(0.0, 1 - loads.stall_ns / read_ns),
            "of reading time",
            f"{megabytes:.0f} MB at {1e3 * megabytes / (read_ns / 1e6):.0f} MB/s",
        ),
        "foreseen": (
            loads.foreseen / max(1, loads.predicted),
            "of predicted",
            f"{loads.predicted} predicted",
        ),
        "memory": ((hits - loads.cached) / uses, "of uses", levels),
    }
    return [
        _claim(f"{area}.{name}.{way}", value, unit, None, None, None, note)
        for name, (value, unit, note) in rows.items()
    ]


def first_token_claims(setting: Setting) -> list[Claim]:
    """Return the time to the first token after a start: hot set, nothing, and the baseline."""
    seen = PooledExperts(setting.folder, 0.5, steering=setting.steering)
    Walker(seen, setting.steps).walk(TOKENS_SEEN)
    heats = seen.weights.pool.heats()
    seen.close()
    spent: dict[str, list[float]] = {name: [] for name in ("hot", "cold", "static")}
    with closing(ColdFiles(setting.folder)) as cold:
        for _ in range(FIRST_ROUNDS):
            for name, seconds in spent.items():
                seconds.append(_first_token(setting, name, heats, cold))
    hot, empty, static = (statistics.median(times) * MILLISECONDS for times in spent.values())
    note = f"prompt of {PROMPT} tokens and one more, half of the experts fit, files forgotten"
    rows = {"cold": (empty, "nothing in memory"), "static": (static, "static top-2, LRU, cold")}
    return [
        _claim(f"runtime.first.{name}", hot, "ms", ms, ms / hot, BARS[name], note, peer)
        for name, (ms, peer) in rows.items()
    ]


def _first_token(setting: Setting, name: str, heats: Sequence[int], cold: ColdFiles) -> float:
    folder = setting.folder
    if name == "static":
        experts: CachedExperts | PooledExperts = CachedExperts(folder, 0.5)
    else:
        known = heats if name == "hot" else ()
        experts = PooledExperts(folder, 0.5, ahead=True, steering=setting.steering, heats=known)
        if name == "cold":
            experts.empty()
    with closing(experts):
        cold.forget()
        start = perf_counter()
        first = TOKENS_SEEN
        for ids in (range(first, first + PROMPT), [first + PROMPT]):
            experts.plan.run(STEP, step_inputs(list(ids), FIRST_POSITION + experts.plan.kv_length))
        return perf_counter() - start


def memory_claims(setting: Setting) -> list[Claim]:
    """Return the most memory that a process of its own holds, and the pool's waste."""
    names = ("static", FULL)
    held = {name: _held(setting, name) for name in names}
    mine, theirs = (held[name] / MEGABYTE for name in (FULL, "static"))
    note = f"{MEMORY_SHARE:.0%} of the experts fit"
    peer = "all weights in memory"
    claims = [
        _claim("runtime.memory", mine, "MB", theirs, theirs / mine, BARS["memory"], note, peer)
    ]
    experts = PooledExperts(setting.folder, MEMORY_SHARE)
    Walker(experts, setting.steps).walk(TOKENS_SEEN)
    counts = experts.weights.pool.counts()
    experts.close()
    waste = internal(counts["asked_bytes"], counts["given_bytes"])
    note = "bytes of runs in use that no expert asked for"
    ratio = MOST_WASTE / max(waste, LEAST_WASTE)
    claims.append(_claim("runtime.waste", waste, "share", MOST_WASTE, ratio, 1.0, note, "most"))
    return claims


def _held(setting: Setting, name: str) -> int:
    steering = setting.steering
    command = [sys.executable, "-m", "benchmarks.runtime_held", str(setting.folder.path)]
    command += [setting.folder.target, name, str(MEMORY_SHARE), str(setting.steps)]
    command += [str(steering.pull), str(steering.margin)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def _claim(
    name: str,
    value: float,
    unit: str,
    peer_value: float | None,
    ratio: float | None,
    bar: float | None,
    note: str = "",
    peer: str = BASELINE,
) -> Claim:
    whom = peer if peer_value is not None else ""
    return Claim(name, value, unit, whom, "", peer_value, ratio, bar, "host", note)


if __name__ == "__main__":
    sys.exit(main("runtime", measure, sys.argv[1:]))
