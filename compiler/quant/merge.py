"""Merge adapters on the codes of a base: by replay, so that the update can ship as its factors.

    codes' = replay(codes of the base, its scales, int8 factors of left and right, seed)

A base has to hold the very weight that the adapter stands beside: its codes are those of W on its
own grid. Where it holds another one (an older adapter is merged into it, or W was trained on), or
the factors are beyond what a delta may carry, W' is quantised on the base's scales like any weight.
"""

import hashlib
from collections.abc import Mapping
from typing import Final

from compiler.contract.delta import DeltaError
from compiler.delta.lowrank import SEED_BYTES, Factors, quantise_factors, replay_codes
from compiler.errors import UserModelError
from compiler.kernels.merged import Merged
from compiler.quant.w4 import PackedW4, on_grid, pack_w4, unpack_w4

_PERSON: Final = b"sparsefleet.merg"
Seeds = Mapping[int, bytes]
"""By weight id; see `seed_of`."""


class MergeBaseError(UserModelError):
    """The base has a weight of another shape where an adapter is to be merged."""

    code = "build.user.merge_base"


def seed_of(section_sha256: str, number: int, release_seq: int) -> bytes:
    """Return the seed of the dither of one weight in one release.

    Args:
        section_sha256: Digest of the base's section that holds the weight.
        number: Which merged weight of it, counted from 0.
        release_seq: Of the release that is made.
    """
    text = f"{section_sha256}/{number}/{release_seq}".encode()
    return hashlib.blake2b(text, digest_size=SEED_BYTES, person=_PERSON).digest()


def replay_merge(merged: Merged, old: PackedW4, seed: bytes) -> tuple[PackedW4, Factors] | None:
    """Return the merged weight on the codes of a base, and the factors that lead there.

    None means that there is no such way: the base does not hold W, or the factors do not fit.

    Raises:
        MergeBaseError: The base's weight has another shape.
    """
    if (old.n, old.k) != merged.base.shape:
        rows, cols = merged.base.shape
        raise MergeBaseError(
            f"an adapter for a weight of {rows} x {cols} cannot be merged: the base has"
            f" {old.n} x {old.k} there",
            hint="compile on a base of the same structure, without a base, or leave the adapter a"
            ' branch: no "adapters": "merge" in pipeline.json',
        )
    if pack_w4(on_grid(merged.base, unpack_w4(old).grid)).codes != old.codes:
        return None
    try:
        factors = quantise_factors(merged.left, merged.right, seed)
        codes = replay_codes(old.codes, old.scales, old.rows, factors)
    except DeltaError:
        return None
    return PackedW4(old.n, old.k, codes, old.scales, old.rows), factors
