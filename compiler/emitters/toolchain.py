"""Run the C compiler and what it made.

Results are kept in a content-addressed folder: the key is the digest of source, flags and compiler
version, files appear by rename, so any number of processes may share the folder. A file ends with
the digest of what stands before it: one that a power cut left torn is made again.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import ziglang

from compiler.emitters.processes import run_command
from compiler.errors import ToolchainError
from compiler.hardware.targets import Target

FLAGS: Final = (
    *("-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno"),
    *("-ffreestanding", "-nostdlib", "-shared", "-fPIC", "-fvisibility=hidden", "-g0"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-Wl,--build-id=none", "-Wl,-z,defs", "-Wl,-s"),
)
PROGRAM_FLAGS: Final = (
    *(flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-Wl,-z,defs")),
    *("-static", "-fno-pie", "-Wl,-e,_start"),
)
OBJECT_FLAGS: Final = (
    *(
        flag
        for flag in FLAGS
        if flag not in ("-shared", "-nostdlib") and not flag.startswith("-Wl")
    ),
    "-c",
)
TIMEOUT_SECONDS: Final = 300
_TAIL_LINES: Final = 12


def compile_shared(source: str, target: Target, cache_dir: Path) -> bytes:
    """Return the shared library made of one C source; from the cache if it was made before.

    Raises:
        ToolchainError: The compiler is missing, crashed, took too long or refused the source.
    """
    return compile_c(source, target, cache_dir, flags=FLAGS, suffix=".so")


def compile_archive(source: str, target: Target, cache_dir: Path) -> bytes:
    """Return the static library made of one C source: its functions, and nothing undefined.

    Raises:
        ToolchainError: As `build_kernels`.
    """
    code = compile_c(source, target, cache_dir, flags=OBJECT_FLAGS, suffix=".o")
    with tempfile.TemporaryDirectory(prefix="sparsefleet-ar-") as folder:
        (Path(folder) / "kernels.o").write_bytes(code)
        command = [str(_compiler()), "ar", "rcsD", "kernels.a", "kernels.o"]
        done = run_command(
            command,
            folder=Path(folder),
            timeout_s=TIMEOUT_SECONDS,
            environment=_zig_environment(cache_dir / "zig"),
        )
        if done.status:
            raise ToolchainError(f"the archiver ended with {done.status}: {done.error_text(400)}")
        return (Path(folder) / "kernels.a").read_bytes()


def compile_c(
    source: str, target: Target, cache_dir: Path, *, flags: tuple[str, ...], suffix: str
) -> bytes:
    """Compile and link one C source with explicit flags.

    Raises:
        ToolchainError: As `compile_shared`.
    """
    command = ("-target", target.triple, f"-mcpu={target.mcpu}", *flags)
    key = hashlib.sha256("\0".join((_compiler_version(), *command, source)).encode()).hexdigest()
    kept = cache_dir / key[:2] / f"{key}{suffix}"
    result = _whole(kept)
    if result is not None:
        with contextlib.suppress(OSError):  # the cache forgets what was used longest ago
            os.utime(kept)
        return result
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".build-") as folder:
        made = _run(Path(folder), source, command, cache_dir / "zig")
        result = made.read_bytes()
        with made.open("ab") as file:
            file.write(hashlib.sha256(result).digest())
        made.replace(kept)
    return result


def _whole(kept: Path) -> bytes | None:
    """Return what a file of the folder holds, or None if it is not there whole."""
    try:
        data = kept.read_bytes()
    except FileNotFoundError:  # never made, or trimmed from the cache meanwhile
        return None
    size = max(0, len(data) - hashlib.sha256().digest_size)
    return data[:size] if hashlib.sha256(data[:size]).digest() == data[size:] else None


def run_program(program: bytes, emulator: Sequence[str], standard_input: bytes) -> bytes:
    """Run a program made by `compile_c`, under an emulator if one is named; return its output.

    Raises:
        ToolchainError: It could not be started, took too long, or did not end with 0.
    """
    with tempfile.TemporaryDirectory(prefix="sparsefleet-run-") as folder:
        path = Path(folder) / "program"
        path.write_bytes(program)
        path.chmod(0o700)
        command = [*emulator, str(path)]
        done = run_command(
            command,
            folder=Path(folder),
            timeout_s=TIMEOUT_SECONDS,
            environment={"PATH": os.defpath},
            standard_input=standard_input,
        )
    if done.status:
        raise ToolchainError(f"{command[0]} ended with {done.status}: {done.error_text(400)}")
    return done.output


def _run(folder: Path, source: str, command: tuple[str, ...], zig_cache: Path) -> Path:
    (folder / "kernels.c").write_text(source, encoding="utf-8")
    environment = _zig_environment(zig_cache)
    command_line = [str(_compiler()), "cc", *command, "kernels.c", "-o", "out"]
    done = run_command(
        command_line, folder=folder, timeout_s=TIMEOUT_SECONDS, environment=environment
    )
    if done.status:
        lines = done.errors.decode("utf-8", "replace").strip().splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])
        raise ToolchainError(f"the C compiler ended with {done.status}:\n{tail}")
    return folder / "out"


def _zig_environment(zig_cache: Path) -> dict[str, str]:
    zig_cache.mkdir(parents=True, exist_ok=True)
    place = str(zig_cache.resolve())
    return {
        "ZIG_GLOBAL_CACHE_DIR": place,
        "ZIG_LOCAL_CACHE_DIR": place,
        "HOME": place,
        "PATH": os.defpath,
    }


def _compiler() -> Path:
    return Path(ziglang.__file__).with_name("zig")


@cache
def _compiler_version() -> str:
    return version("ziglang")
