"""C of the benchmarks themselves, built as the kernels are and loaded into this process."""

import ctypes
import hashlib
from pathlib import Path

from compiler.emitters.toolchain import compile_shared
from compiler.hardware.targets import find_target


def loaded_code(source: str, target_id: str, cache: Path) -> ctypes.CDLL:
    """Return the library made of one C source.

    Its file is named by its bytes and written once: what is mapped is never written over.
    """
    code = compile_shared(source, find_target(target_id), cache)
    path = cache / f"{hashlib.sha256(code).hexdigest()}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(code)
    return ctypes.CDLL(str(path))
