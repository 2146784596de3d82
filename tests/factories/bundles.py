"""Compiled EdgeCard bundles, made once per machine and compiler and kept under `var/`."""

from functools import cache
from pathlib import Path

import pytest

from compiler.driver.compile import compile_model
from compiler.driver.native_check import host_target
from compiler.driver.options import CompiledBundle, CompileOptions
from examples.edgecard.materialise import materialise

STORE = Path(__file__).resolve().parents[2] / "var" / "test-cache" / "driver"
SEQUENCE = {"v1": 1, "v2": 2, "v3-bad": 3}


@cache
def submission(version: str, folder: Path) -> Path:
    """Write the submission of an EdgeCard version below `folder` and return its directory."""
    return materialise(version, folder / version)


@cache
def compiled(
    version: str, target: str, folder: Path, base_version: str | None = None
) -> CompiledBundle:
    """Compile an EdgeCard version, onto the grids of an older one if asked."""
    base = compiled(base_version, target, folder) if base_version else None
    options = CompileOptions(
        target=target,
        model="edgecard",
        version=version,
        release_seq=SEQUENCE[version],
        cache_dir=STORE,
        base_sections=base.sections if base else None,
        base_planes={item.component: item.planes for item in base.manifest.sections}
        if base
        else None,
    )
    return compile_model(submission(version, folder), options)


def compiled_here(version: str, folder: Path) -> CompiledBundle:
    """Compile an EdgeCard version for this machine, or skip the test where no target runs."""
    target = host_target()
    if target is None:
        pytest.skip("no target runs on this machine")
    return compiled(version, target.id, folder)
