"""What a decoder holds in memory while it answers: measured in a process of its own.

    python -m benchmarks.decode_memory FOLDER NAME PROMPT SINGLE

Prints bytes: the most that was resident during a prompt and some tokens, less what was resident
before the candidate was loaded. What loading takes for a moment is left out: the benchmark makes
its models in memory, a device reads them from files.
"""

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.decode_candidates import PROMPT, PROMPT_IDS, candidates, table_rows

STATUS: Final = Path("/proc/self/status")
RESET_PEAK: Final = "5"
TOKENS: Final = 4
KIB: Final = 1024


def held_bytes(name: str, folder: Path, prompt: int = PROMPT, single: float = 0.0) -> int:
    """Return what the child prints.

    Args:
        name: A candidate, or a row of the table.
        folder: Where `prepare` put them.
        prompt: Tokens of the prompt.
        single: As in `table_rows`.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    command = [sys.executable, "-m", "benchmarks.decode_memory", str(folder), name]
    command += [str(prompt), str(single)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def measure(folder: Path, name: str, prompt: int, single: float) -> int:
    """Load, answer, return bytes."""
    load = {**candidates(folder), **table_rows(folder, single)}[name].load
    before = _resident("VmRSS")
    decoder = load(1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    token = decoder.step(PROMPT_IDS[:prompt])
    for _ in range(TOKENS):
        token = decoder.step([token])
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    line = next(row for row in STATUS.read_text().splitlines() if row.startswith(field))
    return int(line.split()[1]) * KIB


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
