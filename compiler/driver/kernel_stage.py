"""The shared library of a target: kept by target and operations, and by C source below that.

The first key saves rendering; the second, in `compiler.emitters.toolchain`, saves the C compiler
when another compiler version renders the same source.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from compiler.contract.operations import Op
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.provenance import compiler_digest
from compiler.hardware.targets import Target

STAGE: Final = "kernels"
TOOLCHAIN: Final = "toolchain"


def find_kernels(target: Target, ops: Iterable[Op], cache: StageCache) -> tuple[str, bytes] | None:
    """Return C source and library if they were made before."""
    parts = cache.get(STAGE, _key(target, ops))
    return None if parts is None else (parts["source"].decode(), parts["library"])


def make_kernels(target: Target, ops: Iterable[Op], cache: StageCache) -> tuple[str, bytes]:
    """Render and build the library that offers exactly `ops`; return C source and library.

    Raises:
        ToolchainError: The C compiler failed.
    """
    from compiler.driver.build_kernels import render_and_build  # the C compiler loads here only

    with scratch_directory() as folder:
        source, library = render_and_build(target, ops, tool_cache(cache, folder))
    cache.put(STAGE, _key(target, ops), {"source": source.encode(), "library": library})
    return source, library


def tool_cache(cache: StageCache, scratch: Path) -> Path:
    """Return the folder of the C compiler's results: in the cache, or else in `scratch`."""
    return cache.directory / TOOLCHAIN if cache.directory else scratch


def _key(target: Target, ops: Iterable[Op]) -> str:
    names = sorted({op.name for op in ops})
    facts = {"target": target.id, "ops": names, "compiler": compiler_digest()}
    return cache_key(STAGE, facts)
