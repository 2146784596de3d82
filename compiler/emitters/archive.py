"""The kernels as a static library with its header, for programs that link instead of loading.

    emit(ops, target) -> C source -> libmoe_kernels.a
                                  -> moe_kernels.h: the exported functions and their structs

Devices load the shared library of their bundle; this is for owners of other programs.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from compiler.contract.native_abi import C_STRUCTS
from compiler.contract.operations import Op
from compiler.contract.plan_format import ABI_VERSION, Status
from compiler.emitters.backends import emitter_for
from compiler.emitters.c import CEmitter
from compiler.emitters.interface import EmitterError
from compiler.emitters.toolchain import compile_archive
from compiler.hardware.targets import Target

LIBRARY: Final = "libmoe_kernels.a"
HEADER: Final = "moe_kernels.h"
_EXPORT: Final = re.compile(r"^SF_EXPORT (.+?) \{", re.MULTILINE)
_OPEN_C: Final = '#ifdef __cplusplus\nextern "C" {\n#endif\n'
_CLOSE_C: Final = "#ifdef __cplusplus\n}\n#endif\n"
_STATUSES: Final = "/* Every int32_t that a function returns is a status: {} */\n".format(
    ", ".join(f"{status.value} {status.name}" for status in Status)
)
_PAGER: Final = "typedef int32_t (*sf_pager)(void *user, uint32_t event, uint32_t weight);"


def build_archive(target: Target, ops: Iterable[Op], cache_dir: Path) -> dict[str, bytes]:
    """Return the static library and its header, by file name.

    Raises:
        EmitterError: The target's back end makes no library to link.
        ToolchainError: The compiler or the archiver failed.
    """
    emitter = emitter_for(target)
    if not isinstance(emitter, CEmitter):
        raise EmitterError(f"the {emitter.name} back end makes no static library")
    source = emitter.emit(ops, target)
    return {
        LIBRARY: compile_archive(source, target, cache_dir),
        HEADER: header(source, target).encode(),
    }


def header(source: str, target: Target) -> str:
    """Return the declarations of what a rendered library exports."""
    structs = []
    for struct in C_STRUCTS:
        fields = "".join(f"  {field.c_type} {field.name};\n" for field in struct.fields)
        structs.append(f"typedef struct {struct.name} {{\n{fields}}} {struct.name};\n")
    functions = "".join(f"{text};\n" for text in _EXPORT.findall(source))
    return (
        f"/* Kernels for {target.id}, ABI {ABI_VERSION}; see docs/formats/plan.md. */\n"
        "#ifndef MOE_KERNELS_H\n#define MOE_KERNELS_H\n#include <stdint.h>\n\n"
        f"{_OPEN_C}\n"
        + "\n".join(structs)
        + f"\n{_PAGER}\n\n{_STATUSES}{functions}\n{_CLOSE_C}\n#endif\n"
    )
