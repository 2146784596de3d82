"""What a bundle carries: code of its target's machine and no other, within a bound."""

import struct
from pathlib import Path

import pytest

from compiler.contract.native_errors import NativeError
from compiler.contract.native_library import KernelLibrary
from compiler.contract.operations import Op
from compiler.contract.plan import parse_plan
from compiler.driver.build_kernels import render_and_build
from compiler.driver.compile import compile_model
from compiler.driver.native_check import check_opencl
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.emitters.opencl import emitter
from compiler.errors import UnsupportedOperatorError
from compiler.hardware.targets import OPENCL, TARGETS, Target, find_target
from compiler.kernels.naming import kernel_names
from compiler.kernels.select import TILES, select_tile
from tests.factories.bundles import compiled as edgecard
from tests.factories.kernels import library
from tests.factories.onnx_blocks import moe_block
from tests.factories.onnx_models import write_block
from tests.factories.opencl import POCL_CACHE

MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
"""`e_machine` of the ELF header."""
MOST_CODE_BYTES = 200_000
ELF = b"\x7fELF"


def compiled(target: str, folder: Path) -> CompiledBundle:
    submission = folder / "submission"
    if not submission.exists():
        write_block(submission, moe_block())
    return compile_model(submission, CompileOptions(target, "block", "1"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.id)
def test_a_library_holds_code_of_its_machine_only(target: Target) -> None:
    code = library(target.id, frozenset({Op.LINEAR, Op.MOE_LAYER, Op.ATTENTION, Op.CONV2D}))
    assert code.count(ELF) == 1
    assert code.startswith(ELF)
    (machine,) = struct.unpack_from("<H", code, 18)
    assert machine == MACHINES[target.arch]
    assert len(code) <= MOST_CODE_BYTES


@pytest.mark.parametrize("target", ["x86-64-v1", "aarch64-dotprod"])
def test_a_bundle_carries_one_library_and_no_source(target: str, tmp_path: Path) -> None:
    bundle = compiled(target, tmp_path)
    holding = [name for name, data in bundle.sections.items() if ELF in data]
    assert holding == ["kernels"]
    assert len(bundle.sections["kernels"]) <= MOST_CODE_BYTES
    (machine,) = struct.unpack_from("<H", bundle.sections["kernels"], 18)
    assert machine == MACHINES[find_target(target).arch]
    assert not any(b"__kernel" in data for data in bundle.sections.values())
    tile = select_tile(find_target(target).isa)
    others = {other.isa for other in TILES} - {tile.isa, "portable"}
    named = kernel_names(parse_plan(bundle.sections["plan"]).ops, tile)
    assert all(name in bundle.c_source for name in named)
    assert not any(f"__{isa}\n" in bundle.c_source for isa in others)


@pytest.mark.opencl
def test_a_bundle_for_opencl_carries_source_whose_bits_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POCL_CACHE_DIR", str(POCL_CACHE))
    POCL_CACHE.mkdir(parents=True, exist_ok=True)
    bundle = compiled(OPENCL.id, tmp_path)
    kernels = bundle.sections["kernels"]
    assert b"__kernel void run_tiles(" in kernels
    assert not any(ELF in data for data in bundle.sections.values())
    assert len(kernels) <= MOST_CODE_BYTES
    assert bundle.manifest.verified_on == "host"
    assert bundle.report["native_check"]["failed_vectors"] == 0
    assert bundle.report["native_check"]["vectors"] >= 16
    assert "opencl" in bundle.report["explain"][0]["kernel"]
    with pytest.raises(NativeError):
        KernelLibrary(kernels)


@pytest.mark.full
@pytest.mark.opencl
def test_a_whole_model_gives_the_bits_of_the_simulator_on_opencl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POCL_CACHE_DIR", str(POCL_CACHE))
    POCL_CACHE.mkdir(parents=True, exist_ok=True)
    bundle = edgecard("v1", OPENCL.id, tmp_path)
    assert bundle.manifest.verified_on == "host"
    assert bundle.report["native_check"]["failed_vectors"] == 0
    assert bundle.report["native_check"]["runs"] > 50


def test_where_no_device_is_opencl_is_checked_in_structure_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent, folder = tmp_path / "absent", tmp_path / "bundle"
    absent.mkdir()
    folder.mkdir()
    (absent / "pyopencl.py").write_text("raise ImportError('not on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(absent))
    check = check_opencl(folder, {"plan": b"", "kernels": b"", "selftest": b""}, 60)
    assert check.verified_on == "structural"
    assert "not on this machine" in str(check.detail["reason"])


def test_a_plan_that_opencl_cannot_run_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emitter, "TEMPLATES", {Op.LINEAR: emitter.TEMPLATES[Op.LINEAR]})
    with pytest.raises(UnsupportedOperatorError, match="no kernel for PRUNE_TOP_P") as caught:
        render_and_build(OPENCL, [Op.LINEAR, Op.PRUNE_TOP_P], tmp_path)
    assert "another back end" in caught.value.hint
    assert list(tmp_path.iterdir()) == []
