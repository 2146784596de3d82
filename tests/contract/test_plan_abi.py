"""The C compiler and Python agree on every record and struct: sizes, and offset of each field."""

import ctypes

from compiler.contract.native_abi import C_STRUCTS
from compiler.contract.plan_format import RECORDS
from compiler.emitters.backends import render_kernels
from compiler.emitters.toolchain import FLAGS, compile_c
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE

PROBE = """
#define SF_PROBE(n, value) \\
  SF_EXPORT uint32_t sf_probe_##n(void) {{ return (uint32_t)(value); }}
{probes}
"""


def expectations() -> list[tuple[str, int]]:
    """Return C expressions and what they must be."""
    found = []
    for record in RECORDS:
        found.append((f"sizeof({record.name})", record.layout.size))
        offset = 0
        for field in record.fields:
            found.append((f"offsetof({record.name}, {field.name})", offset))
            offset += field.count * {"s": 1, "H": 2, "I": 4, "Q": 8}[field.code]
    for one in C_STRUCTS:
        found.append((f"sizeof({one.name})", ctypes.sizeof(one.ctype)))
        found += [
            (f"offsetof({one.name}, {field.name})", getattr(one.ctype, field.name).offset)
            for field in one.fields
        ]
    return found


def test_it_has_the_layout_that_the_c_compiler_has() -> None:
    expected = expectations()
    target = find_target("x86-64-v1")
    probes = "\n".join(f"SF_PROBE({at}, {text})" for at, (text, _) in enumerate(expected))
    source = render_kernels(target, ()) + PROBE.format(probes=probes)
    path = CACHE / "probe.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compile_c(source, target, CACHE, flags=FLAGS, suffix=".so"))
    library = ctypes.CDLL(str(path))
    for at, (text, value) in enumerate(expected):
        probe = getattr(library, f"sf_probe_{at}")
        assert probe() == value, text
