"""The shared library of a target: kept by target and operations, and by C source below that.

The first key saves rendering; the second, in `compiler.emitters.toolchain`, saves the C compiler
when another compiler version renders the same source.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from compiler.contract.operations import Op
from compiler.driver.cache import StageCache, cache_key, scratch_directory
from compiler.driver.provenance import compiler_digest
from compiler.hardware.targets import Target

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

STAGE: Final = "kernels"
TOOLCHAIN: Final = "toolchain"


class KernelBuild:
    """Kernels of a target, built beside what the compiler does until they are needed.

    The C compiler is a process of its own; the thread mostly waits for it. Leaving the block waits
    for a build that nobody finished: no process outlives the compilation.
    """

    def __init__(self, target: Target, cache: StageCache) -> None:
        self._target, self._cache = target, cache
        self._thread: ThreadPoolExecutor | None = None
        self._begun: tuple[frozenset[Op], Future[tuple[str, bytes]]] | None = None

    def __enter__(self) -> "KernelBuild":
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    @property
    def is_begun(self) -> bool:
        """Whether a build runs or ran."""
        return self._begun is not None

    def begin(self, ops: frozenset[Op]) -> None:
        """Start to build the library that offers exactly `ops`, unless the cache has it."""
        if find_kernels(self._target, ops, self._cache) is None:
            from concurrent.futures import ThreadPoolExecutor  # what is cached needs no thread

            self._thread = ThreadPoolExecutor(max_workers=1)
            job = self._thread.submit(make_kernels, self._target, ops, self._cache)
            self._begun = ops, job

    def finish(self, ops: frozenset[Op]) -> tuple[str, bytes]:
        """Return C source and library for `ops`, built by now or here.

        Raises:
            ToolchainError: The C compiler failed.
        """
        if self._begun is not None and self._begun[0] == ops:
            return self._begun[1].result()
        return make_kernels(self._target, ops, self._cache)


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


def kernels_for(target: Target, ops: Iterable[Op], cache: StageCache) -> bytes:
    """Return the library that offers exactly `ops`, made now if it was not before.

    Raises:
        ToolchainError: The C compiler failed.
    """
    _, library = find_kernels(target, ops, cache) or make_kernels(target, ops, cache)
    return library


def tool_cache(cache: StageCache, scratch: Path) -> Path:
    """Return the folder of the C compiler's results: in the cache, or else in `scratch`."""
    return cache.directory / TOOLCHAIN if cache.directory else scratch


def _key(target: Target, ops: Iterable[Op]) -> str:
    names = sorted({op.name for op in ops})
    facts = {"target": target.id, "ops": names, "compiler": compiler_digest()}
    return cache_key(STAGE, facts)
