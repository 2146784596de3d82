"""Components of a bundle and the planes inside a weight-bearing section.

A *component* is the name of one section; the grammar is closed because names become file names and
index keys. A *plane* is a range of a section whose bytes have one meaning, so that the delta codec
can take differences of like things.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from compiler.contract.errors import ContractError, LimitExceededError

# kind -> bytes of one element. codes4: two 4-bit codes a byte, low nibble first (never split);
# scales8: u8; f32: little-endian IEEE; raw: anything else, alignment padding too.
ELEMENT_BYTES: Final = MappingProxyType({"codes4": 1, "scales8": 1, "f32": 4, "raw": 1})
PLANE_KINDS: Final = tuple(ELEMENT_BYTES)
MAX_SECTION_BYTES: Final = 1 << 34
# A sealed section (`compiler.contract.sealing`) is cut into chunks, each with a tag.
SEALED_CHUNK_BYTES: Final = 64 * 1024
SEAL_TAG_BYTES: Final = 16
COMPONENT_PATTERN: Final = re.compile(
    r"plan|kernels|pipeline|selftest|router_stats|expert_groups|schedule|bands|policy|steering|substitutes"
    r"|weights\.shared|(?:adapter\.|dense\.L)(?:0|[1-9][0-9]{0,3})"
    r"|expert\.L(?:0|[1-9][0-9]{0,3})\.E(?:0|[1-9][0-9]{0,3})"
)


@dataclass(frozen=True, slots=True)
class Plane:
    """A range of a section with one meaning.

    Attributes:
        kind: What the bytes are, one of `PLANE_KINDS`.
        offset: First byte inside the section.
        length: Bytes, at least 1, a multiple of the element size of `kind`.

    Raises:
        ContractError: Unknown kind, or a field is no integer, negative, empty, no whole elements.
        LimitExceededError: The plane reaches beyond `MAX_SECTION_BYTES`.
    """

    kind: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.kind not in PLANE_KINDS:
            raise ContractError(f"unknown plane kind {self.kind!r}")
        if type(self.offset) is not int or type(self.length) is not int:
            raise ContractError("plane offset and length are integers")
        if self.offset < 0 or self.length < 1 or self.length % ELEMENT_BYTES[self.kind]:
            raise ContractError(f"bad {self.kind} plane at {self.offset}, {self.length} bytes")
        if self.offset + self.length > MAX_SECTION_BYTES:
            raise LimitExceededError(f"plane ends above {MAX_SECTION_BYTES} bytes")

    @property
    def end(self) -> int:
        """First byte behind the plane."""
        return self.offset + self.length


def sealed_size(size_bytes: int) -> int:
    """Return the size of a section when it is sealed; an empty one has one empty chunk."""
    chunks = max(1, -(-size_bytes // SEALED_CHUNK_BYTES))
    return size_bytes + SEAL_TAG_BYTES * chunks


def require_component(value: object) -> str:
    """Return `value` if it is a component name of the closed grammar.

    Raises:
        ContractError: It is anything else.
    """
    if not isinstance(value, str) or COMPONENT_PATTERN.fullmatch(value) is None:
        raise ContractError("not a component name")
    return value


def require_cover(planes: Sequence[Plane], length: int) -> None:
    """Check that `planes` cover `length` bytes exactly, in order, without gap or overlap.

    Raises:
        ContractError: They do not.
    """
    position = 0
    for plane in planes:
        if plane.offset != position:
            raise ContractError(f"plane at {plane.offset}, expected at {position}")
        position = plane.end
    if position != length:
        raise ContractError(f"planes cover {position} of {length} bytes")
