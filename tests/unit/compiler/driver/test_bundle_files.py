"""Bundles on disk, the base of grids, and options."""

import dataclasses
import os

import numpy as np
import pytest

from compiler.contract.canonical import sha256_hex
from compiler.contract.errors import ContractError, DigestMismatchError
from compiler.contract.manifest import ReleaseManifest, Requirements, Section
from compiler.contract.planes import Plane
from compiler.driver.base_grids import kept_codes
from compiler.driver.bundle_files import read_bundle, read_report, write_bundle
from compiler.driver.options import CompiledBundle, CompileOptions
from compiler.driver.stages import Portable, StageClock
from compiler.emitters.plan import emit_plan
from compiler.errors import CompilerError
from compiler.quant.module import pack_module
from compiler.quant.w4 import PackedW4, pack_w4, quantise_w4
from tests.factories.modules import small_decoder

SECTIONS = {"plan": b"p" * 10, "weights.shared": b"w" * 64}
MANIFEST = ReleaseManifest(
    "m",
    "1",
    1,
    0,
    "x86-64-v3",
    1,
    Requirements(1, 2),
    "host",
    tuple(Section(name, len(data), sha256_hex(data)) for name, data in SECTIONS.items()),
    "ab" * 32,
)
BUNDLE = CompiledBundle(MANIFEST, SECTIONS, {"target": "x86-64-v3"}, "ir", "c")


def test_it_reads_back_what_it_wrote(tmp_path) -> None:
    write_bundle(BUNDLE, tmp_path)
    assert read_bundle(tmp_path) == (MANIFEST, SECTIONS)
    assert read_report(tmp_path) == {"target": "x86-64-v3"}
    write_bundle(BUNDLE, tmp_path)
    assert read_bundle(tmp_path) == (MANIFEST, SECTIONS)


def test_it_takes_away_what_the_bundle_before_had_beyond_this_one(tmp_path) -> None:
    write_bundle(BUNDLE, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    smaller = dataclasses.replace(
        BUNDLE,
        manifest=dataclasses.replace(MANIFEST, sections=MANIFEST.sections[:1]),
        sections={"plan": SECTIONS["plan"]},
    )
    write_bundle(smaller, tmp_path)
    assert [path.name for path in (tmp_path / "sections").iterdir()] == ["plan"]
    assert read_bundle(tmp_path) == (smaller.manifest, smaller.sections)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_it_notices_a_flipped_bit_and_missing_files(tmp_path) -> None:
    write_bundle(BUNDLE, tmp_path)
    path = tmp_path / "sections" / "plan"
    path.write_bytes(b"q" + b"p" * 9)
    with pytest.raises(DigestMismatchError, match="plan"):
        read_bundle(tmp_path)
    path.unlink()
    with pytest.raises(ContractError, match="no bundle"):
        read_bundle(tmp_path)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(ContractError, match="not an object"):
        read_report(tmp_path)


def test_it_leaves_no_manifest_when_writing_stops(tmp_path, monkeypatch) -> None:
    write_bundle(BUNDLE, tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bundle(BUNDLE, tmp_path)
    with pytest.raises(ContractError, match="no bundle"):
        read_bundle(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "a/b"},
        {"version": ""},
        {"selftest_vectors": 15},
        {"release_seq": 0},
        {"security_epoch": -1},
    ],
)
def test_it_refuses_options_that_cannot_be_released(change) -> None:
    good = CompileOptions("x86-64-v3", "m", "1")
    with pytest.raises(CompilerError):
        dataclasses.replace(good, **change)


def _packed(seed: int) -> PackedW4:
    weight = np.random.default_rng(seed).standard_normal((16, 64)).astype(np.float32)
    return pack_w4(quantise_w4(weight))


def test_it_counts_codes_that_stayed() -> None:
    one, other = _packed(1), _packed(2)
    flipped = bytearray(one.codes)
    flipped[0] ^= 0x10
    flipped[5] ^= 0x11
    changed = dataclasses.replace(one, codes=bytes(flipped))
    kept = kept_codes({0: changed, 1: other, 2: other}, {0: one, 1: other})
    assert kept.codes == 3 * 1024
    assert kept.same == 2 * 1024 - 3
    assert kept_codes({}, {}).ratio == 1.0


def test_it_stores_and_restores_what_targets_share() -> None:
    module = small_decoder()
    emitted = emit_plan(module, weights_packed=pack_module(module).packed)
    portable = Portable(
        {"plan": emitted.plan_bytes, "weights.shared": b"\x00\xff"},
        {"weights.shared": (Plane("raw", 0, 3), Plane("f32", 3, 4))},
        "module {}",
        {"notes": ["é"], "base": None},
        emitted.plan,
    )
    assert Portable.from_parts(portable.to_parts()) == portable


def test_it_reports_stages_in_order() -> None:
    seen: list[tuple[str, float]] = []
    clock = StageClock(lambda stage, share: seen.append((stage, share)))
    clock.skip("import")
    clock.within("plan")(0.5)
    with clock.stage("selftest"):
        pass
    rows = {row["name"]: row["cached"] for row in clock.rows()}
    assert seen == [("import", 0.0), ("plan", pytest.approx(0.45)), ("selftest", 0.8)]
    assert list(rows) == ["import", "raise", "quantise", "plan", "kernels", "selftest", "manifest"]
    assert rows["import"] is True
    assert rows["selftest"] is False


@pytest.mark.parametrize("name", ["manifest.json", "sections/plan", "report.json"])
def test_it_opens_no_pipe_and_no_device(tmp_path, name) -> None:
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        write_bundle(BUNDLE, tmp_path)
        (tmp_path / name).unlink()
        make(tmp_path / name)
        read = read_report if name == "report.json" else read_bundle
        with pytest.raises(ContractError, match="not a regular file"):
            read(tmp_path)
        (tmp_path / name).unlink()
