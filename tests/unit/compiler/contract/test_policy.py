"""The policy table: its bytes are kept for ever, damaged ones are refused."""

import random
from pathlib import Path

import pytest

from compiler.contract.policy import (
    CELLS,
    DENSITIES,
    FULL,
    LEGAL,
    PLAIN,
    POLICY_BYTES,
    ROWS,
    SIZES,
    CallKind,
    Cell,
    Flags,
    Policy,
    PolicyError,
    Variant,
    cell_of,
    parse_policy,
    require_variants,
)

VECTOR = Path(__file__).parents[3] / "contract" / "vectors" / "policy" / "table.bin"
HEADER = POLICY_BYTES - 2 * CELLS


def policy() -> Policy:
    variants, doubts = bytearray(CELLS), bytearray(CELLS)
    for index in range(CELLS):
        known = LEGAL[Cell.at(index).kind]
        variants[index] = known[index % len(known)]
        if index % 3 == 0 and len(known) > 1:
            doubts[index] = 1 << variants[index] | 1 << known[(index + 1) % len(known)]
    return Policy(bytes(variants), bytes(doubts), Flags.MEASURED, 123)


def damaged(at: int, value: int) -> bytes:
    data = bytearray(policy().to_bytes())
    data[at] = value
    return bytes(data)


def test_it_writes_and_reads_the_bytes_as_ever() -> None:
    data = VECTOR.read_bytes()
    assert policy().to_bytes() == data
    assert parse_policy(data) == policy()
    assert parse_policy(PLAIN.to_bytes()) == PLAIN


def test_it_numbers_every_cell_once() -> None:
    cells = [Cell.at(index) for index in range(CELLS)]
    assert [cell.index for cell in cells] == list(range(CELLS))
    assert len({cell.name for cell in cells}) == CELLS
    assert max(cells) == Cell(CallKind.CONV, SIZES - 1, ROWS - 1, DENSITIES - 1)


@pytest.mark.parametrize(
    ("size", "rows", "density", "buckets"),
    [
        (0, 1, 0, (0, 0, 0)),
        (32 << 10, 1, 100, (0, 0, 0)),
        ((32 << 10) + 1, 2, 101, (1, 1, 1)),
        (2 << 20, 128, 900, (3, 3, 5)),
        ((2 << 20) + 1, 129, FULL, (4, 4, 6)),
    ],
)
def test_it_takes_a_bound_to_the_bucket_below(size, rows, density, buckets) -> None:
    cell = cell_of(CallKind.TILES, size, rows, density)
    assert (cell.size, cell.rows, cell.density) == buckets


def test_it_names_candidates() -> None:
    found = parse_policy(VECTOR.read_bytes())
    doubtful = Cell.at(next(i for i in range(CELLS) if found.doubts[i]))
    assert len(found.candidates(doubtful)) == 2
    assert found.variant(doubtful) in found.candidates(doubtful)
    assert found.candidates(Cell.at(0)) == ()


def first(kind: CallKind) -> int:
    return Cell(kind, 0, 0, 0).index


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, ord("X"), "no policy"),
        (8, 33, "no policy"),
        (HEADER - 1, 1, "no policy"),
        (12, 4, "flags"),
        (16, 8, "cells"),
        (18, 4, "cells"),
        (26, 255, "residual"),
        (HEADER + first(CallKind.OTHER), Variant.ALONE, "no variant"),
        (HEADER + first(CallKind.LINEAR), Variant.UNCHECKED, "no variant"),
        (HEADER + first(CallKind.CHECKED), Variant.COARSE, "no variant"),
        (HEADER + CELLS - 1, 5, "no variant"),
        (HEADER + CELLS - 1, 255, "no variant"),
        (HEADER + CELLS + first(CallKind.LINEAR), 1, "doubt"),
        (HEADER + CELLS + first(CallKind.LINEAR), 255, "doubt"),
        (HEADER + CELLS + first(CallKind.OTHER), 3, "doubt"),
        (12, Flags.FIXED, "nothing to measure"),
    ],
)
def test_it_refuses_damaged_bytes(at, value, message) -> None:
    with pytest.raises(PolicyError, match=message):
        parse_policy(damaged(at, value))


def test_it_refuses_doubts_without_the_default() -> None:
    index = first(CallKind.LINEAR)
    variants, doubts = bytes(CELLS), bytearray(CELLS)
    doubts[index] = 1 << Variant.ALONE | 1 << Variant.COARSE
    with pytest.raises(PolicyError, match="doubt"):
        parse_policy(Policy(variants, bytes(doubts)).to_bytes())


@pytest.mark.parametrize("size", [0, 1, HEADER, POLICY_BYTES - 1, POLICY_BYTES + 1])
def test_it_refuses_another_length(size) -> None:
    with pytest.raises(PolicyError, match="bytes"):
        parse_policy((policy().to_bytes() + b"\0")[:size])
    with pytest.raises(PolicyError, match="cells"):
        require_variants(bytes(CELLS - 1))


def test_it_reads_nothing_but_legal_tables_from_random_damage() -> None:
    source = random.Random(11)
    good = policy().to_bytes()
    accepted = 0
    for _ in range(2_000):
        data = bytearray(good)
        data[source.randrange(len(data))] = source.randrange(256)
        try:
            found = parse_policy(bytes(data))
        except PolicyError:
            continue
        accepted += 1
        assert found.to_bytes() == bytes(data)
        assert all(found.variants[i] in LEGAL[Cell.at(i).kind] for i in range(CELLS))
    assert accepted > 10
