"""The `expert_groups` section: round trip, canonical form, damage."""

import struct
import zlib

import pytest

from compiler.contract.errors import ContractError, LimitExceededError
from compiler.contract.expert_groups import (
    MAX_EXPERTS,
    MAX_GROUPS_BYTES,
    ExpertGroups,
    parse_expert_groups,
)

GROUPS = ExpertGroups(((0, 1, 0), (2, 1)), (0, 2, 4, 1, 3))


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def test_it_reads_what_it_wrote() -> None:
    data = GROUPS.to_bytes()
    assert parse_expert_groups(data) == GROUPS
    assert len(data) == 12 + 2 * (2 + 5 + 5) + 4
    assert data[:8] == b"SFGROUP1"


def test_it_names_the_members_of_a_group_in_their_order() -> None:
    assert GROUPS.count == 3
    assert GROUPS.members(0) == ((0, 0), (0, 2))
    assert GROUPS.members(1) == ((1, 1), (0, 1))
    assert GROUPS.members(2) == ((1, 0),)


@pytest.mark.parametrize(
    ("groups", "order", "message"),
    [
        (((0, 1),), (0, 0), "permutation"),
        (((0, 1),), (0,), "permutation"),
        (((0, 1),), (1, 0), "numbered"),
        (((0, 1, 0),), (0, 1, 2), "apart"),
        (((0, 2),), (0, 1), "numbered"),
        ((), (), "no experts"),
        (((0,), ()), (0,), "no experts"),
    ],
)
def test_it_refuses_what_is_not_canonical(groups, order, message) -> None:
    with pytest.raises(ContractError, match=message):
        ExpertGroups(groups, order)


def test_it_refuses_too_many_experts() -> None:
    with pytest.raises(LimitExceededError):
        ExpertGroups(((0,) * (MAX_EXPERTS + 1),), tuple(range(MAX_EXPERTS + 1)))
    with pytest.raises(LimitExceededError):
        parse_expert_groups(bytes(MAX_GROUPS_BYTES + 1))


def test_it_refuses_every_truncation_and_every_flipped_bit() -> None:
    good = GROUPS.to_bytes()
    for length in range(len(good)):
        with pytest.raises(ContractError):
            parse_expert_groups(good[:length])
    for bit in range(8 * len(good)):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ContractError):
            parse_expert_groups(bytes(changed))


def test_it_checks_numbers_even_under_a_right_checksum() -> None:
    body = GROUPS.to_bytes()[:-4]
    for at, value in ((8, 3), (8, 0xFFFF), (10, 2), (12, 9), (14, 0), (16, 1), (26, 7)):
        changed = bytearray(body)
        struct.pack_into("<H", changed, at, value)
        with pytest.raises(ContractError):
            parse_expert_groups(sealed(bytes(changed)))
    for more in (b"\0", b"\0\0"):
        with pytest.raises(ContractError):
            parse_expert_groups(sealed(body + more))
