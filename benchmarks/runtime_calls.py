"""System calls of a token, loads of experts included, counted from outside (`system_calls`).

    python -m benchmarks.runtime_calls FOLDER TARGET WAY SHARE STEPS PULL MARGIN

The child: warms up, then walks tokens between marks. `calls_claims` starts it and says what it saw.
"""

import sys
from pathlib import Path
from typing import Final

from benchmarks.runner import Claim
from benchmarks.runtime_memory import FULL, Folder, Walker, open_experts
from benchmarks.system_calls import (
    HEAP,
    PAGES,
    TraceRefusedError,
    counted,
    imports_of,
    marked,
    wait_for_go,
)
from compiler.contract.steering import Steering

TOKENS: Final = 100
WARM_UP: Final = 100
SHARE: Final = 0.5
_ROOT: Final = Path(__file__).parents[1]


def calls_claims(folder: Folder, steps: int, steering: Steering) -> list[Claim]:
    """Return heap calls of a token, those that a heap would make of the system, and the others."""
    heap = len(imports_of(folder.kernels.read_bytes()))
    command = [sys.executable, "-m", "benchmarks.runtime_calls", str(folder.path), folder.target]
    command += [FULL, str(SHARE), str(steps), str(steering.pull), str(steering.margin)]
    claims = [_claim("runtime.calls.heap", heap, "the kernels import nothing that could be one")]
    try:
        found = counted(command, _ROOT)
    except TraceRefusedError as error:
        sys.stderr.write(f"system calls of a token are left out: {error}\n")
        return claims
    claims.append(_claim("runtime.calls.mapped", found.per_run(*HEAP), "brk, mmap, munmap"))
    note = f"{SHARE:.0%} of the experts fit, the thread that reads ahead included: by design"
    for name in ("pread64", *PAGES, "futex"):
        value = found.per_run(name)
        claims.append(
            Claim(f"runtime.calls.{name}", value, "a token", "", "", None, None, None, "host", note)
        )
    known = {*HEAP, *PAGES, "pread64", "futex"}
    others = {name: count for name, count in sorted(found.inside.items()) if name not in known}
    told = ", ".join(f"{name} {count / max(1, found.runs):.2f}" for name, count in others.items())
    value = found.per_run(*others)
    claims.append(
        Claim("runtime.calls.others", value, "a token", "", "", None, None, None, "host", told)
    )
    return claims


def _claim(name: str, value: float, note: str) -> Claim:
    """Return a claim that nothing is called: 1 if so, else 0, against a bar of 1."""
    ratio = 1.0 if value == 0 else 0.0
    return Claim(name, value, "a token", "none", "", 0.0, ratio, 1.0, "host", note)


def walk(arguments: list[str]) -> None:
    """In the child: load, warm up, and walk between marks."""
    path, target, way, share, steps, pull, margin = arguments
    steering = Steering(pull=float(pull), margin=float(margin))
    experts = open_experts(way, Folder(Path(path), target), float(share), steering)
    walker = Walker(experts, int(steps))
    walker.walk(WARM_UP)
    marked(experts.plan)
    wait_for_go()
    walker.walk(TOKENS)
    experts.close()


if __name__ == "__main__":
    walk(sys.argv[1:])
