"""What encoding and applying take beside the imported code, whatever the size of a section."""

import bz2
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compiler.contract.delta import (
    DeltaRecord,
    DeltaSection,
    Mode,
    RecordKind,
    chunk_hash,
    header_bytes,
)
from compiler.contract.planes import Plane
from compiler.delta import SectionBytes, encode_delta
from compiler.delta.bsdiff import apply_bsdiff4
from compiler.delta.lowrank import replay_codes
from compiler.delta.pieces import SOURCE_RANGE
from tests.unit.compiler.delta.bundles import draw_codes, move_codes, pack_codes
from tests.unit.compiler.delta.memory_child import COMPONENT
from tests.unit.compiler.delta.merged import adapter, packed, weight

MIB = 1 << 20
MOST_APPLY_BYTES = 16 * MIB
CHILD = "tests.unit.compiler.delta.memory_child"


def grown(what: str, first: Path, second: Path, planes: tuple[Plane, ...], out: Path) -> int:
    layout = json.dumps([[p.kind, p.offset, p.length] for p in planes])
    command = [sys.executable, "-m", CHILD, what, str(first), str(second), layout, str(out)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def codes_update(share: float) -> tuple[SectionBytes, SectionBytes]:
    """24 MiB of codes, scales and rows; all chunks are alike, so that they are quickly made."""
    rng = np.random.default_rng(60)
    codes = draw_codes(rng, 2 * MIB)
    moved = move_codes(rng, codes, share)
    scales, rows = rng.bytes(2 * MIB), rng.random(1 << 18).astype("<f4").tobytes()
    planes = (Plane("codes4", 0, 21 * MIB), Plane("scales8", 21 * MIB, 2 * MIB),
              Plane("f32", 23 * MIB, MIB))  # fmt: skip
    first = (np.frombuffer(rows, "<f4") * np.float32(1.001)).tobytes()
    return (
        SectionBytes(21 * pack_codes(codes) + scales + rows, planes),
        SectionBytes(21 * pack_codes(moved) + scales[::-1] + first, planes),
    )


def code_update() -> tuple[SectionBytes, SectionBytes]:
    """A section without planes that a byte matcher takes apart."""
    rng = np.random.default_rng(61)
    code = rng.integers(0, 40, 4 * MIB).astype(np.uint8).tobytes()
    return SectionBytes(code), SectionBytes(code[: 2 * MIB] + rng.bytes(999) + code[2 * MIB :])


@pytest.mark.parametrize("share", [0.02, 0.24, 0.49, 0.9])
def test_applying_planes_takes_no_more_than_its_share(tmp_path: Path, share: float) -> None:
    old, new = codes_update(share)
    assert_applied_within(tmp_path, old, new, encode_delta({COMPONENT: old}, {COMPONENT: new}).data)


def test_applying_pieces_takes_no_more_than_its_share(tmp_path: Path) -> None:
    old, new = code_update()
    encoded = encode_delta({COMPONENT: old}, {COMPONENT: new})
    assert len(encoded.data) < 20_000
    assert_applied_within(tmp_path, old, new, encoded.data)


def test_a_patch_of_many_steps_takes_no_more_than_its_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(63)
    source = rng.bytes(2 * MIB)
    triples = b"".join(struct.pack("<QQQ", 12, 4, 20) for _ in range(1 << 16))
    parts = [bz2.compress(part) for part in (triples, bytes(12 << 16), rng.bytes(4 << 16))]
    head = struct.pack("<8sQQQ", b"BSDIFF40", len(parts[0]), len(parts[1]), MIB)
    patch = head + b"".join(parts)
    made = apply_bsdiff4(patch, source, MIB)
    payload = SOURCE_RANGE.pack(0, len(source)) + patch
    record = DeltaRecord(
        RecordKind.PIECE,
        Mode.BSDIFF4,
        0,
        0,
        MIB,
        len(payload),
        chunk_hash(source),
        chunk_hash(made),
    )
    sides = SectionBytes(source), SectionBytes(made)
    section = DeltaSection(COMPONENT, *(side.sha256 for side in sides), 2 * MIB, MIB, ())
    body = record.to_bytes() + payload
    delta = header_bytes([section], reversible=False, record_count=1, records_length=len(body))
    assert_applied_within(tmp_path, *sides, delta + body)


def test_replaying_takes_no_more_than_its_share(tmp_path: Path) -> None:
    rng = np.random.default_rng(62)
    codes, scales, rows = weight(rng, 2048, 8192)
    factors = adapter(rng, 2048, 8192, 64, 0.002)
    old = packed(codes, scales, rows)
    new = packed(replay_codes(codes, scales, rows, factors), scales, rows)
    encoded = encode_delta({COMPONENT: old}, {COMPONENT: new}, replays={(COMPONENT, 0): factors})
    assert encoded.report.sections[0].codec == "planes+lowrank"
    assert_applied_within(tmp_path, old, new, encoded.data)


def test_encoding_takes_no_more_than_three_times_a_section(tmp_path: Path) -> None:
    old, new = codes_update(0.04)
    paths = tmp_path / "old", tmp_path / "new"
    for path, side in zip(paths, (old, new), strict=True):
        path.write_bytes(side.data)
    most = grown("encode", *paths, old.planes, tmp_path / "delta")
    assert (tmp_path / "delta").read_bytes() == encode_delta(
        {COMPONENT: old}, {COMPONENT: new}
    ).data
    assert most < 3 * old.length, f"{most / MIB:.1f} MiB"
    print(f"{most / MIB:.1f} MiB")


def assert_applied_within(folder: Path, old: SectionBytes, new: SectionBytes, delta: bytes) -> None:
    (folder / "old").write_bytes(old.data)
    (folder / "delta").write_bytes(delta)
    most = grown("apply", folder / "old", folder / "delta", (), folder / "made")
    assert (folder / "made").read_bytes() == new.data
    assert most <= MOST_APPLY_BYTES, f"{most / MIB:.1f} MiB"
    print(f"{most / MIB:.1f} MiB")
