"""Apply a submission's weight masks: the mask section becomes zeros of constants.

Before:
    %w = "sp.constant"() <{sha256 = "ab..", ...}> : () -> tensor<64x64xf32>
After (the section holds a mask for ab..):
    %w = "sp.constant"() <{sha256 = "cd..", ...}> : () -> tensor<64x64xf32>    (masked)

A mask section (`sparse_mask.bin`) names constants by digest and gives one bit per element, so it is
tied to the weights it was made for. Masks that fit no constant are refused: a mask that is silently
ignored would ship dense weights under a sparse name. The section's digest stands in the notes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from xdsl.dialects.builtin import ModuleOp

from compiler.analysis.constants import DIGEST_DIGITS
from compiler.analysis.mask_moves import Bits
from compiler.dialects.sp import ConstantOp
from compiler.errors import MalformedModelError
from compiler.passes.base import Pass, PassContext, PassResult
from compiler.passes.functions import operations
from compiler.passes.rewriting import swap

MAGIC = b"SFMASK1\n"
MAX_MASKS = 4096
MAX_AXES = 8


def encode_masks(masks: Mapping[str, Bits]) -> bytes:
    """Return the section: magic, then per mask its digest, shape and packed bits, by digest."""
    parts = [MAGIC, len(masks).to_bytes(4, "little")]
    for digest in sorted(masks):
        bits = masks[digest]
        parts += [bytes.fromhex(digest), len(bits.shape).to_bytes(1, "little")]
        parts += [size.to_bytes(4, "little") for size in bits.shape]
        parts.append(np.packbits(bits).tobytes())
    return b"".join(parts)


def decode_masks(data: bytes) -> dict[str, Bits]:
    """Parse a section.

    Raises:
        MalformedModelError: The bytes are not a mask section.
    """
    reader = _Reader(data)
    if reader.take(len(MAGIC)) != MAGIC:
        raise MalformedModelError("sparse_mask.bin does not start like a mask section")
    count = reader.number(4)
    if count > MAX_MASKS:
        raise MalformedModelError(f"sparse_mask.bin holds {count} masks, at most {MAX_MASKS}")
    masks = {}
    for _ in range(count):
        digest = reader.take(DIGEST_DIGITS // 2).hex()
        axes = reader.number(1)
        if axes > MAX_AXES:
            raise MalformedModelError(f"a mask in sparse_mask.bin has {axes} axes")
        shape = tuple(reader.number(4) for _ in range(axes))
        size = 1
        for axis in shape:
            size *= axis
        packed = np.frombuffer(reader.take((size + 7) // 8), np.uint8)
        masks[digest] = np.unpackbits(packed, count=size).astype(np.bool_).reshape(shape)
    if reader.left:
        raise MalformedModelError(f"sparse_mask.bin has {reader.left} bytes too many")
    return masks


@dataclass(frozen=True)
class InjectMasks(Pass):
    """Set the masked elements of constants to zero.

    Attributes:
        section: Bytes of the mask section; empty for none.
    """

    name: ClassVar[str] = "inject-masks"
    section: bytes = b""

    @property
    def changes_values(self) -> bool:
        """Whether the program computes something else afterwards."""
        return bool(self.section)

    def run(self, module: ModuleOp, ctx: PassContext) -> PassResult:
        """Replace every constant that has a mask.

        Raises:
            MalformedModelError: The section is broken, or a mask fits no constant.
        """
        if not self.section:
            return PassResult(0)
        masks, used = decode_masks(self.section), set()
        changed = 0
        for op in operations(module):
            digest = op.sha256.data if isinstance(op, ConstantOp) else ""
            if not isinstance(op, ConstantOp) or digest not in masks:
                continue
            array, bits = ctx.constants.of(op), masks[digest]
            used.add(digest)
            if bits.shape != array.shape:
                raise MalformedModelError(
                    f"the mask of {digest} has shape {bits.shape}, the constant {array.shape}",
                    hint="make sparse_mask.bin again from these weights",
                )
            swap(op, ctx.constants.add(np.where(bits, array, array.dtype.type(0))), ctx.origins)
            changed += 1
        if unknown := sorted(set(masks) - used):
            raise MalformedModelError(
                f"sparse_mask.bin masks {unknown[0]}, which is no constant of the model",
                hint="make sparse_mask.bin again from these weights",
            )
        digest = hashlib.sha256(self.section).hexdigest()
        return PassResult(changed, (f"{changed} constants masked by {digest[:DIGEST_DIGITS]}",))


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise MalformedModelError("sparse_mask.bin is cut off")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")
