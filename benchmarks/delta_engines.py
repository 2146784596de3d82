"""One engine, one direction, in a process of its own: what it costs and whether it is right.

    python -m benchmarks.delta_engines ENGINE diff|apply OLD NEW PATCH [PLANES]

`diff` writes PATCH from OLD and NEW, `apply` writes NEW from OLD and PATCH; files hold one section
each. The last line printed is `{"cpu_s": ..., "rss_kib": ...}`: processor time, and the largest
resident set above that after imports, inputs included, since an engine that needs its inputs in
memory must pay for them; of a program that is not Python's, the whole process. PLANES is a JSON
file of [kind, offset, length], which ours reads. `run` starts it; called by `benchmarks.delta`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from compiler.contract.planes import Plane
from compiler.delta import SectionFile, apply_delta, write_delta

OURS: Final = "ours"
COMPONENT: Final = "expert.L0.E0"
PROGRAMS: Final[Mapping[str, str]] = MappingProxyType({"xdelta3": "xdelta3", "zstd": "zstd"})
MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {"bsdiff4": "bsdiff4", "hdiffpatch": "hdiffpatch", "detools": "detools"}
)
SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        OURS: "",
        "bsdiff4": "",
        "hdiffpatch": "zstd",
        "detools": "sequential, lzma",
        "xdelta3": "-9 -B 32 MiB",
        "zstd": "-19 --long=27 --patch-from",
    }
)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run took.

    Attributes:
        cpu_s: Processor time, seconds.
        rss_kib: Largest resident set above that after imports.
    """

    cpu_s: float
    rss_kib: int


def engine_version(engine: str) -> str:
    """Return which version is installed; empty if the engine is not there."""
    if engine == OURS:
        return version("numpy")
    if engine in PROGRAMS:
        program = shutil.which(PROGRAMS[engine])
        flag = "-V" if engine == "xdelta3" else "--version"
        told = subprocess.run([program, flag], capture_output=True, text=True) if program else None
        words = f"{told.stdout} {told.stderr}".replace(",", " ").split() if told else []
        return next((w.lstrip("v") for w in words if w.lstrip("v")[:1].isdigit()), "")
    try:
        return version(MODULES[engine])
    except PackageNotFoundError:
        return ""


def run(engine: str, way: str, old: Path, new: Path, patch: Path, planes: Path) -> Cost:
    """Run an engine in a process of its own.

    Args:
        engine: One of `SETTINGS`.
        way: `diff` or `apply`.
        old: What is there.
        new: What shall be; written by `apply`.
        patch: Written by `diff`.
        planes: Layout of both, for ours.

    Raises:
        SystemExit: It failed.
    """
    command = [sys.executable, "-m", "benchmarks.delta_engines", engine, way]
    command += [str(path) for path in (old, new, patch, planes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        raise SystemExit(f"error: {engine} {way} ended with {done.returncode}: {done.stderr}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def _layout(path: Path) -> tuple[Plane, ...]:
    return tuple(Plane(*item) for item in json.loads(path.read_text()))


class _File:
    """A section in a file, as a device has it."""

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags, 0o644)

    def pread(self, _component: str, length: int, offset: int) -> bytes:
        return os.pread(self._fd, length, offset)

    def pwrite(self, _component: str, data: bytes, offset: int) -> None:
        os.pwrite(self._fd, data, offset)


def _ours_diff(old: Path, new: Path, patch: Path, planes: Path) -> None:
    layout = _layout(planes)
    before = {COMPONENT: SectionFile(old, layout)}
    after = {COMPONENT: SectionFile(new, layout)}
    with patch.open("wb") as out:
        write_delta(before, after, out)


def _ours_apply(old: Path, new: Path, patch: Path, _planes: Path) -> None:
    sink = _File(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    with patch.open("rb") as stream:
        apply_delta(_File(old, os.O_RDONLY), stream, sink)


def _module(engine: str, way: str, old: Path, new: Path, patch: Path) -> None:
    peer: Any = import_module(MODULES[engine])
    if engine == "detools":
        with old.open("rb") as a, patch.open("rb" if way == "apply" else "wb") as p:
            if way == "apply":
                with new.open("wb") as b:
                    peer.apply_patch(a, p, b)
            else:
                with new.open("rb") as b:
                    peer.create_patch(a, b, p)
        return
    if way == "apply":
        call = peer.patch if engine == "bsdiff4" else peer.apply
        new.write_bytes(call(old.read_bytes(), patch.read_bytes()))
        return
    options = {} if engine == "bsdiff4" else {"compression": peer.COMPRESSION_ZSTD}
    patch.write_bytes(peer.diff(old.read_bytes(), new.read_bytes(), **options))


def _command(engine: str, way: str, old: Path, new: Path, patch: Path) -> list[str]:
    made, read = (patch, new) if way == "diff" else (new, patch)
    if engine == "xdelta3":
        how = ["-e", "-9"] if way == "diff" else ["-d"]
        words = ["xdelta3", "-f", "-B", str(32 << 20), *how, "-s", str(old)]
        return [*words, str(read), str(made)]
    how = ["-19"] if way == "diff" else ["-d"]
    return [
        "zstd",
        "-q",
        "-f",
        "--long=27",
        *how,
        f"--patch-from={old}",
        str(read),
        "-o",
        str(made),
    ]


def _of_python(work: Callable[[], None]) -> Cost:
    Path("/proc/self/clear_refs").write_text("5")
    start, held = time.process_time(), _peak_kib()
    work()
    return Cost(time.process_time() - start, _peak_kib() - held)


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1])


def _of_program(command: list[str]) -> Cost:
    child = subprocess.Popen(command)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with {child.returncode}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss)


def _main(words: list[str]) -> None:
    engine, way, *rest = words
    old, new, patch, planes = map(Path, rest)
    if engine in PROGRAMS:
        cost = _of_program(_command(engine, way, old, new, patch))
    elif engine == OURS:
        ours = _ours_diff if way == "diff" else _ours_apply
        cost = _of_python(lambda: ours(old, new, patch, planes))
    else:
        import_module(MODULES[engine])
        cost = _of_python(lambda: _module(engine, way, old, new, patch))
    print(json.dumps({"cpu_s": cost.cpu_s, "rss_kib": cost.rss_kib}))


if __name__ == "__main__":
    _main(sys.argv[1:])
