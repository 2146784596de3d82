"""The `expert_groups` section: which experts are used together, and in which order to keep them.

The compiler groups experts that calibration saw in the same program runs, over all layers. A device
may lay them out, load them and drop them by group; nothing computed depends on it. All integers are
little endian:

    magic "SFGROUP1" | layers u16 | groups u16 | experts u16 per layer
    group ids  u16 per expert, layer by layer
    order      u16 per expert: numbers of experts, counted over all layers, as they should lie
    CRC-32 of everything before, u32

Canonical: every group id below `groups` occurs, numbered by first occurrence in `order`; `order` is
a permutation in which the members of a group stand together. A device parses the section after its
digest was verified; the checksum serves tools that read a file on its own.
"""

import struct
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from compiler.contract.errors import ContractError, LimitExceededError

MAGIC: Final = b"SFGROUP1"
MAX_LAYERS: Final = 1 << 12
MAX_EXPERTS: Final = 1 << 15
"""Experts of all layers together."""
_HEADER: Final = struct.Struct("<8sHH")
_CHECKSUM: Final = struct.Struct("<I")
_NUMBER_BYTES: Final = 2
MAX_GROUPS_BYTES: Final = _HEADER.size + _NUMBER_BYTES * (MAX_LAYERS + 2 * MAX_EXPERTS) + 4


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of experts.

    Attributes:
        groups: Group of each expert, layer by layer.
        order: Numbers of all experts, counted over the layers, as they should lie.

    Raises:
        ContractError: A group or the order is not canonical, or a layer is empty.
        LimitExceededError: More layers or experts than the limits.
    """

    groups: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        ids = [group for layer in self.groups for group in layer]
        if len(self.groups) > MAX_LAYERS or len(ids) > MAX_EXPERTS:
            raise LimitExceededError(f"{len(self.groups)} layers of {len(ids)} experts")
        if not ids or not all(self.groups):
            raise ContractError("a layer has no experts")
        if sorted(self.order) != list(range(len(ids))):
            raise ContractError("the order of experts is not a permutation")
        runs = [ids[expert] for expert in self.order]
        starts = [runs[0], *(after for before, after in pairwise(runs) if before != after)]
        if starts != list(range(len(starts))):
            raise ContractError("groups are not numbered by their order, or lie apart")

    @property
    def count(self) -> int:
        """Number of groups."""
        return 1 + max(group for layer in self.groups for group in layer)

    def members(self, group: int) -> tuple[tuple[int, int], ...]:
        """Return (layer, expert) of each member of a group, in their order."""
        places = [
            (layer, expert) for layer, row in enumerate(self.groups) for expert in range(len(row))
        ]
        chosen = (places[number] for number in self.order)
        return tuple(
            (layer, expert) for layer, expert in chosen if self.groups[layer][expert] == group
        )

    def to_bytes(self) -> bytes:
        """Return the section."""
        sizes = [len(layer) for layer in self.groups]
        ids = [group for layer in self.groups for group in layer]
        numbers = [*sizes, *ids, *self.order]
        body = _HEADER.pack(MAGIC, len(sizes), self.count)
        body += struct.pack(f"<{len(numbers)}H", *numbers)
        return body + _CHECKSUM.pack(zlib.crc32(body))


def parse_expert_groups(data: bytes) -> ExpertGroups:
    """Parse and check an `expert_groups` section.

    Raises:
        LimitExceededError: Longer than `MAX_GROUPS_BYTES`, or beyond another limit.
        ContractError: Damaged, truncated, or not canonical.
    """
    if len(data) > MAX_GROUPS_BYTES:
        raise LimitExceededError(f"expert groups of {len(data)} bytes, limit {MAX_GROUPS_BYTES}")
    if len(data) < _HEADER.size + _CHECKSUM.size or data[: len(MAGIC)] != MAGIC:
        raise ContractError("not an expert_groups section")
    body, checksum = data[: -_CHECKSUM.size], data[-_CHECKSUM.size :]
    if _CHECKSUM.unpack(checksum)[0] != zlib.crc32(body):
        raise ContractError("the checksum of the expert groups is wrong")
    _, layers, count = _HEADER.unpack_from(body)
    if (len(body) - _HEADER.size) % _NUMBER_BYTES:
        raise ContractError("expert groups end inside a number")
    numbers = struct.unpack(
        f"<{(len(body) - _HEADER.size) // _NUMBER_BYTES}H", body[_HEADER.size :]
    )
    sizes, rest = numbers[:layers], numbers[layers:]
    experts = sum(sizes)
    if len(sizes) != layers or len(rest) != 2 * experts:
        raise ContractError(f"expert groups of {layers} layers have {len(numbers)} numbers")
    groups, at = [], 0
    for size in sizes:
        groups.append(rest[at : at + size])
        at += size
    found = ExpertGroups(tuple(groups), rest[experts:])
    if found.count != count:
        raise ContractError(f"{found.count} groups, the header says {count}")
    return found
