"""The capability library: enough rows, each resolves, none gets code that it cannot run."""

import pytest

from compiler.hardware.library import (
    UNVERIFIED,
    Soc,
    SocLibraryError,
    accelerators,
    load_socs,
    parse_socs,
    variants,
)
from compiler.hardware.targets import OPENCL, find_target

ROW = """
[[soc]]
id = "toy-1"
vendor = "Toy"
name = "One"
class = "phone"
arch = "aarch64"
cores = ["Cortex-A55 x4"]
features = ["asimd", "asimddp"]
"""
FAMILIES = {"Qualcomm", "MediaTek", "Unisoc", "Apple", "HiSilicon", "Rockchip", "Intel", "AMD"}


def test_it_knows_more_than_twenty_systems_of_every_family() -> None:
    socs = load_socs()
    assert len({soc.id for soc in socs}) == len(socs) >= 20
    assert {soc.vendor for soc in socs} >= FAMILIES
    assert {soc.verified_on for soc in socs} == {UNVERIFIED}


@pytest.mark.parametrize("soc", load_socs(), ids=lambda soc: soc.id)
def test_every_system_gets_code_of_its_own_architecture_that_its_cores_run(soc: Soc) -> None:
    found = variants(soc)
    assert found
    assert {target.arch for target in found} == {soc.arch}
    assert all(target.features <= soc.features for target in found)
    text = " ".join(isa for target in found for isa in target.isa)
    assert soc.arch == "x86_64" or "avx" not in text


@pytest.mark.parametrize(
    ("soc", "targets"),
    [
        ("sm8550", ["aarch64-i8mm", "aarch64-dotprod", "aarch64"]),
        ("mt6983", ["aarch64-sve2", "aarch64-i8mm", "aarch64-dotprod", "aarch64"]),
        ("sm8350", ["aarch64-dotprod", "aarch64"]),
        ("rk3399", ["aarch64"]),
        ("th1520", ["riscv64"]),
        ("spacemit-k1", ["riscv64-v", "riscv64"]),
        ("x86-silvermont", ["x86-64-v2", "x86-64-v1"]),
        ("x86-zen4", ["x86-64-v4-vnni", "x86-64-v3", "x86-64-v2", "x86-64-v1"]),
    ],
)
def test_it_lists_the_best_target_first(soc: str, targets: list[str]) -> None:
    found = next(row for row in load_socs() if row.id == soc)
    assert [target.id for target in variants(found)] == targets
    assert variants(found)[0] == find_target(targets[0])


def test_it_names_the_opencl_variant_of_a_gpu_and_gives_it_to_no_core() -> None:
    for soc in load_socs():
        assert accelerators(soc) == ((OPENCL,) if soc.gpu else ())
        assert OPENCL not in variants(soc)
    assert sum(bool(soc.gpu) for soc in load_socs()) > 20


def test_it_reads_a_row() -> None:
    (soc,) = parse_socs(ROW)
    assert (soc.system, soc.memory_gb_s, soc.gpu, soc.npu) == ("linux", None, "", "")
    assert soc.features == {"asimd", "asimddp"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "toy-1"', 'id = "Toy 1"', "lower case"),
        ('vendor = "Toy"', "", "lacks"),
        ('vendor = "Toy"', "vendor = 7", "no text"),
        ('vendor = "Toy"', 'vendor = "Toy"\ntdp = 5', "unknown field"),
        ('vendor = "Toy"', 'vendor = "Toy"\ngpu = 7', "gpu is no text"),
        ('class = "phone"', 'class = "toaster"', "class"),
        ('arch = "aarch64"', 'arch = "sparc64"', "no target"),
        ('["Cortex-A55 x4"]', '["Cortex-A55"]', "Name xN"),
        ('["Cortex-A55 x4"]', "[]", "no cores"),
        ('["Cortex-A55 x4"]', '"Cortex-A55 x4"', "no list"),
        ('["asimd", "asimddp"]', "[1]", "else than text"),
        ('vendor = "Toy"', 'vendor = "Toy"\nmemory_gb_s = -1.0', "out of range"),
        ('vendor = "Toy"', 'vendor = "Toy"\nmemory_gb_s = "much"', "out of range"),
        ('vendor = "Toy"', 'vendor = "Toy"\nsystem = "dos"', "system"),
        ("[[soc]]", "[[chip]]", "tables only"),
        ("[[soc]]", "[[soc", "TOML"),
    ],
)
def test_it_refuses_a_row_that_makes_no_sense(old: str, new: str, message: str) -> None:
    assert old in ROW
    with pytest.raises(SocLibraryError, match=message):
        parse_socs(ROW.replace(old, new))


def test_it_refuses_two_rows_of_one_name() -> None:
    with pytest.raises(SocLibraryError, match="two rows"):
        parse_socs(ROW + ROW)
