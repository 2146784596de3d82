"""What a way of holding experts keeps in memory, measured in a process of its own.

    python -m benchmarks.runtime_held FOLDER TARGET WAY SHARE STEPS PULL MARGIN

Prints bytes: the most memory of its own (not files) that the process held while it walked the
trace, less what it held before. `static` holds all weights in memory.
"""

import gc
import sys
from pathlib import Path
from typing import Final

from benchmarks.decode_plan import PlanDecoder
from benchmarks.runtime_memory import Experts, Folder, Loads, Walker, open_experts
from compiler.contract.steering import Steering

STATUS: Final = Path("/proc/self/status")
TOKENS: Final = 200
EVERY: Final = 10
KIB: Final = 1024


class StaticExperts:
    """All weights in memory."""

    def __init__(self, folder: Folder) -> None:
        self._decoder = PlanDecoder(folder.path, 1)
        self.plan = self._decoder.plan

    def loads(self) -> Loads:
        return Loads(0, 0)

    def close(self) -> None:
        self.plan.close()


def measure(arguments: list[str]) -> int:
    """Load, walk, return bytes."""
    path, target, way, share, steps, pull, margin = arguments
    folder = Folder(Path(path), target)
    steering = Steering(pull=float(pull), margin=float(margin))
    gc.collect()
    before = _anonymous()
    experts: Experts
    if way == "static":
        experts = StaticExperts(folder)
    else:
        experts = open_experts(way, folder, float(share), steering)
    walker, most = Walker(experts, int(steps)), _anonymous()
    for _ in range(TOKENS // EVERY):
        walker.walk(EVERY)
        most = max(most, _anonymous())
    return most - before


def _anonymous() -> int:
    line = next(row for row in STATUS.read_text().splitlines() if row.startswith("RssAnon"))
    return int(line.split()[1]) * KIB


if __name__ == "__main__":
    print(measure(sys.argv[1:]))
