"""The targets: the part of a device's fingerprint that changes compiled output.

Ordered from the plainest to the most capable within an architecture; a device takes the last one
whose features it has.
"""

from dataclasses import dataclass
from typing import ClassVar, Final

from compiler.errors import CompilerError


class UnknownTargetError(CompilerError):
    """No target has this id."""

    code: ClassVar[str] = "build.app.unknown_target"


@dataclass(frozen=True, slots=True)
class Target:
    """One thing we compile for.

    Attributes:
        id: Permanent name.
        arch: Machine name as `uname -m` gives it.
        backend: Code generator (`compiler.emitters.backends`) that builds for it.
        triple: Target of the C compiler.
        mcpu: Processor argument of the C compiler.
        features: Names in /proc/cpuinfo (flags or Features) that a device must have.
        isa: Instruction set of the tile layer that `compiler.kernels.select` looks for.
        verified_on: How the emitted code was checked: host, qemu or assembled.
    """

    id: str
    arch: str
    backend: str
    triple: str
    mcpu: str
    features: frozenset[str]
    isa: frozenset[str]
    verified_on: str


_V2: Final = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3: Final = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4: Final = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

TARGETS: Final[tuple[Target, ...]] = (
    Target(
        id="x86-64-v1",
        arch="x86_64",
        backend="x86-64",
        triple="x86_64-linux-gnu",
        mcpu="x86_64",
        features=frozenset({"sse2"}),
        isa=frozenset({"vec128"}),
        verified_on="host",
    ),
    Target(
        id="x86-64-v2",
        arch="x86_64",
        backend="x86-64",
        triple="x86_64-linux-gnu",
        mcpu="x86_64_v2",
        features=_V2,
        isa=frozenset({"vec128", "ssse3"}),
        verified_on="host",
    ),
    Target(
        id="x86-64-v3",
        arch="x86_64",
        backend="x86-64",
        triple="x86_64-linux-gnu",
        mcpu="x86_64_v3",
        features=_V3,
        isa=frozenset({"vec128", "ssse3", "avx2"}),
        verified_on="host",
    ),
    Target(
        id="x86-64-v4-vnni",
        arch="x86_64",
        backend="x86-64",
        triple="x86_64-linux-gnu",
        mcpu="x86_64_v4+avx512vnni",
        features=_V4 | {"avx512_vnni"},
        isa=frozenset({"vec128", "ssse3", "avx2", "avx512vnni"}),
        verified_on="host",
    ),
    Target(
        id="aarch64",
        arch="aarch64",
        backend="aarch64",
        triple="aarch64-linux-gnu",
        mcpu="generic",
        features=frozenset({"asimd"}),
        isa=frozenset({"vec128"}),
        verified_on="qemu",
    ),
    Target(
        id="aarch64-dotprod",
        arch="aarch64",
        backend="aarch64",
        triple="aarch64-linux-gnu",
        mcpu="generic+dotprod",
        features=frozenset({"asimd", "asimddp"}),
        isa=frozenset({"vec128", "dotprod"}),
        verified_on="qemu",
    ),
    Target(
        id="aarch64-i8mm",
        arch="aarch64",
        backend="aarch64",
        triple="aarch64-linux-gnu",
        mcpu="generic+dotprod+i8mm",
        features=frozenset({"asimd", "asimddp", "i8mm"}),
        isa=frozenset({"vec128", "dotprod", "i8mm"}),
        verified_on="qemu",
    ),
    Target(
        id="aarch64-sve2",
        arch="aarch64",
        backend="aarch64",
        triple="aarch64-linux-gnu",
        mcpu="generic+sve2+dotprod+i8mm",
        features=frozenset({"asimd", "asimddp", "i8mm", "sve", "sve2", "svei8mm"}),
        isa=frozenset({"vec128", "dotprod", "i8mm", "sve2"}),
        verified_on="qemu",
    ),
    Target(
        id="riscv64",
        arch="riscv64",
        backend="riscv64",
        triple="riscv64-linux-musl",
        mcpu="baseline_rv64",
        features=frozenset(),
        isa=frozenset(),
        verified_on="qemu",
    ),
    Target(
        id="riscv64-v",
        arch="riscv64",
        backend="riscv64",
        triple="riscv64-linux-musl",
        mcpu="baseline_rv64+v",
        features=frozenset({"v"}),
        isa=frozenset({"vec128"}),
        verified_on="qemu",
    ),
)

OPENCL: Final = Target(
    id="opencl",
    arch="opencl",
    backend="opencl",
    triple="",
    mcpu="",
    features=frozenset(),
    isa=frozenset({"opencl"}),
    verified_on="host",
)
"""A GPU, or whatever else takes OpenCL C 1.2: compiled for by name only. No machine reports this
architecture, so no device is given such a bundle."""
ALL_TARGETS: Final = (*TARGETS, OPENCL)

_BY_ID: Final = {target.id: target for target in ALL_TARGETS}


def find_target(target_id: str) -> Target:
    """Return the target of that id.

    Raises:
        UnknownTargetError: There is none; the hint lists those there are.
    """
    try:
        return _BY_ID[target_id]
    except KeyError:
        raise UnknownTargetError(
            f"unknown target {target_id!r}", hint=f"known targets: {', '.join(_BY_ID)}"
        ) from None


def best_target(arch: str, features: frozenset[str]) -> Target | None:
    """Return the most capable target that a machine can run, or None if there is none."""
    able = [t for t in TARGETS if t.arch == arch and t.features <= features]
    return able[-1] if able else None
