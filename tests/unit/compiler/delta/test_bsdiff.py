"""The reader of BSDIFF40 patches: equal to the known reader on honest patches, safe on others."""

import bz2
import struct

import bsdiff4
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.contract.delta import DeltaFormatError
from compiler.delta.bsdiff import MAX_CONTROL_BYTES, apply_bsdiff4, make_bsdiff4

SOURCE = bytes(range(200)) * 5


def _sign_magnitude(value: int) -> int:
    return value if value >= 0 else (1 << 63) | -value


def _patch(
    controls: list[tuple[int, int, int]],
    diff: bytes = b"",
    extra: bytes = b"",
    length: int = 10,
    **header: int,
) -> bytes:
    rows = b"".join(struct.pack("<QQQ", *map(_sign_magnitude, row)) for row in controls)
    packed, added = bz2.compress(rows), bz2.compress(diff)
    fields = {"control": len(packed), "difference": len(added), "length": length} | header
    numbers = struct.pack("<QQQ", *map(_sign_magnitude, fields.values()))
    return b"BSDIFF40" + numbers + packed + added + bz2.compress(extra)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 2000), edits=st.integers(0, 20))
def test_it_gives_what_the_package_gives(seed, size, edits):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 5, size).astype(np.uint8).tobytes()
    new = bytearray(old)
    for _ in range(edits):
        at = int(rng.integers(0, len(new) + 1))
        new[at : at + int(rng.integers(0, 9))] = rng.bytes(int(rng.integers(0, 9)))
    patch = make_bsdiff4(old, bytes(new))
    assert patch is not None
    assert patch == bsdiff4.diff(old, bytes(new))
    assert apply_bsdiff4(patch, old, len(new)) == bytes(new)


def test_it_follows_a_seek_back_and_forth():
    patch = _patch([(4, 1, 100), (3, 0, -107), (2, 0, -10_000)], bytes(9), b"!")
    assert apply_bsdiff4(patch, SOURCE, 10) == SOURCE[:4] + b"!" + SOURCE[104:107] + SOURCE[:2]


@pytest.mark.parametrize(
    "patch",
    [
        b"",
        b"BSDIFF40",
        _patch([(10, 0, 0)], bytes(10))[:-3],
        b"BSDIFF41" + _patch([(10, 0, 0)], bytes(10))[8:],
        _patch([(10, 0, 0)], bytes(10), length=-1),
        _patch([(10, 0, 0)], bytes(10), length=1 << 62),
        _patch([(10, 0, 0)], bytes(10), control=-1),
        _patch([(10, 0, 0)], bytes(10), control=1 << 62),
        _patch([(10, 0, 0)], bytes(10), difference=-1),
        _patch([(10, 0, 0)], bytes(10), difference=1 << 40),
        _patch([(10, 0, 0)], bytes(10)) + b"x",
        _patch([]),
        _patch([(9, 0, 0)], bytes(9)),
        _patch([(11, 0, 0)], bytes(11)),
        _patch([(-1, 11, 0)], b"", bytes(11)),
        _patch([(11, -1, 0)], bytes(11)),
        _patch([(1 << 62, 1 << 62, 0)], bytes(10)),
        _patch([(5, 0, -6), (5, 0, 0)], bytes(10)),
        _patch([(5, 0, 1 << 62), (5, 0, 0)], bytes(10)),
        _patch([(5, 0, -(1 << 62)), (5, 0, 0)], bytes(10)),
        _patch([(5, 0, 991), (5, 0, 0)], bytes(10)),
        _patch([(10, 0, 0)], bytes(9)),
        _patch([(10, 0, 0)], bytes(11)),
        _patch([(10, 0, 0)], bytes(10), b"x"),
        _patch([(5, 5, 0)], bytes(5), b"four"),
        _patch([(10, 0, 0)], bytes(1 << 26)),
        _patch([(0, 10, 0)], b"", bytes(1 << 26)),
        _patch([(0, 0, 0)] * (MAX_CONTROL_BYTES // 24) + [(10, 0, 0)], bytes(10)),
    ],
)
def test_it_refuses_a_patch_that_lies(patch):
    with pytest.raises(DeltaFormatError):
        apply_bsdiff4(patch, SOURCE, 10)


def test_it_refuses_a_control_block_of_broken_triples():
    packed = bz2.compress(b"x" * 23)
    patch = b"BSDIFF40" + struct.pack("<QQQ", len(packed), 0, 10) + packed
    with pytest.raises(DeltaFormatError):
        apply_bsdiff4(patch, SOURCE, 10)


@pytest.mark.parametrize(("old", "new"), [(b"", b""), (b"", b"x"), (b"x", b""), (b"x", b"y")])
def test_it_takes_files_of_no_and_one_byte(old, new):
    patch = make_bsdiff4(old, new)
    assert patch is not None
    assert apply_bsdiff4(patch, old, len(new)) == new
