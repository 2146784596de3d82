"""Run the C compiler: the only place of the compiler that starts a process.

Results are kept in a content-addressed folder: the key is the digest of source, flags and compiler
version, files appear by rename, so any number of processes may share the folder.
"""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

import ziglang

from compiler.contract.operations import Op
from compiler.emitters.c import render_kernels
from compiler.errors import ToolchainError
from compiler.hardware.targets import Target
from compiler.kernels.select import TileSpec

FLAGS: Final = (
    *("-std=c11", "-O3", "-ffp-contract=off", "-fno-fast-math", "-fno-math-errno"),
    *("-ffreestanding", "-nostdlib", "-shared", "-fPIC", "-fvisibility=hidden", "-g0"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
    *("-Wl,--build-id=none", "-Wl,-z,defs", "-Wl,-s"),
)
TIMEOUT_SECONDS: Final = 300
_TAIL_LINES: Final = 12


def build_kernels(
    target: Target, ops: Iterable[Op], cache_dir: Path, *, tile: TileSpec | None = None
) -> bytes:
    """Return the shared library for `target` that offers exactly `ops`.

    Args:
        target: What to build for.
        ops: Operations to offer, in any order.
        cache_dir: Folder of results and of the compiler's own caches; made if missing.
        tile: Tile layer to use instead of the target's best one.

    Raises:
        ToolchainError: The compiler is missing, crashed, took too long or refused the source.
    """
    source = render_kernels(target, ops, tile=tile)
    return compile_shared(source, target, cache_dir)


def compile_shared(source: str, target: Target, cache_dir: Path) -> bytes:
    """Return the shared library made of one C source; from the cache if it was made before.

    Raises:
        ToolchainError: As `build_kernels`.
    """
    return compile_c(source, target, cache_dir, flags=FLAGS, suffix=".so")


def compile_c(
    source: str, target: Target, cache_dir: Path, *, flags: tuple[str, ...], suffix: str
) -> bytes:
    """Compile and link one C source with explicit flags.

    Raises:
        ToolchainError: As `build_kernels`.
    """
    command = ("-target", target.triple, f"-mcpu={target.mcpu}", *flags)
    key = hashlib.sha256("\0".join((_compiler_version(), *command, source)).encode()).hexdigest()
    kept = cache_dir / key[:2] / f"{key}{suffix}"
    if kept.exists():
        return kept.read_bytes()
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".build-") as folder:
        made = _run(Path(folder), source, command, cache_dir / "zig")
        result = made.read_bytes()
        made.replace(kept)
    return result


def _run(folder: Path, source: str, command: tuple[str, ...], zig_cache: Path) -> Path:
    (folder / "kernels.c").write_text(source, encoding="utf-8")
    zig_cache.mkdir(parents=True, exist_ok=True)
    environment = {
        "ZIG_GLOBAL_CACHE_DIR": str(zig_cache.resolve()),
        "ZIG_LOCAL_CACHE_DIR": str(zig_cache.resolve()),
        "HOME": str(zig_cache.resolve()),
        "PATH": os.defpath,
    }
    try:
        done = subprocess.run(  # noqa: S603 - our own compiler with fixed arguments
            [str(_compiler()), "cc", *command, "kernels.c", "-o", "out"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolchainError(f"the C compiler took more than {TIMEOUT_SECONDS} s") from error
    except OSError as error:
        raise ToolchainError(
            f"the C compiler could not be started: {error}", hint="install the package ziglang"
        ) from error
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-_TAIL_LINES:])
        raise ToolchainError(f"the C compiler ended with {done.returncode}:\n{tail}")
    return folder / "out"


def _compiler() -> Path:
    return Path(ziglang.__file__).with_name("zig")


@cache
def _compiler_version() -> str:
    return version("ziglang")
