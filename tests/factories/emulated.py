"""Targets that this machine is not, and how their code runs here."""

from collections.abc import Mapping

from compiler.driver.native_check import EMULATORS

SVE2 = "aarch64-sve2"
RUNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "x86-64-v1": ("x86-64-v1", ()),
    **{target: (target, command) for target, command in EMULATORS.items() if target != SVE2},
    **{
        f"{SVE2}-{128 * quads}": (SVE2, ("qemu-aarch64", "-cpu", f"max,sve-max-vq={quads}"))
        for quads in (1, 2, 4)
    },
}
"""Target and command by name: the tile of SVE2 at vector lengths of 128, 256 and 512 bits."""
EMULATED = [name for name, (_, command) in RUNS.items() if command]
