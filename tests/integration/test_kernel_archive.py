"""The static library: a C program links it, calls it, and sees the structs as Python does."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from compiler.contract.native_abi import C_STRUCTS
from compiler.contract.operations import Op
from compiler.contract.plan_format import ABI_VERSION, Status
from compiler.driver.cli import main
from compiler.emitters.archive import HEADER, LIBRARY, build_archive
from compiler.emitters.interface import EmitterError
from compiler.hardware.targets import find_target
from tests.factories.kernels import CACHE, native_targets

MAIN = """#include <stdio.h>
#include "moe_kernels.h"
int main(void) {
  sf_size_report report = {.struct_bytes = sizeof(report)};
  uint64_t none = 0;
  printf("%u %d", sf_abi_version(), sf_sizes((const uint8_t *)&none, sizeof(none), &report));
  SIZES
  return 0;
}
"""


def test_a_program_links_it_and_calls_it(tmp_path: Path) -> None:
    if not native_targets() or shutil.which("gcc") is None:
        pytest.skip("needs x86-64 and gcc: apt-get install gcc")
    files = build_archive(find_target("x86-64-v1"), [Op.ADD, Op.LINEAR], CACHE)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    sizes = " ".join(f'printf(" %zu", sizeof({struct.name}));' for struct in C_STRUCTS)
    (tmp_path / "main.c").write_text(MAIN.replace("SIZES", sizes))
    command = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "main.c", LIBRARY]
    subprocess.run([*command, "-o", "main"], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True)
    expected = [ABI_VERSION, Status.BAD_PLAN, *(ctypes.sizeof(s.ctype) for s in C_STRUCTS)]
    assert [int(word) for word in done.stdout.split()] == expected


def test_the_command_writes_library_and_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels"
    command = ["library", "--target", "aarch64-sve2", "--out", str(out), "--ops"]
    assert main([*command, "add"]) == 0
    assert (out / LIBRARY).read_bytes().startswith(b"!<arch>")
    assert "int32_t sf_run(void *context, uint32_t program, sf_args *args);" in (
        (out / HEADER).read_text()
    )
    assert f"{out / LIBRARY}: " in capsys.readouterr().out
    assert main([*command, "ADD,FLY"]) != 0
    assert "there is no operation 'FLY'" in capsys.readouterr().err


def test_a_target_without_c_has_none() -> None:
    with pytest.raises(EmitterError, match="no static library"):
        build_archive(find_target("opencl"), [Op.ADD], CACHE)
