"""The kernels as SPIR-V: valid, complete, never contracted."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import ziglang

from compiler.hardware.targets import OPENCL
from tests.factories.kernels import CACHE
from tests.factories.opencl import EMITTER

pytestmark = [pytest.mark.opencl, pytest.mark.spirv]
TRIPLE = "spirv64v1.0-unknown-unknown"


def headers() -> Path:
    """Return the folder of the OpenCL C headers, which come with PoCL."""
    found = importlib.util.find_spec("pocl_binary_distribution")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the OpenCL C headers of pocl-binary-distribution")
    return Path(found.submodule_search_locations[0]) / ".libs" / "share" / "pocl" / "include"


def run(folder: Path, *command: str) -> str:
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(CACHE / "zig"), "PATH": "/usr/bin:/bin"}
    environment["ZIG_LOCAL_CACHE_DIR"] = environment["ZIG_GLOBAL_CACHE_DIR"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_they_are_valid_and_complete(tmp_path: Path) -> None:
    source = EMITTER.emit(EMITTER.capabilities(), OPENCL)
    (tmp_path / "kernels.cl").write_text(source)
    zig, tool = str(Path(ziglang.__file__).with_name("zig")), shutil.which("spirv-val")
    assert tool is not None
    language = ("-x", "cl", "-cl-std=CL1.2", "-Xclang", "-finclude-default-header")
    flags = (*language, "-target", TRIPLE, "-I", str(headers()), "-O1")
    run(tmp_path, zig, "clang", *flags, "-c", "kernels.cl", "-o", "kernels.spv")
    run(tmp_path, tool, "--target-env", "opencl2.1", "kernels.spv")
    text = run(tmp_path, str(Path(tool).with_name("spirv-dis")), "kernels.spv")
    kernels = set(re.findall(r"__kernel void (\w+)\(", source))
    assert len(kernels) > 20
    assert set(re.findall(r'OpEntryPoint Kernel %\w+ "(\w+)"', text)) == kernels
    assert text.count("ContractionOff") == len(kernels)
    assert "OpAtomicFAdd" not in text
