from pathlib import Path

import pytest

from compiler.contract.fingerprint import parse_fingerprint, target_of
from device_agent.probe.linux import isa_features, limited, probe

FLAGS_V3 = (
    "fpu vme sse sse2 ssse3 sse4_1 sse4_2 cx16 lahf_lm popcnt avx avx2 bmi1 bmi2 f16c fma abm movbe"
    " xsave aes ibrs ibpb md_clear constant_tsc"
)
FLAGS_V4 = f"{FLAGS_V3} avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"


def machine(root: Path, flags: str, memory_kb: int = 3_900_000) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"model name\t: Toy CPU\nflags\t\t: {flags}\n\nflags: x\n")
    (root / "proc/meminfo").write_text(f"MemTotal:  {memory_kb} kB\nMemFree: 1 kB\n")
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "512K")]
    ):
        folder = root / f"sys/devices/system/cpu/cpu0/cache/index{index}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    return root


def test_it_reads_what_the_kernel_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = probe(device_class="car", root=machine(tmp_path, FLAGS_V4))
    assert (found.soc, found.l1d_kb, found.l2_kb, found.l3_kb) == ("Toy CPU", 32, 512, 0)
    assert found.ram_bucket_mb == 2048
    assert found.device_class == "car"
    assert target_of(found) == "x86-64-v4-vnni"
    assert parse_fingerprint(found.to_bytes()) == found


def test_it_leaves_out_what_comes_and_goes_between_boots(tmp_path: Path) -> None:
    found = isa_features(FLAGS_V3.split())
    assert "avx2" in found
    assert not {"ibrs", "md_clear", "constant_tsc", "vme"} & set(found)


@pytest.mark.parametrize(
    ("isa", "target", "features"),
    [
        ("rv64imafdc_zicsr_zifencei", "riscv64", ()),
        ("rv64imafdcv_zicsr_zvfh_zba", "riscv64-v", ("v", "zba", "zvfh")),
        ("", "riscv64", ()),
    ],
)
def test_it_reads_the_letters_of_risc_v(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, target: str, features: tuple[str]
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"hart\t: 0\nisa\t: {isa}\nmmu\t: sv39\n")
    found = probe(device_class="car", root=tmp_path)
    assert found.isa_features == features
    assert target_of(found) == target


@pytest.mark.parametrize("level", ["x86-64-v1", "x86-64-v2", "x86-64-v3"])
def test_it_reports_nothing_above_the_limit_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = probe(device_class="pc", isa_limit=level, root=machine(tmp_path, FLAGS_V4))
    assert target_of(found) == level
    assert level in found.soc
    assert found.isa_features == limited(found.isa_features, level)


def test_it_has_a_fingerprint_where_nothing_can_be_read(tmp_path: Path) -> None:
    found = probe(device_class="pc", root=tmp_path)
    assert found.isa_features == ()
    assert found.ram_bucket_mb == 512
    assert parse_fingerprint(found.to_bytes()) == found
