"""Fuzz the parsers, guided by coverage: `python -m tests.fuzz [--seconds 20] [NAME ...]`.

Each target runs in a process of its own under a limit of memory and time per input. What reaches
new code is kept in `var/fuzz/NAME` and is where the next run starts; an input that ends in a fault
is written to `tests/fuzz/corpus/NAME` as `fault-<digest>`, from where `test_corpus` replays it
every day. Ends with 1 if there was a fault. Needs the atheris package (`make fuzz` installs it).
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.fuzz.targets import CORPUS, TARGETS

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ROOT / "var" / "fuzz"
MEMORY_MIB: Final = 1024
INPUT_SECONDS: Final = 10
MOST_BYTES: Final = 65_536


def main(words: list[str]) -> int:
    """Run targets one after the other; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=20, help="of each target, default 20")
    options = parser.parse_args(words)
    unknown = [name for name in options.names if name not in TARGETS]
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    faults = [name for name in options.names or TARGETS if not fuzz(name, options.seconds)]
    for name in faults:
        print(f"fault: {name}, see {CORPUS / name}")
    return 1 if faults else 0


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one target; return whether every input ended as it may."""
    kept, found = KEPT / name, CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    for example in TARGETS[name].examples():
        (kept / hashlib.sha256(example).hexdigest()).write_bytes(example)
    command = [sys.executable, "-m", "tests.fuzz.guided", name, f"-max_total_time={seconds}"]
    command += [
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-timeout={INPUT_SECONDS}",
        f"-max_len={MOST_BYTES}",
    ]
    command += ["-print_final_stats=1", f"-artifact_prefix={found}/fault-", str(kept), str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stderr.splitlines()
    runs = next((line.split()[-1] for line in said if "number_of_executed_units" in line), "?")
    coverage = next((line for line in reversed(said) if " cov: " in line), "")
    print(f"{name}: {runs} inputs, {coverage.partition(' cov: ')[2].split(' ')[0] or '?'} edges")
    if done.returncode:
        print("\n".join([*done.stdout.splitlines()[-40:], *said[-20:]]))
        print(f"{name}: exit {done.returncode}")
    return not done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
