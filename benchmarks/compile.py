"""How long a compilation of EdgeCard takes, and how much memory: cold, after a change, unchanged.

    python -m benchmarks.compile [--check]

Every measurement is a process of its own, as a person or a worker starts it: interpreter, imports,
compilation and writing the bundle are all in the figure. `cold` begins with an empty cache,
`unchanged` compiles the very same submission, `one_expert` the weekly update: one expert of one
layer has changed, and the grids are those of the bundle before, `second_target` the same submission
for another target. Processor time is
printed beside the wall time: on a busy machine it says what the wall time would be on an idle one.
"""

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.runner import Claim, main
from compiler.driver.native_check import host_target, runs_here
from compiler.hardware.targets import TARGETS
from examples.edgecard.materialise import materialise

ROUNDS: Final = 3
ROOT: Final = Path(__file__).parents[1]
BARS_SECONDS: Final[Mapping[str, float | None]] = MappingProxyType(
    {"cold": 30.0, "one_expert": 5.0, "unchanged": 1.0, "second_target": None}
)
CHANGED_EXPERT: Final = 3
BAR: Final = "the bar"


@dataclass(frozen=True, slots=True)
class Cost:
    """One process.

    Attributes:
        seconds: Wall time.
        cpu_seconds: Processor time of it and its children.
        peak_kib: Its largest resident set, or that of its largest child.
    """

    seconds: float
    cpu_seconds: float
    peak_kib: int


def compile_once(
    submission: Path, target: str, out: Path, cache: Path, base: Path | None = None
) -> Cost:
    """Run `python -m compiler compile` once, onto the grids of `base` if there is one.

    Raises:
        SystemExit: It failed.
    """
    command = [sys.executable, "-m", "compiler", "compile", str(submission), "--target", target]
    command += ["--out", str(out), "--cache", str(cache)]
    command += ["--base", str(base)] if base else []
    start = perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        errors = child.stderr.read() if child.stderr else b""
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"error: the compiler ended with {child.returncode}: {errors.decode()}")
    return Cost(perf_counter() - start, usage.ru_utime + usage.ru_stime, _peak_kib(usage))


def _peak_kib(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss if sys.platform != "darwin" else usage.ru_maxrss // 1024


def change_one_expert(submission: Path, turn: int) -> None:
    """Scale the first matrix of one expert by a factor that no turn before it had."""
    path = submission / "decoder.onnx"
    model = onnx.load(path)
    stacked = next(item for item in model.graph.initializer if len(item.dims) == 3)
    experts = numpy_helper.to_array(stacked).copy()
    experts[CHANGED_EXPERT] *= np.float32(1 + 0.001 * (turn + 1))
    stacked.CopyFrom(numpy_helper.from_array(experts, stacked.name))
    onnx.save(model, path)


def measure(rounds: int = ROUNDS) -> list[Claim]:
    """Compile EdgeCard `rounds` times in each situation; return the claims."""
    here = host_target()
    if here is None:
        raise SystemExit("error: no target runs on this machine")
    runnable = [item for item in TARGETS if item.arch == here.arch and runs_here(item)]
    other = next((item for item in runnable if item != here), here)
    costs: dict[str, list[Cost]] = {name: [] for name in BARS_SECONDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = materialise("v1", folder / "v1")
        for turn in range(rounds):
            cache = folder / f"cache-{turn}"
            changed = shutil.copytree(original, folder / f"changed-{turn}")
            change_one_expert(changed, turn)
            situations = {
                "cold": (original, here, None),
                "unchanged": (original, here, None),
                "one_expert": (changed, here, folder / "cold"),
                "second_target": (original, other, None),
            }
            for situation, (submission, target, base) in situations.items():
                out = folder / situation
                cost = compile_once(submission, target.id, out, cache, base)
                costs[situation].append(cost)
    return [claim for situation, items in costs.items() for claim in _claims(situation, items)]


def _claims(situation: str, costs: Sequence[Cost]) -> list[Claim]:
    seconds = statistics.median(cost.seconds for cost in costs)
    bar = BARS_SECONDS[situation]
    processor = statistics.median(cost.cpu_seconds for cost in costs)
    load = os.getloadavg()[0]
    return [
        Claim(
            id=f"compile.edgecard.{situation}",
            value=seconds,
            unit="s",
            peer=BAR if bar else "",
            peer_version="",
            peer_value=bar,
            ratio=bar / seconds if bar else None,
            bar=1.0 if bar else None,
            label="host",
            note=f"{processor:.2f} s of processor time, median of {len(costs)}, load {load:.1f}",
        ),
        Claim(
            id=f"compile.edgecard.{situation}.peak",
            value=max(cost.peak_kib for cost in costs) / 1024,
            unit="MiB",
            peer="",
            peer_version="",
            peer_value=None,
            ratio=None,
            bar=None,
            label="host",
            note="largest resident set of the process or a child",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("compile", measure, sys.argv[1:]))
